"""Open calls: asynchronous calls that have begun, and that no thread carries on at the moment.

BUSY, a word of the group's context, is OPEN for an open call. The thread that carried the call on stores OPEN; a thread
takes the call over by replacing OPEN with its own number, atomically. So one thread at a time carries the call on, and
it sees everything that the previous one has written.
"""

from __future__ import annotations

from ..compiler.jit import entry, external, locked_entry
from ..core.status import DONE, LATER, WORKED
from ..kernels.primitives import load_acquire, load_word, store_word, swap_if_equal, this_thread
from ..kernels.pyobjects import Index, integer
from ..kernels.waiting import NAP, nanosleep
from . import context_layout as at

OPEN = -1  # no thread's number

_PR_SET_TIMERSLACK = 29

_prctl = external("prctl", "int32(int32, int64)")


@locked_entry
def take_over(context: Index) -> int:
    """Take an open call over; return DONE, or LATER if there is none.

    The GIL stays held, so no signal handler runs between the check and the swap.
    """
    return DONE if swap_if_equal(integer(context) + 8 * at.BUSY, OPEN, this_thread()) else LATER


@entry
def watch(context: Index, table: Index, nanoseconds: Index, polls: Index) -> int:
    """Poll until the same call is open in two polls in a row: return DONE; WORKED after `polls` polls without a call.

    Args:
        table: address of a back-off table (kernels/waiting.py) of this thread.
        nanoseconds: time between two polls.
    """
    _prctl(_PR_SET_TIMERSLACK, 1)
    c, last, left = integer(context), -1, integer(polls)
    store_word(integer(table), NAP + 1, integer(nanoseconds))
    while left > 0:
        nanosleep(integer(table) + 8 * NAP, 0)
        if load_acquire(c + 8 * at.BUSY) != OPEN:
            last = -1
            left -= 1
        elif last == load_word(c, at.CALLS):
            return DONE
        else:
            last = load_word(c, at.CALLS)
    return WORKED
