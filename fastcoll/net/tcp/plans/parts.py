"""How an array is divided: into blocks, one a rank, and these into segments, at the borders of items."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from .shape import Limits


class Span(NamedTuple):
    """A part of an array, in bytes."""

    offset: int
    nbytes: int


def divided(nbytes: int, parts: int, itemsize: int) -> list[Span]:
    """Spans that cover an array, as even as items allow; the first ones are the longer ones."""
    each, longer = divmod(nbytes // itemsize, parts)
    borders = [(each * k + min(k, longer)) * itemsize for k in range(parts + 1)]
    return [Span(low, high - low) for low, high in pairwise(borders)]


class Segments(NamedTuple):
    """The same division for a number of blocks, so that segment k of one can go with segment k of another.

    Attributes:
        number: how many segments the longest block has.
        nbytes: of a segment; the last one may be shorter, and those of shorter blocks may be empty.
    """

    number: int
    nbytes: int

    def of(self, block: Span, k: int) -> Span:
        """Segment `k` of a block."""
        low = min(k * self.nbytes, block.nbytes)
        high = min((k + 1) * self.nbytes, block.nbytes)
        return Span(block.offset + low, high - low)


def segments(blocks: Sequence[Span], itemsize: int, limits: Limits, at_once: int) -> Segments:
    """Segments of equal size for blocks of which a rank receives `at_once` at the same time."""
    longest = max(block.nbytes for block in blocks)
    limit = max(min(limits.segment, limits.at_once // max(at_once, 1)) // itemsize, 1) * itemsize
    number = max(-(-longest // limit), 1)
    items = longest // itemsize
    return Segments(number, max(-(-items // number), 1) * itemsize)
