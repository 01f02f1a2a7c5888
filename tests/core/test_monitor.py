"""Errors about a peer that died, failed or left name global ranks in every group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from fastcoll.core.monitor import FAILED, IN_ORDER, LEAVING, LEFT, Monitor
from fastcoll.errors import AbortedError, CollectiveTimeoutError, PeerDiedError
from fastcoll.system.processes import Member

RANKS = (2, 5, 7)  # the global ranks of the group


class Told(Monitor):
    """Of rank 0 of the group; the test says what the others have published."""

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


def test_the_dead_are_named_by_global_ranks() -> None:
    found = Told(IN_ORDER, IN_ORDER, dead=[5, 7]).decide([1], "a call")
    assert isinstance(found, PeerDiedError)
    assert found.ranks == (5, 7)
    assert str(found).startswith("rank 5 (pid ")
    assert Told(LEFT, IN_ORDER, dead=[5]).decide([2], "a call") is None, "it left before it ended"


@pytest.mark.parametrize(
    ("state", "needed", "ranks"), [(LEFT, [1], (5,)), (LEAVING, [1, 2], (5,)), (LEFT, [2], None)]
)
def test_only_a_rank_that_is_needed_may_not_have_left(state: int, needed: list[int], ranks: object) -> None:
    found = Told(state, IN_ORDER).decide(needed, "a call")
    assert (found and found.ranks) == ranks
    assert found is None or (type(found) is AbortedError and "its reason; a call" in str(found))


def test_what_a_peer_has_failed_for_counts_for_all_but_those_it_blames() -> None:
    told = Told(IN_ORDER, FAILED)
    assert told.decide([], "a call").ranks == (7,)
    told.blamed = (5,), True
    assert type(told.decide([], "a call")) is CollectiveTimeoutError
    assert told.decide([], "a call").ranks == (5,)
    told.blamed = (2,), True
    assert type(told.decide([], "a call")) is AbortedError
