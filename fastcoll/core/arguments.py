"""Plain arguments, checked at the border: whole numbers, lists of ranks, timeouts."""

from __future__ import annotations

import operator
import re
from datetime import timedelta
from numbers import Real
from typing import Any

from ..errors import UnavailableError, UsageError
from .work import Timeout, seconds

WORLD_OF_ONE = "; this is a world of one: start it with -n 2, as in python -m fastcoll.launch -n 2 script.py"
"""What ends the message about another rank where there is none."""


def whole(name: str, value: Any) -> int:
    """The whole number that the argument `name` is, NumPy's kinds of integers among them, or a UsageError."""
    try:
        return operator.index(value)
    except TypeError:
        kind = type(value).__name__
        raise UsageError(f"{name} is {value!r}, a {kind}; give a whole number, as in int(...)") from None


def wholes(name: str, values: Any) -> list[int]:
    """The whole numbers in the argument `name`, or a UsageError."""
    try:
        items = list(values)
    except TypeError:
        raise UsageError(f"{name} is {values!r}; give a list of whole numbers") from None
    return [whole(f"{name}[{index}]", item) for index, item in enumerate(items)]


def check_unused(pg_options: Any, device_id: Any) -> None:
    """Refuse options, which no backend has, and what is no index, no "cpu" or "cuda:0" as text or as torch's device."""
    if pg_options is not None:
        raise UnavailableError(f"pg_options is {pg_options!r}, but no backend here has options; leave it out")
    if device_id is None or (
        isinstance(device_id, int) and not isinstance(device_id, bool) and device_id >= 0
    ):
        return
    if not re.fullmatch(r"(cpu|cuda)(:\d+)?", str(device_id)):
        raise UsageError(f"device_id is {device_id!r}; give a device as in 0 or 'cuda:0', or leave it out")


def positive_seconds(timeout: Timeout, default: float) -> float:
    """A timeout, which must be greater than 0, as seconds; None is the default."""
    if timeout is None:
        return default
    if isinstance(timeout, Real | timedelta):
        limit = seconds(timeout, default)
        if limit > 0:
            return limit
    raise UsageError(f"timeout is {timeout!r}; give seconds greater than 0, or a timedelta")
