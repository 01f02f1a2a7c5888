"""Rings to the ranks of a node and connections to the others, as the channels of one mailbox.

A blocking call takes only the channels that it uses, and waits as these do. The courier, and a receive from any rank,
take both; while both may bring something they are tried in turn, with naps in between.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from ..core.status import AGAIN, DONE, LATER
from ..net.tcp import mail_words
from ..net.tcp.mail_channels import MailChannels
from ..p2p.channels import ANY, Ack, Channels, Header
from ..p2p.transfers import Send
from ..shm import channels as ring_words
from ..shm import ring_kernels
from ..shm.ring_channels import RingChannels

_BUDGET = 0.05  # seconds that a wait for both may take before Python looks at signals, deadlines and peers
_SHORT_NAP, _LONG_NAP, _LONG_AFTER = 50e-6, 1e-3, 1.0  # seconds, as kernels/waiting.py has them
_T = TypeVar("_T")


class NodeChannels(Channels):
    """Rings to the ranks of this node and connections to the others.

    Args:
        near: the rings; their ranks are places on the node.
        far: the connections; their ranks are those of the group.
        local: the group rank at each place of the node.

    Attributes:
        awaits_near, awaits_far: whether anything under way needs these channels.
    """

    def __init__(self, near: RingChannels, far: MailChannels, local: Sequence[int]) -> None:
        self.size = far.size
        self.awaits_near = self.awaits_far = True
        self._near, self._far = near, far
        self._local = list(local)
        self._routes: list[tuple[RingChannels | MailChannels, int]] = [
            (far, peer) for peer in range(far.size)
        ]
        for place, peer in enumerate(local):
            self._routes[peer] = (near, place)
        self._in_turn: list[RingChannels | MailChannels] = [near, far]
        self._moved = 0.0  # when something moved last, by time.monotonic

    def is_near(self, peer: int) -> bool:
        """Whether a rank is on this node."""
        return self._routes[peer][0] is self._near

    def _rank(self, part: Channels, number: int) -> int:
        """The group rank of a peer of one kind of channels."""
        return self._local[number] if part is self._near else number

    # ---- whose turn it is ------------------------------------------------------------------------

    def ring_bell(self) -> None:
        self._far.ring_bell()  # first: `_hurry` looks whether it has rung
        self._near.ring_bell()

    def silence_bell(self) -> None:
        for part in (self._near, self._far):
            if part.is_mine():
                part.silence_bell()

    def set_behind(self, behind: bool) -> None:
        self._near.set_behind(behind)
        self._far.set_behind(behind)

    def seize(self) -> bool:
        if not self._near.seize():
            return False
        if self._far.seize():
            return True
        self._near.let_go()
        return False

    def let_go(self) -> None:
        for part in (self._near, self._far):
            if part.is_mine():
                part.let_go()

    def is_mine(self) -> bool:
        return self._near.is_mine() or self._far.is_mine()

    def is_ready(self, peer: int) -> bool:
        part, number = self._routes[peer]
        return part.is_ready(number)

    def prepare(self, peer: int) -> None:
        part, number = self._routes[peer]
        part.prepare(number)

    def check(self, peer: int | None) -> None:
        if peer is None or not self.is_near(peer):
            self._far.check(peer)

    def has_unread(self, peer: int) -> bool:
        part, number = self._routes[peer]
        return part.has_unread(number)

    def retire(self) -> None:
        self._near.retire()
        self._far.retire()

    # ---- a blocking call -------------------------------------------------------------------------

    def send(self, array: NDArray[Any], peer: int, kind: int, resumed: bool) -> int:
        part, number = self._routes[peer]
        return part.send(array, number, kind, resumed)

    def receive(self, array: NDArray[Any], source: int, kind: int, resumed: bool) -> int:
        if source != ANY:
            part, number = self._routes[source]
            status = part.receive(array, number, kind, resumed)
            return status if status >= DONE else -1 - source
        if not resumed and not self.seize():
            return LATER
        status = self._receive_any(array, kind)
        if status <= DONE:
            self.let_go()
        return status

    def _receive_any(self, array: NDArray[Any], kind: int) -> int:
        """As `receive`, with both kinds of channels taken."""

        def attempt(part: RingChannels | MailChannels) -> int | None:
            status = part.receive(array, ANY, kind, True)
            return None if status == AGAIN and self._chosen() is None else self._received(part, status)

        part = self._chosen()
        if part is None:
            status = self._try_in_turn(attempt)
            return AGAIN if status is None else status
        return self._received(part, part.receive(array, ANY, kind, True))

    def _received(self, part: Channels, status: int) -> int:
        return status if status >= DONE else -1 - self._rank(part, -1 - status)

    def _chosen(self) -> RingChannels | MailChannels | None:
        """The channels by which a message for the receive from any rank is arriving."""
        if self._near.table[ring_words.SOURCE]:
            return self._near
        return self._far if self._far.table[mail_words.SOURCE] else None

    def adopt_send(self, send: Send) -> bool:
        part, place = self._routes[send.peer]
        if part is self._far:
            return part.adopt_send(send)
        part.rows[place, ring_words.SENDING] = 0
        return part.word(place, ring_words.OUT_HEAD) < part.word(place, ring_words.OUT_END)

    def adopt_receive(self, peer: int | None) -> int | None:
        if peer is not None:
            part, number = self._routes[peer]
            return peer if part.adopt_receive(number) is not None else None
        sources = [(part, part.adopt_receive(None)) for part in (self._near, self._far)]
        return next((self._rank(part, source) for part, source in sources if source is not None), None)

    # ---- the courier's steps ---------------------------------------------------------------------

    def advance(self) -> tuple[int, int] | None:
        if not self.awaits_near:
            return self._far.advance()
        if not self.awaits_far:
            return self._step(self._near)
        return self._try_in_turn(self._step)

    def _step(self, part: RingChannels | MailChannels) -> tuple[int, int] | None:
        happened = part.advance()
        return None if happened is None else (happened[0], self._rank(part, happened[1]))

    def _try_in_turn(self, attempt: Callable[[RingChannels | MailChannels], _T | None]) -> _T | None:
        """What an attempt on either kind of channels brings first; None after 50 ms without, or when the bell rang."""
        end = time.monotonic() + _BUDGET
        self._hurry(True)
        try:
            while not self._far.has_rung():
                for part in self._in_turn:
                    found = attempt(part)
                    if found is not None:
                        self._in_turn.reverse()  # so that neither starves
                        self._moved = time.monotonic()
                        return found
                if not self._rest(end):
                    break
            return None
        finally:
            self._hurry(False)

    def _hurry(self, hurried: bool) -> None:
        """Whether the compiled code comes back as soon as it has nothing to do; rings have the bell for that."""
        self._far.hurry(hurried)
        if hurried:
            self._near.ring_bell()
            return
        self._near.silence_bell()
        if self._far.has_rung():
            self._near.ring_bell()

    def _rest(self, end: float) -> bool:
        """An idle moment, as long as kernels/waiting.py has it; False: it is time to look at other things."""
        now = time.monotonic()
        idle = now - self._moved
        if idle * 1e9 < self._far.spin:
            os.sched_yield()
        else:
            time.sleep(_SHORT_NAP if idle < _LONG_AFTER else _LONG_NAP)
        return now < end

    def begin(self, send: Send, attached: int) -> None:
        part, place = self._routes[send.peer]
        if part is self._far:
            part.begin(send, attached)
        else:
            ring_kernels.begin.call(part.address, place, send.address, send.nbytes, send.kind)

    def last_sent(self, peer: int) -> int:
        part, number = self._routes[peer]
        return part.last_sent(number)

    def last_ack(self, peer: int) -> Ack:
        part, number = self._routes[peer]
        return part.last_ack(number)

    def header(self, peer: int) -> Header:
        part, number = self._routes[peer]
        return part.header(number)

    def accept(self, peer: int, address: int, nbytes: int, keep: object) -> None:
        part, number = self._routes[peer]
        part.accept(number, address, nbytes, keep)

    def acknowledge(self, peer: int, ack: Ack) -> bool:
        part, number = self._routes[peer]
        return part.acknowledge(number, ack)

    def watch(self, interest: NDArray[np.int64]) -> None:
        self._near.watch(interest[self._local])
        self._far.watch(interest)

    def note_unacked(self, peer: int, count: int) -> None:
        part, number = self._routes[peer]
        part.note_unacked(number, count)

    def note_owed(self, peer: int, count: int) -> None:
        part, number = self._routes[peer]
        part.note_owed(number, count)
