"""Carries posted sends and receives out: kernels move the bytes, decisions are made here, one event at a time.

Whoever calls these methods holds the mailbox's turn; outcomes are handed out afterwards by `deliver`, so
that callbacks of the user run without it. An operation is *live* from its admission to its outcome:

    send      queued -> entering the ring -> unacked -> done or refused
    receive   posted -> matched, its message arriving -> arrived -> answered (may wait for ack space) -> done
"""

from __future__ import annotations

import ctypes
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ..kernels.pointers import address_of
from . import lanes as words
from . import ring_kernels, rings
from .lanes import Lanes
from .matching import Book, Message
from .rounds import DONE
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
        busy: whether rings hold anything that only the courier knows about.
    """

    def __init__(self, lanes: Lanes, rank: int) -> None:
        size = len(lanes.rows)
        self.live: dict[Transfer, None] = {}
        self.busy = False
        self._lanes = lanes
        self._rank = rank
        self._book = Book(size)
        self._queued: list[deque[Send]] = [deque() for _ in range(size)]
        self._entering: dict[int, Send] = {}
        self._unacked: list[dict[int, Send]] = [{} for _ in range(size)]
        self._arriving: dict[int, Message] = {}
        self._owed: list[deque[Message]] = [deque() for _ in range(size)]
        self._outcomes: deque[Outcome] = deque()
        self._next_look = 0.0
        self._on_event: dict[int, Callable[[int], None]] = {
            ring_kernels.ENTERED: self._on_entered,
            ring_kernels.ACKED: self._on_acked,
            ring_kernels.HEADER: self._on_header,
            ring_kernels.ARRIVED: self._on_arrived,
            ring_kernels.ACK_SPACE: self._answer,
        }

    # ---- operations come in -----------------------------------------------------------------------

    def admit(self, transfer: Transfer) -> None:
        """Take a new operation on."""
        self.live[transfer] = None
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
        """Go on with a blocking send that a kernel has begun."""
        self.live[send] = None
        self._lanes.rows[send.peer, words.SENDING] = 0
        self._entering[send.peer] = send
        if not self._lanes.is_sending(send.peer):
            self._on_entered(send.peer)
        self._note_business()

    def adopt_receive(self, receive: Receive) -> None:
        """Go on with a blocking receive that a kernel has begun, or not even that."""
        source = self._lanes.take_source() if receive.peer is None else receive.peer
        if source < 0 or not self._lanes.is_receiving(source):
            self.admit(receive)
            return
        self.live[receive] = None
        message = self._message_of(source)
        message.receive = receive
        self._arriving[source] = message
        self._note_business()

    def _note_business(self) -> None:
        self.busy = bool(self.live or self._book.stored)

    def _post(self, receive: Receive) -> None:
        message = self._book.post(receive)
        self._lanes.rows[:, words.WATCHED] = self._book.interest
        if message is not None:
            self._give(message, receive)

    def _give(self, message: Message, receive: Receive) -> None:
        message.receive = receive
        if message.arrived:
            self._settle(message, receive)

    def _send_here(self, send: Send) -> None:
        message = Message(
            self._rank,
            send.kind,
            send.nbytes,
            address=send.address,
            keep=send.array,
            sender=send,
            arrived=True,
        )
        if send.buffered:
            message.sender = None
            self._end(send)
        receive = self._book.arrive(message)
        self._lanes.rows[:, words.WATCHED] = self._book.interest
        if receive is not None:
            self._give(message, receive)

    def _begin_next(self, peer: int) -> None:
        if peer not in self._entering and self._queued[peer]:
            send = self._queued[peer].popleft()
            self._entering[peer] = send
            ring_kernels.begin.call(self._lanes.address, peer, send.address, send.nbytes, send.kind)

    # ---- and go on --------------------------------------------------------------------------------

    def step(self) -> None:
        """Move bytes until something happens or 50 ms have passed, and deal with it. Outcomes go first.

        Raises:
            GroupError: the peers or the clock make going on hopeless.
        """
        if self._outcomes or not self.live:
            return
        event = ring_kernels.advance.call(self._lanes.address)
        if event >= 0:
            self._on_event[event % ring_kernels.EVENTS](event // ring_kernels.EVENTS)
            self._note_business()
        if time.monotonic() >= self._next_look:
            self._look()
            self._next_look = time.monotonic() + _LOOK_EVERY

    def fail(self, error: BaseException) -> None:
        """End every operation with an error; the rings are not used any more."""
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

    def _end(self, transfer: Transfer, source: int | None = None, error: BaseException | None = None) -> None:
        del self.live[transfer]
        self._outcomes.append(Outcome(transfer, source, error))

    def _on_entered(self, peer: int) -> None:
        send = self._entering.pop(peer)
        self._unacked[peer][self._lanes.word(peer, words.SENT)] = send
        self._lanes.rows[peer, words.UNACKED] = len(self._unacked[peer])
        self._begin_next(peer)

    def _on_acked(self, peer: int) -> None:
        send = self._unacked[peer].pop(self._lanes.word(peer, words.ACK_NUMBER))
        self._lanes.rows[peer, words.UNACKED] = len(self._unacked[peer])
        refused = self._lanes.word(peer, words.ACK_VERDICT) != rings.TAKEN
        kind, nbytes = self._lanes.word(peer, words.ACK_KIND), self._lanes.word(peer, words.ACK_NBYTES)
        self._end(send, error=send.misfit(kind, nbytes) if refused else None)

    def _on_header(self, peer: int) -> None:
        message = self._message_of(peer)
        receive = self._book.arrive(message)
        self._lanes.rows[:, words.WATCHED] = self._book.interest
        target = 0
        if receive is not None:
            message.receive = receive
            target = receive.address if receive.fits(message.kind, message.nbytes) else 0
        else:
            message.keep = np.empty(max(message.nbytes, 1), np.uint8)
            target = message.address = address_of(message.keep)
        self._arriving[peer] = message
        ring_kernels.accept.call(self._lanes.address, peer, target)
        message.number = self._lanes.word(peer, words.RECEIVED)

    def _message_of(self, peer: int) -> Message:
        """The message whose header was read last."""
        lanes = self._lanes
        kind, nbytes = lanes.word(peer, words.IN_KIND), lanes.word(peer, words.IN_NBYTES)
        return Message(peer, kind, nbytes, number=lanes.word(peer, words.RECEIVED))

    def _on_arrived(self, peer: int) -> None:
        message = self._arriving.pop(peer)
        message.arrived = True
        if message.receive is not None:
            self._settle(message, message.receive)

    def _settle(self, message: Message, receive: Receive) -> None:
        """An arrived message has its receive: copy, and answer the sender."""
        if message.address and receive.fits(message.kind, message.nbytes):
            ctypes.memmove(receive.address, message.address, message.nbytes)
        if message.source != self._rank:
            self._owed[message.source].append(message)
            self._answer(message.source)
            return
        self._conclude(message, receive)
        if message.sender is not None:
            fits = receive.fits(message.kind, message.nbytes)
            self._end(
                message.sender, error=None if fits else message.sender.misfit(receive.kind, receive.nbytes)
            )

    def _answer(self, peer: int) -> None:
        """Write the acks owed to a peer, as far as there is space."""
        owed = self._owed[peer]
        while owed:
            message, receive = owed[0], owed[0].receive
            assert receive is not None
            verdict = rings.TAKEN if receive.fits(message.kind, message.nbytes) else rings.MISFIT
            answer = (message.number, verdict, receive.nbytes, receive.kind)
            if ring_kernels.acknowledge.call(self._lanes.address, peer, *answer) != DONE:
                break
            owed.popleft()
            self._conclude(message, receive)
        self._lanes.rows[peer, words.OWED] = len(owed)

    def _conclude(self, message: Message, receive: Receive) -> None:
        if receive.fits(message.kind, message.nbytes):
            self._end(receive, source=message.source)
        else:
            self._end(receive, error=receive.misfit(message.source, message.kind, message.nbytes))
