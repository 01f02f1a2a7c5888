"""A rank is killed while ranks talk over TCP: every survivor raises soon and knows who died."""

from __future__ import annotations

from functools import cache

import pytest

from faults import crew, victims

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
    crew.check(crew.run(*world(op, 3, victim, "long-inside")), victim, op, others=2.0)


@pytest.mark.parametrize(("op", "victim"), BETWEEN.items())
def test_killed_between_two_small_calls(op: str, victim: int) -> None:
    crew.check(outcomes_between()[op], victim, op, others=2.0)


def test_killed_rank_of_four() -> None:
    crew.check(crew.run(*world("all_reduce", 4, 3, "long-inside")), 3, "all_reduce", others=3.0)


def world(op: str, n: int, victim: int, moment: str) -> tuple[object, ...]:
    return (victims.work_until_death, n, op, *MOMENTS[moment], victim, "tcp")
