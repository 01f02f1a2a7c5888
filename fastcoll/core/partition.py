"""Divisions of arrays: into a part for each rank, and into segments for a pipeline.

Sizes and offsets are numbers of elements or of bytes, as the caller chooses. A part begins at a multiple of `unit` or,
if it is empty, at the end of the array.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

X = TypeVar("X", bound=Any)  # an array, on the host or on a GPU


class Span(NamedTuple):
    """A part of an array."""

    offset: int
    nbytes: int


def even(total: int, parts: int, unit: int = 1) -> list[Span]:
    """Divide an array into parts of whole units. They differ by at most one unit, and the first ones are longer."""
    each, longer = divmod(total // unit, parts)
    borders = [(each * k + min(k, longer)) * unit for k in range(parts + 1)]
    return [Span(low, high - low) for low, high in pairwise(borders)]


def start_of(total: int, parts: int, k: int, unit: int = 1) -> int:
    """Return the start of part k of an array; for k = parts, return the array's end.

    All parts are equally long except the last ones, which may be shorter or empty. `total` need not be a multiple of
    `unit`. kernels/primitives.py has the same function, compiled.
    """
    return min(total, k * -(-total // (parts * unit)) * unit)


def segments(total: int, most: int) -> list[Span]:
    """Divide an array into parts of size `most`, of which the last may be shorter; an empty array has no parts."""
    return [Span(start, min(most, total - start)) for start in range(0, total, most)]


def pieces(x: X, sizes: Sequence[int]) -> list[X]:
    """Return consecutive views of an array; `sizes` are their numbers of elements."""
    flat, end = x.reshape(-1), 0
    return [flat[end : (end := end + size)] for size in sizes]


def shares(x: X, parts: int) -> list[X]:
    """Return views of the parts into which `even` divides a flat array."""
    return [x[start : start + size] for start, size in even(x.size, parts)]


def cut(x: X, most: int) -> list[X]:
    """Return views of the parts into which `segments` divides a flat array."""
    return [x[start : start + size] for start, size in segments(x.size, most)]


class Segments(NamedTuple):
    """A division of several blocks into the same number of segments, so that segments of two blocks correspond."""

    number: int  # number of segments of each block
    nbytes: int  # size of a segment; a block's last segments may be shorter or empty

    @classmethod
    def of_blocks(cls, blocks: Sequence[Span], most: int, unit: int) -> Segments:
        """Divide blocks into segments of one size: a multiple of `unit`, at most `most`, but at least one unit."""
        longest = max(block.nbytes for block in blocks)
        number = max(-(-longest // (max(most // unit, 1) * unit)), 1)
        return cls(number, max(-(-(longest // unit) // number), 1) * unit)

    def of(self, block: Span, k: int) -> Span:
        low = min(k * self.nbytes, block.nbytes)
        high = min((k + 1) * self.nbytes, block.nbytes)
        return Span(block.offset + low, high - low)
