"""A rank is killed while ranks talk over TCP: every survivor raises soon and knows who died."""

from __future__ import annotations

import pytest

from faults import crew, victims

WITHIN = 2.0
# Elements, and whether the victim is killed inside a call or between two.
MOMENTS = {"short-between": (7, False), "long-inside": (1_000_003, True)}
OPERATIONS = ["all_reduce", "broadcast", "all_gather", "send_recv", "barrier"]


@pytest.mark.parametrize("victim", [0, 1, 2])
@pytest.mark.parametrize("op", OPERATIONS)
def test_killed_in_the_middle_of_a_large_call(op: str, victim: int) -> None:
    check(op, 3, victim, "long-inside")


@pytest.mark.parametrize(("op", "victim"), [("all_reduce", 0), ("barrier", 1), ("send_recv", 2)])
def test_killed_between_two_small_calls(op: str, victim: int) -> None:
    check(op, 3, victim, "short-between")


def test_killed_rank_of_four() -> None:
    check("all_reduce", 4, 3, "long-inside")


def check(op: str, n: int, victim: int, moment: str) -> None:
    outcomes = crew.run(victims.work_until_death, n, op, *MOMENTS[moment], victim, "tcp")
    dead = outcomes.pop(victim)
    assert dead.exitcode == -9
    for outcome in outcomes:
        assert outcome.result is not None, outcome.error
        saw = outcome.result
        assert saw["kind"] == "PeerDiedError", saw
        assert saw["ranks"] == (victim,), saw
        assert f"rank {victim} " in saw["error"]
        assert str(dead.pid) in saw["error"]
        assert saw["again"] == saw["error"]
        assert saw["again_after"] < WITHIN
        assert saw["delay"] < WITHIN
        assert saw["others"] == n - 1
