"""The private words of a mailbox, on which the kernels of rings.py work: one table, and a lane for each peer."""

from __future__ import annotations

import numpy as np

from ..kernels import waiting
from ..kernels.pointers import address_of
from . import rings
from .context import BUDGET
from .layout import Layout


class Lanes:
    """The state of all rings that begin or end at one rank. One thread at a time may drive it.

    Attributes:
        address: what the kernels take as `m`.
        table: the mailbox's words.
        rows: the lanes' words, a row a peer.
    """

    def __init__(self, base: int, layout: Layout, rank: int, patience: tuple[int, int]) -> None:
        self.rows = np.zeros((layout.size, rings.LANE_WORDS), np.int64)
        self.table = np.zeros(rings.MAILBOX_WORDS, np.int64)
        self.address = address_of(self.table)
        self.table[waiting.SPINS], self.table[waiting.YIELDS] = patience
        self.table[waiting.BUDGET] = BUDGET
        self.table[rings.LANES] = address_of(self.rows)
        self.table[rings.SIZE] = layout.size
        self.table[rings.RANK] = rank
        self.table[rings.RING] = layout.ring
        for peer in range(layout.size):
            self.rows[peer, rings.OUT] = base + ring_offset(layout, rank, peer)
            self.rows[peer, rings.IN] = base + ring_offset(layout, peer, rank)

    def word(self, peer: int, index: int) -> int:
        """A word of the lane to `peer`."""
        return int(self.rows[peer, index])

    def is_sending(self, peer: int) -> bool:
        """Whether a message is entering the ring to `peer`."""
        return self.word(peer, rings.OUT_HEAD) < self.word(peer, rings.OUT_END)

    def is_receiving(self, peer: int) -> bool:
        """Whether a message is arriving from `peer`."""
        return self.word(peer, rings.IN_TAIL) < self.word(peer, rings.IN_END)

    def ring_bell(self) -> None:
        """Have the kernel that runs on these words come back at once. From any thread."""
        self.table[rings.BELL] = 1

    def silence_bell(self) -> None:
        """Answer the bell; look at what it may have rung for afterwards, never before."""
        self.table[rings.BELL] = 0

    def take_source(self) -> int:
        """The rank that a receive from any has chosen, -1 for none; the next one chooses anew."""
        source = int(self.table[rings.SOURCE]) - 1
        self.table[rings.SOURCE] = 0
        return source


def ring_offset(layout: Layout, src: int, dst: int) -> int:
    """Offset in the segment of the ring from `src` to `dst`."""
    return layout.section(src) + layout.rings_at + dst * layout.ring_stride
