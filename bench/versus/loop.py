"""The loop that every rank of every side runs: the same arrays, calls, checks and clock. NumPy only.

A rank writes lines of JSON to `FOLDER/RANK.jsonl`: what it is, then each cell as it begins and as it ends. So
whoever started it knows where it was when it failed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, TextIO

import numpy as np

from .cells import Buffers, Place, make_buffers, prepare, wrong
from .measuring import Schedule, Timing, estimate, no_collector, time_batches
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

    def call(self, operation: str, buffers: Buffers) -> Callable[[], Any]:
        """What is timed: the operation on these arrays, root 0, in the form that is the library's fastest."""

    def close(self) -> None:
        """Leave the other ranks."""


def main(name: str, folder: Path) -> None:
    """Run the job in `folder` as a rank of the side `name`."""
    job = read_job(folder)
    side: Side = import_module(f"{__package__}.sides.{SIDES[name]}").join(job, folder)
    place = Place(side.rank, job.ranks, np.dtype(job.dtype))
    with (folder / f"{side.rank}.jsonl").open("w") as log:
        _tell(log, library=side.library, pid=os.getpid(), cores=sorted(os.sched_getaffinity(0)))
        for number, cell in enumerate(job.cells):
            _tell(log, begins=number)
            _tell(log, ends=number, **_measure(side, cell, place, job))
    side.close()


def pin(job: Job, rank: int) -> None:
    """This thread, and the threads that it starts from now on, to the rank's core."""
    if job.cores:
        os.sched_setaffinity(0, {job.cores[rank % len(job.cores)]})


def rank_in_environment() -> int:
    """This process' rank as its launcher says, before the library is asked."""
    names = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "RANK")  # mpiexec passes on a RANK that is not its own
    return int(next(os.environ[name] for name in names if name in os.environ))


def _measure(side: Side, cell: Cell, place: Place, job: Job) -> dict[str, Any]:
    """This rank's seconds a call: median and p99 over batches, and how many batches there were."""
    buffers = make_buffers(cell, place)
    call = side.call(cell.operation, buffers)
    _verify(side, cell, call, buffers, place)
    batches = _affordable(side, call, cell, job.seconds)
    with no_collector():
        side.barrier()
        timing = _time(call, cell, batches, job)
        side.barrier()  # nobody allocates while others are timed
    return {"seconds": timing.median, "p99": timing.p99, "batches": batches}


def _time(call: Callable[[], Any], cell: Cell, batches: int, job: Job) -> Timing:
    """Seconds a call. Where ranks share cores, some batches would not show what it takes all of them."""
    shape = (SHAPES | LIMITS)[cell.operation]
    plan, factor = Schedule(batches, cell.calls), 1 / shape.calls_in_time
    if job.crowding > 1 and cell.operation in LIMITS:  # each rank needs its core for so long, in turn
        timing, factor = time_batches(call, plan, cpu_time=True), job.crowding
    elif job.crowding > 1 and shape.rooted:  # ranks run ahead, and wait long but seldom
        timing = time_batches(call, Schedule(1, batches * cell.calls))
    else:
        timing = time_batches(call, plan)
    return Timing(timing.median * factor, timing.p99 * factor)


def _verify(side: Side, cell: Cell, call: Callable[[], Any], buffers: Buffers, place: Place) -> None:
    prepare(cell, buffers, place)
    side.barrier()
    call()
    side.barrier()  # nobody reads the arrays any more
    if found := wrong(cell, buffers, place):
        raise AssertionError(
            f"{cell.operation} of {cell.size} bytes: {found} wrong elements on rank {place.rank}"
        )
    buffers.x.fill(0)  # sums stay finite however often


def _affordable(side: Side, call: Callable[[], Any], cell: Cell, limit: float) -> int:
    """Two batches to warm up; the second says how many there may be, the same number on all ranks."""
    estimate(call, max(cell.calls, _WARM_UP))
    side.barrier()
    batch = side.slowest(estimate(call, cell.calls) * cell.calls)
    return max(_FEWEST_BATCHES, min(cell.batches, int(limit / max(batch, 1e-9))))


def _tell(log: TextIO, **what: Any) -> None:
    log.write(json.dumps(what) + "\n")
    log.flush()
