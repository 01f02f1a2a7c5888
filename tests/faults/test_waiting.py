"""Ranks that are late, stopped or interrupted, over shared memory and TCP."""

from __future__ import annotations

import logging
import math
import re
import time
from collections.abc import Sequence
from functools import cache

import pytest

import fastcoll as dist
from fastcoll import config
from faults import crew, net_victims, victims

BACKENDS = ["auto", "tcp"]
CALLS = [
    ("auto", "recv"),
    *(
        pytest.param("auto", call, marks=pytest.mark.long)
        for call in ("all_reduce", "send", "work", "destroy")
    ),
    ("tcp", "all_reduce"),
    ("tcp", "recv"),
]


@cache
def outcomes() -> dict[tuple[str, str], list[crew.Outcome]]:
    """Run the worlds whose ranks mostly sleep at once, and return their outcomes."""
    worlds = {("late", backend): (victims.wait_for_late_rank, 3, 1.2, backend) for backend in BACKENDS}
    worlds |= {("stopped", backend): (victims.stop_and_continue, 2, 1.0, backend) for backend in BACKENDS}
    return dict(zip(worlds, crew.run_together(list(worlds.values())), strict=True))


def check_given_up(ends: Sequence[crew.Outcome]) -> list[str]:
    """Check that all others name rank 2, which is late, at least one of them because of the timeout; return the errors.

    Another rank may be late as well, and the error of the first rank may end the call of a second one.
    """
    *reports, _ = crew.results(ends)
    for saw in reports:
        assert 2 in saw["ranks"], saw
        assert str(ends[2].pid) in saw["error"]
    kinds = {saw["kind"] for saw in reports}
    assert "CollectiveTimeoutError" in kinds
    assert kinds <= {"CollectiveTimeoutError", "AbortedError"}
    return [saw["error"] for saw in reports]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_rank_that_does_not_arrive_is_named_at_the_timeout(backend: str) -> None:
    for text in check_given_up(outcomes()["late", backend]):
        assert ("call 2" in text, "1.2 s" in text) == (True, True), text


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_rank_that_is_stopped_for_a_while_is_not_taken_for_dead(backend: str) -> None:
    assert crew.results(outcomes()["stopped", backend]) == [2.0, 2.0]


@pytest.mark.long
def test_a_rank_that_stops_is_named_by_all_at_the_timeout() -> None:
    check_given_up(crew.run(net_victims.stop_for_good, 3, 3.0))


@pytest.mark.parametrize("within", [math.inf, pytest.param(crew.SOON, marks=pytest.mark.timed)])
@pytest.mark.parametrize(("backend", "call"), CALLS)
def test_ctrl_c_ends_a_blocked_call(backend: str, call: str, within: float) -> None:
    first, *others = crew.results(crew.run(victims.interrupt, 3, call, backend))
    assert first["after"] < within
    for saw in others:
        # The operation goes on after an interrupted wait for its Work.
        assert call == "work" or "rank 0" in saw["error"]


def test_ctrl_c_in_the_middle_of_64_mib_reaches_all() -> None:
    first, *others = crew.run(net_victims.interrupt_large, 3, "tcp")
    crew.check_interrupted(first, others)


@pytest.mark.ranks(2)
def test_a_late_rank_is_named_by_a_warning(rank, world_size, monkeypatch, tmp_path):
    monkeypatch.setenv("FASTCOLL_WARN_AFTER", "0.2")
    config.forget()
    dist.barrier()  # the kernel is compiled by now
    warnings = tmp_path / "warnings"
    if rank == 0:
        log, handler = logging.getLogger("fastcoll"), logging.FileHandler(warnings, delay=True)
        log.addHandler(handler)
        try:
            dist.barrier()
        finally:
            log.removeHandler(handler)
            handler.close()
        (text,) = warnings.read_text().splitlines()
        assert re.match(r"rank 0: barrier\(\), .* s for rank 1 \(pid ", text)
    else:
        while not warnings.exists():
            time.sleep(0.01)
        dist.barrier()
    config.forget()
