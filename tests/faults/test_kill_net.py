"""A rank is killed while ranks talk over TCP: every survivor raises soon and knows who died."""

from __future__ import annotations

from functools import cache

import pytest

from faults import crew, victims

WITHIN = 8.0  # seconds; on an idle machine it takes 0.1, and the deadlines are 20 and 30
# Elements, and whether the victim is killed inside a call or between two.
MOMENTS = {"short-between": (7, False), "long-inside": (1_000_003, True)}
OPERATIONS = ["all_reduce", "broadcast", "all_gather", "send_recv", "barrier"]


BETWEEN = {"all_reduce": 0, "barrier": 1, "send_recv": 2}


@cache
def outcomes_between() -> dict[str, list[crew.Outcome]]:
    """Of a world for each operation, at once, with a rank killed between two small calls."""
    worlds = [world(op, 3, victim, "short-between") for op, victim in BETWEEN.items()]
    return dict(zip(BETWEEN, crew.run_together(worlds), strict=True))


@pytest.mark.parametrize("victim", [0, 1, 2])
@pytest.mark.parametrize("op", OPERATIONS)
def test_killed_in_the_middle_of_a_large_call(op: str, victim: int) -> None:
    check(crew.run(*world(op, 3, victim, "long-inside")), victim)


@pytest.mark.parametrize(("op", "victim"), BETWEEN.items())
def test_killed_between_two_small_calls(op: str, victim: int) -> None:
    check(outcomes_between()[op], victim)


def test_killed_rank_of_four() -> None:
    check(crew.run(*world("all_reduce", 4, 3, "long-inside")), 3)


def world(op: str, n: int, victim: int, moment: str) -> tuple[object, ...]:
    return (victims.work_until_death, n, op, *MOMENTS[moment], victim, "tcp")


def check(ended: list[crew.Outcome], victim: int) -> None:
    outcomes = list(ended)
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
        assert saw["others"] == len(outcomes)
