"""The functions that torch.compile traces instead of the public ones; they call the operators of torch/operators.py.

Dynamo is the tracer of torch.compile. If a function has an attribute `_torchdynamo_inline`, Dynamo traces the function
in this attribute instead. So calls outside of compiled functions do not change, and do not import torch.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

_MODULES = ("fastcoll.api.collectives", "fastcoll.api.objects", "fastcoll.api.p2p", "fastcoll.api.multigpu")


def mark(public: dict[str, Any]) -> None:
    """Set the attribute `_torchdynamo_inline` of each public function that communicates."""
    for function in public.values():
        if isinstance(function, FunctionType) and function.__module__ in _MODULES:
            vars(function)["_torchdynamo_inline"] = _traced_by_operators(function.__name__)


def _traced_by_operators(name: str) -> Callable[..., Any]:
    def traced(*args: Any, **named: Any) -> Any:
        from .torch import operators  # imports torch, so only when a call is traced

        return operators.trace(name, args, named)

    return traced
