"""The loop that every rank of every side runs: the same arrays, calls, checks and clock. NumPy only.

A rank writes lines of JSON to `FOLDER/RANK.jsonl`: what it is, then each cell as it begins and as it ends. So
whoever started it knows where it was when it failed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from importlib import import_module
from pathlib import Path
from time import perf_counter_ns
from typing import Any, Protocol, TextIO

import numpy as np
from numpy.typing import NDArray

from . import single_copy
from .cells import Buffers, Place, make_buffers, prepare, wrong
from .measuring import Call, Schedule, estimate, no_collector, time_batches
from .pinning import pin, place_threads
from .plan import LIMITS, SHAPES, Cell, Job, read_job

SIDES = {
    "fastcoll": "ours",
    "limit": "limit",
    "gloo": "gloo",
    "openmpi": "mpi",
    "openmpi-tcp": "mpi",
    "mpich": "mpi",
}
"""The module of `sides` that speaks for a side."""

_WARM_UP = 12  # calls at least, on every side; libraries that learn while they run have learnt by then
_FEWEST_BATCHES = 3
_SINGLES = 200  # calls of a round that are timed by themselves


class Side(Protocol):
    """A library that has joined its ranks; made by `join(job, folder)` of its module.

    Attributes:
        rank: of this process.
        library: name and version, for people.
    """

    rank: int
    library: str

    def barrier(self) -> None:
        """Returns when all ranks have called."""

    def slowest(self, seconds: float) -> float:
        """The largest of all ranks' numbers."""

    def memory(self, operation: str) -> AbstractContextManager[Any]:
        """Where the operation's arrays are made."""

    def call(self, operation: str, buffers: Buffers) -> Call:
        """What is timed: the operation on these arrays, root 0, in the form that is the library's fastest."""

    def close(self) -> None:
        """Leave the other ranks."""


def main(name: str, folder: Path) -> None:
    """Run the job in `folder` as a rank of the side `name`."""
    job = read_job(folder)
    pin(job.cores, rank_in_environment())
    counter = single_copy.count() if job.counted else None
    side: Side = import_module(f"{__package__}.sides.{SIDES[name]}").join(job, folder)
    place = Place(side.rank, job.ranks, np.dtype(job.dtype))
    with (folder / f"{side.rank}.jsonl").open("w") as log:
        _tell(log, library=side.library, pid=os.getpid(), placed=place_threads(job.cores, side.rank))
        for number, cell in enumerate(job.cells):
            _tell(log, begins=number)
            with side.memory(cell.operation):
                buffers = make_buffers(cell, place)
            call = side.call(cell.operation, buffers)
            _verify(side, cell, call, buffers, place)
            told = _count(side, call, counter) if counter else _measure(side, call, cell, job)
            _tell(log, ends=number, **told)
    side.close()


def rank_in_environment() -> int:
    """This process' rank as its launcher says, before the library is asked."""
    names = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "RANK")  # mpiexec passes on a RANK that is not its own
    return int(next(os.environ[name] for name in names if name in os.environ))


def _measure(side: Side, call: Call, cell: Cell, job: Job) -> dict[str, Any]:
    """This rank's seconds a call, as the median over batches; how many batches there were; and single calls."""
    batches = _affordable(side, call, cell, job.seconds)
    place_threads(job.cores, side.rank)
    with no_collector():
        side.barrier()
        singles = _time_singly(call, min(_SINGLES, batches * cell.calls))
        side.barrier()
        seconds = float(np.median(singles))
        if cell.calls > 1 or job.crowding > 1:
            seconds = _median(call, cell, batches, job)
            side.barrier()  # nobody allocates while others are timed
    factor = 1 / (SHAPES | LIMITS)[cell.operation].calls_in_time
    return {"seconds": seconds * factor, "batches": batches, "singles": (singles * factor).tolist()}


def _median(call: Call, cell: Cell, batches: int, job: Job) -> float:
    """Seconds a call. Where ranks share cores, some batches would not show what it takes all of them."""
    plan = Schedule(batches, cell.calls)
    if job.crowding > 1 and cell.operation in LIMITS:  # each rank needs its core for so long, in turn
        return time_batches(call, plan, cpu_time=True).median * job.crowding
    if (
        job.crowding > 1 and (SHAPES | LIMITS)[cell.operation].rooted
    ):  # ranks run ahead, and wait long but seldom
        plan = Schedule(1, batches * cell.calls)
    return time_batches(call, plan).median


def _time_singly(call: Call, number: int) -> NDArray[np.float64]:
    """Seconds of each of so many calls in a row: a batch's mean would hide the slow ones. The clock adds 0.1 us."""
    marks = np.empty(number + 1, np.int64)
    marks[0] = perf_counter_ns()
    for index in range(1, number + 1):
        call()
        marks[index] = perf_counter_ns()
    return np.diff(marks) * 1e-9


def _count(side: Side, call: Call, counter: Callable[[], int]) -> dict[str, Any]:
    """How many times this rank's part of a call copies straight between processes: the mean of some, warmed up."""
    estimate(call, _WARM_UP)
    side.barrier()
    before = counter()
    estimate(call, _WARM_UP)
    side.barrier()
    return {"copies": (counter() - before) / _WARM_UP}


def _verify(side: Side, cell: Cell, call: Call, buffers: Buffers, place: Place) -> None:
    prepare(cell, buffers, place)
    side.barrier()
    call()
    side.barrier()  # nobody reads the arrays any more
    if found := wrong(cell, buffers, place):
        raise AssertionError(
            f"{cell.operation} of {cell.size} bytes: {found} wrong elements on rank {place.rank}"
        )
    buffers.x.fill(0)  # sums stay finite however often


def _affordable(side: Side, call: Call, cell: Cell, limit: float) -> int:
    """Two batches to warm up; the second says how many there may be, the same number on all ranks."""
    estimate(call, max(cell.calls, _WARM_UP))
    side.barrier()
    batch = side.slowest(estimate(call, cell.calls) * cell.calls)
    return max(_FEWEST_BATCHES, min(cell.batches, int(limit / max(batch, 1e-9))))


def _tell(log: TextIO, **what: Any) -> None:
    log.write(json.dumps(what) + "\n")
    log.flush()
