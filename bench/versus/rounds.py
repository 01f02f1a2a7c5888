"""Who runs when: each round every side once, in an order that is turned round from one to the next."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic
from typing import Any

from .launch import Launch, SideFailedError, run
from .outcome import LIMIT, OURS, SideTimes
from .plan import Cell, Job

_START_SECONDS = 60
_CELL_FACTOR = 4  # verifying, filling and warming up take as long again as what is timed


@dataclass(frozen=True)
class Contender:
    """A side with its job, and where its times go."""

    launch: Launch
    job: Job
    times: SideTimes


def order(contenders: Sequence[Contender], number: int) -> list[Contender]:
    """The turns of one round."""
    return list(contenders) if number % 2 == 0 else list(contenders)[::-1]


def run_rounds(contenders: Sequence[Contender], rounds: int) -> list[str]:
    """Run all rounds; a peer that fails is left out from then on.

    Returns:
        what to say of the peers that failed.

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
    """Run a side once and add what it took to its times."""
    job = contender.job
    timeout = _START_SECONDS + _CELL_FACTOR * len(job.cells) * (job.seconds + 1)
    with TemporaryDirectory(prefix="fastcoll-versus-", ignore_cleanup_errors=True) as folder:
        said = run(contender.launch, job, Path(folder), timeout)
    contender.times.library = said[0][0]["library"]
    contender.times.cores = [lines[0]["cores"] for lines in said]
    for cell, seconds, batches in slowest(job.cells, said):
        contender.times.add((cell.operation, cell.size), seconds, batches)


def slowest(cells: Sequence[Cell], said: Sequence[Sequence[dict[str, Any]]]) -> list[tuple[Cell, float, int]]:
    """Each cell with the slowest rank's seconds, and the number of batches."""
    ends = [{line["ends"]: line for line in lines if "ends" in line} for lines in said]
    return [
        (cell, max(rank[number]["seconds"] for rank in ends), ends[0][number]["batches"])
        for number, cell in enumerate(cells)
    ]


def _show(text: str) -> None:
    print(f"# {text}", file=sys.stderr, flush=True)
