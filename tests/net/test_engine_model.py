"""The engine under any schedule: who goes on, and which bytes arrive, is drawn at random; also with wrong calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastcoll.core.status import DONE, MISMATCH
from net.engine_calls import OPERATIONS, Call
from net.engines import Engines

SEVERAL = (2, 3, 5)
MANY = 18  # they meet by dissemination


@st.composite
def programs(draw: st.DrawFn, n: int, most: int, length: int) -> list[list[Call]]:
    """What each rank calls; in some rounds one rank calls something else, from which the others differ."""
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


def check(engines: Engines, rounds: Sequence[Sequence[Call]]) -> None:
    """Run the rounds: every rank sees which ones match, and gets what is right, or nothing."""
    n = engines.size
    parts = [[calls[rank].of(engines, rank) for calls in rounds] for rank in range(n)]
    before = [[[x.copy() for x in part.arrays] for part in mine] for mine in parts]
    results = engines.run([[(part.prepared, part.arrays) for part in mine] for mine in parts])
    for number, calls in enumerate(rounds):
        wanted = DONE if _match(calls) else MISMATCH
        assert [result[number] for result in results] == [wanted] * n, calls
        for rank in range(n):
            part = parts[rank][number]
            assert part.is_right() if wanted == DONE else part.is_untouched(before[rank][number]), (
                f"rank {rank}, {calls[rank]}"
            )
    assert engines.nothing_left()


def _match(calls: Sequence[Call]) -> bool:
    """Whether ranks that call so agree: rootless operations have no root."""
    rooted = calls[0].operation in ("reduce", "broadcast")
    seen = {
        (call.operation, call.operation in ("barrier", "refused") or call.count, rooted and call.root)
        for call in calls
    }
    return len(seen) == 1


@pytest.mark.parametrize("payload", [0, 2048])
@pytest.mark.parametrize("n", [2, 3, 5])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_every_operation_in_pieces_of_any_size(operation: str, n: int, payload: int) -> None:
    rounds = [[Call(operation, count, n - 1, 1000 * count)] * n for count in (1, 0, 130, 97)]
    with Engines(n, 2, payload, seed=n, piece=40) as engines:
        check(engines, rounds)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_every_operation_of_many_ranks(operation: str) -> None:
    with Engines(MANY, seed=5, piece=20_000) as engines:
        check(engines, [[Call(operation, count, 3, 1000 * count)] * MANY for count in (2, 700)])


@pytest.mark.parametrize("count", [9000, 100_000])
def test_sums_of_many_ranks(count: int) -> None:
    """What is reduced as it arrives, by halves and along the ring."""
    with Engines(MANY, seed=5) as engines:
        check(engines, [[Call("sum", count)] * MANY])


@pytest.mark.parametrize("streams", [1, 3])
def test_two_ranks_reduce_what_arrives_in_pieces_that_cut_items(streams: int) -> None:
    with Engines(2, streams, seed=1, piece=30_001) as engines:
        check(engines, [[Call("all_reduce", 40_000)] * 2])
        carried = engines.carried()
    assert len(carried) == 2 * streams, "a stream is not used"
    assert min(carried.values()) > 100_000


@settings(max_examples=120, deadline=None)
@given(st.data())
def test_any_schedule_of_calls_that_match_or_not(data: st.DataObject) -> None:
    n = data.draw(st.sampled_from(SEVERAL))
    payload = data.draw(st.sampled_from([0, 256, 2048]))
    rounds = data.draw(programs(n, most=200, length=4))
    seed, piece = data.draw(st.integers(0, 1 << 30)), data.draw(st.sampled_from([7, 100, 1 << 16]))
    streams = data.draw(st.sampled_from([1, 3]))
    with Engines(n, streams, payload, seed, piece) as engines:
        check(engines, rounds)


@settings(max_examples=15, deadline=None)
@given(st.data())
def test_any_schedule_of_many_ranks(data: st.DataObject) -> None:
    rounds = data.draw(programs(MANY, most=20, length=3))
    with Engines(MANY, seed=data.draw(st.integers(0, 1 << 30))) as engines:
        check(engines, rounds)
