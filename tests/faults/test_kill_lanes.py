"""A rank is killed in a call that lanes share: as in test_kill.py."""

from __future__ import annotations

import pytest

from faults import crew, lane_victims

OPERATIONS = [
    "all_reduce", "reduce", "scan", "reduce_scatter", "broadcast", "all_gather", "gather", "scatter", "all_to_all",
]  # fmt: skip


@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize("op", OPERATIONS)
def test_killed_rank_is_named_by_all(op: str, victim: int) -> None:
    with crew.nothing_left():
        outcomes = crew.run(lane_victims.work_over_lanes_until_death, 3, op, 1_000_003, victim)
    crew.check(outcomes, victim, op, others=2.0)
