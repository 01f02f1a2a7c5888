"""Ranks that come late, are stopped, or are interrupted."""

from __future__ import annotations

import logging
import re
import time
from functools import cache

import pytest

import fastcoll as dist
from fastcoll import config
from faults import crew, victims


@cache
def outcomes() -> dict[str, list[crew.Outcome]]:
    """Of the worlds whose ranks mostly sleep, at once."""
    worlds = {
        "late": (victims.wait_for_late_rank, 3, 1.2),
        "stopped": (victims.stop_and_continue, 2, 1.0),
    }
    return dict(zip(worlds, crew.run_together(list(worlds.values())), strict=True))


def test_a_rank_that_does_not_come_is_named_at_the_timeout():
    *waiting, late = outcomes()["late"]
    assert late.result == "late", late.error
    for outcome in waiting:
        assert outcome.result, outcome.error
        assert "rank 2" in outcome.result
        assert str(late.pid) in outcome.result
        assert "call 1" in outcome.result
        assert outcome.result.startswith("CollectiveTimeoutError")
        assert "1.2 s" in outcome.result


def test_a_stopped_rank_is_not_taken_for_dead():
    assert [outcome.result for outcome in outcomes()["stopped"]] == [2.0, 2.0], outcomes()["stopped"]


@pytest.mark.long
@pytest.mark.parametrize("call", ["all_reduce", "recv", "send", "work", "destroy"])
def test_ctrl_c_ends_a_blocked_call_soon(call):
    first, *others = crew.run(victims.interrupt, 3, call)
    assert first.result is not None, first.error
    assert first.result["after"] < crew.SOON
    for outcome in others:
        assert outcome.result is not None, outcome.error
        if call == "work":
            continue  # the interrupted wait leaves the operation itself going on
        assert "rank 0" in outcome.result["error"]


@pytest.mark.ranks(2, timeout=30)
def test_a_late_rank_is_named_by_a_warning(rank, world_size, monkeypatch, tmp_path):
    monkeypatch.setenv("FASTCOLL_WARN_AFTER", "0.2")
    config.forget()
    dist.barrier()  # its kernel is compiled by now
    warnings = tmp_path / "warnings"
    if rank == 0:
        log, handler = logging.getLogger("fastcoll"), logging.FileHandler(warnings, delay=True)
        log.addHandler(handler)
        try:
            dist.barrier()
        finally:
            log.removeHandler(handler)
            handler.close()
        (said,) = warnings.read_text().splitlines()
        assert re.match(r"rank 0: barrier\(\), .* s for rank 1 \(pid ", said)
    else:
        while not warnings.exists():
            time.sleep(0.01)
        dist.barrier()
    config.forget()
