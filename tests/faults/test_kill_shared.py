"""A rank is killed whose arrays the others read in place: as in test_kill.py."""

from __future__ import annotations

import pytest

from faults import crew, shared_victims, victims

OPERATIONS = [op for op in victims.STEPS if op not in ("barrier", "put", "symmetric_all_reduce")]


@pytest.mark.parametrize("op", OPERATIONS)
def test_killed_rank_is_named_by_all(op):
    victim = OPERATIONS.index(op) % 3
    with crew.nothing_left():
        outcomes = crew.run(shared_victims.work_on_shared_arrays_until_death, 3, op, 1_000_003, victim)
    crew.check(outcomes, victim, op, others=2.0)
