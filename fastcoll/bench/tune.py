"""`python -m fastcoll.bench --tune`: find the fastest algorithms on this machine, for all collectives and sizes.

It finds the fastest algorithm for each operation and size (shm/autotune.py) and, for 3 ranks and more, the size up to
which a one-shot all_reduce (every rank reduces everything) is faster than a two-shot one. The results go into the file
of shm/tuning_cache.py; later groups with the same number of ranks begin with them.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

import fastcoll as dist

from ..core.operations import KINDS
from ..shm import tuning_cache
from ..shm.backend import ShmBackend
from .cases import SHAPES, cases, format_size
from .command import read_study, run_ranks
from .measuring import pin
from .rank import FAILED, OK, Host, prepare, timed

SIZES = tuple(1 << k for k in range(10, 20))
CLASSES = tuple(16 << 10 << 2 * k for k in range(7))  # one of each class of sizes from 8 KiB to 128 MiB
OPERATIONS = tuple(name for name, shape in SHAPES.items() if shape.moves and name in KINDS)
_ROUNDS = 7
_SECONDS = 0.02  # per round of one size and algorithm
# Warm-up calls, in which even slow algorithms are tried twice, and seconds of timing, per class.
_CALLS, _SECONDS_A_CLASS = 160, 0.3
_ALWAYS, _NEVER = 1 << 62, -1


class Measured(NamedTuple):
    """Seconds per call of the slowest rank, medians over the rounds."""

    nbytes: int
    one_shot: float
    two_shot: float


def main(words: Sequence[str]) -> int:
    """Tune for the number of ranks of a command line; return the exit code."""
    parser, given, launched, ranks = read_study(
        words, "--tune", ["--cores"], "find the fastest algorithms on this machine, and store them"
    )
    if ranks < 2:
        parser.error("--tune compares algorithms between ranks; give -n, as in --tune -n 4")
    if tuning_cache.path() is None:
        parser.error("--tune writes its results to the file of FASTCOLL_TUNING, and that is none")
    return run_ranks(
        run, launched, ranks, given.cores, shlex.join(["python", "-m", "fastcoll.bench", *words])
    )


def run(local_rank: int, meeting: dict[str, Any], cores: Sequence[int], command: str) -> int:
    """Measure on all ranks; rank 0 prints and writes the results."""
    pin(cores, local_rank)
    dist.init_process_group("shm", **meeting)
    group = dist.group.WORLD
    assert isinstance(group, dist.ProcessGroup)
    assert isinstance(group.backend, ShmBackend)
    tell: Callable[[str], None] = partial(print, flush=True) if group.rank == 0 else lambda text: None
    try:
        limit = _one_shot(group, tell) if group.size > 2 else None
        group.backend.reset_tuning()
        tell(f"{group.size} ranks, float32, us a call")
        for case in cases(list(OPERATIONS), ["float32"], ["sum"], list(CLASSES), 0, group.size):
            name, nbytes = case.operation, case.size
            call = prepare(case, group.rank, Host()).call
            timing = timed(call, _CALLS, _SECONDS_A_CLASS)[1]
            tell(f"{name:>15} {format_size(nbytes):>5} {timing.median * 1e6:10.2f}")
        if group.rank != 0:
            return OK
        path = group.backend.save_tuning(command, limit)
    except OSError as error:
        tell(f"the results cannot be written: {error}")
        return FAILED
    finally:
        dist.destroy_process_group()
    tell(f"the results for {group.size} ranks are written to {path}")
    return OK


def _one_shot(group: dist.ProcessGroup, tell: Callable[[str], None]) -> int:
    """Return the number of bytes up to which one-shot is faster, and set it in the group."""
    assert isinstance(group.backend, ShmBackend)
    rows = []
    for nbytes in SIZES:
        x, seconds = np.zeros(nbytes // 4, np.float32), np.empty((_ROUNDS, 2))
        for each in seconds:
            for way, limit in enumerate((_ALWAYS, _NEVER)):
                group.backend.context.go_one_shot(limit)
                each[way] = timed(partial(group.fast.all_reduce, x), 5, _SECONDS)[1].median
        rows.append(Measured(nbytes, *np.median(seconds, 0).tolist()))
    limit = best_limit(rows)
    group.backend.context.go_one_shot(limit)
    tell(f"all_reduce of float32, {group.size} ranks, us a call")
    tell(f"{'bytes':>8} {'one-shot':>10} {'two-shot':>10}")
    for row in rows:
        tell(f"{row.nbytes:8} {row.one_shot * 1e6:10.2f} {row.two_shot * 1e6:10.2f}")
    tell(f"one-shot up to {limit} bytes with {group.size} ranks")
    return limit


def best_limit(rows: Sequence[Measured]) -> int:
    """Return the limit for which the sum of `time / time of the faster algorithm` over all sizes is smallest."""

    def loss(limit: int) -> float:
        return sum((row[1] if row.nbytes <= limit else row[2]) / min(row[1:]) for row in rows)

    return min([0, *(row.nbytes for row in rows)], key=loss)
