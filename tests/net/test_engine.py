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


def begin(engines: Engines, calls: Call | list[Call], ranks: list[int]) -> list[Part]:
    """Return the parts of all ranks in a call, or in calls that differ; some of them have begun."""
    made = calls if isinstance(calls, list) else [calls] * engines.size
    parts = [call.of(engines, rank) for rank, call in enumerate(made)]
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


def test_a_sleeping_engine_reports_the_ranks_it_waits_for() -> None:
    with Engines(4) as engines:
        context = engines.contexts[0]
        context.words[words.BACKOFF_SWEEPS] = 0
        context.words[words.BACKOFF + waiting.BUDGET] = 1 << 40
        parts = begin(engines, Call("barrier", 0), [1, 3])
        assert engines.begin(0, parts[0].prepared, parts[0].arrays) == AGAIN
        assert context.waited_for == [1, 2, 3]
        carry_all(engines)
        assert engines.go_on(0, parts[0].prepared) == AGAIN
        assert context.waited_for == [2]
        assert context.headers()[:, words.NUMBER].tolist() == [1, 1, 0, 1]
        assert context.in_progress


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
        parts = begin(engines, [Call("all_reduce", 7), Call("all_reduce", 8)], [0, 1])
        carry_all(engines)
        assert sweep(engines, parts, 0) == MISMATCH
        assert engines.contexts[0].in_progress
        engine.after_mismatch.call(engines.contexts[0].address)
        assert not engines.contexts[0].in_progress


def test_bytes_of_the_next_call_are_kept_when_the_calls_differ() -> None:
    """Rank 0 expects 2000 bytes with the header, and receives fewer, then the beginning of rank 1's next call."""
    with Engines(2) as engines:
        wrong = begin(engines, [Call("all_reduce", 133), Call("barrier", 0)], [0, 1])
        right = begin(engines, Call("all_reduce", 50), [])
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
