"""A rank is killed in every operation: every survivor raises soon, names it, and nothing is left behind."""

from __future__ import annotations

from functools import cache

import pytest

from faults import crew, victims

# Elements, and whether the victim is killed inside a call or between two.
MOMENTS = {"short-between": (7, False), "long-inside": (1_000_003, True)}


@cache
def outcomes_by_victim(op):
    """Of three worlds at once, in each of which another rank is killed between two short calls: they mostly wait."""
    return crew.run_together([world(op, victim, "short-between") for victim in range(3)])


def world(op, victim, moment):
    return (victims.work_until_death, 3, op, *MOMENTS[moment], victim)


def case(op, victim, moment):
    """`pytest` alone kills one rank of each operation, another one from operation to operation, inside a long call."""
    long = moment == "long-inside" and victim != list(victims.STEPS).index(op) % 3
    return pytest.param(op, victim, moment, marks=[pytest.mark.long] if long else [])


@pytest.mark.parametrize(
    ("op", "victim", "moment"),
    [case(op, victim, moment) for op in victims.STEPS for victim in range(3) for moment in MOMENTS],
)
def test_killed_rank_is_named_by_all(op, victim, moment):
    with crew.nothing_left():
        at_once = moment == "short-between"
        outcomes = outcomes_by_victim(op)[victim] if at_once else crew.run(*world(op, victim, moment))
    crew.check(outcomes, victim, op, others=2.0)
