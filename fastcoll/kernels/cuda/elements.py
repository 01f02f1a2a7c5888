"""How a dtype's elements lie in device memory and in registers, and what the operations do to them.

| dtype             | lanes in memory      | computed as           |
|-------------------|----------------------|-----------------------|
| ints, floats      | one                  | the same              |
| complex           | two of its float     | the same              |
| bool              | a uint8              | 0 or 1                |
| float16, bfloat16 | a uint16             | float32, rounded once |

A *group* is the tuple of an element's lanes; every function here takes and returns groups, as operations of one lane
and of two are put together alike (fold.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numba import types

from ...core.reduce_op import AVG, BAND, BOR, BXOR, MAX, MIN, PRODUCT, SUM
from . import bits
from .toolkit import device


@dataclass(frozen=True)
class Element:
    """What kernels need to know of a dtype."""

    lane: Any
    """Numba's type of a lane in memory."""
    computed: Any
    """Numba's type of a lane in registers."""
    lanes: int = 1
    """Lanes of an element."""
    widen: Callable[..., Any] | None = None
    """From memory to registers; None where nothing changes."""
    narrow: Callable[..., Any] | None = None
    """From registers to memory."""


def element_of(dtype: np.dtype[Any]) -> Element:
    """The lanes of a numeric dtype."""
    if dtype.name == "float16":
        return _half(bits.widen_float16, bits.round_float16)
    if dtype.name == "bfloat16":
        return _half(bits.widen_bfloat16, bits.round_bfloat16)
    if dtype.kind == "b":
        return Element(types.uint8, types.uint8, widen=_truth)
    if dtype.kind == "c":
        part = types.float32 if dtype.itemsize == 8 else types.float64
        return Element(part, part, lanes=2)
    kind = getattr(types, f"{'uint' if dtype.kind == 'u' else 'int'}{dtype.itemsize * 8}", None)
    kind = getattr(types, f"float{dtype.itemsize * 8}") if dtype.kind == "f" else kind
    return Element(kind, kind)


def _half(widen: Callable[..., Any], narrow: Callable[..., Any]) -> Element:
    return Element(types.uint16, types.float32, widen=_each(widen), narrow=_each(narrow))


def _each(function: Callable[..., Any]) -> Any:
    return device(lambda a: (function(a[0]),))


@device
def _truth(a):
    """1 for any byte but 0."""
    return (types.uint8(1 if a[0] != 0 else 0),)


def combination(code: int, element: Element, kind: str) -> Any:
    """What an operation does to two groups; a code that names no other (as PREMUL_SUM's) means SUM.

    Args:
        code: of a predefined operation that the dtype has.
        element: the dtype's element.
        kind: the dtype's kind, "f" for bfloat16.
    """
    if kind == "c":
        return _multiply_complex(element.computed) if code == PRODUCT else _add_complex
    table = _BOOL if kind == "b" else _NUMBERS
    return _wrapped(table.get(code, table[SUM]), element.computed)


def _wrapped(function: Callable[..., Any], kind: Any) -> Any:
    """One lane; integers wrap, as Numba computes small ones with 64 bits."""
    scalar = device(function)
    return device(lambda a, b: (kind(scalar(a[0], b[0])),))


@device
def _add_complex(a, b):
    return a[0] + b[0], a[1] + b[1]


def _multiply_complex(part: Any) -> Any:
    times = bits.product32 if part == types.float32 else bits.product64

    @device
    def multiply(a, b):
        return times(a[0], b[0]) - times(a[1], b[1]), times(a[0], b[1]) + times(a[1], b[0])

    return multiply


def _smaller(a, b):
    """As `numpy.minimum`: the first of equals, and a NaN rather than a number."""
    return a if a <= b or a != a else b


def _larger(a, b):
    return a if a >= b or a != a else b


def _either(a, b):
    return a | b


def _both(a, b):
    return a & b


_NUMBERS: dict[int, Callable[..., Any]] = {
    SUM: lambda a, b: a + b,
    PRODUCT: lambda a, b: a * b,
    MIN: _smaller,
    MAX: _larger,
    BAND: _both,
    BOR: _either,
    BXOR: lambda a, b: a ^ b,
}
_BOOL: dict[int, Callable[..., Any]] = {
    **dict.fromkeys((SUM, MAX, BOR), _either),
    **dict.fromkeys((PRODUCT, MIN, BAND), _both),
    BXOR: lambda a, b: a ^ b,
}


def ending(code: int, element: Element, n: int) -> Any:
    """What is done to the combined group at the end: AVG divides by n; None where nothing is."""
    if code != AVG:
        return None
    kind = element.computed
    if isinstance(kind, types.Float):
        divisor = kind(n)
        if element.lanes == 2:
            return device(lambda a: (kind(a[0] / divisor), kind(a[1] / divisor)))
        return device(lambda a: (kind(a[0] / divisor),))
    wide = types.int64 if kind.signed else types.uint64
    number, up = wide(n), wide(n - 1 if kind.signed else 0)
    none = wide(0)
    # Truncated towards zero: the floor, but of negative numbers the ceiling.
    return device(lambda a: (kind((wide(a[0]) + (up if a[0] < 0 else none)) // number),))
