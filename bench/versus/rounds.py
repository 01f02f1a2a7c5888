"""The order of the sides: each round runs every side once, in reverse order in every second round."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from time import monotonic
from typing import Any

from .launch import Launch, SideFailedError, run
from .outcome import LIMIT, MPIS, OURS, SideTimes
from .plan import Cell, Job

_START_SECONDS = 60
# A cell may take this many times the time of its timed calls, because checks, fills and warm-up take as long as these.
_CELL_FACTOR = 4


@dataclass(frozen=True)
class Contender:
    """A side with its job and its times."""

    launch: Launch
    job: Job
    times: SideTimes


def order(contenders: Sequence[Contender], number: int) -> list[Contender]:
    """Return the order of the sides in a round."""
    return list(contenders) if number % 2 == 0 else list(contenders)[::-1]


def run_rounds(contenders: Sequence[Contender], rounds: int) -> list[str]:
    """Run all rounds; leave a peer out after it has failed.

    Returns:
        messages about the peers that failed.

    Raises:
        SideFailedError: fastcoll, or the limit, failed.
    """
    failed: dict[str, str] = {}
    start = monotonic()
    for number in range(rounds):
        for contender in order(contenders, number):
            name = contender.launch.side
            if name in failed:
                continue
            _show(f"round {number + 1} of {rounds}, {monotonic() - start:.0f} s: {name}")
            try:
                run_once(contender)
            except SideFailedError as error:
                if name in (OURS, LIMIT):
                    raise
                failed[name] = str(error)
                print(error, file=sys.stderr, flush=True)
    return list(failed.values())


def run_once(contender: Contender) -> None:
    """Run a side once and add its times."""
    job = contender.job
    with TemporaryDirectory(prefix="fastcoll-versus-", ignore_cleanup_errors=True) as folder:
        results = run(contender.launch, job, Path(folder), _timeout(job))
    contender.times.library = results[0][0]["library"]
    contender.times.placed = [lines[0]["placed"] for lines in results]
    for cell, ends in ends_of(job.cells, results):
        key = cell.operation, cell.size
        seconds, processor = max(end["seconds"] for end in ends), sum(end["processor"] for end in ends)
        contender.times.add(key, seconds, processor, ends[0]["batches"], [end["singles"] for end in ends])
        contender.times.sent[key] = fmean(end["sent"] for end in ends)


def count_copies(contenders: Sequence[Contender]) -> None:
    """Run fastcoll and each MPI once more, and count their single copies.

    Gloo makes no copies between processes, because it sends over TCP.
    """
    for contender in contenders:
        if contender.launch.side not in (OURS, *MPIS):
            continue
        _show(f"single copies: {contender.launch.side}")
        job = replace(contender.job, counted=True)
        try:
            with TemporaryDirectory(prefix="fastcoll-versus-", ignore_cleanup_errors=True) as folder:
                results = run(contender.launch, job, Path(folder), _timeout(job))
        except SideFailedError as error:
            print(error, file=sys.stderr, flush=True)
            continue
        contender.times.copies = {
            (cell.operation, cell.size): sum(end["copies"] for end in ends)
            for cell, ends in ends_of(job.cells, results)
        }


def ends_of(
    cells: Sequence[Cell], results: Sequence[Sequence[dict[str, Any]]]
) -> list[tuple[Cell, list[dict[str, Any]]]]:
    """Return each cell with the lines that the ranks wrote at its end."""
    ends = [{line["ends"]: line for line in lines if "ends" in line} for lines in results]
    return [(cell, [rank[number] for rank in ends]) for number, cell in enumerate(cells)]


def _timeout(job: Job) -> float:
    return _START_SECONDS + _CELL_FACTOR * len(job.cells) * (job.seconds + 1)


def _show(text: str) -> None:
    print(f"# {text}", file=sys.stderr, flush=True)
