"""The meeting of many ranks: every header is combined exactly once, and all headers reach all where they are wanted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from fastcoll.net.tcp.plans.circulant import COMBINED, combine_headers, gather_headers, known_before
from fastcoll.net.tcp.plans.plan import (
    BUFFER,
    BUFFER2,
    COPY,
    FOLD,
    FRAMES,
    KIND,
    NBYTES,
    OFFSET,
    OFFSET2,
    PEER,
    PHASE,
    RECV,
    SCRATCH,
    SEND,
    Plan,
)

HEADER = 64
SIZES = [*range(2, 70), 100, 127, 128, 129]

Memory = dict[tuple[int, int], "Counter[int]"]
"""Which ranks' headers lie at a buffer and offset, each how often."""


def plans(make: Callable[[int, int, int], Plan], size: int) -> list[list[list[int]]]:
    return [make(size, rank, HEADER).table.tolist() for rank in range(size)]


def do_locally(memory: Memory, rows: Sequence[Sequence[int]]) -> None:
    for at, row in enumerate(rows):
        place = row[BUFFER], row[OFFSET]
        if row[KIND] == COPY:
            memory[place] = memory[row[BUFFER2], row[OFFSET2]]
        elif row[KIND] == FOLD:
            sources = rows[at + 1 : at + 1 + row[PEER]]
            memory[place] = sum((memory[each[BUFFER], each[OFFSET]] for each in sources), Counter())


def peers(rows: Sequence[Sequence[int]]) -> set[int]:
    return {row[PEER] for row in rows if row[KIND] in (SEND, RECV)}


@pytest.mark.parametrize("size", SIZES)
def test_every_header_is_combined_once(size: int) -> None:
    tables = plans(combine_headers, size)
    memories: list[Memory] = [{(FRAMES, rank * HEADER): Counter([rank])} for rank in range(size)]
    phases = 1 + max(row[PHASE] for row in tables[0])
    assert phases == (size - 1).bit_length() + 1, "as many rounds as it takes, and what is local behind them"
    for phase in range(phases):
        now = [[row for row in rows if row[PHASE] == phase] for rows in tables]
        sent: dict[tuple[int, int], Counter[int]] = {}
        for rank, rows in enumerate(now):
            do_locally(memories[rank], rows)
            around = range(rank, rank + [*known_before(size), size][phase])
            assert memories[rank][SCRATCH, COMBINED] == Counter(each % size for each in around)
            for row in rows:
                if row[KIND] == SEND:
                    assert row[NBYTES] == HEADER
                    sent[rank, row[PEER]] = memories[rank][row[BUFFER], row[OFFSET]]
        for rank, rows in enumerate(now):
            for row in rows:
                if row[KIND] == RECV:
                    memories[rank][row[BUFFER], row[OFFSET]] = sent.pop((row[PEER], rank))
        assert not sent
    assert all(memory[SCRATCH, COMBINED] == Counter(range(size)) for memory in memories)


@pytest.mark.parametrize("size", SIZES)
def test_all_headers_reach_all_through_the_same_peers(size: int) -> None:
    tables = plans(gather_headers, size)
    known: list[set[int]] = [{rank} for rank in range(size)]
    for phase in range((size - 1).bit_length()):
        sent: dict[tuple[int, int], list[Any]] = {}
        for here, kind in ((True, SEND), (False, RECV)):
            for rank, rows in enumerate(tables):
                for row in (row for row in rows if row[PHASE] == phase and row[KIND] == kind):
                    blocks = set(range(row[OFFSET] // HEADER, (row[OFFSET] + row[NBYTES]) // HEADER))
                    if here:
                        assert blocks <= known[rank]
                        sent.setdefault((rank, row[PEER]), []).append(blocks)
                    else:
                        assert sent[row[PEER], rank].pop(0) == blocks
                        known[rank] |= blocks
        assert not any(sent.values())
    assert all(each == set(range(size)) for each in known)
    for rank, rows in enumerate(plans(combine_headers, size)):
        assert peers(rows) == peers(tables[rank])
