"""How compiled code writes a call into its group's ring, whose layout record/record.py has.

The thread whose call has the group's context writes; others read at any time, so a row's NUMBER comes last. A row is a
cache line: 8-byte calls in shared memory take 1 to 2 ns more for it. A look at the clock takes 25, so times are another
matter, for each backend to decide.
"""

from __future__ import annotations

from ..compiler.jit import inlined
from ..record import record as r
from .primitives import store_release, store_word


@inlined
def row_of(ring, number):
    """Address of the row of a call."""
    return ring + 8 * r.ENTRY_WORDS * (number & (r.RING - 1))


@inlined
def record_call(ring, number, call, shape, began):
    """A call begins; `began` in ns, or 0 where that is not known."""
    row = row_of(ring, number)
    store_word(row, r.CALL, call)
    store_word(row, r.SHAPE, shape)
    store_word(row, r.BEGAN, began)
    store_word(row, r.ENDED, 0)
    store_release(row + 8 * r.NUMBER, number)


@inlined
def record_end(ring, number, began, ended):
    """A call is complete, which was timed; see record.py for the lowest bits of ENDED."""
    row = row_of(ring, number)
    store_word(row, r.BEGAN, began)
    store_word(row, r.ENDED, ended & ~7)
