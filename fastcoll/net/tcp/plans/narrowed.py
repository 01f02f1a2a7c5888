"""Plans of an all_reduce whose float32 array travels as narrow items (core/travel.py).

The plan is that of an all_reduce of the items, which lie in SCRATCH behind the plan's own bytes, with two kinds of rows
more. Each piece of the array is converted to items in the phase that first uses the piece, and back to float32 in the
phase after the last one that writes it. So a piece is converted while it is in the cache.

The plan is always `direct`, because it combines all operands in one pass: each rank's elements are rounded once, and
the result is rounded once. No data is attached to headers, because a header is written before ranks have compared
calls, and NARROW changes the array `lost`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from ....core.travel import TRAVELS
from . import direct
from . import plan as t
from .plan import LOCAL, SCRATCH, Plan, Rows, Table
from .shape import CallShape, array

_ALIGNED = 64
_NEVER = np.iinfo(np.int64).max


@dataclass(frozen=True)
class NarrowPlans:
    """The function that makes the plans of calls whose array has `length` elements of float32.

    Attributes:
        travel: the name of the narrow type.
        keeps: whether the call has a second array, `lost`.
    """

    travel: str
    length: int
    keeps: bool

    def __call__(self, shape: CallShape) -> Plan:
        """Return the plan of a call on items; `shape` describes the items."""
        return _plan(self, shape)

    def conversions(self, shape: CallShape, uses: Table, start: int) -> tuple[Table, Table]:
        """Return the NARROW and WIDEN rows for an inner plan's rows that use the array."""
        kind = t.NARROW_KEEPING if self.keeps else t.NARROW
        edges = np.unique([0, shape.total, *uses[:, t.OFFSET], *(uses[:, t.OFFSET] + uses[:, t.NBYTES])])
        low, high = edges[:-1], edges[1:]
        sent, done = np.full(low.size, _NEVER), np.full(low.size, -1)
        for row in uses:
            begin, end = np.searchsorted(edges, (row[t.OFFSET], row[t.OFFSET] + row[t.NBYTES]))
            sent[begin:end] = np.minimum(sent[begin:end], row[t.PHASE])
            if row[t.KIND] in (t.RECV, t.REDUCE, t.FOLD):
                done[begin:end] = np.maximum(done[begin:end], row[t.PHASE])
        sent[sent == _NEVER] = 0  # in a group of one rank
        elements = TRAVELS[self.travel].elements
        first, last = low // shape.itemsize * elements, high // shape.itemsize * elements
        nbytes = 4 * (np.minimum(last, self.length) - first)
        rows = np.zeros((2, low.size, t.COLUMNS), np.int64)
        inside, outside = (SCRATCH, start + low), (array(0), 4 * first)
        for table, phase, which, to, source in (
            (rows[0], sent, kind, inside, outside),
            (rows[1], done + 1, t.WIDEN, outside, inside),
        ):
            table[:, t.PHASE], table[:, t.KIND], table[:, t.NBYTES] = phase, which, nbytes
            table[:, t.BUFFER], table[:, t.OFFSET] = to
            table[:, t.BUFFER2], table[:, t.OFFSET2] = source
        return rows[0], rows[1]


@lru_cache(maxsize=256)
def _plan(narrow: NarrowPlans, shape: CallShape) -> Plan:
    inner = direct.all_reduce(shape) if shape.size > 1 else Rows().plan()
    start = -(-inner.scratch // _ALIGNED) * _ALIGNED
    table, x = inner.table.copy(), array(0)
    on_x = table[:, t.BUFFER] == x
    begins, ends = narrow.conversions(shape, table[on_x], start)
    table[on_x, t.OFFSET] += start
    table[on_x, t.BUFFER] = SCRATCH
    rows = np.concatenate([begins, table, ends])
    is_local = np.isin(rows[:, t.KIND], [*LOCAL])
    rows = np.ascontiguousarray(rows[np.lexsort((~is_local, rows[:, t.PHASE]))])  # a stable order
    rows.setflags(write=False)  # plans are cached and shared
    return Plan(rows, start + shape.total)
