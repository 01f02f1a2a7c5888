"""The loop that both sides of a comparison run: the same arrays, calls, checks and clock.

Imported by fastcoll_worker.py and mpi_worker.py, each in its own Python; needs NumPy and nothing else.
Each rank writes what it measured to `<out>/<rank>.json`; the side's time is the slowest rank's.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter_ns
from typing import Any, NamedTuple

import numpy as np

OPERATIONS = ("all_reduce", "reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all")


class Buffers(NamedTuple):
    """float32 arrays: x goes in; out comes out, and is x itself where the operation works in place."""

    x: np.ndarray
    out: np.ndarray


Setup = Callable[[str, Buffers], Callable[[], Any]]
"""`setup(operation, buffers)` gives the call to be timed."""


def run(rank: int, ranks: int, barrier: Callable[[], Any], setup: Setup, library: str) -> None:
    """Measure every size that the command line asks for, and write the times."""
    given = _arguments()
    if given.cores:
        os.sched_setaffinity(0, {given.cores[rank % len(given.cores)]})
    times = {}
    for size in given.sizes:
        buffers = make_buffers(given.operation, size, ranks)
        times[size] = _measure(
            given.operation, setup(given.operation, buffers), buffers, rank, ranks, barrier, given
        )
    Path(given.out, f"{rank}.json").write_text(json.dumps({"library": library, "seconds": times}))


def schedule(size: int, scale: float) -> tuple[int, int]:
    """Batches, and calls a batch, for arrays of `size` bytes; at scale 1 a second or less a size."""
    calls = max(1, min(200, (1 << 20) // size))
    batches = max(3, round(scale * min(400, (1 << 30) // (size * calls))))
    return batches, calls


def make_buffers(operation: str, size: int, ranks: int) -> Buffers:
    """The arrays of one rank; `size` is the bytes of the larger of the two."""
    whole = np.zeros(size // 4, np.float32)
    part = np.zeros(size // 4 // ranks, np.float32)
    if operation == "all_gather":
        return Buffers(part, whole)
    if operation == "reduce_scatter":
        return Buffers(whole, part)
    return Buffers(whole, np.zeros_like(whole) if operation == "all_to_all" else whole)


def fill(operation: str, buffers: Buffers, rank: int, ranks: int) -> None:
    """Values by which `check` knows where each element comes from."""
    buffers.out.fill(-1)
    if operation == "all_to_all":
        buffers.x.reshape(ranks, -1)[:] = (rank * ranks + np.arange(ranks))[:, None]
    else:
        buffers.x.fill(rank + 1)


def check(operation: str, buffers: Buffers, rank: int, ranks: int) -> None:
    """Raise unless `buffers.out` is what the operation must give (root 0)."""
    total, numbers = ranks * (ranks + 1) // 2, np.arange(ranks)
    blocks = {
        "all_reduce": [total],
        "reduce": [total if rank == 0 else rank + 1],
        "broadcast": [1],
        "reduce_scatter": [total],
        "all_gather": numbers + 1,
        "all_to_all": numbers * ranks + rank,
    }[operation]
    if not np.array_equal(buffers.out, np.repeat(np.float32(blocks), buffers.out.size // len(blocks))):
        raise AssertionError(f"{operation} of {buffers.x.nbytes} bytes: wrong result on rank {rank}")


def _measure(
    operation: str,
    call: Callable[[], Any],
    buffers: Buffers,
    rank: int,
    ranks: int,
    barrier: Callable[[], Any],
    given: argparse.Namespace,
) -> float:
    """Seconds a call on this rank: the median over batches."""
    fill(operation, buffers, rank, ranks)
    call()
    check(operation, buffers, rank, ranks)
    barrier()  # nobody reads the arrays any more
    buffers.x.fill(0)  # sums stay finite however often
    batches, calls = schedule(buffers_size(buffers), given.scale)
    _batch(call, max(3, calls))
    gc.collect()
    gc.disable()
    barrier()
    times = [_batch(call, calls) for _ in range(batches)]
    gc.enable()
    return median(times) / calls


def buffers_size(buffers: Buffers) -> int:
    """The size of a case, in bytes."""
    return max(buffers.x.nbytes, buffers.out.nbytes)


def _batch(call: Callable[[], Any], calls: int) -> float:
    start = perf_counter_ns()
    for _ in range(calls):
        call()
    return (perf_counter_ns() - start) * 1e-9


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("operation", choices=OPERATIONS)
    parser.add_argument("--sizes", type=_numbers, required=True)
    parser.add_argument("--cores", type=_numbers, default=[])
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--out", required=True)
    return parser.parse_args()


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",") if part]
