"""Ranks are delayed at random points inside calls: every result must be right in every order of their steps.

At every failpoint of a call, in shared memory, over TCP and on nodes, every rank sleeps for a random time of up to 0.2
ms. That causes orders of steps that do not occur otherwise. Arrays have from no elements to many chunks; worlds have 2
to 5 ranks.
"""

from __future__ import annotations

import os
import random
import time

import fastcoll as dist

from .calls import CALLS, ONE_NODE
from .fleet import Fleet, live_on_nodes
from .report import Report

JITTER = ",".join(f"{backend}.*:jitter=0.0002" for backend in ("shm", "tcp", "hybrid"))
_BACKENDS = ("shm", "tcp", "auto")
TIMEOUT = 60.0
_WORLDS = (2, 3, 4, 5)
_CALLS = 2500  # per world
# Numbers of elements: 131,072 float32 fill two slots. Large sizes are rare, because they take long.
_COUNTS = (0, 1, 2, 3, 22, 23, 100, 1000, 1009, 20_011, 70_001, 131_072, 300_007)
_WEIGHTS = (3, 3, 3, 3, 3, 3, 3, 3, 3, 2, 1, 1, 1)


def run(amount: int, seed: int) -> Report:
    """Run `amount` calls in all, in several worlds."""
    if os.environ.get("FASTCOLL_FAILPOINT") != JITTER:
        raise RuntimeError(f"needs FASTCOLL_FAILPOINT={JITTER} before kernels are loaded")
    report, done, number, began = Report(), 0, 0, time.monotonic()
    while done < amount:
        n, backend = _WORLDS[number // len(_BACKENDS) % len(_WORLDS)], _BACKENDS[number % len(_BACKENDS)]
        calls = min(_CALLS, -(-amount // (len(_WORLDS) * len(_BACKENDS))), amount - done)
        with Fleet() as fleet:
            for rank in range(n):
                fleet.start(work, rank, n, backend, calls, f"{seed}/{number}")
            for rank, end in enumerate(fleet.ends(TIMEOUT + calls * 0.2)):
                if end.result is None or end.result:
                    report.fail(
                        f"world {number} of {n}, {backend}, rank {rank}: {end.result or end.error or end.code}"
                    )
            done += int(fleet.turns[0])
        number += 1
        if report.faults and not done:
            break
    report.done = f"{done:,} calls of {number} worlds"
    report.figures = {
        "wrong, hung or failed": str(len(report.faults)),
        "took": f"{time.monotonic() - began:.0f} s",
    }
    return report


def work(fleet: Fleet, rank: int, n: int, backend: str, calls: int, seed: str) -> str:
    """Make random calls, the same on all ranks, and return the faults."""
    dice = random.Random(seed)
    names = sorted(set(CALLS) - {"new_group", "objects"} - (ONE_NODE if backend != "shm" else set()))
    if backend == "auto":
        live_on_nodes(rank, (n + 1) // 2)
    dist.init_process_group(backend, f"file://{fleet.folder}/meet", TIMEOUT, n, rank)
    for turn in range(calls):
        name, count = dice.choice(names), dice.choices(_COUNTS, _WEIGHTS)[0]
        *_, right = CALLS[name](rank, n, count, turn)
        if not right:
            return f"wrong result of {name} of {count}, call {turn}"
        fleet.turns[rank] += 1
    dist.destroy_process_group()
    return ""
