"""Twenty real processes: more than those that meet one another directly."""

from __future__ import annotations

from typing import Any

import pytest
from conformance.test_every_operation import ROWS
from faults import crew, net_victims

import fastcoll as dist
from fastcoll.net.tcp.plans.shape import MEET_RANKS

PROCESSES = 20


def run_every_operation(rank: int, n: int, url: str, backend: str) -> dict[str, Any]:
    """What went wrong, by row."""
    if backend == "auto":
        net_victims.live_on_nodes(rank)
    dist.init_process_group(backend, init_method=url, rank=rank, world_size=n, timeout=60)
    for row in ROWS.values():
        for count in (5, 7001):
            row(rank, n, count)
    kind = type(dist.group.WORLD.backend).__name__
    dist.destroy_process_group()
    return {"kind": kind}


@pytest.mark.long  # test_plans_many.py has the plans of as many ranks
@pytest.mark.parametrize(("backend", "kind"), [("tcp", "TcpBackend"), ("auto", "HybridBackend")])
def test_every_operation(backend: str, kind: str) -> None:
    assert PROCESSES > MEET_RANKS
    with crew.nothing_left():
        outcomes = crew.run(run_every_operation, PROCESSES, backend, deadline=90.0)
    for outcome in outcomes:
        assert outcome.result == {"kind": kind}, outcome.error
