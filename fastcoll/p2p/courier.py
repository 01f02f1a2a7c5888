"""Carries posted sends and receives out: channels move the bytes, decisions are made here, one event at a time.

Whoever calls these methods holds the mailbox's turn; outcomes are handed out afterwards by `deliver`, so
that callbacks of the user run without it. An operation is *live* from its admission to its outcome:

    send      queued -> entering the channel -> unacked -> done or refused
    receive   posted -> matched, its message arriving -> arrived -> answered (may wait for ack space) -> done
"""

from __future__ import annotations

import ctypes
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ..kernels.primitives import address_of
from . import channels as events
from .channels import MISFIT, TAKEN, Ack, Channels
from .matching import Book, Message
from .transfers import Receive, Send, Transfer

_LOOK_EVERY = 0.05  # seconds between two looks at deadlines and peers


@dataclass(frozen=True)
class Outcome:
    """How an operation ended."""

    transfer: Transfer
    source: int | None = None
    error: BaseException | None = None


class Courier:
    """The operations of one rank that are under way.

    Attributes:
        live: operations without an outcome, oldest first.
        busy: whether channels hold anything that only the courier knows about.
    """

    def __init__(self, channels: Channels, rank: int) -> None:
        size = channels.size
        self.live: dict[Transfer, None] = {}
        self.busy = False
        self._channels = channels
        self._rank = rank
        self._book = Book(size)
        self._queued: list[deque[Send]] = [deque() for _ in range(size)]
        self._entering: dict[int, Send] = {}
        self._unacked: list[dict[int, Send]] = [{} for _ in range(size)]
        self._arriving: dict[int, Message] = {}
        self._owed: list[deque[tuple[Message, int]]] = [deque() for _ in range(size)]
        self._outcomes: deque[Outcome] = deque()
        self._next_look = 0.0
        self._on_event: dict[int, Callable[[int], None]] = {
            events.ENTERED: self._on_entered,
            events.ACKED: self._on_acked,
            events.HEADER: self._on_header,
            events.ARRIVED: self._on_arrived,
            events.ACK_SPACE: self._answer,
        }

    # ---- operations come in -----------------------------------------------------------------------

    def admit(self, transfer: Transfer) -> None:
        """Take a new operation on."""
        self._begin(transfer)
        if isinstance(transfer, Receive):
            self._post(transfer)
        elif isinstance(transfer, Send):
            if transfer.peer == self._rank:
                self._send_here(transfer)
            else:
                self._queued[transfer.peer].append(transfer)
                self._begin_next(transfer.peer)
        self._note_business()

    def adopt_send(self, send: Send) -> None:
        """Go on with a blocking send that has begun."""
        self._begin(send)
        self._entering[send.peer] = send
        if not self._channels.adopt_send(send):
            self._on_entered(send.peer)
        self._note_business()

    def adopt_receive(self, receive: Receive) -> None:
        """Go on with a blocking receive that has begun, or not even that."""
        source = self._channels.adopt_receive(receive.peer)
        if source is None:
            self.admit(receive)
            return
        self._begin(receive)
        self._resume(receive, source)
        self._note_business()

    def _resume(self, receive: Receive, source: int) -> None:
        """Go on with a blocking receive into whose array a message of `source` is arriving."""
        message = self._message_of(source)
        message.receive = receive
        self._arriving[source] = message

    def _begin(self, transfer: Transfer) -> None:
        self.live[transfer] = None

    def _note_business(self) -> None:
        self.busy = bool(self.live or self._book.stored)

    def _post(self, receive: Receive) -> None:
        message = self._book.post(receive)
        self._watch()
        if message is not None:
            self._give(message, receive)

    def _watch(self) -> None:
        self._channels.watch(self._book.interest)

    def _give(self, message: Message, receive: Receive) -> None:
        message.receive = receive
        if message.arrived:
            self._settle(message, receive)

    def _send_here(self, send: Send) -> None:
        message = Message(
            self._rank,
            send.kind,
            send.nbytes,
            attached=send.nbytes,
            address=send.address,
            keep=send.array,
            sender=send,
            arrived=True,
        )
        if send.buffered:
            message.sender = None
            self._end(send)
        receive = self._book.arrive(message)
        self._watch()
        if receive is not None:
            self._give(message, receive)

    def _begin_next(self, peer: int) -> None:
        if peer not in self._entering and self._queued[peer]:
            send = self._queued[peer].popleft()
            self._entering[peer] = send
            self._channels.begin(send, send.nbytes)

    # ---- and go on --------------------------------------------------------------------------------

    def step(self) -> None:
        """Move bytes until something happens or 50 ms have passed, and deal with it. Outcomes go first.

        Raises:
            GroupError: the peers or the clock make going on hopeless.
        """
        if self._outcomes or not self.live:
            return
        happened = self._channels.advance()
        if happened is not None:
            event, peer = happened
            self._on_event[event](peer)
            self._note_business()
        if time.monotonic() >= self._next_look:
            self._look()
            self._next_look = time.monotonic() + _LOOK_EVERY

    def fail(self, error: BaseException) -> None:
        """End every operation with an error; the channels are not used any more."""
        for transfer in self.live:
            self._outcomes.append(Outcome(transfer, error=error))
        self.live.clear()

    def deliver(self) -> None:
        """Hand out outcomes. Runs the user's callbacks: call it without the turn."""
        while self._outcomes:
            outcome = self._outcomes.popleft()
            error = outcome.error
            if error is None:
                try:
                    outcome.transfer.finish_array()
                except Exception as problem:
                    error = problem
            outcome.transfer._finish(outcome.source, error)

    def _look(self) -> None:
        """Look after the oldest operation of each kind with each peer; the others share its fate."""
        seen = set()
        for transfer in self.live:
            key = (type(transfer), transfer.peer)
            if key not in seen:
                seen.add(key)
                transfer.watch.look()
                self._channels.check(transfer.peer)

    def _end(self, transfer: Transfer, source: int | None = None, error: BaseException | None = None) -> None:
        del self.live[transfer]
        self._outcomes.append(Outcome(transfer, source, error))

    def _on_entered(self, peer: int) -> None:
        send = self._entering.pop(peer)
        self._expect_ack(send)
        self._begin_next(peer)

    def _expect_ack(self, send: Send) -> None:
        unacked = self._unacked[send.peer]
        unacked[self._channels.last_sent(send.peer)] = send
        self._channels.note_unacked(send.peer, len(unacked))

    def _on_acked(self, peer: int) -> None:
        ack = self._channels.last_ack(peer)
        send = self._unacked[peer].pop(ack.number)
        self._channels.note_unacked(peer, len(self._unacked[peer]))
        self._end(send, error=None if ack.verdict == TAKEN else send.misfit(ack.kind, ack.nbytes))

    def _on_header(self, peer: int) -> None:
        message = self._message_of(peer)
        receive = self._book.arrive(message)
        self._watch()
        target = 0
        if receive is not None:
            message.receive = receive
            target = receive.address if receive.fits(message.kind, message.nbytes) else 0
        else:
            message.keep = np.empty(max(message.attached, 1), np.uint8)
            target = message.address = address_of(message.keep)
        self._arriving[peer] = message
        self._channels.accept(peer, target, message.attached, message)

    def _message_of(self, peer: int) -> Message:
        """The message whose header was read last."""
        header = self._channels.header(peer)
        return Message(peer, header.kind, header.nbytes, header.number, header.attached)

    def _on_arrived(self, peer: int) -> None:
        message = self._arriving.pop(peer)
        message.arrived = True
        if message.receive is not None:
            self._settle(message, message.receive)

    def _settle(self, message: Message, receive: Receive) -> None:
        """An arrived message has its receive: copy, and answer the sender."""
        fits = receive.fits(message.kind, message.nbytes)
        if message.address and fits:
            ctypes.memmove(receive.address, message.address, message.attached)
        if message.source != self._rank:
            self._owe(message, TAKEN if fits else MISFIT)
            return
        self._conclude(message, receive)
        if message.sender is not None:
            self._end(
                message.sender, error=None if fits else message.sender.misfit(receive.kind, receive.nbytes)
            )

    def _owe(self, message: Message, verdict: int) -> None:
        self._owed[message.source].append((message, verdict))
        self._answer(message.source)

    def _answer(self, peer: int) -> None:
        """Write the acks owed to a peer, as far as there is space."""
        owed = self._owed[peer]
        while owed:
            message, verdict = owed[0]
            receive = message.receive
            assert receive is not None
            if not self._channels.acknowledge(
                peer, Ack(message.number, verdict, receive.nbytes, receive.kind)
            ):
                break
            owed.popleft()
            if verdict in (TAKEN, MISFIT):
                self._conclude(message, receive)
        self._channels.note_owed(peer, len(owed))

    def _conclude(self, message: Message, receive: Receive) -> None:
        if receive.fits(message.kind, message.nbytes):
            self._end(receive, source=message.source)
        else:
            self._end(receive, error=receive.misfit(message.source, message.kind, message.nbytes))
