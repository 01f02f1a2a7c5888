"""The status codes that compiled code returns to Python, the same for every backend.

The names below the enum are the same codes as plain ints, which compiled code and the fast functions compare.
"""

from __future__ import annotations

from enum import IntEnum


class CallStatus(IntEnum):
    """The status of a compiled call. If a call returns a result instead, such as a rank, that is a negative number."""

    DONE = 0  # the call is complete
    AGAIN = 1  # the call has waited, or another thread wants it to return: check signals, deadlines, peers; call again
    WORKED = 2  # the call has worked for a while without waiting: check as for AGAIN, and call again
    LATER = 3  # nothing was done: the call needs Python, or another thread's call is under way
    MISMATCH = 4  # the ranks' calls differ; all ranks return this
    MIXED = 5  # only some ranks have chosen to read peers' arrays in place: call again, with slots (staging)
    GONE = 6  # the connection to a peer has ended
    GARBLED = 7  # a peer has sent bytes that the protocol does not allow
    REFUSED = 8  # a message does not fit the receiver's array; the last ack has that array's kind and size
    OTHER = 9  # a message has arrived that only the engine (p2p/engine.py) can handle
    NEEDS_FLUSHER = 10  # a send is complete, and acks were deferred, which another thread must flush
    UNREADABLE = 11  # a peer's array, which the call reads in place, cannot be read
    UNMAPPED = 12  # a peer's array is in an arena that is not mapped here yet: map it, then call again
    UNALLOCATED = (
        13  # the shared memory for this rank's data is not allocated yet: allocate it, then call again
    )
    UNCONNECTED = 14  # all ranks have begun the call; connect to the peers of its plan, then call again


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
    UNALLOCATED,
    UNCONNECTED,
) = map(int, CallStatus)
