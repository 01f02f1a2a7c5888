"""The loop of every rank of every side: the same arrays, calls, checks and clock.

It needs only NumPy. A rank writes lines of JSON to `FOLDER/RANK.jsonl`: first one that describes the rank, then one at
the beginning and one at the end of each cell. So the process that started the rank can see where a failed rank was.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from importlib import import_module
from pathlib import Path
from time import perf_counter_ns, process_time
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
    "intelmpi": "mpi",
}
"""For each side the module of `sides` that calls its library."""

_WARM_UP = 12  # least calls before the timing; libraries that tune themselves are tuned by then
_FEWEST_BATCHES = 3
_SINGLES = 200  # calls of a round that are timed one by one


class Side(Protocol):
    """A library whose ranks have joined.

    It is made by `join(job, folder)` of the side's module.

    Attributes:
        rank: this process's rank.
        library: the library's name and version.
    """

    rank: int
    library: str

    def barrier(self) -> None:
        """Wait until all ranks have called this."""

    def slowest(self, seconds: float) -> float:
        """Return the largest of all ranks' numbers."""

    def memory(self, operation: str) -> AbstractContextManager[Any]:
        """Return a context in which the operation's arrays are made."""

    def call(self, operation: str, buffers: Buffers) -> Call:
        """Return the timed call: the operation on these arrays, root 0, in the library's fastest form."""

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
        _write_line(log, library=side.library, pid=os.getpid(), placed=place_threads(job.cores, side.rank))
        for number, cell in enumerate(job.cells):
            _write_line(log, begins=number)
            with side.memory(cell.operation):
                buffers = make_buffers(cell, place)
            call = side.call(cell.operation, buffers)
            _verify(side, cell, call, buffers, place)
            fields = _count(side, call, counter) if counter else _measure(side, call, cell, job)
            _write_line(log, ends=number, **fields)
    side.close()


def rank_in_environment() -> int:
    """Return this process's rank from the variables of its launcher, before the library is imported."""
    # RANK is last, because it may be that of mpiexec, which passes it on to the ranks.
    names = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "RANK")
    return int(next(os.environ[name] for name in names if name in os.environ))


def _measure(side: Side, call: Call, cell: Cell, job: Job) -> dict[str, Any]:
    """Time a cell's calls in batches and one by one.

    Returns:
        fields of the cell's last line: `seconds` is this rank's median seconds per call over `batches` batches,
        `singles` has the seconds of single calls, and `processor` is the processor time of a call in seconds: that of
        all threads of this rank, over all timed calls. `sent` is how many bytes this rank's host has sent in a call.
    """
    batches = _affordable(side, call, cell, job.seconds)
    place_threads(job.cores, side.rank)
    with no_collector():
        side.barrier()
        before, calls = (process_time(), bytes_sent()), min(_SINGLES, batches * cell.calls)
        singles = _time_singly(call, calls)
        side.barrier()
        seconds = float(np.median(singles))
        if cell.calls > 1 or job.crowding > 1:
            seconds = _median(call, cell, batches, job)
            calls += batches * cell.calls
            side.barrier()  # no rank allocates while others are timed
        processor, sent = process_time() - before[0], bytes_sent() - before[1]
    factor = 1 / (SHAPES | LIMITS)[cell.operation].calls_in_time
    return {
        "seconds": seconds * factor,
        "processor": processor / calls * factor,
        "sent": sent / calls * factor,
        "batches": batches,
        "singles": (singles * factor).tolist(),
    }


def bytes_sent() -> int:
    """Return how many bytes this host has sent over all its interfaces but the loopback one."""
    interfaces = [path for path in Path("/sys/class/net").iterdir() if path.name != "lo"]
    return sum(int((path / "statistics/tx_bytes").read_text()) for path in interfaces)


def _median(call: Call, cell: Cell, batches: int, job: Job) -> float:
    """Return the median seconds per call over batches.

    If ranks share cores, a limit is timed by CPU time, and a rooted operation as one batch, because its single batches
    would not include the time of all ranks.
    """
    plan = Schedule(batches, cell.calls)
    # The ranks use their core one after the other, each for this CPU time.
    if job.crowding > 1 and cell.operation in LIMITS:
        return time_batches(call, plan, cpu_time=True).median * job.crowding
    # Some ranks run ahead of the others for many batches, and then wait in one batch for long.
    if job.crowding > 1 and (SHAPES | LIMITS)[cell.operation].rooted:
        plan = Schedule(1, batches * cell.calls)
    return time_batches(call, plan).median


def _time_singly(call: Call, number: int) -> NDArray[np.float64]:
    """Return the seconds of each of `number` calls.

    A batch would hide single slow calls. Reading the clock adds 0.1 us to each call.
    """
    marks = np.empty(number + 1, np.int64)
    marks[0] = perf_counter_ns()
    for index in range(1, number + 1):
        call()
        marks[index] = perf_counter_ns()
    return np.diff(marks) * 1e-9


def _count(side: Side, call: Call, counter: Callable[[], int]) -> dict[str, Any]:
    """Count this rank's single copies (see `single_copy`) in calls after a warm-up.

    Returns:
        the mean number per call, as a field of the cell's last line.
    """
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
    side.barrier()  # all ranks have finished with the arrays
    if found := wrong(cell, buffers, place):
        raise AssertionError(
            f"{cell.operation} of {cell.size} bytes: {found} wrong elements on rank {place.rank}"
        )
    buffers.x.fill(0)  # so that repeated sums stay finite


def _affordable(side: Side, call: Call, cell: Cell, limit: float) -> int:
    """Run two batches as a warm-up; return how many batches fit into `limit` seconds.

    The number follows from the second batch's time on the slowest rank, so it is the same on all ranks.
    """
    estimate(call, max(cell.calls, _WARM_UP))
    side.barrier()
    batch = side.slowest(estimate(call, cell.calls) * cell.calls)
    return max(_FEWEST_BATCHES, min(cell.batches, int(limit / max(batch, 1e-9))))


def _write_line(log: TextIO, **what: Any) -> None:
    log.write(json.dumps(what) + "\n")
    log.flush()
