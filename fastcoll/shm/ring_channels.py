"""The rings of a segment as channels for messages."""

from __future__ import annotations

import ctypes
import threading
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..core.status import DONE
from ..kernels import waiting
from ..kernels.primitives import address_of
from ..p2p.channels import Ack, Channels, Header
from ..p2p.transfers import Send
from . import channels as words
from . import ring_kernels
from .channels import ring_offset
from .context import BUDGET
from .layout import Layout
from .rings import HEAD
from .rounds import PREPARED, RESUMED


class RingChannels(Channels):
    """The state of all rings that begin or end at one rank.

    Attributes:
        address: what the kernels take as `m`.
        table: the mailbox's words.
        rows: the channels' words, a row a peer.
    """

    def __init__(self, base: int, layout: Layout, rank: int, patience: tuple[int, int], context: int) -> None:
        self.size = layout.size
        self.rows = np.zeros((layout.size, words.CHANNEL_WORDS), np.int64)
        self.table = np.zeros(words.MAILBOX_WORDS, np.int64)
        self.address = address_of(self.table)
        self.table[waiting.SPINS], self.table[waiting.YIELDS] = patience
        self.table[waiting.BUDGET] = BUDGET
        self.table[words.CHANNELS] = address_of(self.rows)
        self.table[words.SIZE] = layout.size
        self.table[words.RANK] = rank
        self.table[words.RING] = layout.ring
        self.table[words.CONTEXT] = context
        for peer in [peer for peer in range(layout.size) if peer != rank]:
            self.rows[peer, words.OUT] = base + ring_offset(layout, rank, peer)
            self.rows[peer, words.IN] = base + ring_offset(layout, peer, rank)

    def word(self, peer: int, index: int) -> int:
        """A word of the channel to `peer`."""
        return int(self.rows[peer, index])

    # ---- whose turn it is ------------------------------------------------------------------------

    def ring_bell(self) -> None:
        self.table[words.BELL] = 1

    def silence_bell(self) -> None:
        self.table[words.BELL] = 0

    def set_behind(self, behind: bool) -> None:
        self.table[words.BEHIND] = behind

    def seize(self) -> bool:
        return waiting.seize.call(self.address + 8 * words.BUSY) == DONE

    def let_go(self) -> None:
        self.table[words.BUSY] = 0

    def is_mine(self) -> bool:
        return int(self.table[words.BUSY]) == threading.get_ident()

    def is_ready(self, peer: int) -> bool:
        return True

    def prepare(self, peer: int) -> None:
        pass

    def check(self, peer: int | None) -> None:
        pass

    def has_unread(self, peer: int) -> bool:
        head = ctypes.c_int64.from_address(self.word(peer, words.IN) + HEAD)
        return head.value > self.word(peer, words.IN_TAIL)

    def retire(self) -> None:
        ring_kernels.retire.call(self.address)

    # ---- a blocking call -------------------------------------------------------------------------

    def send(self, array: NDArray[Any], peer: int, kind: int, resumed: bool) -> int:
        self.table[words.GIVEN] = array.nbytes
        return ring_kernels.send.call(self._prepared(resumed), peer, array, kind)

    def receive(self, array: NDArray[Any], source: int, kind: int, resumed: bool) -> int:
        self.table[words.GIVEN] = array.nbytes
        return ring_kernels.receive.call(self._prepared(resumed), source, array, kind)

    def _prepared(self, resumed: bool) -> int:
        return self.address | PREPARED | (RESUMED if resumed else 0)

    def adopt_send(self, send: Send) -> bool:
        self.rows[send.peer, words.SENDING] = 0
        return self.word(send.peer, words.OUT_HEAD) < self.word(send.peer, words.OUT_END)

    def adopt_receive(self, peer: int | None) -> int | None:
        source = int(self.table[words.SOURCE]) - 1 if peer is None else peer
        self.table[words.SOURCE] = 0
        return source if source >= 0 and self._is_receiving(source) else None

    def _is_receiving(self, peer: int) -> bool:
        return self.word(peer, words.IN_TAIL) < self.word(peer, words.IN_END)

    # ---- the courier's steps ---------------------------------------------------------------------

    def advance(self) -> tuple[int, int] | None:
        event = ring_kernels.advance.call(self.address)
        return None if event < 0 else (event % ring_kernels.EVENTS, event // ring_kernels.EVENTS)

    def begin(self, send: Send, attached: int) -> None:
        ring_kernels.begin.call(self.address, send.peer, send.address, send.nbytes, send.kind)

    def last_sent(self, peer: int) -> int:
        return self.word(peer, words.SENT)

    def last_ack(self, peer: int) -> Ack:
        number, verdict, nbytes, kind = map(int, self.rows[peer, words.ACK_NUMBER : words.ACK_KIND + 1])
        return Ack(number, verdict, nbytes, kind)

    def header(self, peer: int) -> Header:
        nbytes = self.word(peer, words.IN_NBYTES)
        # An arriving message has been counted already.
        number = self.word(peer, words.RECEIVED) + (not self._is_receiving(peer))
        return Header(self.word(peer, words.IN_KIND), nbytes, number, nbytes)

    def accept(self, peer: int, address: int, nbytes: int, keep: object) -> None:
        ring_kernels.accept.call(self.address, peer, address)

    def acknowledge(self, peer: int, ack: Ack) -> bool:
        return ring_kernels.acknowledge.call(self.address, peer, *ack) == DONE

    def watch(self, interest: NDArray[Any]) -> None:
        self.rows[:, words.WATCHED] = interest

    def note_unacked(self, peer: int, count: int) -> None:
        self.rows[peer, words.UNACKED] = count

    def note_owed(self, peer: int, count: int) -> None:
        self.rows[peer, words.OWED] = count
