"""Messages of a group over several nodes: through shared memory inside a node, over TCP between nodes.

One mailbox has both kinds of channels (hybrid_channels.py), so matching, order and any source are what they are
everywhere.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from ..core.monitor import Vigil
from ..core.operands import LARGEST_TAG
from ..core.status import DONE, LATER
from ..interop.arrays import Adopted
from ..net.tcp.mail import Mail
from ..net.tcp.mail_channels import MailChannels
from ..net.tcp.mail_courier import MailCourier
from ..p2p.courier import Courier
from ..p2p.mailbox import Mailbox
from ..p2p.matching import Message
from ..p2p.transfers import Array, Receive, Send, Transfer
from ..shm import ring_kernels
from ..shm.ring_channels import RingChannels
from ..shm.rounds import RESUMED
from .channels import NodeChannels


class NodeCourier(MailCourier):
    """The operations of one rank that are under way over both kinds of channels: each peer's go the way of its kind."""

    _channels: NodeChannels

    def __init__(self, channels: NodeChannels, wire: MailChannels, rank: int) -> None:
        super().__init__(channels, wire, rank)
        self._near_live = self._far_live = 0
        # Two threads may come back early from blocking calls, each with one kind of channels.
        self._adopting = threading.Lock()

    def _way(self, peer: int) -> type[Courier]:
        return Courier if self._channels.is_near(peer) else MailCourier

    def step(self) -> None:
        self._channels.awaits_near = self._near_live > 0
        self._channels.awaits_far = self._far_live > 0
        super().step()

    def _begin(self, transfer: Transfer) -> None:
        super()._begin(transfer)
        self._count(transfer, 1)

    def _end(self, transfer: Transfer, source: int | None = None, error: BaseException | None = None) -> None:
        super()._end(transfer, source, error)
        self._count(transfer, -1)

    def _count(self, transfer: Transfer, change: int) -> None:
        peer = transfer.peer
        if peer is None or (peer != self._rank and self._channels.is_near(peer)):
            self._near_live += change
        if peer is None or not self._channels.is_near(peer):
            self._far_live += change

    def adopt_send(self, send: Send) -> None:
        with self._adopting:
            self._way(send.peer).adopt_send(self, send)

    def adopt_receive(self, receive: Receive) -> None:
        with self._adopting:
            super().adopt_receive(receive)

    def _resume(self, receive: Receive, source: int) -> None:
        self._way(source)._resume(self, receive, source)

    def _begin_next(self, peer: int) -> None:
        self._way(peer)._begin_next(self, peer)

    def _on_entered(self, peer: int) -> None:
        self._way(peer)._on_entered(self, peer)

    def _on_acked(self, peer: int) -> None:
        self._way(peer)._on_acked(self, peer)

    def _on_header(self, peer: int) -> None:
        self._way(peer)._on_header(self, peer)

    def _give(self, message: Message, receive: Receive) -> None:
        self._way(message.source)._give(self, message, receive)

    def _settle(self, message: Message, receive: Receive) -> None:
        self._way(message.source)._settle(self, message, receive)


class NodeMail(Mail):
    """Messages between the ranks of a group over several nodes; the contract is that of Mailbox.

    It takes over rings and connections, neither of which has carried a message.

    Args:
        wire: the connections between all ranks.
        rings: between the ranks of this node.
        local: their group ranks.
        remember: lets the rings' compiled calls know a dtype.
        rank: this process's group rank.
        vigil: of all ranks.
        timeout: seconds that an operation may take.
    """

    def __init__(
        self,
        wire: MailChannels,
        rings: RingChannels,
        local: Sequence[int],
        remember: Callable[[np.dtype[Any]], object],
        rank: int,
        vigil: Vigil,
        timeout: float,
    ) -> None:
        self.wire = wire
        self._minder = None
        channels = NodeChannels(rings, wire, local)
        Mailbox.__init__(self, channels, NodeCourier(channels, wire, rank), rank, vigil, timeout)
        self._rings = rings.address
        self._remember = remember
        self._places = {peer: place for place, peer in enumerate(local) if peer != rank}

    def send(self, x: Adopted, dst: int, tag: int) -> None:
        if dst not in self._places:
            return super().send(x, dst, tag)
        self._remember(x.array.dtype)
        return Mailbox.send(self, x, dst, tag)

    def recv(self, x: Adopted, src: int | None, tag: int) -> int:
        if src is not None and src not in self._places:
            return super().recv(x, src, tag)
        self._remember(x.array.dtype)
        return Mailbox.recv(self, x, src, tag)

    def try_recv(self, array: Array, src: int | None, tag: int, owner: Adopted | None = None) -> int | None:
        # What comes from this node, or may, does not come by a connection.
        return None if src is None or src in self._places else super().try_recv(array, src, tag, owner)

    def send_near(self, tensor: Any, dst: Any, tag: Any) -> bool:
        """Send a plain array to a rank of this node by one compiled call; False: it takes the general way."""
        place = self._place(dst, tag)
        if place is None:
            return False
        try:
            status = ring_kernels.send.call(self._rings, place, tensor, tag)
            if status > DONE and status != LATER:
                again = partial(ring_kernels.send.call, self._rings | RESUMED, place, tensor, tag)
                send = self._send_of(tensor, dst, tag)
                if self._go_on(again, status, send) is send:
                    self._await(send)
        except BaseException as error:
            self.torn(error, "send")
            raise
        return status != LATER

    def receive_near(self, tensor: Any, src: Any, tag: Any) -> bool:
        """Receive into a plain array from a rank of this node by one compiled call; False: it takes the general way."""
        place = self._place(src, tag)
        if place is None:
            return False
        try:
            status = ring_kernels.receive.call(self._rings, place, tensor, tag)
            if status > DONE and status != LATER:
                again = partial(ring_kernels.receive.call, self._rings | RESUMED, place, tensor, tag)
                receive = self._receive_of(Adopted(tensor), src, tag)
                if self._go_on(again, status, receive) is receive:
                    self._await(receive)
        except BaseException as error:
            self.torn(error, "recv")
            raise
        return status != LATER

    def _place(self, peer: Any, tag: Any) -> int | None:
        """The place of a rank of this node; None: it is on another, or the arguments are not those of a plain call."""
        if type(peer) is not int or type(tag) is not int or not 0 <= tag <= LARGEST_TAG:
            return None
        return self._places.get(peer)
