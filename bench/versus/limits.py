"""The machine's own limit for each operation, as NumPy reaches it.

All ranks do it at once, on their cores, over arrays of the operation's size again and again, so they are in
the caches or not as the operation's own. S is the size (bytes of the larger of input and output), n the ranks.

stream      `np.multiply(x, 1, out=x)`: read and write S
            all_reduce, reduce, custom
fold        add the n parts of x into one: read S, write S/n
            reduce_scatter
copy        `np.copyto` of S, which the busiest rank must write
            broadcast, all_gather, gather, all_to_all, send_recv
copy_part   `np.copyto` of S/n, which the busiest rank must write
            scatter

A barrier has none. Below LIMIT_FROM none is shown: there it is NumPy's own time for a call.
With more ranks than cores it is a rank's CPU time for it times the ranks a core, as they take turns.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from .plan import Cell

LIMIT_OF = {
    "all_reduce": "stream",
    "reduce": "stream",
    "custom": "stream",
    "reduce_scatter": "fold",
    "broadcast": "copy",
    "all_gather": "copy",
    "gather": "copy",
    "all_to_all": "copy",
    "send_recv": "copy",
    "scatter": "copy_part",
}
LIMIT_FROM = 32 << 10  # bytes; NumPy's call takes 0.3 us of the 2 us that 32 KiB take


def limit_cells(cells: Iterable[Cell]) -> list[Cell]:
    """What to measure for these operations: the limit of each, in its size, once."""
    found = {
        (LIMIT_OF[cell.operation], cell.size): replace(cell, operation=LIMIT_OF[cell.operation])
        for cell in cells
        if cell.operation in LIMIT_OF
    }
    return list(found.values())
