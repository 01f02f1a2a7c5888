"""Make, fill and check the arrays of a cell on one rank.

Every element shows from which rank and position it comes. This module needs only NumPy. Every root is rank 0.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .measuring import Tile, count_wrong, fill, moved, reduced_input, reduced_output
from .plan import LIMITS, SHAPES, Cell

Array = NDArray[Any]


class Buffers(NamedTuple):
    """The input `x` and the output `out`, which is x itself for in-place operations."""

    x: Array
    out: Array


Exchange = Callable[[int], tuple[Callable[[], Any], Callable[[], Any]]]


class Place(NamedTuple):
    """A rank, the number of ranks, and the dtype of the arrays."""

    rank: int
    ranks: int
    dtype: np.dtype[Any]


def make_buffers(cell: Cell, place: Place) -> Buffers:
    """Make the arrays of one rank."""
    shape = (SHAPES | LIMITS)[cell.operation]
    counts = {"nothing": 0, "part": cell.count // place.ranks, "whole": cell.count}
    x = np.zeros(counts[shape.x], place.dtype)
    return Buffers(x, x if shape.out is None else np.zeros(counts[shape.out], place.dtype))


def partner(rank: int, ranks: int) -> int | None:
    """Return a rank's partner in send_recv: 0 with 1, 2 with 3, ...; None for the last rank of an odd number."""
    other = rank ^ 1
    return other if other < ranks else None


def ping_pong(rank: int, ranks: int, exchange: Exchange) -> Callable[[], Any]:
    """Return a round trip between a rank and its partner; a rank without one does nothing.

    Args:
        exchange: returns for a partner a function that sends x to it, and one that receives out from it.
    """
    other = partner(rank, ranks)
    if other is None:
        return lambda: None
    send, recv = exchange(other)
    first, second = (send, recv) if rank < other else (recv, send)

    def both() -> None:
        first()
        second()

    return both


def updated(x: Array, call: Callable[[], Any]) -> Callable[[], Any]:
    """Return a function that writes all of x and then makes the call.

    Programs write an array before they reduce it.
    """
    one = x.dtype.type(1)

    def both() -> None:
        np.multiply(x, one, out=x)
        call()

    return both


def prepare(cell: Cell, buffers: Buffers, place: Place) -> None:
    """Fill the inputs, and set all outputs to wrong values."""
    buffers.out.fill(0)
    given, _ = _TILES[cell.operation](place)
    for block, tile in zip(_blocks(buffers.x, len(given)), given, strict=True):
        fill(block, tile)


def wrong(cell: Cell, buffers: Buffers, place: Place) -> int:
    """Return the number of wrong elements after the call."""
    _, wanted = _TILES[cell.operation](place)
    start = place.rank * buffers.out.size if cell.operation == "reduce_scatter" else 0
    return sum(
        count_wrong(block, tile, start)
        for block, tile in zip(_blocks(buffers.out, len(wanted)), wanted, strict=True)
    )


def absmax(a: Array, b: Array) -> Array:
    """Reduce arrays with the user-defined reduction of `custom`: of two elements the one further from 0."""
    return np.where(np.abs(a) >= np.abs(b), a, b)


def _blocks(x: Array, blocks: int) -> list[Array]:
    return list(x.reshape(blocks, -1)) if blocks else []


Tiles = tuple[list[Tile], list[Tile]]
"""The contents of the blocks of x, and those that the blocks of out must have after the call.

An empty list means that this rank has nothing to fill, or nothing to check.
"""


def _reduction(place: Place) -> Tiles:
    given = reduced_input("sum", place.rank, place.ranks, place.dtype)
    return [given], [reduced_output("sum", place.ranks, place.dtype)]


def _reduction_at_root(place: Place) -> Tiles:
    given, wanted = _reduction(place)
    return given, wanted if place.rank == 0 else []  # the arrays of the other ranks are undefined then


def _custom(place: Place) -> Tiles:
    given = [_signed(rank, place.dtype) for rank in range(place.ranks)]
    return [given[place.rank]], [reduce(absmax, given)]


def _signed(rank: int, dtype: np.dtype[Any]) -> Tile:
    tile = moved(rank, dtype)
    return -tile if rank % 2 and dtype.kind != "u" else tile


def _to_all(place: Place) -> Tiles:
    wanted = moved(0, place.dtype)
    return [wanted if place.rank == 0 else np.zeros_like(wanted)], [wanted]


def _own_to_everybody(place: Place) -> Tiles:
    return [moved(place.rank, place.dtype)], [moved(rank, place.dtype) for rank in range(place.ranks)]


def _own_to_root(place: Place) -> Tiles:
    given, wanted = _own_to_everybody(place)
    return given, wanted if place.rank == 0 else []


def _from_root(place: Place) -> Tiles:
    parts = [moved(rank, place.dtype) for rank in range(place.ranks)]
    return parts if place.rank == 0 else [], [parts[place.rank]]


def _all_to_all(place: Place) -> Tiles:
    ranks = range(place.ranks)
    given = [moved(place.rank * place.ranks + to, place.dtype) for to in ranks]
    return given, [moved(source * place.ranks + place.rank, place.dtype) for source in ranks]


def _pair(place: Place) -> Tiles:
    other = partner(place.rank, place.ranks)
    return [moved(place.rank, place.dtype)], [] if other is None else [moved(other, place.dtype)]


def _nothing(_: Place) -> Tiles:
    return [], []


def _same(place: Place) -> Tiles:
    return [moved(place.rank, place.dtype)], [moved(place.rank, place.dtype)]


def _folded(place: Place) -> Tiles:
    part = reduced_input("sum", 0, 1, place.dtype)
    return [part] * place.ranks, [(part * place.ranks).astype(place.dtype)]


_TILES: dict[str, Callable[[Place], Tiles]] = {
    "all_reduce": _reduction,
    "reduce": _reduction_at_root,
    "reduce_scatter": _reduction,
    "broadcast": _to_all,
    "all_gather": _own_to_everybody,
    "gather": _own_to_root,
    "scatter": _from_root,
    "all_to_all": _all_to_all,
    "send_recv": _pair,
    "barrier": _nothing,
    "custom": _custom,
    "update_all_reduce": _reduction,
    "update_shared_all_reduce": _reduction,
    "stream": _same,
    "fold": _folded,
    "copy": _same,
    "copy_past": _same,
    "copy_part": _same,
    "copy_part_past": _same,
}
