"""A rank is killed or interrupted while ranks talk through several nodes: every survivor knows of whom it was."""

from __future__ import annotations

import pytest

from faults import crew, net_victims

WITHIN = 8.0  # seconds; on an idle machine it takes 0.1, and the deadlines are 20 and 30
VICTIMS = {"all_reduce": 0, "broadcast": 3, "all_gather": 1, "reduce_scatter": 2, "batch_isend_irecv": 3}


@pytest.mark.parametrize(("op", "victim"), VICTIMS.items())
def test_killed_rank_is_named_by_all(op: str, victim: int) -> None:
    with crew.nothing_left():
        outcomes = crew.run(net_victims.work_on_nodes_until_death, 4, op, 1_000_003, True, victim)
    check(outcomes, victim)


@pytest.mark.parametrize("victim", [2, 4])
def test_killed_rank_of_a_node_of_another_size(victim: int) -> None:
    with crew.nothing_left():
        outcomes = crew.run(net_victims.work_on_nodes_until_death, 5, "all_reduce", 1_000_003, True, victim)
    check(outcomes, victim)


def check(outcomes: list[crew.Outcome], victim: int) -> None:
    survivors = len(outcomes) - 1
    dead = outcomes.pop(victim)
    assert dead.exitcode == -9
    for outcome in outcomes:
        assert outcome.result is not None, outcome.error
        saw = outcome.result
        assert saw["kind"] == "PeerDiedError", saw
        assert saw["ranks"] == (victim,), saw
        assert f"rank {victim} " in saw["error"]
        assert saw["again"] == saw["error"]
        assert saw["again_after"] < WITHIN
        assert saw["delay"] < WITHIN
        assert saw["others"] == survivors


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
