"""Meetings: everybody gets everybody's contribution, or everybody the same error."""

from __future__ import annotations

import json
from functools import partial

import pytest
from rendezvous.observed import await_value

from fastcoll.errors import (
    CollectiveTimeoutError,
    FastcollError,
    PeerDiedError,
    RendezvousError,
    ResourceError,
    StoreError,
    StoreTimeoutError,
    UnavailableError,
    UsageError,
)
from fastcoll.rendezvous.assemble import FAILED, MET, MOVED, Ending, GroupMeeting, assemble
from fastcoll.store import HashStore, Store
from fastcoll.system.processes import Member

TOLD = [
    UsageError("no eth9"),
    UnavailableError("no MPI"),
    ResourceError("no port"),
    RendezvousError("another secret"),
    StoreTimeoutError("rank 3 did not come"),
    PeerDiedError("rank 2 died", [2]),
]


def crew(size: int) -> list[Member]:
    """Ranks, all of them this process."""
    return [Member.here(rank, size, "tcp") for rank in range(size)]


def meetings(store: Store, size: int, timeout: float = 50.0) -> list[GroupMeeting]:
    """One group's, as each of its ranks has it."""
    members = crew(size)
    made = [GroupMeeting(store, members, rank, timeout, "testing") for rank in range(size)]
    for each in made:
        each._looked = 0.0
    return made


@pytest.mark.parametrize("size", [1, 2, 5])
def test_everybody_gets_everybodys(size: int, in_threads) -> None:
    members = crew(size)
    with HashStore() as store:
        results = in_threads(
            *(partial(assemble, store, members, rank, {"rank": rank}, 50, "testing") for rank in range(size))
        )
    assert results == [[{"rank": rank} for rank in range(size)]] * size


def test_what_the_first_one_finds_wrong_is_everybodys_error(in_threads) -> None:
    def check(everybody: list[int]) -> None:
        raise UsageError(f"got {everybody}")

    def meet(meeting: GroupMeeting) -> list[int]:
        with meeting:
            return meeting.assemble(meeting.place, check)

    with HashStore() as store:
        results = in_threads(*(partial(meet, each) for each in meetings(store, 3)))
    assert [type(error) for error in results] == [UsageError] * 3
    assert all(str(error).endswith("got [0, 1, 2]") for error in results)


@pytest.mark.parametrize("refusing", [0, 2])
def test_who_cannot_go_on_ends_it_for_all(refusing: int, in_threads) -> None:
    def meet(meeting: GroupMeeting) -> list[int]:
        with meeting:
            if meeting.place == refusing:
                raise ResourceError("no memory")
            return meeting.assemble(meeting.place)

    with HashStore() as store:
        results = in_threads(*(partial(meet, each) for each in meetings(store, 3)))
    for rank, error in enumerate(results):
        assert type(error) is ResourceError
        assert str(error).startswith(f"rank {refusing} (") == (rank != refusing)


def test_who_does_not_come_is_named_by_all(in_threads, clock) -> None:
    members = crew(3)
    with HashStore() as store:

        def let_time_pass() -> None:
            await_value(store, "group/missing", str(members[2]).encode())
            clock.ahead += 1000

        calls = [partial(assemble, store, members, rank, rank, 600, "testing") for rank in (0, 1)]
        *errors, _ = in_threads(*calls, let_time_pass)
    for error in errors:
        assert isinstance(error, StoreTimeoutError)
        assert f"testing: {members[2]} did not come within 600 s" in str(error)


def test_without_the_first_one_it_is_the_one_that_is_missing() -> None:
    with (
        HashStore() as store,
        pytest.raises(StoreTimeoutError, match=r"rank 0 \(.*\) \(it collects the others\) did"),
    ):
        assemble(store, crew(2), 1, 1, 0.3, "testing")
    with HashStore() as store, pytest.raises(StoreTimeoutError, match=r"rank 0 \(.*\) did not come"):
        meetings(store, 2, 0.3)[1].hear("terms")


@pytest.mark.parametrize("have_met", [False, True])
@pytest.mark.parametrize("error", TOLD)
def test_the_others_raise_what_one_tells(error: Exception, have_met: bool) -> None:
    with HashStore() as store:
        first, second = meetings(store, 2)
        if have_met:
            assert Ending(store, "group").decide(MET, b"all")
        second.look()
        first.tell(error)
        second._looked = 0.0
        with pytest.raises(type(error)) as caught:
            second.look()
    assert str(caught.value).startswith("rank 0 (")
    assert str(caught.value).endswith(f"): {error}")
    assert getattr(caught.value, "ranks", ()) == getattr(error, "ranks", ())


def test_why_the_others_have_failed_is_heard_where_one_tells() -> None:
    with HashStore() as store:
        first, second = meetings(store, 2, 0.05)
        second.hear_why()  # no rank has published an error
        first.tell(ResourceError("no port"))
        with pytest.raises(ResourceError, match=r"^rank 0 \(.*\): no port"):
            second.hear_why()


def test_ctrl_c_is_told_too() -> None:
    with HashStore() as store:
        first, second = meetings(store, 2)
        with pytest.raises(KeyboardInterrupt), first:
            raise KeyboardInterrupt
        with pytest.raises(RendezvousError, match=r"rank 0 \(.*\): it was ended by KeyboardInterrupt"):
            second.look()


def test_what_all_find_themselves_and_what_came_from_another_is_not_told() -> None:
    with HashStore() as store:
        first, second = meetings(store, 2)
        first.tell(CollectiveTimeoutError("late", [1]))
        second.look()
        second._looked = 0.0
        first.tell(UsageError("of the first"))
        with pytest.raises(UsageError) as caught, second:
            second.look()
        second.tell(UsageError(f"again: {caught.value}"))
        with pytest.raises(UsageError, match=r"\): of the first"):
            first.look()


def test_the_first_to_decide_decides(in_threads) -> None:
    with HashStore() as store:
        kinds = [MET, FAILED, MOVED] * 5
        results = in_threads(
            *(partial(Ending(store, "m").decide, kind, b"%d" % n) for n, kind in enumerate(kinds))
        )
        assert results.count(True) == 1
        winner = results.index(True)
        assert store.get(Ending(store, "m").key) == kinds[winner] + b"%d" % winner


def test_a_failure_in_a_lost_store_is_kept_to_oneself() -> None:
    store = HashStore()
    first, _ = meetings(store, 2)
    store.close()
    first.tell(UsageError("nobody hears"))


@pytest.mark.parametrize(
    "record", [b"", b"{}", b"[]", b'{"kind": "KeyError", "text": "x", "ranks": []}', b"[" * 9999]
)
def test_what_is_no_failure_is_called_so(record: bytes) -> None:
    with HashStore() as store:
        store.set("group/end", FAILED + record)
        with pytest.raises(StoreError, match="why the meeting failed cannot be read"):
            meetings(store, 2)[1].look()


@pytest.mark.parametrize("value", [b"", b"nonsense", json.dumps([1, 2]).encode()])
def test_what_is_no_contribution_is_called_so(value: bytes) -> None:
    with HashStore() as store:
        store.set("group/end", MET + value)
        with pytest.raises(FastcollError, match="cannot be read"):
            assemble(store, crew(2), 1, 1, 5, "testing")
