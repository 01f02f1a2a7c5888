"""A rank is killed in every operation: every survivor raises soon, names it, and nothing is left behind."""

from __future__ import annotations

import pytest

from faults import crew, victims

WITHIN = 2.0
# Elements, and whether the victim is killed inside a call or between two.
MOMENTS = {"short-between": (7, False), "long-inside": (1_000_003, True)}


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("victim", [0, 1, 2])
@pytest.mark.parametrize("op", victims.STEPS)
def test_killed_rank_is_named_by_all(op, victim, moment):
    with crew.nothing_left():
        outcomes = crew.run(victims.work_until_death, 3, op, *MOMENTS[moment], victim)
    dead = outcomes.pop(victim)
    assert dead.exitcode == -9
    for outcome in outcomes:
        assert outcome.result is not None, outcome.error
        saw = outcome.result
        assert f"rank {victim}" in saw["error"]
        assert str(dead.pid) in saw["error"] or saw["kind"] == "AbortedError"
        assert victim in saw["ranks"] or saw["kind"] == "AbortedError"
        assert saw["again"] == saw["error"]
        assert saw["again_after"] < WITHIN
        assert saw["others"] == 2.0
        assert saw["delay"] < WITHIN
