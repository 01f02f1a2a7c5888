"""The machine's own limit for each operation.

A *limit* is the least work on memory that an operation requires of a rank, without communication. All ranks run it at
once, on their cores, repeatedly over arrays of the operation's size. So the arrays are in the caches if those of the
operation are. S is the size (bytes of the larger of input and output), n the number of ranks. Below each limit are its
operations:

stream      `np.multiply(x, 1, out=x)`: read and write S
            all_reduce, reduce, custom
fold        add the n parts of x into one: read S, write S/n
            reduce_scatter
copy        copy S, which the busiest rank must write
            broadcast, all_gather, gather, all_to_all, send_recv
copy_part   copy S/n, which the busiest rank must write
            scatter

A copy is the faster of two: NumPy's, which is libc's memcpy, and fastcoll's with non-temporal stores past the caches
(`copy_past`, `copy_part_past`).

A barrier has no limit. Below LIMIT_FROM no limit is shown, because it would be mostly the time of NumPy's call. With
more ranks than cores, the limit is a rank's CPU time times the ranks per core, because they share the core.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from .plan import Cell

_STREAM = ("stream",)
_COPY = ("copy", "copy_past")
LIMITS_OF: dict[str, tuple[str, ...]] = {
    "all_reduce": _STREAM,
    "reduce": _STREAM,
    "custom": _STREAM,
    "reduce_scatter": ("fold",),
    "broadcast": _COPY,
    "all_gather": _COPY,
    "gather": _COPY,
    "all_to_all": _COPY,
    "send_recv": _COPY,
    "scatter": ("copy_part", "copy_part_past"),
}
"""The limits of each operation; the fastest counts."""

LIMIT_FROM = 32 << 10  # bytes; for 32 KiB a limit is 2 us, of which NumPy's call takes 0.3 us


def limit_cells(cells: Iterable[Cell]) -> list[Cell]:
    """Return the cells of limits for some operations, each size once."""
    found = {
        (limit, cell.size): replace(cell, operation=limit)
        for cell in cells
        for limit in LIMITS_OF.get(cell.operation, ())
    }
    return list(found.values())
