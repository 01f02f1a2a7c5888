"""`python -m fastcoll.bench --tune`: up to which size one-shot beats two-shot here, written to this machine's table."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

import fastcoll as dist

from ..errors import UsageError
from ..rendezvous.detect import detect
from ..shm.backend import ShmBackend
from ..shm.thresholds import BUILT_IN, table_path, write
from .command import count_ranks, make_parser, run_ranks
from .rank import timed

SIZES = tuple(1 << k for k in range(10, 20))
_ROUNDS = 7
_SECONDS = 0.02  # a round of one size and way
_ALWAYS, _NEVER = 1 << 62, -1


class Measured(NamedTuple):
    """Seconds a call of the slowest rank, medians over the rounds."""

    nbytes: int
    one_shot: float
    two_shot: float


def main(words: Sequence[str]) -> int:
    """Tune for as many ranks as the words of a command line ask for; returns the exit code."""
    parser = make_parser()
    parser.add_argument("--tune", action="store_true", help="find this machine's thresholds")
    given = parser.parse_args(words)
    try:
        launched = detect(os.environ)
        ranks = count_ranks(given.ranks, launched)
        if ranks < 3:
            raise UsageError("--tune compares ways that differ from 3 ranks on; give -n, as in --tune -n 4")
    except UsageError as error:
        parser.error(str(error))
    return run_ranks(run, launched, ranks, shlex.join(["python", "-m", "fastcoll.bench", *words]))


def run(local_rank: int, meeting: dict[str, Any], command: str) -> None:
    """Measure on all ranks; rank 0 tells and writes."""
    dist.init_process_group(**meeting)
    group = dist.new_group(backend="shm")
    assert isinstance(group, dist.ProcessGroup)
    assert isinstance(group.backend, ShmBackend)
    rows = []
    for nbytes in SIZES:
        x, seconds = np.zeros(nbytes // 4, np.float32), np.empty((_ROUNDS, 2))
        for each in seconds:
            for way, limit in enumerate((_ALWAYS, _NEVER)):
                group.backend.context.go_one_shot(limit)
                each[way] = timed(partial(group.all_reduce, x), 5, _SECONDS)[1].median
        rows.append(Measured(nbytes, *np.median(seconds, 0).tolist()))
    rank = group.rank
    dist.destroy_process_group()
    if rank != 0:
        return
    print(f"all_reduce of float32, {group.size} ranks on {len(os.sched_getaffinity(0))} cores, us a call")
    print(f"{'bytes':>8} {'one-shot':>10} {'two-shot':>10}")
    for row in rows:
        print(f"{row.nbytes:8} {row.one_shot * 1e6:10.2f} {row.two_shot * 1e6:10.2f}")
    limit, path = best_limit(rows), table_path()
    write(path, group.size, limit, command)
    usual = min((n for n in BUILT_IN.one_shot if n >= group.size), default=max(BUILT_IN.one_shot))
    built_in = f"built in: {BUILT_IN.one_shot[usual]}"
    print(f"one-shot up to {limit} bytes with {group.size} ranks ({built_in}), written to {path}", flush=True)


def best_limit(rows: Sequence[Measured]) -> int:
    """The limit with which the calls of all sizes together lose least against the faster way of each size."""

    def loss(limit: int) -> float:
        return sum((row[1] if row.nbytes <= limit else row[2]) / min(row[1:]) for row in rows)

    return min([0, *(row.nbytes for row in rows)], key=loss)
