"""Failures of the engine: connections that end, invalid data, and calls that are not resumed as planned."""

from __future__ import annotations

import numpy as np
import pytest

from fastcoll.core import signature
from fastcoll.core.status import AGAIN, DONE, GARBLED, GONE, MISMATCH, WORKED
from fastcoll.kernels import waiting
from fastcoll.kernels.sockets import CLOSED
from fastcoll.net.tcp import engine_layout as words
from fastcoll.net.tcp import executor as engine
from fastcoll.net.tcp.plans.shape import HEADER_BYTES
from net.engine_calls import Call, Part
from net.engines import FREE, Engines


def begin(engines: Engines, call: Call, ranks: list[int]) -> list[Part]:
    """Return the parts of all ranks, of which some have begun."""
    parts = [call.of(engines, rank) for rank in range(engines.size)]
    for rank in ranks:
        assert engines.begin(rank, parts[rank].prepared, parts[rank].arrays) == WORKED
    return parts


def sweep(engines: Engines, parts: list[Part], rank: int, turns: int = 100) -> int:
    """Sweep until a rank's call ends; return the last status."""
    for _ in range(turns):
        status = engines.go_on(rank, parts[rank].prepared)
        if status not in (AGAIN, WORKED):
            break
    return status


def carry_all(engines: Engines) -> None:
    while any(engines.carry(a, b) for a in range(engines.size) for b in range(engines.size) if a != b):
        pass


def test_a_call_waits_for_a_rank_that_has_not_arrived() -> None:
    with Engines(3) as engines:
        parts = begin(engines, Call("all_reduce", 7), [0, 1])
        carry_all(engines)
        assert sweep(engines, parts, 0) == WORKED
        numbers = engines.contexts[0].headers()[:, words.NUMBER]
        assert numbers.tolist() == [1, 1, 0]
        assert engines.contexts[0].in_progress


def test_a_sleeping_engine_reports_the_ranks_it_waits_for() -> None:
    with Engines(4) as engines:
        context = engines.contexts[0]
        context.words[words.BACKOFF_SWEEPS] = 0
        context.words[words.BACKOFF + waiting.BUDGET] = 1 << 40
        part = Call("barrier", 0).of(engines, 0)
        assert engines.begin(0, part.prepared, part.arrays) == AGAIN
        assert context.waited_for == [1, 2, 3]
        for rank in (1, 3):
            other = Call("barrier", 0).of(engines, rank)
            engines.begin(rank, other.prepared, other.arrays)
        carry_all(engines)
        assert engines.go_on(0, part.prepared) == AGAIN
        assert context.waited_for == [2]


@pytest.mark.parametrize("count", [7, 40_000])
def test_a_lost_connection_is_named(count: int) -> None:
    """In the meeting, and in the middle of a plan."""
    with Engines(3) as engines:
        parts = begin(engines, Call("all_reduce", count), [0, 1, 2] if count > 7 else [0, 1])
        if count > 7:
            while not all(context[words.STAGE] == words.RUN for context in engines.contexts):
                carry_all(engines)
                for rank in range(3):
                    sweep(engines, parts, rank, turns=1)
        engines.cut(0, 2)
        assert sweep(engines, parts, 0, FREE) == GONE
        assert engines.contexts[0][words.PEER] == 2
        assert engines.contexts[0][words.ERROR] < 0
        assert engines.contexts[0].in_progress


def test_what_a_peer_sent_before_it_ended_counts() -> None:
    with Engines(2) as engines:
        parts = begin(engines, Call("all_reduce", 7), [0, 1])
        carry_all(engines)
        engines.cut(0, 1)
        assert [sweep(engines, parts, rank) for rank in (0, 1)] == [DONE] * 2
        assert all(part.is_right() for part in parts)
        late = Call("barrier", 0).of(engines, 0)
        status = engines.begin(0, late.prepared, late.arrays)
        assert (sweep(engines, [late], 0) if status == WORKED else status) == GONE
        assert engines.contexts[0][words.ERROR] in (CLOSED, -32)


@pytest.mark.parametrize("word", [words.NUMBER, words.HEAD_ATTACHED])
@pytest.mark.parametrize("value", [-1, 1 << 62, 3])
def test_an_invalid_header_is_garbled(word: int, value: int) -> None:
    with Engines(2) as engines:
        parts = begin(engines, Call("barrier", 0), [0])
        header = np.zeros(HEADER_BYTES // 8, np.int64)
        header[words.NUMBER], header[words.HEAD_CALL] = 1, parts[1].prepared.call
        header[words.HEAD_BALANCE] = signature.balance(1, *parts[1].prepared.sizes)
        header[word] = value
        engines.write(1, 0, header.tobytes() + b"x" * max(0, value if value == 3 else 0))
        assert sweep(engines, parts, 0) == GARBLED
        assert engines.contexts[0][words.PEER] == 1
        assert engines.contexts[0].in_progress


def test_a_mismatched_call_is_in_progress_until_its_headers_are_read() -> None:
    """So an exception before that fails the group."""
    with Engines(2) as engines:
        parts = [Call("all_reduce", 7 + rank).of(engines, rank) for rank in range(2)]
        for rank, part in enumerate(parts):
            engines.begin(rank, part.prepared, part.arrays)
        carry_all(engines)
        assert sweep(engines, parts, 0) == MISMATCH
        assert engines.contexts[0].in_progress
        engine.after_mismatch.call(engines.contexts[0].address)
        assert not engines.contexts[0].in_progress


def test_bytes_of_the_next_call_are_kept_when_the_calls_differ() -> None:
    """Rank 0 expects 2000 bytes with the header, and receives fewer, then the beginning of rank 1's next call."""
    with Engines(2) as engines:
        wrong = [Call("all_reduce", 133).of(engines, 0), Call("barrier", 0).of(engines, 1)]
        right = [Call("all_reduce", 50).of(engines, rank) for rank in range(2)]
        for rank, part in enumerate(wrong):
            engines.begin(rank, part.prepared, part.arrays)
        engines.carry(0, 1)
        assert sweep(engines, wrong, 1) == MISMATCH
        engine.after_mismatch.call(engines.contexts[1].address)
        engines.begin(1, right[1].prepared, right[1].arrays)
        carry_all(engines)
        assert sweep(engines, wrong, 0) == MISMATCH
        engine.after_mismatch.call(engines.contexts[0].address)
        kept = int(engines.contexts[0]._kept[words.HAVE][1])
        assert 0 < kept <= HEADER_BYTES + 750
        engines.begin(0, right[0].prepared, right[0].arrays)
        carry_all(engines)
        assert [sweep(engines, right, rank) for rank in (0, 1)] == [DONE] * 2
        assert all(part.is_right() for part in right)
