"""Worlds of many real processes: over shared memory they meet in groups, over TCP in rounds."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable
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

PROCESSES = 20
NODE = 18  # ranks of the first of two nodes: more than exchange headers directly
LAST_ALONE = FLAT + 1  # a world whose last rank is a group of its own
HANGS = 250.0  # s: so many processes are slow on a loaded machine


def results_of(program: Callable[..., Any], n: int, *args: Any) -> list[Any]:
    """Run a program in n ranks; return its results."""
    outcomes = crew.run(program, n, *args, deadline=HANGS)
    for outcome in outcomes:
        assert outcome.result is not None, outcome.error
    return [outcome.result for outcome in outcomes]


def run_every_operation(rank: int, n: int, url: str, backend: str) -> str:
    """Run every operation; return the backend's name if all results are right."""
    if backend == "auto":
        net_victims.live_on_nodes(rank, NODE)
    dist.init_process_group(backend, init_method=url, rank=rank, world_size=n, timeout=60)
    for row in ROWS.values():
        for count in (2, 1009):  # sizes that fit into a line, and that do not
            row(rank, n, count)
    dist.barrier()
    kind = type(dist.group.WORLD.backend).__name__
    dist.destroy_process_group()
    return kind


@pytest.mark.long  # net/test_plans.py tests the plans of as many ranks, shm/test_rounds_model.py the meeting
@pytest.mark.parametrize(
    ("backend", "kind"), [("shm", "ShmBackend"), ("tcp", "TcpBackend"), ("auto", "HybridBackend")]
)
def test_every_operation(backend: str, kind: str) -> None:
    assert max(FLAT, MEET_RANKS) < NODE < PROCESSES
    with crew.nothing_left():
        assert results_of(run_every_operation, PROCESSES, backend) == [kind] * PROCESSES


def refuse(rank: int, n: int, url: str) -> list[str]:
    """Return the errors of calls that do not match, in which one rank makes another call, and then of a late rank."""
    dist.init_process_group("shm", init_method=url, rank=rank, world_size=n, timeout=60)
    errors = []
    for odd in (0, GROUP - 1, GROUP, n - 1):
        is_odd = rank == odd
        # Ranks may differ in the sizes of an all_gather: only the sum of their balances shows that this rank expects
        # one element too many from its left neighbour.
        outputs = [np.zeros(1 + peer + (is_odd and peer == (odd - 1) % n)) for peer in range(n)]
        for call, *args in (
            (dist.all_reduce, np.ones(2 if is_odd else 3, "f4")),
            (dist.barrier,) if is_odd else (dist.scan, np.ones(1)),
            (dist.all_gather, outputs, np.ones(1 + rank)),
        ):
            with pytest.raises(dist.MismatchError) as refused:
                call(*args)
            errors.append(str(refused.value))
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
        # A rank whose own wait ends a moment later raises the error of another rank.
        assert caught.value.ranks == (GROUP,), caught.value
    dist.barrier()
    return errors


def put_forward(clock: Clock, backend: Any, over: threading.Event) -> None:
    """Advance the clock in the first call of a group, once all ranks except one have arrived."""
    while not over.wait(0.05):
        if backend.context.words[at.CALLS] == 1 and backend.calls.report.late() == [GROUP]:
            clock.ahead += 100.0


@pytest.mark.long
def test_all_ranks_raise_the_same_mismatch_and_name_the_late_rank() -> None:
    texts, *others = results_of(refuse, LAST_ALONE)
    assert others == [texts] * (LAST_ALONE - 1)
    for text, odd in zip(texts, np.repeat([0, GROUP - 1, GROUP, LAST_ALONE - 1], 3), strict=True):
        assert re.search(rf"rank {odd}\b", text), text


def meet_and_leave(rank: int, n: int, url: str) -> bool:
    """Run two barriers; in the second one, a rank is slow to pass on the headers of others."""
    if rank == GROUP:
        # One header sent and one received in each of five rounds.
        arm(f"tcp.none.mid_chunk:delay=1@{2 * 5 + 4}")
    dist.init_process_group("tcp", init_method=url, rank=rank, world_size=n, timeout=60)
    dist.barrier()
    dist.barrier()
    dist.destroy_process_group()
    return True


@pytest.mark.long
def test_a_rank_that_completed_a_call_may_leave_before_others_have() -> None:
    """The ranks that wait for no header of the slow rank leave; the slow rank does not report them as late."""
    assert all(results_of(meet_and_leave, LAST_ALONE))


def disagree(rank: int, n: int, url: str) -> list[int]:
    """Return how many calls a reduction took where one rank would use slots, and the others single-copy reads."""
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


def test_ranks_with_different_algorithms_agree_on_one() -> None:
    results = results_of(disagree, LAST_ALONE)
    if not results[0]:
        pytest.skip("these ranks may not read one another's memory")
    assert results == [[2, 2, 2]] * LAST_ALONE  # they meet, find the difference, and meet again


@pytest.mark.long  # faults/test_kill.py kills ranks of small worlds
@pytest.mark.parametrize("victim", [0, GROUP, LAST_ALONE - 1])
def test_a_killed_rank_is_named_by_all(victim: int) -> None:
    with crew.nothing_left():
        outcomes = crew.run(
            *die("all_reduce", "shm.all_reduce.enter", 1, victim, n=LAST_ALONE), deadline=HANGS
        )
    crew.check(outcomes, victim, "all_reduce", crew.WITHIN)
