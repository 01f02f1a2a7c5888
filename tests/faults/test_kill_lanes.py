"""A rank is killed in a call that lanes share: as in test_kill.py."""

from __future__ import annotations

import pytest

from faults import crew, lane_victims

WITHIN = 8.0  # seconds; on an idle machine it takes 0.1, and the deadlines are 20 and 30
OPERATIONS = [
    "all_reduce", "reduce", "scan", "reduce_scatter", "broadcast", "all_gather", "gather", "scatter", "all_to_all",
]  # fmt: skip


@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize("op", OPERATIONS)
def test_killed_rank_is_named_by_all(op: str, victim: int) -> None:
    with crew.nothing_left():
        outcomes = crew.run(lane_victims.work_over_lanes_until_death, 3, op, 1_000_003, victim)
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
