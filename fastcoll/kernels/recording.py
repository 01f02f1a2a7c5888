"""Write a call into its group's flight record, the ring of record/record.py.

Only the thread that executes a call with the group's context writes. Other threads and processes read at any time, so
the group's count of calls is written before an entry, and the entry's NUMBER last. All are release stores, which keep
this order. An entry is a cache line: writing it adds 1 to 2 ns to a call of 8 bytes in shared
memory. Reading the clock takes 25 ns, so each backend decides whether it records times.
"""

from __future__ import annotations

from ..compiler.jit import inlined
from ..record import record as r
from .primitives import store_release, store_word


@inlined
def entry_of(ring, number):
    """Return the address of a call's entry."""
    return ring + 8 * r.ENTRY_WORDS * (number & (r.RING - 1))


@inlined
def record_call(ring, number, call, shape, began):
    """Record that a call begins; `began` in ns, 0 if not known."""
    entry = entry_of(ring, number)
    store_release(entry + 8 * r.CALL, call)
    store_release(entry + 8 * r.SHAPE, shape)
    store_release(entry + 8 * r.BEGAN, began)
    store_release(entry + 8 * r.ENDED, 0)
    store_release(entry + 8 * r.NUMBER, number)


@inlined
def record_end(ring, number, began, ended):
    """Record that a timed call is complete.

    The lowest three bits of ENDED, which record.py explains, are 0 here.
    """
    entry = entry_of(ring, number)
    store_word(entry, r.BEGAN, began)
    store_word(entry, r.ENDED, ended & ~7)
