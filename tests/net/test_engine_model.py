"""The engine under random schedules: ranks run, and bytes arrive, in random order; also with mismatched calls."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain, permutations
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastcoll.core import signature
from fastcoll.core.status import DONE, MISMATCH, WORKED
from fastcoll.net.tcp import engine_layout as words
from fastcoll.net.tcp.context import PreparedPlan
from fastcoll.net.tcp.meet import AHEAD, PIGGYBACK_BYTES
from fastcoll.net.tcp.plans.shape import HEADER_BYTES
from net.engine_calls import OPERATIONS, Call
from net.engines import Engines

MANY = 18  # their headers are combined in rounds


@st.composite
def programs(draw: st.DrawFn, n: int, most: int, length: int) -> list[list[Call]]:
    """Draw the calls of each rank; in some rounds one rank makes another call than the others."""
    operations, counts, roots = st.sampled_from(OPERATIONS), st.integers(0, most), st.integers(0, n - 1)
    rounds = []
    for salt in range(draw(st.integers(1, length))):
        usual = Call(draw(operations), draw(counts), draw(roots), 1000 * salt)
        change: dict[str, Any] = draw(
            st.fixed_dictionaries({"operation": operations})
            | st.fixed_dictionaries({"count": counts})
            | st.fixed_dictionaries({"root": roots})
        )
        strange = draw(st.none() | st.integers(0, n - 1))
        rounds.append([replace(usual, **change) if rank == strange else usual for rank in range(n)])
    return rounds


def check(
    engines: Engines,
    rounds: Sequence[Sequence[Call]],
    plant: Callable[[PreparedPlan], object] = lambda prepared: None,
) -> None:
    """Run the rounds: each rank finds whether the calls match, and has right results, or none; `plant` adds faults."""
    n = engines.size
    parts = [[calls[rank].of(engines, rank) for calls in rounds] for rank in range(n)]
    for part in chain(*parts):
        plant(part.prepared)
    before = [[[x.copy() for x in part.arrays] for part in mine] for mine in parts]
    results = engines.run([[(part.prepared, part.arrays) for part in mine] for mine in parts])
    for number, calls in enumerate(rounds, 1):
        for rank in range(n):
            part, status = parts[rank][number - 1], results[rank][number - 1]
            reported = [when for call, when in engines.reported[rank] if call == number]
            assert status in (DONE, MISMATCH), calls
            assert len(reported) + (status == MISMATCH) == (not _match(calls)), f"rank {rank}, {calls}"
            assert all(when - number < AHEAD for when in reported)
            assert not reported or _only_gives(calls[rank], rank), f"rank {rank} waited for nobody"
            right = part.is_right() if status == DONE else part.is_untouched(before[rank][number - 1])
            assert right, f"rank {rank}, {calls[rank]}"
    assert engines.nothing_left()


def _only_gives(call: Call, rank: int) -> bool:
    return call.operation == ("broadcast" if call.root == rank else "reduce")


def _match(calls: Sequence[Call]) -> bool:
    """Return whether ranks with these calls agree, in their roots and counts if the operation has them."""
    compared = {"reduce": ("count", "root"), "broadcast": ("count", "root"), "barrier": (), "refused": ()}
    names = ("operation", *compared.get(calls[0].operation, ("count",)))
    return len({tuple(getattr(call, name) for name in names) for call in calls}) == 1


@pytest.mark.parametrize("payload", [0, 2048])
@pytest.mark.parametrize("n", [2, 3, 5])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_every_operation_in_transfers_of_any_size(operation: str, n: int, payload: int) -> None:
    rounds = [[Call(operation, count, n - 1, 1000 * count)] * n for count in (1, 0, 130, 97)]
    with Engines(n, 2, payload, seed=n, transfer=40) as engines:
        check(engines, rounds)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_every_operation_of_many_ranks(operation: str) -> None:
    """Large sums are reduced as the data arrives, by halving and along the ring."""
    larger = [9000, 100_000] if operation == "sum" else []
    with Engines(MANY, seed=5, transfer=20_000) as engines:
        check(engines, [[Call(operation, count, 3, 1000 * count)] * MANY for count in (2, 700, *larger)])


@pytest.mark.parametrize("streams", [1, 3])
def test_two_ranks_reduce_transfers_that_cut_items(streams: int) -> None:
    with Engines(2, streams, seed=1, transfer=30_001) as engines:
        check(engines, [[Call("all_reduce", 40_000)] * 2])
        carried = engines.carried()
    assert len(carried) == 2 * streams, "a stream is not used"
    assert min(carried.values()) > 100_000


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_any_schedule_of_calls_that_match_or_not(data: st.DataObject) -> None:
    n = data.draw(st.sampled_from([2, 3, 5]))
    payload = data.draw(st.sampled_from([0, 256, 2048]))
    rounds = data.draw(programs(n, most=200, length=4))
    seed, transfer = data.draw(st.integers(0, 1 << 30)), data.draw(st.sampled_from([7, 100, 1 << 16]))
    streams = data.draw(st.sampled_from([1, 3]))
    with Engines(n, streams, payload, seed, transfer) as engines:
        check(engines, rounds)


@pytest.mark.long
@settings(max_examples=15, deadline=None)
@given(st.data())
def test_any_schedule_of_many_ranks(data: st.DataObject) -> None:
    n = data.draw(st.sampled_from([17, MANY, 21]))
    rounds = data.draw(programs(n, most=20, length=3))
    with Engines(n, seed=data.draw(st.integers(0, 1 << 30))) as engines:
        check(engines, rounds)


def test_many_ranks_report_a_late_rank() -> None:
    late = 5
    with Engines(MANY, seed=1) as engines:
        parts = {rank: Call("barrier", 0).of(engines, rank) for rank in range(MANY) if rank != late}
        assert {engines.begin(rank, part.prepared, part.arrays) for rank, part in parts.items()} == {WORKED}
        for _ in range(10 * MANY):
            for here, there in permutations(parts, 2):
                engines.carry(here, there)
            assert {engines.go_on(rank, part.prepared) for rank, part in parts.items()} == {WORKED}
        waited_for = [engines.contexts[rank].late_ranks() for rank in parts]
    assert all(late in ranks and rank not in ranks for rank, ranks in zip(parts, waited_for, strict=True))
    assert min(map(len, waited_for)) <= MANY // 2


@pytest.mark.parametrize("sweeps", range(11))
def test_many_ranks_name_a_rank_that_stops_in_the_meeting(sweeps: int) -> None:
    """Also where its own header has arrived, and it does not pass on those of others."""
    stopped = 5
    with Engines(MANY, seed=1) as engines:
        parts = {rank: Call("barrier", 0).of(engines, rank) for rank in range(MANY)}
        waiting = {
            rank for rank, part in parts.items() if engines.begin(rank, part.prepared, part.arrays) == WORKED
        }
        for turn in range(10 * MANY):
            for here, there in permutations(parts, 2):
                engines.carry(here, there)
            for rank in [rank for rank in waiting if rank != stopped or turn < sweeps]:
                if engines.go_on(rank, parts[rank].prepared) == DONE:
                    waiting.remove(rank)
        named = {rank: engines.contexts[rank].late_ranks() for rank in waiting - {stopped}}
    assert named or sweeps > 4
    assert all(stopped in ranks for ranks in named.values()), named


def test_many_ranks_add_up_their_balances() -> None:
    """A rank gives more than the others expect, which only the sum of all balances shows."""
    usual = Call("all_gather", 3)
    with Engines(MANY, seed=3) as engines:
        parts = [usual.of(engines, rank) for rank in range(MANY)]
        parts[7].prepared._words[words.BALANCE] += 1
        results = engines.run([[(part.prepared, part.arrays)] for part in parts])
    assert results == [[MISMATCH]] * MANY


def _mostly_ahead(n: int, length: int, draw: random.Random) -> list[list[Call]]:
    """Draw calls in which some ranks run ahead; in one of ten, one rank makes another call."""
    rounds = []
    for salt in range(length):
        operation = draw.choice(["broadcast"] * 3 + ["reduce"] * 2 + ["scan", "all_gather"])
        operation = "broadcast" if salt // AHEAD == 1 else operation  # only the root has to send
        call = Call(operation, draw.randint(1, 9), draw.choice([0, draw.randrange(n)]), 1000 * salt)
        rounds.append([call] * n)
        if draw.random() < 0.1:
            other = draw.choice([replace(call, count=call.count + 1), Call("barrier", 0), Call("refused", 0)])
            rounds[-1][draw.randrange(n)] = other
    return rounds


@pytest.mark.long
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("n", [2, 3, 4])
def test_ranks_that_run_ahead_until_records_are_reused(n: int, seed: int) -> None:
    with Engines(n, payload=[256, 2048][seed % 2], seed=seed) as engines:
        check(engines, _mostly_ahead(n, 3 * AHEAD, random.Random(seed)))


@pytest.mark.parametrize("who", [0, 1])
def test_every_call_mismatches(who: int) -> None:
    """The root reports each mismatch, one in a call."""
    counts = [1 + (rank == who) for rank in range(2)]
    rounds = [[Call("broadcast", count, 0, 1000 * salt) for count in counts] for salt in range(2 * AHEAD)]
    with Engines(2, payload=256) as engines:
        check(engines, rounds)


def test_a_root_returns_early_until_all_records_are_in_use() -> None:
    with Engines(2, buffer=1 << 18) as engines:
        part = Call("broadcast", 5).of(engines, 0)
        statuses = [engines.begin(0, part.prepared, part.arrays) for _ in range(AHEAD)]
        assert statuses == [DONE] * (AHEAD - 1) + [WORKED]
        engines.carry(0, 1)
        calls = 0
        while not engines.carry(1, 0):
            assert engines.go_on(0, part.prepared) == WORKED, "a header is still to come"
            other = Call("broadcast", 5).of(engines, 1)
            assert engines.begin(1, other.prepared, other.arrays) == WORKED
            assert engines.go_on(1, other.prepared) == DONE
            assert other.is_right()
            calls += 1
        assert calls == PIGGYBACK_BYTES // HEADER_BYTES + 1, "headers are not sent together"
        assert engines.go_on(0, part.prepared) == DONE


def test_a_rank_that_writes_before_all_agree_is_found() -> None:
    """The planted fault: in a group of three, the receivers also return early."""

    def plant(prepared: PreparedPlan) -> None:
        prepared._words[words.CAN_RETURN_EARLY] = prepared.call & 0xFF == signature.code_of("broadcast")

    rounds = _mostly_ahead(3, 2 * AHEAD, random.Random(1))
    with Engines(3, seed=1) as engines, pytest.raises(AssertionError, match="waited for nobody"):
        check(engines, rounds, plant)


def test_a_wrong_record_is_found() -> None:
    """The planted fault: the record of a call is cleared before the others' headers arrive."""
    rounds = _mostly_ahead(2, AHEAD, random.Random(2))
    with Engines(2, seed=2) as engines:
        engines.loses_records = True
        with pytest.raises(AssertionError):
            check(engines, rounds)
