"""Meetings: all members get all contributions, or all the same error."""

from __future__ import annotations

import json
from functools import partial

import pytest
from rendezvous.observed import LIMIT, await_value

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
from fastcoll.rendezvous import assemble as module
from fastcoll.rendezvous.assemble import FAILED, MET, MOVED, Ending, GroupMeeting, assemble
from fastcoll.store import HashStore, Store
from fastcoll.system.processes import Member

PUBLISHED = [
    UsageError("no eth9"),
    UnavailableError("no MPI"),
    ResourceError("no port"),
    RendezvousError("another secret"),
    StoreTimeoutError("rank 3 did not come"),
    PeerDiedError("rank 2 died", [2]),
]


def crew(size: int) -> list[Member]:
    """Return ranks that are all this process."""
    return [Member.here(rank, size, "tcp") for rank in range(size)]


def meetings(store: Store, size: int, timeout: float = LIMIT) -> list[GroupMeeting]:
    """Return the meeting of one group, as seen by each rank."""
    members = crew(size)
    return [GroupMeeting(store, members, rank, timeout, "testing") for rank in range(size)]


@pytest.fixture(autouse=True)
def look_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each look at the store read it, however soon after the one before."""
    monkeypatch.setattr(module, "_LOOK_SECONDS", 0.0)


@pytest.mark.parametrize("size", [1, 2, 5])
def test_all_members_get_all_contributions(store: HashStore, size: int, in_threads) -> None:
    members = crew(size)
    results = in_threads(
        *(partial(assemble, store, members, rank, {"rank": rank}, LIMIT, "testing") for rank in range(size))
    )
    assert results == [[{"rank": rank} for rank in range(size)]] * size


def test_an_error_of_the_check_at_place_0_is_raised_on_all(store: HashStore, in_threads) -> None:
    def check(everybody: list[int]) -> None:
        raise UsageError(f"got {everybody}")

    def meet(meeting: GroupMeeting) -> list[int]:
        with meeting:
            return meeting.assemble(meeting.place, check)

    results = in_threads(*(partial(meet, each) for each in meetings(store, 3)))
    assert [type(error) for error in results] == [UsageError] * 3
    assert all(str(error).endswith("got [0, 1, 2]") for error in results)


@pytest.mark.parametrize("refusing", [0, 2])
def test_a_failing_member_fails_all(store: HashStore, refusing: int, in_threads) -> None:
    def meet(meeting: GroupMeeting) -> list[int]:
        with meeting:
            if meeting.place == refusing:
                raise ResourceError("no memory")
            return meeting.assemble(meeting.place)

    results = in_threads(*(partial(meet, each) for each in meetings(store, 3)))
    for rank, error in enumerate(results):
        assert type(error) is ResourceError
        assert str(error).startswith(f"rank {refusing} (") == (rank != refusing)


def test_a_missing_member_is_named_on_all(store: HashStore, in_threads, clock) -> None:
    members = crew(3)

    def let_time_pass() -> None:
        await_value(store, "group/missing", str(members[2]).encode())
        clock.ahead += 1000

    calls = [partial(assemble, store, members, rank, rank, 600, "testing") for rank in (0, 1)]
    *errors, _ = in_threads(*calls, let_time_pass)
    for error in errors:
        assert isinstance(error, StoreTimeoutError)
        assert f"testing: {members[2]} did not come within 600 s" in str(error)


def test_without_place_0_that_member_is_named_as_missing(store: HashStore) -> None:
    with pytest.raises(StoreTimeoutError, match=r"rank 0 \(.*\) \(it collects the others\) did"):
        assemble(store, crew(2), 1, 1, 0.0, "testing")
    with HashStore() as other, pytest.raises(StoreTimeoutError, match=r"rank 0 \(.*\) did not come"):
        meetings(other, 2, 0.0)[1].receive("terms")


@pytest.mark.parametrize("have_met", [False, True])
@pytest.mark.parametrize("error", PUBLISHED)
def test_the_others_raise_a_published_error(store: HashStore, error: Exception, have_met: bool) -> None:
    first, second = meetings(store, 2)
    if have_met:
        assert Ending(store, "group").decide(MET, b"all")
    second.look()
    first.publish_error(error)
    with pytest.raises(type(error)) as caught:
        second.look()
    assert str(caught.value).startswith("rank 0 (")
    assert str(caught.value).endswith(f"): {error}")
    assert getattr(caught.value, "ranks", ()) == getattr(error, "ranks", ())


def test_raise_published_raises_a_published_failure(store: HashStore) -> None:
    first, second = meetings(store, 2, 0.05)
    second.raise_published()  # no rank has published an error
    first.publish_error(ResourceError("no port"))
    with pytest.raises(ResourceError, match=r"^rank 0 \(.*\): no port"):
        second.raise_published()


def test_ctrl_c_is_published_too(store: HashStore) -> None:
    first, second = meetings(store, 2)
    with pytest.raises(KeyboardInterrupt), first:
        raise KeyboardInterrupt
    with pytest.raises(RendezvousError, match=r"rank 0 \(.*\): it was ended by KeyboardInterrupt"):
        second.look()


def test_errors_that_all_detect_or_that_another_member_published_are_not_published(store: HashStore) -> None:
    first, second = meetings(store, 2)
    first.publish_error(CollectiveTimeoutError("late", [1]))
    second.look()
    first.publish_error(UsageError("of the first"))
    with pytest.raises(UsageError) as caught, second:
        second.look()
    second.publish_error(UsageError(f"again: {caught.value}"))
    with pytest.raises(UsageError, match=r"\): of the first"):
        first.look()


def test_the_first_decision_counts(store: HashStore, in_threads) -> None:
    kinds = [MET, FAILED, MOVED] * 5
    results = in_threads(
        *(partial(Ending(store, "m").decide, kind, b"%d" % n) for n, kind in enumerate(kinds))
    )
    assert results.count(True) == 1
    winner = results.index(True)
    assert store.get(Ending(store, "m").key) == kinds[winner] + b"%d" % winner


def test_a_failure_with_a_lost_store_is_not_published() -> None:
    store = HashStore()
    first, _ = meetings(store, 2)
    store.close()
    first.publish_error(UsageError("nobody reads this"))


@pytest.mark.parametrize(
    "record", [b"", b"{}", b"[]", b'{"kind": "KeyError", "text": "x", "ranks": []}', b"[" * 9999]
)
def test_a_malformed_failure_is_an_error(store: HashStore, record: bytes) -> None:
    store.set("group/end", FAILED + record)
    with pytest.raises(StoreError, match="the error of the failed meeting cannot be read"):
        meetings(store, 2)[1].look()


@pytest.mark.parametrize("value", [b"", b"nonsense", json.dumps([1, 2]).encode()])
def test_a_malformed_contribution_is_an_error(store: HashStore, value: bytes) -> None:
    store.set("group/end", MET + value)
    with pytest.raises(FastcollError, match="cannot be read"):
        assemble(store, crew(2), 1, 1, 5, "testing")
