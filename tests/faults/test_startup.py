"""A rank is killed while the job starts: the others raise soon, name it, and no segment is left behind."""

from __future__ import annotations

import pytest

from faults import crew, victims

WITHIN = 2.0


def places():
    """Where each of three ranks passes: rank 0 creates the segment, the others attach to it."""
    for victim in range(3):
        for where in victims.PLACES:
            if where != ("segment attached" if victim == 0 else "segment created"):
                yield where, victim


@pytest.mark.parametrize(("where", "victim"), list(places()))
def test_killed_while_starting(where, victim):
    with crew.nothing_left():
        outcomes = crew.run(victims.die_while_starting, 3, where, victim)
    dead = outcomes.pop(victim)
    assert dead.exitcode == -9
    for outcome in outcomes:
        assert outcome.result is not None, outcome.error
        assert f"rank {victim}" in outcome.result["error"], outcome.result
        assert outcome.result["delay"] < WITHIN, outcome.result
