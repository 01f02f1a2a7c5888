"""The courier of a network's mail: beyond the shared one, it asks for the rest of long messages, and grants credit.

send      queued -> entering -> unacked (-> GO -> its rest entering -> unacked) -> done or refused
receive   posted -> matched, the first part arriving (-> GO owed, the rest arriving) -> answered -> done
"""

from __future__ import annotations

import ctypes
from collections import deque

from ...p2p import channels as events
from ...p2p.channels import GO, TAKEN, Channels
from ...p2p.courier import Courier
from ...p2p.matching import Message
from ...p2p.transfers import Receive, Send
from . import mail_words as words
from .mail_channels import MailChannels
from .mail_frames import EAGER, WINDOW

MOST_UNACKED = (
    1 << 16
)  # messages to one peer without an answer; later ones wait. Each costs the receiver 0.3 KiB
_LARGEST = 1 << 62


class MailCourier(Courier):
    """The operations of one rank that are under way over connections.

    Args:
        channels: to all peers.
        wire: those of them that are connections.
        rank: this one's.
    """

    def __init__(self, channels: Channels, wire: MailChannels, rank: int) -> None:
        super().__init__(channels, rank)
        size = channels.size
        self._wire = wire
        self._credit = [
            WINDOW
        ] * size  # bytes that may be attached to messages which nobody has asked for yet
        self._attached: list[dict[int, int]] = [{} for _ in range(size)]  # and those that were, by number
        self._rests: list[deque[tuple[int, Send, int]]] = [deque() for _ in range(size)]
        self._resting: set[int] = set()  # peers to which a rest enters
        self._granted: list[dict[int, Message]] = [{} for _ in range(size)]
        self._kept = [0] * size  # bytes of messages without a receive
        self._kept_messages = [0] * size
        self._on_event[events.REST] = self._on_rest

    # ---- sending ---------------------------------------------------------------------------------

    def adopt_send(self, send: Send) -> None:
        peer = send.peer
        resting = self._wire.word(peer, words.SENDING) == 2
        entering = self._channels.adopt_send(send)
        self._begin(send)
        if not resting:
            self._attach(send, min(send.nbytes, EAGER))
        self._expect_ack(send)
        if entering and resting:
            self._resting.add(peer)
        elif entering:
            self._entering[peer] = send
        self._note_business()

    def _attach(self, send: Send, attached: int) -> None:
        """Note what is attached to the message begun last."""
        self._attached[send.peer][self._channels.last_sent(send.peer)] = attached
        self._credit[send.peer] -= attached

    def _begin_next(self, peer: int) -> None:
        if peer in self._entering or peer in self._resting:
            return
        if self._rests[peer]:
            number, send, attached = self._rests[peer].popleft()
            self._resting.add(peer)
            self._wire.begin_rest(send, number, attached)
        elif self._queued[peer] and len(self._unacked[peer]) < MOST_UNACKED:
            send = self._queued[peer].popleft()
            attached = min(send.nbytes, EAGER)
            if attached > self._credit[peer]:
                attached = 0
            self._entering[peer] = send
            self._channels.begin(send, attached)
            self._attach(send, attached)
            self._expect_ack(send)  # GO may come before all that is attached has entered

    def _on_entered(self, peer: int) -> None:
        if peer in self._resting:
            self._resting.discard(peer)
        else:
            del self._entering[peer]
        self._begin_next(peer)

    def _on_acked(self, peer: int) -> None:
        ack = self._channels.last_ack(peer)
        send = self._unacked[peer].get(ack.number)
        attached = self._attached[peer].pop(ack.number, None)
        if send is None or (ack.verdict == GO and (attached is None or attached >= send.nbytes)):
            raise self._wire.garbled(peer)
        self._credit[peer] += attached or 0
        if ack.verdict == GO:
            self._rests[peer].append((ack.number, send, attached or 0))
        else:
            super()._on_acked(peer)
        self._begin_next(peer)

    # ---- receiving -------------------------------------------------------------------------------

    def _resume(self, receive: Receive, source: int) -> None:
        number = self._wire.word(source, words.TAKING)
        message = Message(source, receive.kind, receive.nbytes, number, min(receive.nbytes, EAGER))
        message.receive = receive
        self._resume_at(message, self._wire.take_stage(source))

    def _resume_at(self, message: Message, stage: int) -> None:
        """Go on with a receive that has got as far as `stage`."""
        peer = message.source
        message.arrived = stage != words.ARRIVING
        message.complete = stage in (words.REST_ARRIVING, words.ANSWERING)
        if stage in (words.ARRIVING, words.REST_ARRIVING):
            self._arriving[peer] = message
        if message.attached < message.nbytes and not message.complete:
            self._granted[peer][message.number] = message
            self._wire.expect(peer, len(self._granted[peer]))
        if self._wire.take_asking(peer):
            self._owe(message, GO)
        if stage == words.ANSWERING:
            self._owe(message, TAKEN)

    def _on_header(self, peer: int) -> None:
        header = self._channels.header(peer)
        sound = header.kind >= 0 and 0 <= header.nbytes < _LARGEST
        if not sound or header.attached not in (0, min(header.nbytes, EAGER)):
            raise self._wire.garbled(peer)
        # Until it is known whether a receive is there, it counts as kept.
        self._keep(peer, header.attached, 1)
        super()._on_header(peer)
        message = self._arriving[peer]
        if message.receive is not None:
            self._keep(peer, -message.attached, -1)
            self._ask(message, message.receive)

    def _keep(self, peer: int, nbytes: int, messages: int) -> None:
        """Count what is kept here of a peer's messages, or is no longer."""
        self._kept[peer] += nbytes
        self._kept_messages[peer] += messages
        if self._kept[peer] > WINDOW + EAGER or self._kept_messages[peer] > MOST_UNACKED + 1:
            raise self._wire.garbled(peer)

    def _give(self, message: Message, receive: Receive) -> None:
        if message.source != self._rank:
            self._keep(message.source, -message.attached, -1)
            self._ask(message, receive)
        super()._give(message, receive)

    def _ask(self, message: Message, receive: Receive) -> None:
        """Ask for the rest of a message, if there is one and the receive can hold it."""
        if message.attached < message.nbytes and receive.fits(message.kind, message.nbytes):
            message.receive = receive
            self._granted[message.source][message.number] = message
            self._wire.expect(message.source, len(self._granted[message.source]))
            self._owe(message, GO)

    def _on_rest(self, peer: int) -> None:
        number, nbytes = self._wire.rest(peer)
        message = self._granted[peer].pop(number, None)
        if message is None or message.receive is None or nbytes != message.nbytes - message.attached:
            raise self._wire.garbled(peer)
        self._wire.expect(peer, len(self._granted[peer]))
        message.complete = True
        self._arriving[peer] = message
        self._channels.accept(peer, message.receive.address + message.attached, nbytes, message)

    def _settle(self, message: Message, receive: Receive) -> None:
        partial = message.attached < message.nbytes and not message.complete
        if partial and receive.fits(message.kind, message.nbytes):
            if message.address:
                ctypes.memmove(receive.address, message.address, message.attached)
                message.address, message.keep = 0, None
            return
        if message.complete and message.address:
            message.address, message.keep = 0, None
        super()._settle(message, receive)
