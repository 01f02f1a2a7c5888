"""The private words of a mailbox, on which the kernels of its rings work: one table, and a channel for each peer."""

from __future__ import annotations

from ..kernels.waiting import POLLING_WORDS
from .autotune import table_words
from .layout import Layout

# Words of a mailbox's private table, behind the polling table.
BELL = POLLING_WORDS  # not 0: somebody wants the kernel back
CHANNELS = BELL + 1  # address of the channel to rank 0
SIZE = BELL + 2
RANK = BELL + 3
RING = BELL + 4  # bytes of a ring, a power of two
TURN = BELL + 5  # the rank to serve first, so that nobody starves
SOURCE = BELL + 6  # receive from any: the rank chosen plus 1, 0 before
BUSY = BELL + 7  # not 0: a thread drives the rings
BEHIND = BELL + 8  # not 0: operations are under way, or the end has come; blocking calls come after them
CONTEXT = BELL + 9  # address of the group's context, whose memo knows the dtypes
STORED = BELL + 10  # not 0: messages wait for a receive, so that none may be armed
TOLD = BELL + 11  # events that `advance` has told
EVENT = BELL + 12  # the last of them
CHOOSING = BELL + 13  # the table of autotune.py, for the operations SENDS and RECEIVES
SENDS, RECEIVES = range(2)
MAILBOX_WORDS = CHOOSING + table_words(2)

# Words of a channel, what a rank keeps about one peer. Positions count bytes since the ring was made.
OUT = 0  # address of the ring to the peer
OUT_HEAD = 1
OUT_TAIL = 2  # the peer's TAIL as last seen
OUT_BODY = 3  # position of the payload of the message that enters
OUT_END = 4  # end of that message; equal to OUT_HEAD when none enters
OUT_FROM = 5  # address of the payload
OUT_NBYTES = 6
OUT_KIND = 7
SENT = 8  # messages begun
ACKS_READ = 9
ACK_NUMBER = 11  # the last ack read
ACK_VERDICT = 12
ACK_NBYTES = 13
ACK_KIND = 14
ARMED_KIND = 15  # of the receive that the kernels may complete by themselves; -1: none
IN = 16  # address of the ring from the peer
IN_HEAD = 17  # the peer's HEAD as last seen
IN_TAIL = 18
IN_BODY = 19
IN_END = 20  # end of the message that arrives; equal to IN_TAIL when none does
IN_TO = 21  # where its payload goes; 0: nowhere
IN_NBYTES = 22  # of the last header read
IN_KIND = 23
RECEIVED = 24  # messages begun
ACKS_GIVEN = 25
IN_ACKS_TAKEN = 26  # the peer's ACKS_TAKEN as last seen
WATCHED = 27  # how many posted receives may match a message of this peer
OWED = 28  # acks that wait for space; set from Python
OUT_WAY = 29  # CLOSE or PAST (autotune.py): how the message that enters is written
IN_WAY = 30  # and how the one that arrives is
ARMED_TO = 31  # address of the armed receive's array
ARMED_NBYTES = 32
CHANNEL_WORDS = 40


def ring_offset(layout: Layout, src: int, dst: int) -> int:
    """Offset in the segment of the ring from `src` to `dst`, two different ranks."""
    return layout.ring_of(src, dst)
