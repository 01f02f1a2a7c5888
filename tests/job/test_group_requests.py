"""Requests for a new group: what their comparison costs the store, and which errors it raises on all ranks."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from together import together

from fastcoll.errors import AbortedError, MismatchError, RendezvousError, StoreTimeoutError
from fastcoll.job.group_requests import GroupRequest
from fastcoll.job.lease import StoreLease
from fastcoll.rendezvous import assemble
from fastcoll.rendezvous.assemble import MET, Ending
from fastcoll.store import HashStore, Store, waiting
from fastcoll.store.table import Missing, StoreRequest
from fastcoll.system.processes import Member


class Counting(HashStore):
    """A store that counts requests, keys and bytes; several threads may use it."""

    def __init__(self) -> None:
        super().__init__()
        self.requests = self.keys = self.nbytes = 0
        self._counting = threading.Lock()

    def _ask(self, request: StoreRequest) -> list[bytes] | Missing:
        with self._counting:
            self.requests += 1
            self.keys += len(request.keys)
            self.nbytes += sum(map(len, request.values))
        return super()._ask(request)


def request_of(store: Store, rank: int, size: int, backend: str = "cpu:auto") -> GroupRequest:
    """Return the request of one rank for a group of all ranks, whose processes cannot be checked from here."""
    here = Member.here(0, size, "tcp")
    members = [replace(here, rank=each, boot_id=str(each)) for each in range(size)]
    return GroupRequest(StoreLease(store, members, rank, store.close), "group0", [*range(size)], backend)


def test_ranks_agree_on_a_group_with_requests_in_proportion_to_their_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(waiting, "SLICE_SECONDS", 300.0)  # no rank looks at others while it waits
    size, store = 64, Counting()

    def ask(rank: int) -> bool:
        request = request_of(store, rank, size)
        request.publish()
        return request.is_agreed(range(size), 300.0, False)

    assert together(*(partial(ask, rank) for rank in range(size))) == [True] * size
    # A rank counts and publishes its request, and waits for the result. The first rank reads all requests, and
    # publishes the result.
    assert store.requests <= 3 * size + 4
    assert store.keys <= 4 * size + 4


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_late_in_new_group_costs_few_requests(
    monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    monkeypatch.setattr(waiting, "SLICE_SECONDS", 0.001)
    monkeypatch.setattr(assemble, "_MOST_AT_ONCE", 1)
    monkeypatch.setattr(waiting, "LOOKS_PER_SECOND", 1e9)
    size, store, looks = 1000, Counting(), 20
    request = request_of(store, rank, size)
    others = size - 1
    store.multi_set([f"group0/asked/{each}" for each in range(others)], [request.digest] * others)
    store.requests = store.keys = 0
    raise_if_left = StoreLease.raise_if_left

    def look(lease: StoreLease, ranks: Sequence[int], doing: str) -> None:
        nonlocal looks
        looks -= 1
        if looks == 0 and rank == 0:
            store.set(f"group0/asked/{others}", request.digest)
        elif looks == 0:
            Ending(store, f"group0/{request.digest.hex()}").decide(MET, b"null")
        raise_if_left(lease, ranks, doing)

    monkeypatch.setattr(StoreLease, "raise_if_left", look)
    assert request.is_agreed(range(size), 300.0, False)
    # Per look: the wait before it, the failures and late ranks, and whether they have left.
    assert store.requests < 4 * 20
    # Each wait of the first rank lists all keys, and it looks once more at each. Another rank waits for the result.
    assert store.keys < (23 * size if rank == 0 else 6 * 20)


def test_ranks_that_ask_for_the_same_group_write_its_ranks_once() -> None:
    size, store = 200, Counting()
    for rank in range(size):
        request_of(store, rank, size).publish()
    assert store.nbytes < 50 * size + len(str([*range(size)]))


def agree(*requests: GroupRequest, timeouts: Sequence[float] = ()) -> list[Any]:
    """Publish requests of ranks 0, 1, ... of a group of three, and compare them; return each result or exception."""
    for request in requests:
        request.publish()
    limits = timeouts or [300.0] * len(requests)
    return together(
        *(
            partial(each.is_agreed, range(3), limit, False)
            for each, limit in zip(requests, limits, strict=True)
        )
    )


def test_all_ranks_name_the_one_that_is_late() -> None:
    """The first rank reads who is late, and the second one waits much longer."""
    store = HashStore()
    for error in agree(request_of(store, 0, 3), request_of(store, 1, 3), timeouts=[0.0, 300.0]):
        assert isinstance(error, StoreTimeoutError)
        assert str(error).startswith("timed out: new_group([0, 1, 2]): rank 2 (pid ")
        assert str(error).endswith("did not come within 0 s")


@pytest.mark.parametrize("left", [0, 2])
def test_all_ranks_name_the_one_that_has_left(left: int) -> None:
    store = HashStore()
    store.set(f"exit_reason/{left}", "left the job")
    for error in agree(*(request_of(store, rank, 3) for rank in {0, 1} - {left})):
        assert isinstance(error, AbortedError)
        assert str(error).startswith(f"new_group([0, 1, 2]): rank {left} (pid ")
        assert str(error).endswith("left the job")


def test_ctrl_c_on_the_first_rank_ends_the_call_on_all(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(lease: StoreLease, ranks: Sequence[int], doing: str) -> None:
        if lease.rank == 0:
            raise KeyboardInterrupt

    monkeypatch.setattr(StoreLease, "raise_if_left", interrupt)
    store = HashStore()
    first, second = agree(request_of(store, 0, 3), request_of(store, 1, 3))
    assert isinstance(first, KeyboardInterrupt)
    assert isinstance(second, RendezvousError)
    assert str(second).startswith("new_group([0, 1, 2]): rank 0 (pid ")
    assert str(second).endswith("was ended by KeyboardInterrupt")


@pytest.mark.parametrize("different", range(3))
def test_all_ranks_name_another_request(different: int) -> None:
    store = HashStore()
    backends = ["cpu:tcp" if rank == different else "cpu:shm" for rank in range(3)]
    errors = agree(*(request_of(store, rank, 3, backend) for rank, backend in enumerate(backends)))
    for rank, error in enumerate(errors):
        other = int(different == 0) if rank == different else different
        assert isinstance(error, MismatchError), error
        mine, theirs = (f"ranks [0, 1, 2] with {backends[each]}" for each in (rank, other))
        assert f"rank {rank} asks for {mine}, rank {other} for {theirs}; every rank must" in str(error)
