"""Eight ranks are killed one after the other until one is left; after each kill the others shrink and go on.

Two of three kills wait until the others have gone on; the third comes at a random moment, and may hit a rank while it
shrinks. The promises: the last rank keeps its memory; each new group is complete within a second of the error (three
between hosts), not counting the time that the rank waits for a core; its reductions are right; and nothing is left.
"""

from __future__ import annotations

import random
import signal
import time
from typing import Any

import numpy as np

import fastcoll as dist
from fastcoll import GroupError
from fastcoll.testing.worker import Footprint, clock_at_work, lasting, shm_names

from .fleet import Fleet, left_in_shm, live_on_nodes
from .report import Report, percentile

RANKS = 8
MOST = {"shm": 1.0, "tcp": 3.0, "auto": 3.0}  # seconds from the error to the new group; auto: two nodes
PAUSE = 0.02  # the most seconds before a kill
TIMEOUT = 30.0


def run(amount: int, seed: int) -> Report:
    """Kill all ranks except one of each of `amount` worlds."""
    report, dice = Report(), random.Random(seed)
    took: dict[str, list[float]] = {backend: [] for backend in MOST}
    began, shrinks = time.monotonic(), 0
    for number in range(amount):
        backend = list(MOST)[number % len(MOST)]
        order = dice.sample(range(RANKS), RANKS)
        what, names = f"world {number}, {backend}, killed {order[:-1]}", shm_names()
        with Fleet() as fleet:
            for rank in range(RANKS):
                fleet.start(work, rank, backend, f"file://{fleet.folder}/meet")
            if not fleet.await_turns(range(RANKS), 3, TIMEOUT):
                report.fail(f"{what}: not all ranks reached their third call")
            for victim in order[:-1]:
                if dice.random() < 2 / 3:
                    fleet.await_turns(order[-1:], int(fleet.turns[order[-1]]) + 2, TIMEOUT)
                time.sleep(dice.random() * PAUSE)
                fleet.children[victim].signal(signal.SIGKILL)
            end = fleet.reap(fleet.children[order[-1]], time.monotonic() + TIMEOUT)
        if end.result is None:
            report.fail(f"{what}: rank {order[-1]} {'hung' if end.hung else 'failed'}: {end.error}")
            continue
        for fault in (end.result["wrong"], end.result["left"], left_in_shm(names)):
            if fault:
                report.fail(f"{what}: {fault}")
        if (longest := max(end.result["took"])) > MOST[backend]:
            report.fail(f"{what}: a new group took {longest:.2f} s")
        took[backend] += end.result["took"]
        shrinks += len(end.result["took"])
    report.done = f"{amount:,} worlds of {RANKS} ranks"
    for backend, seen in took.items():
        times = (percentile(seen, share) * 1e3 for share in (0.5, 0.99, 1.0))
        report.figures[f"{backend}: p50, p99, longest"] = ", ".join(f"{ms:.1f}" for ms in times) + " ms"
    report.figures |= {"shrinks of the last": f"{shrinks:,}", "took": f"{time.monotonic() - began:.0f} s"}
    return report


def work(fleet: Fleet, rank: int, backend: str, url: str) -> dict[str, Any]:
    """Run a rank: reduce, and shrink after each error, until it is alone."""
    if backend == "auto":
        live_on_nodes(rank, RANKS // 2)
    before, kept, took = Footprint.now(), np.full(1000, rank), list[float]()
    dist.init_process_group(backend, url, TIMEOUT, RANKS, rank)
    wrong = ""
    while dist.get_world_size() > 1 and not wrong:
        try:
            x = np.ones(1000, np.float32)
            dist.all_reduce(x)
            if not (x == dist.get_world_size()).all():
                wrong = f"a wrong result with {dist.get_world_size()} ranks: {x[:4]}"
            fleet.turns[rank] += 1
        except GroupError:
            failed = clock_at_work()
            dist.shrink()
            took.append(clock_at_work() - failed)
    if not (kept == rank).all():
        wrong = "its memory has changed"
    dist.destroy_process_group()
    return {"took": took, "wrong": wrong, "left": lasting(before.growth)}
