"""What torch.compile traces in the place of the public functions: the operators of torch/operators.py.

Dynamo, which traces a function that is compiled, goes on in a function's attribute `_torchdynamo_inline` where it has
one. So calls outside of compiled functions are as they were, and nothing of torch is imported for them.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

_MODULES = ("fastcoll.api.collectives", "fastcoll.api.objects", "fastcoll.api.p2p", "fastcoll.api.multigpu")


def mark(public: dict[str, Any]) -> None:
    """Give each function that communicates its stand-in."""
    for function in public.values():
        if isinstance(function, FunctionType) and function.__module__ in _MODULES:
            vars(function)["_torchdynamo_inline"] = _traced_by_operators(function.__name__)


def _traced_by_operators(name: str) -> Callable[..., Any]:
    def traced(*args: Any, **named: Any) -> Any:
        from .torch import operators  # the first time that one is traced

        return operators.trace(name, args, named)

    return traced
