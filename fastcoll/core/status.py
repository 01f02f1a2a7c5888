"""What compiled code returns to Python: one number a meaning, for every backend.

Kernels and the synchronous path compare with plain ints: the same names below the enum.
"""

from __future__ import annotations

from enum import IntEnum


class Status(IntEnum):
    """How a compiled call came back. Those that block have more numbers of their own below 0."""

    DONE = 0
    """It is complete."""
    AGAIN = 1
    """It waited for a while, or was called back: look at signals, deadlines and peers, and call again."""
    WORKED = 2
    """It did not wait, but worked for a while: do the same."""
    LATER = 3
    """Nothing was done: the call needs Python's help, or another thread's call is under way."""
    MISMATCH = 4
    """The ranks' calls differ; all of them see that."""
    DIVIDED = 5
    """Run the call on the lanes, then call again."""
    MIXED = 6
    """Some ranks would divide the call and some would not: make it anew, undivided."""
    GONE = 7
    """The connection to a peer is over."""
    GARBLED = 8
    """A peer has sent what no rank of the group sends."""
    REFUSED = 9
    """A message does not fit the receiver's array; the last ack says what that is."""
    OTHER = 10
    """A message is of the kind that the progress engine has to go on with."""
    UNMINDED = 11
    """A send is complete, and somebody should see to it that no answer stays deferred."""


DONE, AGAIN, WORKED, LATER, MISMATCH, DIVIDED, MIXED, GONE, GARBLED, REFUSED, OTHER, UNMINDED = map(
    int, Status
)
