"""Divisions: they cover an array once, in order, and cut no element."""

from __future__ import annotations

from itertools import accumulate, pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from fastcoll.core import partition
from fastcoll.core.partition import Segments, Span

COUNTS, PARTS, UNITS = st.integers(0, 1000), st.integers(1, 9), st.integers(1, 16)


def covers(spans: list[Span], total: int) -> bool:
    ends = [0, *(span.offset + span.nbytes for span in spans)]
    return [span.offset for span in spans] == ends[:-1] and ends[-1] == total


@settings(deadline=None)
@given(COUNTS, PARTS, UNITS)
def test_even_parts_are_those_of_numpy(count: int, parts: int, unit: int) -> None:
    spans = partition.even(count * unit, parts, unit)
    assert covers(spans, count * unit)
    assert [span.nbytes // unit for span in spans] == [x.size for x in np.array_split(np.empty(count), parts)]


@settings(deadline=None)
@given(COUNTS, PARTS, UNITS)
def test_parts_of_one_length(total: int, parts: int, unit: int) -> None:
    starts = [partition.start_of(total, parts, k, unit) for k in range(parts + 1)]
    lengths = [high - low for low, high in pairwise(starts)]
    assert (starts[0], starts[-1]) == (0, total)
    assert all(start % unit == 0 or start == total for start in starts)
    assert lengths == sorted(lengths, reverse=True)
    assert sum(0 < length < lengths[0] for length in lengths) <= 1


@settings(deadline=None)
@given(COUNTS, st.integers(1, 100))
def test_segments(total: int, most: int) -> None:
    spans = partition.segments(total, most)
    assert covers(spans, total)
    assert all(span.nbytes == most for span in spans[:-1])
    assert all(0 < span.nbytes <= most for span in spans)


@settings(deadline=None)
@given(st.lists(COUNTS, min_size=1, max_size=5), st.integers(1, 300), UNITS)
def test_segments_of_blocks_go_together(counts: list[int], most: int, unit: int) -> None:
    borders = [0, *accumulate(count * unit for count in counts)]
    blocks = [Span(low, high - low) for low, high in pairwise(borders)]
    parts = Segments.of_blocks(blocks, most, unit)
    assert parts.nbytes <= max(most, unit)
    assert parts.nbytes % unit == 0
    for block in blocks:
        spans = [parts.of(block, k) for k in range(parts.number)]
        assert covers([Span(span.offset - block.offset, span.nbytes) for span in spans], block.nbytes)


def test_views() -> None:
    x = np.arange(10)
    three = partition.pieces(x.reshape(2, 5), [3, 0, 7])
    assert [list(part) for part in three] == [[0, 1, 2], [], [*range(3, 10)]]
    assert [part.size for part in partition.shares(x, 4)] == [3, 3, 2, 2]
    assert [part.size for part in partition.cut(x, 4)] == [4, 4, 2]
    partition.pieces(x, [4, 6])[1][:] = 7
    assert x[5] == 7
