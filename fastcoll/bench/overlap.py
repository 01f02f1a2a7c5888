"""`python -m fastcoll.bench --overlap`: four asynchronous all_reduces beside a computation that takes as long.

It measures how much of the operations overlaps with the computation. There are two computations. In the first, this
process only sleeps, as if a device or a disk worked for it. The second runs on this rank's core. It overlaps with the
operations only if each rank has a core besides those that the operations use. With as many ranks as cores, computation
and operations together take at least the sum of their times, minus the time that the operations wait.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import fastcoll as dist

from .command import read_study, run_ranks

NBYTES = 16 << 20
IN_FLIGHT = 4
_ROUNDS = 15


def main(words: Sequence[str]) -> int:
    """Run the study on the ranks that a command line asks for; return the exit code."""
    _, _, launched, ranks = read_study(words, "--overlap")
    return run_ranks(run, launched, ranks)


def run(local_rank: int, meeting: dict[str, Any]) -> None:
    """Measure on all ranks; rank 0 prints."""
    dist.init_process_group(**meeting)
    xs = [np.ones(NBYTES // 4, np.float32) for _ in range(IN_FLIGHT)]
    block = np.ones((64, 64))
    alone = _slowest(lambda: _finish(_begin(xs)))
    turns = max(1, round(alone / _slowest(lambda: _multiply(block, 100)) * 100))
    computations = {
        "waits for a device": lambda: time.sleep(alone),
        "on this core": lambda: _multiply(block, turns),
    }
    lines = [_line(name, xs, compute, alone) for name, compute in computations.items()]
    if dist.get_rank() == 0:
        print(
            f"{IN_FLIGHT} all_reduces of {NBYTES >> 20} MiB in flight, {dist.get_world_size()} ranks, milliseconds"
        )
        print(f"{'computation':20} {'operations':>10} {'compute':>10} {'together':>10} {'/ longer':>10}")
        print("\n".join(lines), flush=True)
    dist.destroy_process_group()


def _line(name: str, xs: list[np.ndarray], compute: Callable[[], object], alone: float) -> str:
    def both() -> None:
        works = _begin(xs)
        compute()
        _finish(works)

    computing, together = _slowest(compute), _slowest(both)
    times = "".join(f" {seconds * 1e3:10.2f}" for seconds in (alone, computing, together))
    return f"{name:20}{times} {together / max(alone, computing):10.2f}"


def _begin(xs: list[np.ndarray]) -> list[dist.Work]:
    return [work for x in xs if (work := dist.all_reduce(x, dist.ReduceOp.MAX, async_op=True))]


def _finish(works: list[dist.Work]) -> None:
    for work in works:
        work.wait()


def _multiply(block: np.ndarray, turns: int) -> None:
    for _ in range(turns):
        block @ block


def _slowest(do: Callable[[], object]) -> float:
    """Return the slowest rank's median time in seconds; all ranks begin each round together."""
    seconds = []
    for _ in range(_ROUNDS):
        dist.barrier()
        since = time.perf_counter()
        do()
        seconds.append(time.perf_counter() - since)
    slowest = np.array([np.median(seconds)])
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return float(slowest[0])
