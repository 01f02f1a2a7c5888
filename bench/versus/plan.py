"""The work of a side: cells of operations and sizes, with their numbers of calls.

The numbers of calls are the same for all sides. They are chosen so that a batch of the fastest side is long enough for
the clock, and all cells of the slowest side take a minute. This module needs only the standard library.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

DEFAULT_SIZES = tuple(1 << power for power in (3, 10, 12, 15, 18, 20, 22, 24, 26))

_CALLS = 40  # in a batch of the smallest calls, which take about 0.5 us
_BATCHES = 30  # per round, so five rounds have at least 150 calls
_BATCH_BYTES = 1 << 20  # most bytes of the calls of a batch together, if it has more than one call


@dataclass(frozen=True)
class Shape:
    """The arrays of an operation: the `whole`, or one rank's `part` of it, or none.

    Attributes:
        x: the input.
        out: the output; None: it replaces x.
        split: whether the whole consists of one part per rank.
        rooted: whether a rank may finish the operation before all others have begun it.
        calls_in_time: by what the time of a call is divided; 2 for a round trip, of which half is reported.
    """

    x: str
    out: str | None
    split: bool = True
    rooted: bool = False
    calls_in_time: int = 1

    @property
    def moves(self) -> bool:
        """Whether the operation moves data."""
        return self.x != "nothing"


SHAPES: dict[str, Shape] = {
    "all_reduce": Shape("whole", None, split=False),
    "reduce": Shape("whole", None, split=False, rooted=True),
    "reduce_scatter": Shape("whole", "part"),
    "broadcast": Shape("whole", None, split=False, rooted=True),
    "all_gather": Shape("part", "whole"),
    "gather": Shape("part", "whole", rooted=True),
    "scatter": Shape("whole", "part", rooted=True),
    "all_to_all": Shape("whole", "whole"),
    "send_recv": Shape("whole", "whole", split=False, calls_in_time=2),
    "barrier": Shape("nothing", None, split=False),
    "custom": Shape("whole", None, split=False),
    "update_all_reduce": Shape("whole", None, split=False),
    "update_shared_all_reduce": Shape("whole", None, split=False),
}
LIMITS: dict[str, Shape] = {
    "stream": Shape("whole", None, split=False),
    "fold": Shape("whole", "part"),
    "copy": Shape("whole", "whole", split=False),
    "copy_past": Shape("whole", "whole", split=False),
    "copy_part": Shape("part", "part"),
    "copy_part_past": Shape("part", "part"),
}
UPDATES = ("update_all_reduce", "update_shared_all_reduce")
"""Operations that run only if they are named: x *= 1, then all_reduce.

In the second, fastcoll's x is in shared pages.
"""
OPERATIONS = tuple(operation for operation in SHAPES if operation not in UPDATES)
DTYPES = ("float32", "float64", "int8", "uint8", "int32", "int64")


@dataclass(frozen=True)
class Cell:
    """One measurement.

    Attributes:
        operation: a key of SHAPES or LIMITS.
        count: the number of elements of the larger of input and output.
        size: its number of bytes.
        batches, calls: the number of timed batches, and the number of calls in a batch.
    """

    operation: str
    count: int
    size: int
    batches: int
    calls: int


@dataclass(frozen=True)
class Job:
    """The job of all ranks of a side.

    Attributes:
        cells: the cells to measure, in order.
        ranks: the number of ranks.
        dtype: a name of DTYPES.
        cores: rank r is pinned to `cores[r % len(cores)]`; empty: no rank is pinned.
        crowding: ranks per core; if it is more than 1, ranks share cores.
        seconds: the most seconds for a cell; a cell that would take longer gets fewer batches.
        backend: fastcoll's backend.
        hosts: how many hosts the ranks are on, each with as many neighbouring ranks.
        counted: whether to count each cell's single copies (see `single_copy`) instead of measuring.
    """

    cells: tuple[Cell, ...]
    ranks: int
    dtype: str
    cores: tuple[int, ...]
    crowding: float
    seconds: float
    backend: str = "auto"
    hosts: int = 1
    counted: bool = False

    def write(self, folder: Path) -> None:
        """Write the job for `read_job` in another process."""
        (folder / "job.json").write_text(json.dumps(asdict(self)))


def read_job(folder: Path) -> Job:
    """Return the job that was written to `folder`."""
    found = json.loads((folder / "job.json").read_text())
    cells = tuple(Cell(**cell) for cell in found.pop("cells"))
    return Job(cells, **{**found, "cores": tuple(found["cores"])})


def cells(
    operations: Sequence[str], sizes: Sequence[int], itemsize: int, ranks: int, cores: int, scale: float
) -> Iterator[Cell]:
    """Return the cells of a run.

    Sizes are rounded up to whole elements per rank; sizes that are then equal are used once.

    Args:
        cores: the number of cores; with more ranks than cores, fewer calls are made.
        scale: a factor for the number of batches.
    """
    for operation in operations:
        shape = SHAPES[operation]
        unit = itemsize * (ranks if shape.split else 1)
        for size in dict.fromkeys(-(-size // unit) * unit for size in sizes) if shape.moves else [0]:
            yield Cell(operation, size // itemsize, size, *schedule(size, scale, max(1.0, ranks / cores)))


def schedule(size: int, scale: float, crowding: float = 1.0) -> tuple[int, int]:
    """Return the number of batches, and of calls per batch, for `size` bytes.

    Args:
        crowding: ranks per core; the number of calls is divided by it. If ranks share a core, a call takes longer by
            more than this factor.
    """
    calls = max(1, min(_CALLS, _BATCH_BYTES // max(1, size)) // round(crowding))
    return max(3, round(scale * _BATCHES)), calls
