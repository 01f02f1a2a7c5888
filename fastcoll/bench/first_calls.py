"""`python -m fastcoll.bench --first-calls`: the first ten calls of new processes, compared with the converged median.

A cell is an operation of one size. Each cell is measured in several starts, each with new ranks, so its calls are the
first in every respect: they load compiled code, touch shared memory and choose algorithms. One more start precedes
them and does not count; it compiles missing code and fills the tuning cache. Each time is that of the slowest rank. The
median is that of all calls after the first ten. The first ten calls are summarised by their mean, because a median
would hide a single slow call. The mean of calls 2 to 10 is shown too, because the first call loads the code.
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

import fastcoll as dist

from ..errors import UsageError
from ..launch.spawn import spawn
from .cases import Case, cases, format_size, parse_operation
from .command import read_study, temporary_folder
from .measuring import no_collector, pin
from .rank import Host, prepare
from .results import describe, digits, machine
from .tune import OPERATIONS

SIZES = (8, 4 << 10, 256 << 10, 4 << 20, 64 << 20)
STARTS = 3
_FIRST = 10
_FEWEST, _MOST = 100, 20_000  # bounds for the number of calls after the first ten
_ROW = "{:>16} {:>6} {:>10} {:>10} {:>10} {:>13} {:>16}"
_HEADING = _ROW.format("operation", "size", "first", "2 to 10", "median", "ten / median", "2 to 10 / median")
_OPTIONS = (
    "operations",
    "--sizes",
    "--dtype",
    "--op",
    "--root",
    "--backend",
    "--seconds",
    "--cores",
    "--json",
)

Row = dict[str, Any]


def main(words: Sequence[str]) -> int:
    """Measure the cells that a command line asks for; return the exit code."""
    cores = sorted(os.sched_getaffinity(0))
    parser, given, _, ranks = read_study(
        words, "--first-calls", _OPTIONS, starts_ranks=True, cores=cores, seconds=0.5
    )
    try:
        operations = [parse_operation(name) for name in given.operations] or list(OPERATIONS)
    except UsageError as error:
        parser.error(str(error))
    facts = machine(len(cores))
    print(f"{ranks} ranks, {STARTS} starts a cell, us of the slowest rank; {describe(facts)}")
    print(_HEADING)
    rows = []
    for case in cases(operations, given.dtype, given.op, given.sizes or list(SIZES), given.root, ranks):
        rows.append(measure(case, given.cores, given.backend, given.seconds))
        print(line(rows[-1]), flush=True)
    if given.json:
        command = shlex.join(["python -m fastcoll.bench", *words])
        about = {"kind": "first calls", "machine": facts, "command": command, "ranks": ranks}
        given.json.write_text(json.dumps({**about, "results": rows}, indent=1) + "\n")
    return 0


def measure(case: Case, cores: Sequence[int], backend: str, seconds: float) -> Row:
    """Return the times of a cell in microseconds: medians over the starts."""
    starts = [_start(case, cores, backend, seconds) for _ in range(STARTS + 1)][1:]
    names = ("first_us", "others_us", "ten_us", "median_us")
    times = {
        name: median(values) * 1e6 for name, values in zip(names, zip(*starts, strict=True), strict=True)
    }
    ratios = {
        "first_over_median": median(ten / usual for *_, ten, usual in starts),
        "others_over_median": median(others / usual for _, others, _, usual in starts),
    }
    return {"operation": case.operation, "size": case.size, **times, **ratios}


def line(row: Row) -> str:
    """Return a row for a terminal."""
    times = [digits(row[name]) for name in ("first_us", "others_us", "median_us")]
    ratios = [f"{row[name]:.2f}" for name in ("first_over_median", "others_over_median")]
    return _ROW.format(row["operation"], format_size(row["size"]), *times, *ratios)


def _start(case: Case, cores: Sequence[int], backend: str, seconds: float) -> tuple[float, ...]:
    """Measure with new ranks; return four times in seconds, each of the slowest rank.

    They are the first call, the mean of calls 2 to 10, the mean of calls 1 to 10, and the median of the later calls.
    """
    with temporary_folder() as folder:
        spawn(_rank, (case, list(cores), backend, seconds, folder), case.ranks)
        calls = np.array([json.loads(Path(folder, str(rank)).read_text()) for rank in range(case.ranks)])
    ten, later = calls[:, :_FIRST], calls[:, _FIRST:]
    each = ten[:, 0], ten[:, 1:].mean(1), ten.mean(1), np.median(later, 1)
    return tuple(float(ranks.max()) for ranks in each)


def _rank(rank: int, case: Case, cores: Sequence[int], backend: str, seconds: float, folder: str) -> None:
    pin(cores, rank)
    dist.init_process_group(backend, f"file://{folder}/meeting", world_size=case.ranks, rank=rank)
    trial = prepare(case, rank, Host())
    trial.reset()
    with no_collector():
        dist.barrier()
        calls = _times(trial.call, _FIRST)
        enough = np.array([min(_MOST, max(_FEWEST, int(seconds / max(1e-9, min(calls)))))])
        dist.broadcast(enough, 0)
        calls += _times(trial.call, int(enough[0]))
    trial.reset()
    trial.call()
    wrong = trial.wrong()
    Path(folder, str(rank)).write_text(json.dumps(calls))
    dist.destroy_process_group()
    if wrong:
        raise SystemExit(f"{case.operation} of {case.size} bytes: {wrong} wrong elements on rank {rank}")


def _times(call: Callable[[], Any], number: int) -> list[float]:
    """Return the seconds of each of `number` calls."""
    found = []
    for _ in range(number):
        start = perf_counter()
        call()
        found.append(perf_counter() - start)
    return found
