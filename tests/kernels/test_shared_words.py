"""Words that Python shares with compiled code and other processes."""

from __future__ import annotations

import mmap

import numpy as np
import pytest

from fastcoll.kernels.primitives import address_of
from fastcoll.kernels.shared_words import publish, publish_in, read, read_in
from fastcoll.record import recorder
from fastcoll.shm.layout import plan
from fastcoll.shm.segment import Segment, new_name, unlink


@pytest.mark.parametrize("value", [0, 1, -1, 1 << 62, -(1 << 63)])
def test_words_are_written_and_read(value: int) -> None:
    table = np.full(3, 7, np.int64)
    publish_in(table, 1, value)
    assert table.tolist() == [7, value, 7]
    assert read_in(table, 1) == value == read.call(address_of(table) + 8)
    publish.call(address_of(table), value)
    assert table.tolist() == [value, value, 7]


def test_a_word_that_is_no_integer_is_refused() -> None:
    table = np.zeros(1, np.int64)
    with pytest.raises(TypeError):
        publish_in(table, 0, 1.5)  # type: ignore[arg-type]
    assert table[0] == 0


def test_a_closed_segment_is_not_accessed() -> None:
    name = new_name()
    segment = Segment.create(name, plan(2, 1 << 20))
    unlink(name)
    segment.close()
    for access in (lambda: segment.acquire(0, 0), lambda: segment.publish(0, 0, 1), segment.missing):
        with pytest.raises(AttributeError):
            access()


def test_pages_of_other_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """With pages of 64 KiB, the system takes only multiples of that for memory to allocate and to map."""

    class Mapping:
        def madvise(self, advice: int, start: int, nbytes: int) -> None:
            asked.append((start, start + nbytes))

    name, layout = new_name(), plan(2, 1 << 20)
    segment = Segment.create(name, layout)
    unlink(name)
    monkeypatch.setattr(mmap, "PAGESIZE", 1 << 16)
    monkeypatch.setattr(recorder, "_PAGE", 1 << 16)
    asked: list[tuple[int, int]] = []
    own, segment._mapping = segment._mapping, Mapping()  # type: ignore[assignment]
    try:
        start, nbytes = layout.slots_of(1)
        segment.allocate(start, nbytes)
        segment.prefault(0)
    finally:
        segment._mapping = own
        segment.close()
    assert all(first % (1 << 16) == 0 for first, _ in asked), asked
    assert asked[0][0] <= start
    assert asked[0][1] == start + nbytes
    assert recorder._File().end % (1 << 16) == 0
