"""Eight ranks on two cores, beside four busy loops: no rank may declare another dead, and every result must be right.

The first world uses shared memory, the second TCP, the third both, on two nodes. Each runs for a third of the time.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator

import fastcoll as dist

from .calls import CALLS, ONE_NODE
from .fleet import Fleet, live_on_nodes
from .report import Report

RANKS, LOOPS, CORES = 8, 4, 2
TIMEOUT = 30.0
_BACKENDS = ("shm", "tcp", "auto")
_COUNTS = (2, 1000, 100_000)


def run(amount: int, seed: int) -> Report:
    """Run for `amount` seconds in all."""
    report, calls, longest = Report(), 0, 0.0
    share = amount / len(_BACKENDS)
    with _busy_on(CORES):
        for backend in _BACKENDS:
            with Fleet() as fleet:
                until = time.monotonic() + share
                for rank in range(RANKS):
                    fleet.start(work, rank, backend, until)
                for rank, end in enumerate(fleet.ends(share + 4 * TIMEOUT)):
                    if end.result is None:
                        report.fail(
                            f"{backend}, rank {rank}: {'hung' if end.hung else 'failed'}: {end.error}"
                        )
                calls += int(fleet.turns[0])
                longest = max(longest, float(fleet.marks.max()))
    report.done = f"{amount} s, {RANKS} ranks and {LOOPS} busy loops on {CORES} cores"
    report.figures = {
        "false deaths": str(len(report.faults)),
        "calls": f"{calls:,}",
        "longest": f"{longest:.2f} s",
    }
    return report


@contextlib.contextmanager
def _busy_on(cores: int) -> Iterator[None]:
    """Pin this process and its later children to some cores that busy loops use too."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(before)[:cores])
    try:
        with Fleet() as busy:
            for _ in range(LOOPS):
                busy.start(_burn)
            yield
    finally:
        os.sched_setaffinity(0, before)


def _burn(fleet: Fleet) -> None:
    while True:
        pass


def work(fleet: Fleet, rank: int, backend: str, until: float) -> int:
    """Make all kinds of calls in turn until rank 0 ends this; return how many."""
    if backend == "auto":
        live_on_nodes(rank, RANKS // 2)
    dist.init_process_group(backend, f"file://{fleet.folder}/meet", TIMEOUT, RANKS, rank)
    names = sorted(set(CALLS) - (ONE_NODE if backend != "shm" else set()))
    turn, over = 0, [False]
    while not over[0]:
        for name in names:
            began = time.monotonic()
            *_, right = CALLS[name](rank, RANKS, _COUNTS[turn % len(_COUNTS)], turn)
            assert right, f"wrong result of {name} in turn {turn}"
            fleet.marks[rank] = max(fleet.marks[rank], time.monotonic() - began)
            turn += 1
            fleet.turns[rank] = turn
        over = [time.monotonic() > until]
        dist.broadcast_object_list(over, 0)
    dist.destroy_process_group()
    return turn
