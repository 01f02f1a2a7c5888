"""A rank is killed while the job starts: the others raise soon, name it, and no segment is left behind."""

from __future__ import annotations

import pytest

from faults import crew, victims

WITHIN = 2.0


@pytest.mark.parametrize("victim", [0, 1, 2])
@pytest.mark.parametrize("where", victims.PLACES)
def test_killed_while_starting(where, victim):
    if (where == "segment created") != (victim == 0) and where.startswith("segment "):
        pytest.skip(f"rank {victim} does not pass there: rank 0 creates, the others attach")
    with crew.nothing_left():
        outcomes = crew.run(victims.die_while_starting, 3, where, victim)
    dead = outcomes.pop(victim)
    assert dead.exitcode == -9
    for outcome in outcomes:
        assert outcome.result is not None, outcome.error
        assert f"rank {victim}" in outcome.result["error"], outcome.result
        assert outcome.result["delay"] < WITHIN, outcome.result
