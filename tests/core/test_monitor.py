"""Errors about a peer that died, failed or left name global ranks in every group."""

from __future__ import annotations

import re
import threading
from collections.abc import Sequence
from dataclasses import replace

import pytest

import fastcoll as dist
from fastcoll.core.monitor import FAILED, IN_ORDER, LEAVING, LEFT, Monitor
from fastcoll.errors import AbortedError, CollectiveTimeoutError, MismatchError, PeerDiedError, UsageError
from fastcoll.system.processes import Member

RANKS = (2, 5, 7)  # the global ranks of the group


class PublishedStates(Monitor):
    """The monitor of rank 0 of the group; the test sets the states that the others have published."""

    def __init__(self, *states: int, dead: Sequence[int] = ()) -> None:
        here = Member.here(0, 9, "cpu:auto")
        super().__init__([replace(here, rank=rank) for rank in RANKS], 0)
        self.states, self.dead = states, dead
        self.blamed: tuple[Sequence[int], bool] = (), False

    def _publish(self, state: int, reason: str) -> None: ...

    def _states(self) -> list[int]:
        return [IN_ORDER, *self.states]

    def _reason(self, rank: int) -> str:
        return "its reason"

    def _blamed(self, rank: int) -> tuple[Sequence[int], bool]:
        return self.blamed

    def _dead(self, working: Sequence[Member]) -> list[Member]:
        return [member for member in working if member.rank in self.dead]


def test_a_signal_handler_may_leave_a_group_while_a_failure_is_published() -> None:
    published: list[int] = []

    class Interrupted(PublishedStates):
        def _publish(self, state: int, reason: str) -> None:
            published.append(state)
            self.leave()

    monitor = Interrupted(IN_ORDER, IN_ORDER)
    fails = threading.Thread(target=monitor.fail, args=(AbortedError("it had enough"),), daemon=True)
    fails.start()
    fails.join(60)
    assert not fails.is_alive()
    assert published == [FAILED]


def test_a_signal_handler_may_fail_a_group_that_is_failing() -> None:
    class Interrupted(PublishedStates):
        def _publish(self, state: int, reason: str) -> None:
            self.fail(AbortedError("the handler's"))  # a signal handler calls `abort`

    monitor = Interrupted(IN_ORDER, IN_ORDER)
    monitor.fail(AbortedError("the first"))
    assert str(monitor.failure) == "the first"
    monitor = Interrupted(IN_ORDER, IN_ORDER)
    monitor.start_to_leave()
    assert str(monitor.failure) == "the handler's"


def test_ctrl_c_while_a_dump_is_written_does_not_keep_a_group_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(error: Exception) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("fastcoll.core.monitor.dump.after", interrupt)
    monitor, stopped = PublishedStates(IN_ORDER, IN_ORDER), list[bool]()
    monitor.on_failure = lambda: stopped.append(True)
    with pytest.raises(KeyboardInterrupt):
        monitor.fail(AbortedError("it failed"))
    assert stopped == [True]


def test_dead_peers_are_named_by_global_ranks() -> None:
    found = PublishedStates(IN_ORDER, IN_ORDER, dead=[5, 7]).decide([1], "a call")
    assert isinstance(found, PeerDiedError)
    assert found.ranks == (5, 7)
    assert str(found).startswith("rank 5 (pid ")
    assert PublishedStates(LEFT, IN_ORDER, dead=[5]).decide([2], "a call") is None, "it left before it ended"


@pytest.mark.parametrize(
    ("state", "needed", "ranks"), [(LEFT, [1], (5,)), (LEAVING, [1, 2], (5,)), (LEFT, [2], None)]
)
def test_a_rank_that_has_left_matters_only_if_it_is_needed(
    state: int, needed: list[int], ranks: object
) -> None:
    found = PublishedStates(state, IN_ORDER).decide(needed, "a call")
    assert (found and found.ranks) == ranks
    assert found is None or (type(found) is AbortedError and "its reason; a call" in str(found))


def test_a_peers_timeout_is_a_timeout_for_all_ranks_that_it_does_not_blame() -> None:
    monitor = PublishedStates(IN_ORDER, FAILED)
    assert monitor.decide([], "a call").ranks == (7,)
    monitor.blamed = (5,), True
    assert type(monitor.decide([], "a call")) is CollectiveTimeoutError
    assert monitor.decide([], "a call").ranks == (5,)
    monitor.blamed = (2,), True
    assert type(monitor.decide([], "a call")) is AbortedError


@pytest.mark.ranks(2)
@pytest.mark.parametrize("backend", ["shm", "tcp"])
def test_reasons_with_the_name_of_a_file_that_is_not_utf_8_reach_the_others(backend: str) -> None:
    """Python has a surrogate for each of its bytes that is none."""
    text, seen, first = "caf\udce9", re.escape("caf\\udce9"), dist.get_rank() == 0

    class Unpicklable:
        def __reduce__(self) -> str:
            raise ValueError(text)

    group = dist.new_group([0, 1], backend=backend)
    with pytest.raises(UsageError if first else MismatchError, match="caf" if first else seen):
        dist.broadcast_object_list([Unpicklable()], 0, group)
    group.barrier()
    try:
        exec(compile("raise ValueError(text)", f"{text}.py", "exec"))
    except ValueError:
        if first:
            dist.destroy_process_group(group)
    if not first:
        with pytest.raises(AbortedError, match=rf"left: ValueError: {seen} \({seen}\.py:1\)"):
            group.barrier()
    group = dist.new_group([0, 1], backend=backend)
    if first:
        dist.abort(group, text)
    with pytest.raises(AbortedError, match=seen):
        group.barrier()
