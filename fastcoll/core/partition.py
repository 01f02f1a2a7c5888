"""Divisions of arrays: into a part for each rank, and into segments for a pipeline.

Sizes and offsets are numbers of elements, or numbers of bytes. A border between two parts is a multiple of `unit`.
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
    """Divide an array into parts of whole units that are as equal as possible; the first parts are the longer ones."""
    each, longer = divmod(total // unit, parts)
    borders = [(each * k + min(k, longer)) * unit for k in range(parts + 1)]
    return [Span(low, high - low) for low, high in pairwise(borders)]


def start_of(total: int, parts: int, k: int, unit: int = 1) -> int:
    """Return the start of part k, where all parts are equally long except the last ones; return the end for k = parts.

    `total` need not be a multiple of `unit`. kernels/primitives.py has the same function, compiled.
    """
    return min(total, k * -(-total // (parts * unit)) * unit)


def segments(total: int, most: int) -> list[Span]:
    """Divide an array into parts of size `most`, of which the last may be shorter; an empty array has no parts."""
    return [Span(start, min(most, total - start)) for start in range(0, total, most)]


def pieces(x: X, sizes: Sequence[int]) -> list[X]:
    """Return consecutive views of an array, with these numbers of elements."""
    flat, end = x.reshape(-1), 0
    return [flat[end : (end := end + size)] for size in sizes]


def shares(x: X, parts: int) -> list[X]:
    """Return views of a flat array's `even` parts."""
    return [x[start : start + size] for start, size in even(x.size, parts)]


def cut(x: X, most: int) -> list[X]:
    """Return views of a flat array's `segments`."""
    return [x[start : start + size] for start, size in segments(x.size, most)]


class Segments(NamedTuple):
    """A division of several blocks into the same number of segments, so that segments of two blocks correspond."""

    number: int  # of segments of the longest block
    nbytes: int  # of a segment; the last one may be shorter, and those of shorter blocks may be empty

    @classmethod
    def of_blocks(cls, blocks: Sequence[Span], most: int, unit: int) -> Segments:
        """Divide blocks into segments of equal size: at most `most`, but at least one unit."""
        longest = max(block.nbytes for block in blocks)
        number = max(-(-longest // (max(most // unit, 1) * unit)), 1)
        return cls(number, max(-(-(longest // unit) // number), 1) * unit)

    def of(self, block: Span, k: int) -> Span:
        low = min(k * self.nbytes, block.nbytes)
        high = min((k + 1) * self.nbytes, block.nbytes)
        return Span(block.offset + low, high - low)
