"""What torch does around the operations of groups in C++: its dispatcher, through which those of fastcoll's groups do
not go, and torch.compile.

Dynamo would compile this package's methods as it compiles the function around them, and refuses to look at a process
group's members; so they run as they are where it could not put a call into a graph.
"""

from __future__ import annotations

from types import FunctionType
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _len_torch_dispatch_stack
from torch._C._distributed_c10d import _register_work, _resolve_process_group


class _Collective:
    """Stands for an operation of torch.ops.c10d where a mode looks at it; calling it does nothing."""

    def __init__(self, name: str) -> None:
        self._overloadpacket = getattr(torch.ops.c10d, name)

    def __call__(self, *args: Any, **options: Any) -> None:
        return None

    def __str__(self) -> str:
        return f"{self._overloadpacket}.default"


def shown(name: str) -> None:
    """Let modes that count collectives (CommDebugMode) see one."""
    if _len_torch_dispatch_stack():
        from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

        for mode in _get_current_dispatch_mode_stack():
            if hasattr(mode, "comm_counts"):
                mode.__torch_dispatch__(_Collective(name), ())


def serve_functional_collectives() -> Any:
    """Let `_c10d_functional.all_gather_into_tensor_out` find groups that are written in Python.

    Up to 2.13 it calls on them the one method that C++ does not look for in Python.

    Returns:
        What holds the registration, if one is needed.
    """
    if hasattr(dist, "gather_single"):  # came together with that look
        return None
    library = torch.library.Library("_c10d_functional", "IMPL", "CPU")
    library.impl("all_gather_into_tensor_out", _all_gather_into_tensor_out)
    return library


def _all_gather_into_tensor_out(
    input: torch.Tensor, group_size: int, group_name: Any, *, out: torch.Tensor
) -> torch.Tensor:
    group = group_name if isinstance(group_name, dist.ProcessGroup) else _resolve_process_group(group_name)
    _register_work(out, group.all_gather_single(out, input))
    return out


def run_uncompiled(*classes: type) -> None:
    """Let Dynamo skip the methods that `classes` have from this package, and all that these call.

    Dynamo itself, seconds of import, is not loaded for that. A torch without this switch is left as it is.
    """
    try:
        from torch._C._dynamo import eval_frame

        skip = eval_frame._FrameAction.SKIP
        skip_all = eval_frame._FrameExecStrategy(skip, skip)
        set_strategy = eval_frame.set_code_exec_strategy
    except (ImportError, AttributeError):  # up to 2.6, or changed by then
        return
    for method in methods_of(*classes):
        set_strategy(method.__code__, skip_all)


def methods_of(*classes: type) -> list[FunctionType]:
    """The methods that `classes` have from this package."""
    package = __name__.rpartition(".")[0]
    ours = [base for each in classes for base in each.__mro__ if base.__module__.startswith(package)]
    return [method for base in ours for method in vars(base).values() if isinstance(method, FunctionType)]
