"""The private words of a mailbox, on which the kernels of its rings work: one table, and a lane for each peer."""

from __future__ import annotations

import numpy as np

from ..kernels import locks, waiting
from ..kernels.pointers import address_of
from ..kernels.polling import POLLING_WORDS
from .choosing import choosing_words
from .context import BUDGET
from .layout import Layout

# Words of a mailbox's private table, behind the polling table.
BELL = POLLING_WORDS  # not 0: somebody wants the kernel back
LANES = BELL + 1  # address of the lane to rank 0
SIZE = BELL + 2
RANK = BELL + 3
RING = BELL + 4  # bytes of a ring, a power of two
TURN = BELL + 5  # the rank to serve first, so that nobody starves
SOURCE = BELL + 6  # receive from any: the rank chosen plus 1, 0 before
BUSY = BELL + 7  # not 0: a thread drives the rings
BEHIND = (
    BELL + 8
)  # not 0: operations are posted or under way, or the end has come; blocking ones come after them
CONTEXT = BELL + 9  # address of the group's context, whose memo knows the dtypes
GIVEN = BELL + 10  # bytes of the array of a PREPARED call
CHOOSING = BELL + 11  # the table of choosing.py, for the operations SENDS and RECEIVES
SENDS, RECEIVES = range(2)
MAILBOX_WORDS = CHOOSING + choosing_words(2)

# Words of a lane, what a rank keeps about one peer. Positions count bytes since the ring was made.
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
SENDING = 10  # 1 while a blocking send is under way
ACK_NUMBER = 11  # the last ack read
ACK_VERDICT = 12
ACK_NBYTES = 13
ACK_KIND = 14
UNACKED = 15  # how many messages in the ring have no ack yet; set from Python
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
WATCHED = 27  # not 0: a posted receive may match a message of this peer; set from Python
OWED = 28  # acks that wait for space; set from Python
OUT_WAY = 29  # CLOSE or PAST (choosing.py): how the message that enters is written
IN_WAY = 30  # and how the one that arrives is
LANE_WORDS = 32


class Lanes:
    """The state of all rings that begin or end at one rank. One thread at a time may drive it.

    Attributes:
        address: what the kernels take as `m`.
        table: the mailbox's words.
        rows: the lanes' words, a row a peer.
    """

    def __init__(self, base: int, layout: Layout, rank: int, patience: tuple[int, int], context: int) -> None:
        self.rows = np.zeros((layout.size, LANE_WORDS), np.int64)
        self.table = np.zeros(MAILBOX_WORDS, np.int64)
        self.address = address_of(self.table)
        self.table[waiting.SPINS], self.table[waiting.YIELDS] = patience
        self.table[waiting.BUDGET] = BUDGET
        self.table[LANES] = address_of(self.rows)
        self.table[SIZE] = layout.size
        self.table[RANK] = rank
        self.table[RING] = layout.ring
        self.table[CONTEXT] = context
        for peer in [peer for peer in range(layout.size) if peer != rank]:
            self.rows[peer, OUT] = base + ring_offset(layout, rank, peer)
            self.rows[peer, IN] = base + ring_offset(layout, peer, rank)

    def word(self, peer: int, index: int) -> int:
        """A word of the lane to `peer`."""
        return int(self.rows[peer, index])

    def is_sending(self, peer: int) -> bool:
        """Whether a message is entering the ring to `peer`."""
        return self.word(peer, OUT_HEAD) < self.word(peer, OUT_END)

    def is_receiving(self, peer: int) -> bool:
        """Whether a message is arriving from `peer`."""
        return self.word(peer, IN_TAIL) < self.word(peer, IN_END)

    def ring_bell(self) -> None:
        """Have the kernel that runs on these words come back at once. From any thread."""
        self.table[BELL] = 1

    def silence_bell(self) -> None:
        """Answer the bell; look at what it may have rung for afterwards, never before."""
        self.table[BELL] = 0

    def set_behind(self, behind: bool) -> None:
        """Whether blocking operations must go the way of posted ones."""
        self.table[BEHIND] = behind

    def seize(self) -> bool:
        """Take the rings for driving them, unless a call has them."""
        return locks.seize.call(self.address + 8 * BUSY) == locks.TAKEN

    def let_go(self) -> None:
        """The rings are free for whoever wants to drive them next."""
        self.table[BUSY] = 0

    def take_source(self) -> int:
        """The rank that an unfinished receive from any has chosen, -1 for none; the next one chooses anew."""
        source = int(self.table[SOURCE]) - 1
        self.table[SOURCE] = 0
        return source


def ring_offset(layout: Layout, src: int, dst: int) -> int:
    """Offset in the segment of the ring from `src` to `dst`, two different ranks."""
    place = (dst - src) % layout.size - 1
    return layout.section(src) + layout.rings_at + place * layout.ring_stride
