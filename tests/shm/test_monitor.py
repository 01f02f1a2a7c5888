"""Failures that ranks of one node publish: the reason, the ranks at fault, and whether they are late."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

import pytest

from fastcoll.errors import AbortedError, CollectiveTimeoutError, GroupError, PeerDiedError
from fastcoll.shm.layout import Layout
from fastcoll.shm.monitor import ShmMonitor
from fastcoll.shm.segment import Segment, new_name, unlink
from fastcoll.system.processes import Member

FIRST_RANK = 10  # global ranks differ from group ranks


@pytest.fixture
def monitors() -> Iterator[list[ShmMonitor]]:
    members = [replace(Member.here(rank, 4, "shm"), rank=FIRST_RANK + rank) for rank in range(4)]
    name = new_name()
    segment = Segment.create(name, Layout(4, 4096, 4096))
    unlink(name)
    yield [ShmMonitor(segment, members, rank) for rank in range(4)]
    segment.close()


def passed_on(monitor: ShmMonitor) -> GroupError:
    """The error with which a rank that waits for another one fails."""
    found = monitor.decide([], "barrier()")
    assert found is not None
    monitor.fail(found)
    return found


def test_a_rank_that_passes_a_failure_on_is_not_at_fault(monitors: list[ShmMonitor]) -> None:
    monitors[1].fail(PeerDiedError("rank 13 died", [13]))
    for error in (passed_on(monitors[0]), passed_on(monitors[2])):
        assert type(error) is AbortedError
        assert error.ranks == (13,)
        assert re.search(r"rank 11 .*failed the group: rank 13 died; barrier\(\)", str(error))


def test_a_rank_that_names_no_rank_is_at_fault_itself(monitors: list[ShmMonitor]) -> None:
    monitors[1].fail(AbortedError("abort() was called"))
    assert passed_on(monitors[0]).ranks == (11,)


def test_a_timeout_is_a_timeout_on_all_ranks_except_the_late_one(monitors: list[ShmMonitor]) -> None:
    monitors[1].fail(CollectiveTimeoutError("rank 13 did not arrive", [13]))
    for rank, kind in ((0, CollectiveTimeoutError), (2, CollectiveTimeoutError), (3, AbortedError)):
        error = passed_on(monitors[rank])
        assert type(error) is kind
        assert error.ranks == (13,)


def test_many_ranks_at_fault_leave_room_for_the_reason(monitors: list[ShmMonitor]) -> None:
    monitors[1].fail(CollectiveTimeoutError("\u00e4" * 2000, range(100_000, 101_000)))
    error = passed_on(monitors[0])
    assert error.ranks == tuple(range(100_000, 100_032))
    assert "\u00e4" * 300 in str(error)


@pytest.mark.parametrize(("fails", "named"), [(False, 12), (True, 13)])
def test_a_dead_rank_is_named_by_its_global_rank_unless_it_has_failed_meanwhile(
    monitors: list[ShmMonitor], monkeypatch: pytest.MonkeyPatch, fails: bool, named: int
) -> None:
    def end(working: list[Member]) -> list[Member]:
        if fails:
            monitors[2].fail(PeerDiedError("rank 13 died", [13]))
        return [monitors[0].members[2]]

    monkeypatch.setattr(monitors[0], "_dead", end)
    assert passed_on(monitors[0]).ranks == (named,)
