"""A rank is killed or interrupted while ranks talk through several nodes: every survivor knows of whom it was."""

from __future__ import annotations

import pytest

from faults import crew, net_victims

VICTIMS = {"all_reduce": 0, "broadcast": 3, "all_gather": 1, "reduce_scatter": 2, "batch_isend_irecv": 3}


@pytest.mark.parametrize(("op", "victim"), VICTIMS.items())
def test_killed_rank_is_named_by_all(op: str, victim: int) -> None:
    with crew.nothing_left():
        outcomes = crew.run(net_victims.work_on_nodes_until_death, 4, op, 1_000_003, True, victim)
    crew.check(outcomes, victim, op, others=3.0)


@pytest.mark.parametrize("victim", [2, 4])
def test_killed_rank_of_a_node_of_another_size(victim: int) -> None:
    with crew.nothing_left():
        outcomes = crew.run(net_victims.work_on_nodes_until_death, 5, "all_reduce", 1_000_003, True, victim)
    crew.check(outcomes, victim, "all_reduce", others=4.0)


def test_ctrl_c_in_the_middle_of_64_mib_is_told_to_all() -> None:
    with crew.nothing_left():
        first, *others = crew.run(net_victims.interrupt_on_nodes, 4)
    assert first.result is not None, first.error
    assert first.result["kind"] == "KeyboardInterrupt"
    for outcome in others:
        assert outcome.result is not None, outcome.error
        assert outcome.result["kind"] == "AbortedError"
        assert outcome.result["ranks"] == (0,), outcome.result
        assert "KeyboardInterrupt" in outcome.result["error"]
