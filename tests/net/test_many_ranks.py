"""Worlds of many real processes: those of shared memory meet in groups there, those of TCP meet through others."""

from __future__ import annotations

import os
import threading
from typing import Any

import numpy as np
import pytest
from conformance.test_every_operation import ROWS
from faults import crew, net_victims
from faults.failing_victims import arm, die

import fastcoll as dist
from fastcoll import config
from fastcoll.core import monitor
from fastcoll.net.tcp.plans.shape import MEET_RANKS
from fastcoll.shm import autotune
from fastcoll.shm import context_layout as at
from fastcoll.shm.layout import FLAT, GROUP
from net.meshes import Clock

PROCESSES = 24
NODE = 18  # ranks of the first node, of two: more than meet at once
LAST_ALONE = FLAT + 1  # a world whose last rank is a group of its own
HANGS = 250.0  # s: so many processes take long on a machine that does more


def run_every_operation(rank: int, n: int, url: str, backend: str) -> str:
    """What kind of backend did all of it right."""
    if backend == "auto":
        net_victims.live_on_nodes(rank, NODE)
    dist.init_process_group(backend, init_method=url, rank=rank, world_size=n, timeout=60)
    for row in ROWS.values():
        for count in (2, 1009):  # what fits into a line, and what does not
            row(rank, n, count)
    dist.barrier()
    kind = type(dist.group.WORLD.backend).__name__
    dist.destroy_process_group()
    return kind


@pytest.mark.long  # the plans of as many ranks are in net/test_plans.py, the meeting in shm/test_rounds_model.py
@pytest.mark.parametrize(
    ("backend", "kind"), [("shm", "ShmBackend"), ("tcp", "TcpBackend"), ("auto", "HybridBackend")]
)
def test_every_operation(backend: str, kind: str) -> None:
    assert max(FLAT, MEET_RANKS) < NODE < PROCESSES
    with crew.nothing_left():
        outcomes = crew.run(run_every_operation, PROCESSES, backend, deadline=HANGS)
    for outcome in outcomes:
        assert outcome.result == kind, outcome.error


def refuse(rank: int, n: int, url: str) -> list[str]:
    """What a rank is told of calls that do not match, of which one rank makes another one, and then of a late rank."""
    dist.init_process_group("shm", init_method=url, rank=rank, world_size=n, timeout=60)
    told = []
    for odd in (0, GROUP - 1, GROUP, n - 1):
        told.append(_refused(lambda odd=odd: dist.all_reduce(np.ones(2 if rank == odd else 3, "f4"))))
        told.append(_refused(lambda odd=odd: dist.barrier() if rank == odd else dist.scan(np.ones(1))))
        # Ranks may differ in these sizes: only all their balances together tell.
        told.append(_refused(lambda odd=odd: dist.all_gather(_outputs(n, odd, rank), np.ones(1 + rank))))
        total = np.array([float(rank)])
        dist.all_reduce(total)
        assert total[0] == n * (n - 1) / 2
    group = dist.new_group(timeout=60)
    dist.barrier()
    if rank != GROUP:
        monitor.time = clock = Clock()
        over = threading.Event()
        other = threading.Thread(target=put_forward, args=(clock, group.backend, over))
        other.start()
        with pytest.raises(dist.CollectiveTimeoutError) as caught:
            dist.barrier(group)
        over.set()
        other.join()
        # A rank whose own wait ends a moment later gets the error of another one.
        assert caught.value.ranks == (GROUP,), caught.value
    dist.barrier()
    return told


def put_forward(clock: Clock, backend: Any, over: threading.Event) -> None:
    """Let time fly in the first call of a group once all ranks but one have come to it."""
    while not over.wait(0.05):
        if backend.context.words[at.CALLS] == 1 and backend.calls.report.late() == [GROUP]:
            clock.ahead += 100.0


def _outputs(n: int, odd: int, rank: int) -> list[np.ndarray[Any, Any]]:
    """Where rank `odd` takes one element too many from its left neighbour."""
    return [np.zeros(1 + peer + (rank == odd and peer == (odd - 1) % n)) for peer in range(n)]


def _refused(call: Any) -> str:
    with pytest.raises(dist.MismatchError) as caught:
        call()
    return str(caught.value)


@pytest.mark.long
@pytest.mark.parametrize("n", [LAST_ALONE, PROCESSES])
def test_all_are_told_alike_what_does_not_match_and_who_is_late(n: int) -> None:
    outcomes = crew.run(refuse, n, deadline=HANGS)
    for outcome in outcomes:
        assert outcome.result is not None, outcome.error
    for texts, odd in zip(
        zip(*(outcome.result for outcome in outcomes), strict=True),
        np.repeat([0, GROUP - 1, GROUP, n - 1], 3),
        strict=True,
    ):
        assert len(set(texts)) == 1, texts
        assert f"rank {odd} " in texts[0]


def meet_and_leave(rank: int, n: int, url: str) -> bool:
    """Two barriers, in the second of which a rank takes long to pass the headers of others on."""
    if rank == GROUP:
        # A header sent and one received in each of five rounds.
        arm(f"tcp.none.mid_chunk:delay=1@{2 * 5 + 4}")
    dist.init_process_group("tcp", init_method=url, rank=rank, world_size=n, timeout=60)
    dist.barrier()
    dist.barrier()
    dist.destroy_process_group()
    return True


@pytest.mark.long
def test_who_is_done_with_a_call_may_leave_before_others_have_heard_of_it() -> None:
    """Those to whom the slow rank passes nothing on go; it does not look to the others as if they missed them."""
    for outcome in crew.run(meet_and_leave, LAST_ALONE, deadline=HANGS):
        assert outcome.result, outcome.error


def disagree(rank: int, n: int, url: str) -> list[int]:
    """How many calls it took to reduce where one rank would go through the slots, and the others direct."""
    os.environ["FASTCOLL_SHM_ALGORITHMS"] = "direct"
    config.forget()
    dist.init_process_group("shm", init_method=url, rank=rank, world_size=n, timeout=60)
    words = dist.group.WORLD.backend.context.words
    direct, took = words[at.DIRECT_FROM], []
    for odd in (0, GROUP, n - 1):
        words[at.DIRECT_FROM] = autotune.NEVER if rank == odd else direct
        before, x = words[at.CALLS], np.full(5000, rank + 1.0)
        dist.all_reduce(x)
        assert (x == n * (n + 1) / 2).all()
        took.append(int(words[at.CALLS] - before))
    return took if direct < autotune.NEVER else []


def test_ranks_that_would_go_different_ways_all_find_that() -> None:
    for outcome in crew.run(disagree, LAST_ALONE, deadline=HANGS):
        assert outcome.result is not None, outcome.error
        if not outcome.result:
            pytest.skip("these ranks may not read one another's memory")
        assert outcome.result == [2, 2, 2]  # they meet, find it, and meet again


@pytest.mark.long  # faults/test_kill.py kills ranks of small worlds
@pytest.mark.parametrize("victim", [0, GROUP, LAST_ALONE - 1])
def test_a_killed_rank_is_named_by_all(victim: int) -> None:
    with crew.nothing_left():
        outcomes = crew.run(
            *die("all_reduce", "shm.all_reduce.enter", 1, victim, n=LAST_ALONE), deadline=HANGS
        )
    crew.check(outcomes, victim, "all_reduce", crew.WITHIN)
