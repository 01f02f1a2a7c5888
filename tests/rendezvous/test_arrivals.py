"""Ranks by arrival: the first process assigns them, and all agree."""

from __future__ import annotations

import os
import re
from functools import partial

import pytest
from rendezvous.observed import LIMIT, until

from fastcoll.errors import StoreError, StoreTimeoutError, UsageError
from fastcoll.rendezvous.assemble import MET, Ending, MovedError, compact
from fastcoll.rendezvous.join import Arrival, FullError, arrive, assign, call_off
from fastcoll.store import HashStore

HERE = rf"pid {os.getpid()} on {os.uname().nodename}"


@pytest.mark.parametrize("size", [1, 2, 5, 8])
def test_ranks_go_by_arrival(store: HashStore, size: int, in_threads) -> None:
    ranks = in_threads(*[partial(arrive, store, None, size, LIMIT)] * size)
    assert sorted(ranks) == list(range(size))
    arrivals = [Arrival.from_bytes(store.get(f"arrivals/member/{number}")) for number in range(size)]
    assert assign(arrivals) == list(range(size))


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ([(None, 4), (2, 4), (2, 4)], f"rank 2 is claimed by two processes, {HERE} and {HERE}"),
        ([(None, 3), (None, 4)], rf"disagree about the world size: {HERE} has \d, {HERE} has \d"),
    ],
    ids=["a rank twice", "two world sizes"],
)
def test_a_mismatch_is_raised_on_all(
    store: HashStore, in_threads, asked: list[tuple[int | None, int]], message: str
) -> None:
    results = in_threads(*(partial(arrive, store, rank, size, LIMIT) for rank, size in asked))
    for error in results:
        assert isinstance(error, UsageError)
        assert re.search(message, str(error))


def test_a_smaller_world_does_not_count_a_member_of_a_larger_one(store: HashStore, in_threads) -> None:
    assert sorted(in_threads(*[partial(arrive, store, None, 2, LIMIT)] * 2)) == [0, 1]
    text = f"all 2 places were taken, .*; the processes disagree about the world size: {HERE} has 2, {HERE} has 3"
    with pytest.raises(FullError, match=text):
        arrive(store, None, 3, LIMIT)


def test_a_process_too_late_gets_the_names_of_the_others(store: HashStore, in_threads) -> None:
    in_threads(*[partial(arrive, store, None, 2, LIMIT)] * 2)
    assert not call_off(store)
    with pytest.raises(FullError, match=f"all 2 places were taken, by {HERE}, {HERE}") as caught:
        arrive(store, None, 2, LIMIT)
    assert [arrival.pid for arrival in caught.value.arrivals] == [os.getpid()] * 2


def test_a_missing_process_is_named_on_all(store: HashStore, in_threads, clock) -> None:
    def let_time_pass() -> None:
        until(lambda: b"rank(s) 1, 3 (here: " in (store.peek(["arrivals/missing"])[0] or b""))
        clock.ahead += 1000

    *results, _ = in_threads(*(partial(arrive, store, rank, 4, 600) for rank in (0, 2)), let_time_pass)
    for error in results:
        assert isinstance(error, StoreTimeoutError)
        assert "rank(s) 1, 3 (here: " in str(error)


def test_a_cancelled_meeting(store: HashStore, in_threads) -> None:
    begun = iter([lambda: None, lambda: call_off(store)])
    results = in_threads(*[partial(arrive, store, None, 3, LIMIT, lambda: next(begun, lambda: None)())] * 2)
    assert all(isinstance(error, MovedError) for error in results), results
    assert not call_off(store)


def test_garbage_among_the_arrivals_is_an_error() -> None:
    for place, value in ((1, "nonsense"), (0, "[]")):
        with HashStore() as store:
            store.set(f"arrivals/member/{place}", value)
            store.add("arrivals/count", 1 - place)
            with pytest.raises(StoreError, match="an arrival cannot be read"):
                arrive(store, None, 2, 5)
    with HashStore() as store:
        store.add("arrivals/count", 1)
        assert Ending(store, "arrivals").decide(MET, compact(["one", "two"]))
        with pytest.raises(StoreError, match="a rank cannot be read"):
            arrive(store, None, 2, 5)
