"""What torch's dispatcher does for groups in C++, whose operations go through it; those of fastcoll's groups do not."""

from __future__ import annotations

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
