"""Explore how the ranks of a node meet: the plans and the kernels of lines, under every schedule."""

from __future__ import annotations

from itertools import groupby
from typing import Any

import pytest
from shm.explorer import ALL, FOUND, SHARED, Explorer, load

from fastcoll.net.tcp.plans import plan as t
from fastcoll.net.tcp.plans.circulant import COMBINED
from fastcoll.net.tcp.plans.node_meeting import combine_by_nodes

BUFFERS = {t.SCRATCH: 1 << 20, t.FRAMES: 2 << 20}
HEADER, CALLS = 24, 2


class World:
    """The ranks of one node, which make some calls; a header has its number and two more words."""

    def __init__(self, size: int, plant: str = "") -> None:
        self.machine, self.made = load(plant)
        self.size = size
        self.plans = [combine_by_nodes([range(size)], rank, HEADER).table.tolist() for rank in range(size)]

    def begin(self, rank: int) -> tuple[int, dict[int, Any]]:
        return 1, {}

    def go_on(self, rank: int, number: int) -> int | None:
        if number > CALLS:
            return None
        m = self.machine
        m.store_words(BUFFERS[t.FRAMES] + HEADER * rank, [number, *self.given(number, rank)])
        for _, rows in groupby(self.plans[rank], lambda row: row[t.PHASE]):
            phase = list(rows)
            for at, row in enumerate(phase):
                self.begin_row(row, phase[at + 1 :])
            for row in phase:
                if row[t.KIND] == t.AWAIT:
                    m.wait_for(0, self.line(row), number)
                    assert self.made.lines.take(self.line(row), number, self.target(row), HEADER)
        found = m.load_words(BUFFERS[t.SCRATCH] + COMBINED, HEADER // 8)
        right = [
            sum(each) for each in zip(*(self.given(number, rank) for rank in range(self.size)), strict=True)
        ]
        assert found == [number, *right], f"call {number} gave {found}, not {right}"
        return number + 1

    def begin_row(self, row: list[int], following: list[list[int]]) -> None:
        """Do what `begin_phase` does for a row."""
        m = self.machine
        if row[t.KIND] == t.POST:
            self.made.lines.post(self.line(row), self.target(row), HEADER)
        elif row[t.KIND] == t.COPY:
            m.copy(self.target(row), BUFFERS[row[t.BUFFER2]] + row[t.OFFSET2], HEADER)
        elif row[t.KIND] == t.FOLD:
            parts = [m.load_words(self.target(source), HEADER // 8) for source in following[: row[t.PEER]]]
            number, *sums = map(sum, zip(*parts, strict=True))
            m.store_words(self.target(row), [number // len(parts), *sums])

    @staticmethod
    def given(number: int, rank: int) -> list[int]:
        return [100 * number + 10 * rank + 1, 100 * number + 10 * rank + 2]

    @staticmethod
    def line(row: list[int]) -> int:
        return SHARED + HEADER * int(row[t.PEER])

    @staticmethod
    def target(row: list[int]) -> int:
        return BUFFERS[row[t.BUFFER]] + int(row[t.OFFSET])


@pytest.mark.parametrize("weak", [0, ALL])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_every_rank_gets_the_headers_of_all(size: int, weak: int) -> None:
    assert Explorer(World(size), size, weak=weak).explore() >= size


def test_a_missing_order_is_found() -> None:
    plant = "kernels.lines: store_release(line, load_word(header, NUMBER)) => copy(line, header, 8)"
    with pytest.raises(AssertionError, match=FOUND):
        Explorer(World(2, plant), 2, weak=ALL).explore()
