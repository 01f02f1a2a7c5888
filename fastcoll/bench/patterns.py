"""The values that ranks send and must get: formulas of the element's index and the rank.

All values are small integers, so that every result is exact in every dtype (bfloat16 counts to 256).
A pattern repeats after PERIOD elements, a prime, so that a chunk in the wrong place is noticed, and so
that filling and checking 64 MiB costs two passes over memory and no formula.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Tile = NDArray[Any]
"""One period of a pattern, in the dtype of the arrays."""

PERIOD = 16381
_INDEX = np.arange(PERIOD, dtype=np.int64)


def _small(rank: int, ranks: int) -> Array:
    return 1 + (_INDEX + rank) % 2


def _bits(rank: int, ranks: int) -> Array:
    return 1 + (5 * _INDEX + 3 * rank) % 63


_REDUCTIONS: dict[str, tuple[Callable[[int, int], Array], Callable[[Array, Array], Array]]] = {
    "sum": (_small, np.add),
    # One rank gives a multiple of the number of ranks, so that the average is exact in integers too.
    "avg": (lambda rank, n: np.where(_INDEX % n == rank, n * (1 + _INDEX % 3), 0), np.add),
    "product": (_small, np.multiply),
    "min": (_bits, np.minimum),
    "max": (_bits, np.maximum),
    "band": (_bits, np.bitwise_and),
    "bor": (_bits, np.bitwise_or),
    "bxor": (_bits, np.bitwise_xor),
    "custom": (_bits, np.maximum),  # absmax, of numbers that are not negative
}
"""What a rank gives, and how two ranks' values become one."""


def moved(source: int, dtype: np.dtype[Any]) -> Tile:
    """What block number `source` holds in an operation that only moves data; never 0."""
    return _cast(1 + (7 * _INDEX + 31 * source) % 100, dtype)


def reduced_input(redop: str, rank: int, ranks: int, dtype: np.dtype[Any]) -> Tile:
    """What a rank gives to a reduction."""
    return _cast(_REDUCTIONS[redop][0](rank, ranks), dtype)


def reduced_output(redop: str, ranks: int, dtype: np.dtype[Any]) -> Tile:
    """What the reduction over all ranks must give."""
    give, fold = _REDUCTIONS[redop]
    given = [give(rank, ranks) for rank in range(ranks)]
    if dtype.kind == "b":
        given = [values % 2 for values in given]
    total = reduce(fold, given)
    return (total // ranks if redop == "avg" else total).astype(dtype)


def fill(x: Array, tile: Tile, start: int = 0) -> None:
    """Element i of the flat array x becomes element `start + i` of the pattern."""
    whole, body, rest = _periods(x, tile, start)
    whole[...] = body
    x[whole.size :] = rest


def count_wrong(x: Array, tile: Tile, start: int = 0) -> int:
    """The number of elements of the flat array x that differ from the pattern, from `start` on."""
    whole, body, rest = _periods(x, tile, start)
    return int(np.count_nonzero(whole != body) + np.count_nonzero(x[whole.size :] != rest))


def _periods(x: Array, tile: Tile, start: int) -> tuple[Array, Tile, Tile]:
    """x as whole periods, the period that each must equal, and what the elements after them must."""
    body = np.roll(tile, -(start % PERIOD))
    periods = x.size // PERIOD
    return x[: periods * PERIOD].reshape(periods, PERIOD), body, body[: x.size - periods * PERIOD]


def _cast(values: Array, dtype: np.dtype[Any]) -> Tile:
    return (values % 2 if dtype.kind == "b" else values).astype(dtype)
