"""Keeps torch.compile out of this package: its methods run as they are where Dynamo could not put a call into a graph.

Dynamo would compile them as it compiles the function around them, and refuses to look at a process group's members.
"""

from __future__ import annotations

from types import FunctionType


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
