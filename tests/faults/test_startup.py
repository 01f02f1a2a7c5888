"""A rank is killed while the job starts: the others raise soon, name it, and no segment is left behind."""

from __future__ import annotations

from functools import cache

import pytest

from faults import crew, victims


def victims_at(where):
    """The ranks that pass there: rank 0 creates the segment, the others attach to it."""
    return {"segment created": [0], "segment attached": [1, 2]}.get(where, [0, 1, 2])


@cache
def outcomes_by_victim(where):
    """Of a world for each victim, at once."""
    worlds = [(victims.die_while_starting, 3, where, victim) for victim in victims_at(where)]
    with crew.nothing_left():
        return dict(zip(victims_at(where), crew.run_together(worlds), strict=True))


@pytest.mark.parametrize(
    ("where", "victim"), [(where, victim) for where in victims.PLACES for victim in victims_at(where)]
)
def test_killed_while_starting(where, victim):
    outcomes = list(outcomes_by_victim(where)[victim])
    dead = outcomes.pop(victim)
    assert dead.exitcode == -9
    for outcome in outcomes:
        assert outcome.result is not None, outcome.error
        assert f"rank {victim}" in outcome.result["error"], outcome.result
        assert outcome.result["delay"] < crew.WITHIN, outcome.result
