"""Plain arguments, checked at the border: whole numbers, lists of ranks, timeouts."""

from __future__ import annotations

import operator
import re
from datetime import timedelta
from numbers import Real
from typing import Any

from ..errors import UsageError
from .work import Timeout, seconds

WORLD_OF_ONE = "; this is a world of one: start it with -n 2, as in python -m fastcoll.launch -n 2 script.py"
"""What ends the message about another rank where there is none."""


def whole(name: str, value: Any) -> int:
    """The whole number that the argument `name` is, NumPy's kinds of integers among them.

    Raises:
        UsageError: it is something else.
    """
    try:
        return operator.index(value)
    except TypeError:
        kind = type(value).__name__
        raise UsageError(f"{name} is {value!r}, a {kind}; give a whole number, as in int(...)") from None


def wholes(name: str, values: Any) -> list[int]:
    """The whole numbers in the argument `name`.

    Raises:
        UsageError: it cannot be iterated over, or holds something else.
    """
    try:
        items = list(values)
    except TypeError:
        raise UsageError(f"{name} is {values!r}; give a list of whole numbers") from None
    return [whole(f"{name}[{index}]", item) for index, item in enumerate(items)]


def check_device(name: str, value: Any) -> None:
    """Refuse what names no device: an index, or "cpu" or "cuda:0" as text or as torch's device, or None.

    Raises:
        UsageError: it is something else.
    """
    if value is None or (isinstance(value, int) and not isinstance(value, bool) and value >= 0):
        return
    if not re.fullmatch(r"(cpu|cuda)(:\d+)?", str(value)):
        raise UsageError(f"{name} is {value!r}; give a device as in 0 or 'cuda:0', or leave it out")


def positive_seconds(timeout: Timeout, default: float) -> float:
    """A timeout as seconds; None is the default.

    Raises:
        UsageError: it is no time, or not greater than 0.
    """
    if timeout is None:
        return default
    if isinstance(timeout, Real | timedelta):
        limit = seconds(timeout, default)
        if limit > 0:
            return limit
    raise UsageError(f"timeout is {timeout!r}; give seconds greater than 0, or a timedelta")
