"""The conformance suite's table of operations, run with other functions in place of fastcoll's."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import oracle
from conformance import test_every_operation

import fastcoll as dist

Function = Callable[..., Any]
MESSAGES = "send, recv, isend, irecv"


def mapped(make: Callable[[np.ndarray], Any], x: Any) -> Any:
    """Return an argument with its arrays replaced, also those in lists."""
    if isinstance(x, list):
        return [mapped(make, each) for each in x]
    return make(x) if isinstance(x, np.ndarray) else x


def run(rank: int, world_size: int, count: int, change: Callable[[str, Function], Function]) -> None:
    """Run every collective, with `change(name, function)` in place of fastcoll's; sums of the inputs are rounded."""
    names = {name: getattr(dist, name) for name in dist.__all__ if callable(getattr(dist, name))}
    changed = SimpleNamespace(**{name: change(name, function) for name, function in names.items()})
    with (
        patch.object(test_every_operation, "dist", changed),
        patch.object(test_every_operation, "numbers", lambda r, n: oracle.values(r, n, np.dtype("f4"))),
    ):
        for name, row in test_every_operation.ROWS.items():
            if name != MESSAGES:
                row(rank, world_size, count)
