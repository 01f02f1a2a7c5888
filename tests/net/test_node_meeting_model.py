"""Explore how the ranks of a node meet and relay data: the plans and the kernels of lines, under every schedule."""

from __future__ import annotations

from itertools import groupby
from typing import Any

import pytest
from shm.explorer import ALL, FOUND, SHARED, Explorer, load

from fastcoll.net.tcp.plans import plan as t
from fastcoll.net.tcp.plans.circulant import COMBINED
from fastcoll.net.tcp.plans.node_meeting import combine_by_nodes
from fastcoll.net.tcp.plans.relayed import relayed
from fastcoll.net.tcp.plans.shape import CallShape, Limits, array, relay

BUFFERS = {t.SCRATCH: 1 << 20, t.FRAMES: 2 << 20, array(0): 3 << 20}
RELAY, RELAYED = SHARED + 4096, 64  # where relay memory begins, and `Limits.relayed`
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
        self.run(self.plans[rank], number)
        found = m.load_words(BUFFERS[t.SCRATCH] + COMBINED, HEADER // 8)
        right = [
            sum(each) for each in zip(*(self.given(number, rank) for rank in range(self.size)), strict=True)
        ]
        assert found == [number, *right], f"call {number} gave {found}, not {right}"
        return number + 1

    def run(self, plan: list[list[int]], number: int) -> None:
        for _, rows in groupby(plan, lambda row: row[t.PHASE]):
            phase = list(rows)
            for at, row in enumerate(phase):
                self.begin_row(row, phase[at + 1 :], number)
            for row in phase:
                if row[t.KIND] in (t.AWAIT, t.WAIT):
                    self.machine.wait_for(0, self.line(row), number)
                    assert self.made.lines.has(self.line(row), number)
                if row[t.KIND] == t.AWAIT:
                    assert self.made.lines.take(self.line(row), number, self.target(row), HEADER)

    def begin_row(self, row: list[int], following: list[list[int]], number: int) -> None:
        """Do what `begin_phase` does for a row."""
        m = self.machine
        if row[t.KIND] == t.POST:
            self.made.lines.post(self.line(row), self.target(row), HEADER)
        elif row[t.KIND] == t.COPY:
            m.copy(self.target(row), BUFFERS[row[t.BUFFER2]] + row[t.OFFSET2], HEADER)
        elif row[t.KIND] == t.FOLD:
            parts = [m.load_words(self.target(source), HEADER // 8) for source in following[: row[t.PEER]]]
            _, *sums = map(sum, zip(*parts, strict=True))
            m.store_words(self.target(row), [number, *sums])

    @staticmethod
    def given(number: int, rank: int) -> list[int]:
        return [100 * number + 10 * rank + 1, 100 * number + 10 * rank + 2]

    @staticmethod
    def line(row: list[int]) -> int:
        return SHARED + HEADER * int(row[t.PEER])

    def target(self, row: list[int]) -> int:
        return BUFFERS[row[t.BUFFER]] + int(row[t.OFFSET])


@pytest.mark.parametrize("weak", [0, ALL])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_every_rank_gets_the_headers_of_all(size: int, weak: int) -> None:
    assert Explorer(World(size), size, weak=weak).explore() >= size


def test_a_missing_order_is_found() -> None:
    plant = "kernels.lines: store_release(line, load_word(header, NUMBER)) => copy(line, header, 8)"
    with pytest.raises(AssertionError, match=FOUND):
        Explorer(World(2, plant), 2, weak=ALL).explore()


class RelayedWorld(World):
    """The ranks of one node, which have met, relay one word of each in an all_reduce, or of the last in a broadcast.

    They exchange nothing with other nodes.

    Args:
        meets: whether they meet at all.
    """

    def __init__(self, operation: str, size: int, plant: str = "", meets: bool = True) -> None:
        super().__init__(size, plant)
        self.givers, self.meets = range(size) if operation == "all_reduce" else [size - 1], meets
        nodes = (tuple(range(size)),)
        shape = CallShape(operation, size, 0, (8,), Limits(0, relayed=RELAYED), 8, size - 1, nodes=nodes)
        shapes = [shape._replace(rank=rank) for rank in range(size)]
        self.relaying = [relayed(each, lambda _: t.Rows().plan()).table.tolist() for each in shapes]

    def go_on(self, rank: int, number: int) -> int | None:
        if number > CALLS:
            return None
        if self.meets:
            super().go_on(rank, number)
        m = self.machine
        m.store_words(BUFFERS[array(0)], [self.given(number, rank)[0]])
        self.run(self.relaying[rank], number)
        (found,) = m.load_words(BUFFERS[array(0)], 1)
        right = sum(self.given(number, each)[0] for each in self.givers)
        assert found == right, f"call {number} gave {found}, not {right}"
        return number + 1

    def begin_row(self, row: list[int], following: list[list[int]], number: int) -> None:
        m = self.machine
        if row[t.KIND] == t.SIGNAL:
            self.made.lines.signal(self.line(row), number)
        elif row[t.KIND] == t.COPY and row[t.NBYTES] == 8:
            m.copy(self.target(row), self.at(row[t.BUFFER2], row[t.OFFSET2]), 8)
        elif row[t.KIND] == t.FOLD and row[t.NBYTES] == 8:
            parts = [m.load_words(self.target(source), 1)[0] for source in following[: row[t.PEER]]]
            m.store_words(self.target(row), [sum(parts)])
        else:
            super().begin_row(row, following, number)

    def target(self, row: list[int]) -> int:
        return self.at(row[t.BUFFER], row[t.OFFSET])

    def at(self, buffer: int, offset: int) -> int:
        place = buffer - relay(self.size, 0)
        return (RELAY + 2 * RELAYED * place if place >= 0 else BUFFERS[buffer]) + int(offset)


@pytest.mark.parametrize("weak", [0, ALL])
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("operation", ["all_reduce", "broadcast"])
def test_every_rank_gets_the_relayed_result(operation: str, size: int, weak: int) -> None:
    assert Explorer(RelayedWorld(operation, size), size, weak=weak).explore() >= size


def test_without_a_meeting_a_root_overwrites_what_others_read() -> None:
    with pytest.raises(AssertionError, match=FOUND):
        Explorer(RelayedWorld("broadcast", 3, meets=False), 3).explore()


@pytest.mark.parametrize("instead", ["wake_all(line)", "copy(line, line + 0, 8)"])
@pytest.mark.parametrize("operation", ["all_reduce", "broadcast"])
def test_a_signal_that_is_not_stored_is_found(operation: str, instead: str) -> None:
    plant = f"kernels.lines: store_release(line, number) => {instead}"
    with pytest.raises(AssertionError, match=FOUND):
        Explorer(RelayedWorld(operation, 2, plant), 2).explore()
