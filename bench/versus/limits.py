"""The machine's own limit for each operation.

All ranks do it at once, on their cores, over arrays of the operation's size again and again, so they are in
the caches or not as the operation's own. S is the size (bytes of the larger of input and output), n the ranks.

stream      `np.multiply(x, 1, out=x)`: read and write S
            all_reduce, reduce, custom
fold        add the n parts of x into one: read S, write S/n
            reduce_scatter
copy        copy S, which the busiest rank must write
            broadcast, all_gather, gather, all_to_all, send_recv
copy_part   copy S/n, which the busiest rank must write
            scatter

A copy is the faster of two: NumPy's, which is libc's memcpy, and fastcoll's past the caches (`copy_past`,
`copy_part_past`), with non-temporal stores.

A barrier has none. Below LIMIT_FROM none is shown: there it is NumPy's own time for a call.
With more ranks than cores it is a rank's CPU time for it times the ranks a core, as they take turns.
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
"""The limits of an operation, of which the fastest counts."""

LIMIT_FROM = 32 << 10  # bytes; NumPy's call takes 0.3 us of the 2 us that 32 KiB take


def limit_cells(cells: Iterable[Cell]) -> list[Cell]:
    """What to measure for these operations: the limits of each, in its size, once."""
    found = {
        (limit, cell.size): replace(cell, operation=limit)
        for cell in cells
        for limit in LIMITS_OF.get(cell.operation, ())
    }
    return list(found.values())
