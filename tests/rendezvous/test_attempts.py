"""The first meeting of an elastic job: how deaths are published to ranks and launchers."""

from __future__ import annotations

import pytest

from fastcoll import UsageError
from fastcoll.rendezvous.attempts import ELSEWHERE, MADE, Attempts, Loss, ProcessName, loss_of, place_of
from fastcoll.store import HashStore


def loss(name: str, is_final: bool = False) -> Loss:
    return Loss(name, 1, f"{name} died", is_final)


def test_each_death_before_the_meeting_ends_one_attempt(store: HashStore) -> None:
    attempts = Attempts(store)
    assert attempts.wait(0, 0.0) is None
    for name in ("0.1", "0.new1"):
        standing = attempts.report(loss(name))
        assert (standing.has_met, standing.has_come, standing.is_state_lost) == (False, False, False)
    assert attempts.decide(0, MADE) != MADE
    assert [loss_of(attempts.outcome(number) or b"").name for number in (0, 1)] == ["0.1", "0.new1"]
    assert attempts.outcome(2) is None
    attempts.come()
    assert attempts.report(loss("0.2", is_final=True)).has_come


def test_the_state_is_lost_with_the_last_that_has_joined(store: HashStore) -> None:
    attempts = Attempts(store)
    for name in ("0.0", "1.0"):
        attempts.join(name)
    attempts.report(loss("0.1"))  # a process that had not joined
    assert attempts.decide(1, MADE) == MADE
    standing = attempts.report(loss("0.0"))
    assert (standing.has_met, standing.is_state_lost) == (True, False)
    assert not attempts.report(loss("0.new1")).is_state_lost  # it was waiting to join
    attempts.join("0.new2")
    assert not attempts.report(loss("1.0")).is_state_lost
    standing = attempts.report(loss("0.new2"))
    assert standing.is_state_lost
    assert standing.joined == {"0.0", "1.0", "0.new2"}


def test_ranks_that_met_by_other_means_have_met(store: HashStore) -> None:
    attempts = Attempts(store)
    attempts.join("0.0")
    assert [attempts.decide_next(ELSEWHERE) for _ in range(2)] == [ELSEWHERE] * 2
    standing = attempts.report(loss("0.0"))
    assert (standing.has_met, standing.is_state_lost) == (True, False)  # others may not have joined yet


def test_place() -> None:
    place = ProcessName("1.new2", 3, 4)
    assert place_of(str(place)) == place
    for text in ("", "1.0", "1.0:4/4", "1.0:-1/4", ":0/4", "0.0:a/4"):
        with pytest.raises(UsageError, match="FASTCOLL_PLACE is"):
            place_of(text)
