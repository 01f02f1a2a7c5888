"""What compiled code returns to Python: one number a meaning, for every backend.

Kernels and the synchronous path compare with plain ints: the same names below the enum.
"""

from __future__ import annotations

from enum import IntEnum


class CallStatus(IntEnum):
    """How a compiled call came back. Those that block have more numbers of their own below 0."""

    DONE = 0  # it is complete
    AGAIN = 1  # it waited, or was called back: look at signals, deadlines and peers, and call again
    WORKED = 2  # it did not wait, but worked for a while: do the same
    LATER = 3  # nothing was done: it needs Python's help, or another thread's call is under way
    MISMATCH = 4  # the ranks' calls differ; all of them see that
    MIXED = 5  # some ranks read their peers' arrays directly and some do not: make the call anew, through the slots
    GONE = 6  # the connection to a peer is over
    GARBLED = 7  # a peer has sent what no rank of the group sends
    REFUSED = 8  # a message does not fit the receiver's array; the last ack says what that is
    OTHER = 9  # a message is of the kind that the progress engine has to go on with
    NEEDS_FLUSHER = 10  # a send is complete, and somebody should see to it that no answer stays deferred
    UNREADABLE = 11  # a peer's array, which the call reads where it is, cannot be read
    UNMAPPED = 12  # a peer's array is in an arena that is not mapped here yet: map it, then call again


(
    DONE,
    AGAIN,
    WORKED,
    LATER,
    MISMATCH,
    MIXED,
    GONE,
    GARBLED,
    REFUSED,
    OTHER,
    NEEDS_FLUSHER,
    UNREADABLE,
    UNMAPPED,
) = map(int, CallStatus)
