"""Ranks that come late, stop or are interrupted while ranks talk over TCP."""

from __future__ import annotations

from functools import cache

import pytest

from faults import crew, net_victims, victims


@cache
def outcomes() -> dict[str, list[crew.Outcome]]:
    """Of the worlds whose ranks mostly sleep, at once."""
    worlds = {
        "late": (victims.wait_for_late_rank, 3, 1.2, "tcp"),
        "stopped": (victims.stop_and_continue, 2, 1.0, "tcp"),
    }
    return dict(zip(worlds, crew.run_together(list(worlds.values())), strict=True))


def test_a_rank_that_does_not_come_is_named_at_the_timeout() -> None:
    *waiting, late = outcomes()["late"]
    assert late.result == "late", late.error
    for outcome in waiting:
        assert outcome.result, outcome.error
        assert "rank 2" in outcome.result
        assert str(late.pid) in outcome.result
        assert "call 1" in outcome.result
        assert outcome.result.startswith("CollectiveTimeoutError")
        assert "1.2 s" in outcome.result


@pytest.mark.long
def test_a_rank_that_stops_is_named_by_all_at_the_timeout() -> None:
    *others, last = crew.run(net_victims.stop_for_good, 3, "tcp", 3_000_000, 1.0)
    assert last.result is not None, last.error
    for outcome in others:
        assert outcome.result is not None, outcome.error
        # Another rank may be stuck in the call before, and so not have arrived either.
        assert 2 in outcome.result["ranks"], outcome.result
        assert str(last.pid) in outcome.result["error"]
    kinds = {outcome.result["kind"] for outcome in others}
    assert "CollectiveTimeoutError" in kinds
    assert kinds <= {"CollectiveTimeoutError", "AbortedError"}


def test_a_rank_that_is_stopped_for_a_while_is_not_taken_for_dead() -> None:
    assert [outcome.result for outcome in outcomes()["stopped"]] == [2.0, 2.0], outcomes()["stopped"]


@pytest.mark.parametrize("call", ["all_reduce", "recv"])
def test_ctrl_c_ends_a_blocked_call_soon(call: str) -> None:
    first, *others = crew.run(victims.interrupt, 3, call, "tcp")
    assert first.result is not None, first.error
    assert first.result["after"] < crew.SOON
    for outcome in others:
        assert outcome.result is not None, outcome.error
        assert "rank 0" in outcome.result["error"]


def test_ctrl_c_in_the_middle_of_64_mib_is_told_to_all() -> None:
    first, *others = crew.run(net_victims.interrupt_large, 3, "tcp")
    crew.check_interrupted(first, others)
