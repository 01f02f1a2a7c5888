"""The state of all messages between one rank and the others, and how events change it. Nothing here waits.

Pipes move bytes and report events; the Exchange handles one event at a time. An operation is *live* from its admission
(`admit`) to its end. GO is the ack by which a receiver asks for the rest of a message:

    send      queued -> entering the pipe -> unacked (-> GO -> its rest entering -> unacked) -> done or refused
    receive   posted -> matched, its message arriving (-> GO sent, its rest arriving) -> acknowledged -> done
    probe     posted -> done, its message stored

Eager and rendezvous: the first `eager` bytes of a message are *attached*: they follow its header at once. The rest is
sent after the receiver's GO, directly from array to array, without a buffer. The receiver buffers the attached bytes of
messages that match no posted receive. It buffers at most `window` bytes of each peer, because a sender with that many
attached bytes in flight attaches none to its next messages.

The caller of these methods holds the lock (lock.py), unless a docstring says otherwise.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np

from ..kernels.primitives import address_of
from . import pipe as events
from .pipe import GO, MISFIT, TAKEN, Ack, Pipe, Posted
from .queues import IncomingMessage, MatchQueues
from .transfers import Probe, Receive, Send, Transfer, status_of

_LARGEST = 1 << 62


class Peer:
    """The messages between this rank and one other.

    Attributes:
        pipe, number: the pipe to the peer, and the peer's number in it.
        queued: sends that have not begun.
        rests: sends whose rest the peer has asked for, each as (message number, send, number of bytes attached).
        entering: the send whose message, or whose rest, is entering the pipe.
        unacked: the sends without an ack, by message number.
        attached: the number of bytes attached to each message without an ack, by message number.
        credit: bytes that may still be attached to messages before the peer has acknowledged earlier ones.
        is_bounded: whether `credit` is counted.
        interest: the number of posted receives and probes that a message of the peer could match.
        armed: the earliest of these posted receives if a short cut has armed it, so that the pipe completes the receive
            by itself; else None. The pipe may already have the message and wait for space for the ack.
        arriving: the message whose bytes are arriving.
        granted: the messages whose rest this rank has asked for, by message number.
        kept, kept_messages: bytes and number of the peer's messages that are buffered here.
        owed: acks to the peer that wait for space in the pipe.
    """

    def __init__(self, pipe: Pipe, number: int) -> None:
        self.pipe, self.number = pipe, number
        self.queued: deque[Send] = deque()
        self.rests: deque[tuple[int, Send, int]] = deque()
        self.entering: Send | None = None
        self.unacked: dict[int, Send] = {}
        self.attached: dict[int, int] = {}
        self.credit = pipe.window
        self.is_bounded = pipe.window < events.ENDLESS_BYTES
        self.interest = 0
        self.armed: Receive | None = None
        self.arriving: IncomingMessage | None = None
        self.granted: dict[int, IncomingMessage] = {}
        self.kept = self.kept_messages = 0
        self.owed: deque[tuple[IncomingMessage, int]] = deque()


class Exchange:
    """The operations under way of one rank.

    Args:
        routes: for each rank, the pipe to it and its number in that pipe. The entry of this rank is never used.

    Attributes:
        peers: a Peer for each rank.
        live: operations that have not ended, oldest first.
        ended: receives whose messages have arrived, but have not been copied back to the callers' arrays yet.
        on_event: for each event, the method that handles it; the method takes the peer's rank.
    """

    def __init__(self, routes: list[tuple[Pipe, int]], rank: int) -> None:
        self.peers = [Peer(*route) for route in routes]
        self.live: dict[Transfer, None] = {}
        self.ended: deque[tuple[Receive, int]] = deque()
        self.rank = rank
        self._queues = MatchQueues()
        self._probes: list[Probe] = []
        self.on_event: list[Callable[[int], None]] = [self._on_entered] * events.EVENTS
        self.on_event[events.ACKED] = self._on_acked
        self.on_event[events.HEADER] = self._on_header
        self.on_event[events.ARRIVED] = self._on_arrived
        self.on_event[events.ACK_SPACE] = self._send_owed
        self.on_event[events.REST] = self._on_rest
        self.on_event[events.RECEIVED] = self._on_received
        self.on_event[events.BOTH] = self._on_both

    def is_busy(self) -> bool:
        """Whether blocking calls must queue behind operations, or stored messages, that short cuts do not see."""
        return bool(self.live) or self._queues.stored > 0

    def is_entering(self, transfer: Transfer) -> bool:
        """Whether a send is the one that is entering its pipe."""
        return transfer.peer is not None and self.peers[transfer.peer].entering is transfer

    def is_unmatched(self, transfer: Transfer) -> bool:
        """Whether a receive has not matched a message yet. Any thread may call this."""
        if transfer.peer is not None:
            peer = self.peers[transfer.peer]
            if peer.armed is transfer:
                return peer.pipe.is_armed(peer.number)
        return self._queues.keeps(transfer)

    # ---- new operations ----------------------------------------------------------------------------

    def admit(self, transfer: Transfer) -> None:
        """Match or queue a new operation."""
        self.live[transfer] = None
        if isinstance(transfer, Receive):
            message = self._queues.post(transfer)
            if message is None:
                self._count(transfer, 1)
            else:
                self._note_stored()
                self._give(message, transfer)
        elif isinstance(transfer, Probe):
            message = self._queues.find(transfer.peer, transfer.tag)
            self._probes.append(transfer)
            self._count(transfer, 1)
            if message is not None:
                self.end_probe(transfer, message)
        elif isinstance(transfer, Send):
            if transfer.peer == self.rank:
                self._send_here(transfer)
            else:
                self.peers[transfer.peer].queued.append(transfer)
                self._begin_next(self.peers[transfer.peer])

    def may_begin(self, send: Send) -> bool:
        """Whether a short cut may begin a send, because no earlier operation delays it. Any thread may call this."""
        peer = self.peers[send.peer]
        free = peer.entering is None and not peer.queued and not peer.rests
        return free and send.nbytes <= peer.credit and len(peer.unacked) < peer.pipe.most_unacked

    def note_sent(self, send: Send, number: int, entering: bool = False) -> Pipe:
        """Record a send whose message a short cut has begun, with all bytes attached; return its pipe.

        Args:
            entering: as `Pipe.begin` returns it.
        """
        send.is_small, send.number = True, number
        peer = self.peers[send.peer]
        self.live[send] = None
        if peer.is_bounded:
            self._note_begun(peer, send, send.nbytes, number)
        else:
            peer.unacked[number] = send
        if entering:
            peer.entering = send
        return peer.pipe

    def note_armed(self, receive: Receive) -> Pipe:
        """Record a receive that a short cut has armed in its pipe; return the pipe.

        No earlier receive can match the peer's next message.
        """
        assert receive.peer is not None
        peer = self.peers[receive.peer]
        receive.is_small = True
        self.live[receive] = None
        peer.armed = receive
        peer.interest += 1
        return peer.pipe

    def resume_send(self, send: Send) -> None:
        """Continue a blocking send that a short cut has begun. The caller holds the send's pipe."""
        peer = self.peers[send.peer]
        number, entering, resting = peer.pipe.leave_send(peer.number)
        self.live[send] = None
        if resting:
            peer.unacked[number] = send
        else:
            self._note_begun(peer, send, min(send.nbytes, peer.pipe.eager), number)
        if entering:
            peer.entering = send

    def take_over(self, transfer: Transfer, posted: Posted) -> None:
        """Continue a request that a compiled caller has posted."""
        if posted.ended:
            transfer.complete(transfer.peer)
        elif isinstance(transfer, Send) and posted.refused is not None:
            transfer.complete(error=transfer.misfit(*posted.refused))
        elif isinstance(transfer, Send):
            self.note_sent(transfer, posted.message, posted.under_way)
        elif isinstance(transfer, Receive) and transfer.peer is not None and posted.under_way:
            self.resume_receive(transfer, self.peers[transfer.peer].pipe)
        else:
            self.admit(transfer)

    def resume_receive(self, receive: Receive, pipe: Pipe) -> None:
        """Continue a blocking receive of a short cut, whether or not its message has begun. The caller holds `pipe`."""
        source = events.ANY if receive.peer is None else self.peers[receive.peer].number
        begun = pipe.leave_receive(source)
        if begun is None:
            self.admit(receive)
            return
        self.live[receive] = None
        route = (pipe, begun.peer)
        rank = next(r for r, p in enumerate(self.peers) if r != self.rank and (p.pipe, p.number) == route)
        self._resume(receive, rank, begun)

    def _resume(self, receive: Receive, source: int, begun: events.Begun) -> None:
        peer = self.peers[source]
        attached = min(receive.nbytes, peer.pipe.eager)
        message = IncomingMessage(source, receive.kind, receive.nbytes, begun.number, attached)
        message.receive = receive
        message.arrived = not begun.arriving or begun.whole
        message.complete = begun.whole
        if begun.arriving:
            peer.arriving = message
        if message.attached < message.nbytes and not message.complete:
            self._grant(peer, message)
        if begun.asking:
            self._send_ack(message, GO)
        if begun.whole and not begun.arriving:
            self._send_ack(message, TAKEN)

    def _send_here(self, send: Send) -> None:
        message = IncomingMessage(
            self.rank, send.kind, send.nbytes, attached=send.nbytes, address=send.address
        )
        message.keep, message.arrived = send.array, True
        self._end(send)
        receive = self._match(message)
        if receive is not None:
            self._give(message, receive)

    # ---- sending -----------------------------------------------------------------------------------

    def _begin_next(self, peer: Peer) -> None:
        while peer.entering is None:
            if peer.rests:
                number, send, attached = peer.rests.popleft()
                peer.pipe.begin_rest(peer.number, send, number, attached)
                peer.entering = send
            elif peer.queued and len(peer.unacked) < peer.pipe.most_unacked:
                send = peer.queued.popleft()
                attached = min(send.nbytes, peer.pipe.eager)
                if attached > peer.credit:
                    attached = 0
                number, entering = peer.pipe.begin(peer.number, send, attached)
                # GO may arrive before all attached bytes have entered the pipe.
                self._note_begun(peer, send, attached, number)
                peer.entering = send if entering else None
            else:
                break

    def _note_begun(self, peer: Peer, send: Send, attached: int, number: int) -> None:
        peer.attached[number] = attached
        peer.credit -= attached
        peer.unacked[number] = send

    def _on_entered(self, rank: int) -> None:
        peer = self.peers[rank]
        peer.entering = None
        if peer.owed:
            self._send_owed(rank)  # now, between two messages
        self._begin_next(peer)

    def _on_acked(self, rank: int) -> None:
        peer = self.peers[rank]
        number = peer.pipe.taken(peer.number)
        if number in peer.unacked:  # no message has number 0, which `taken` returns for other acks
            if number in peer.attached:
                peer.credit += peer.attached.pop(number)
            send = peer.unacked.pop(number)
            send.complete()  # before it leaves `live`: if a signal handler raises in between, `fail` finds it there
            del self.live[send]
        else:
            self._on_other_ack(peer, peer.pipe.last_ack(peer.number))
        if peer.rests or peer.queued:
            self._begin_next(peer)

    def _on_other_ack(self, peer: Peer, ack: Ack) -> None:
        attached = peer.attached.pop(ack.number, None)
        send = peer.unacked.get(ack.number)
        if send is None or (ack.decision == GO and (attached is None or attached >= send.nbytes)):
            raise peer.pipe.garbled(peer.number)
        peer.credit += attached or 0
        if ack.decision == GO:
            peer.rests.append((ack.number, send, attached or 0))
        else:
            del peer.unacked[ack.number]
            self._end(send, error=send.misfit(ack.kind, ack.nbytes))

    # ---- receiving ---------------------------------------------------------------------------------

    def end_probe(self, probe: Probe, message: IncomingMessage | None = None) -> None:
        """Complete a probe with `message`. It is None if there is no message and the probe does not wait."""
        self._probes.remove(probe)
        self._count(probe, -1)
        probe.complete(message and status_of(message.source, message.kind, message.nbytes))
        del self.live[probe]

    def _count(self, wanting: Receive | Probe, change: int) -> None:
        """Add `change` to the interest in each peer that could send to this receive or probe."""
        for rank in range(len(self.peers)) if wanting.peer is None else (wanting.peer,):
            if rank != self.rank:
                peer = self.peers[rank]
                peer.interest += change
                peer.pipe.watch(peer.number, peer.interest)

    def _match(self, message: IncomingMessage) -> Receive | None:
        """Return the receive that a new message matches. If there is none, store the message and return None."""
        peer = self.peers[message.source]
        receive = peer.armed
        if receive is not None and receive.tag == message.tag and peer.pipe.is_armed(peer.number):
            peer.armed = None
            peer.pipe.disarm(peer.number)
        else:
            receive = self._queues.arrive(message)
        if receive is not None:
            self._count(receive, -1)
            return receive
        self._note_stored()
        for probe in list(self._probes):
            if self._queues.find(probe.peer, probe.tag) is message:
                self.end_probe(probe, message)
        return None

    def _note_stored(self) -> None:
        for pipe in {peer.pipe for peer in self.peers}:
            pipe.note_stored(self._queues.stored)

    def _on_received(self, rank: int) -> None:
        peer = self.peers[rank]
        receive, peer.armed = peer.armed, None
        assert receive is not None
        peer.interest -= 1  # the pipe has already counted this
        receive.complete(rank)  # short cuts post only receives without a copy-back
        del self.live[receive]

    def _on_both(self, rank: int) -> None:
        self._on_received(rank)
        self._on_acked(rank)

    def _on_header(self, rank: int) -> None:
        peer = self.peers[rank]
        header = peer.pipe.header(peer.number)
        sound = header.kind >= 0 and 0 <= header.nbytes < _LARGEST
        if not sound or header.attached not in (0, min(header.nbytes, peer.pipe.eager)):
            raise peer.pipe.garbled(peer.number)
        message = IncomingMessage(rank, header.kind, header.nbytes, header.number, header.attached)
        receive = self._match(message)
        target = 0
        if receive is None:
            self._keep(peer, message.attached, 1)
            message.keep = np.empty(max(message.attached, 1), np.uint8)
            target = message.address = address_of(message.keep)
        else:
            message.receive = receive
            if receive.fits(message.kind, message.nbytes):
                target = receive.address
        peer.arriving = message
        peer.pipe.accept(peer.number, target, message.attached, message)
        if receive is not None:
            self._ask(message, receive)

    def _keep(self, peer: Peer, nbytes: int, messages: int) -> None:
        """Add to the bytes and messages of a peer that are buffered here; negative numbers subtract."""
        peer.kept += nbytes
        peer.kept_messages += messages
        pipe = peer.pipe
        if peer.kept > pipe.window + pipe.eager or peer.kept_messages > pipe.most_unacked + 1:
            raise pipe.garbled(peer.number)

    def _give(self, message: IncomingMessage, receive: Receive) -> None:
        """Give a stored message to its receive."""
        if message.source != self.rank:
            self._keep(self.peers[message.source], -message.attached, -1)
            self._ask(message, receive)
        message.receive = receive
        if message.arrived:
            self._settle(message, receive)

    def _ask(self, message: IncomingMessage, receive: Receive) -> None:
        """Ask for the rest of a message, if it has a rest and fits the receive's array."""
        if message.attached < message.nbytes and receive.fits(message.kind, message.nbytes):
            message.receive = receive
            self._grant(self.peers[message.source], message)
            self._send_ack(message, GO)

    def _grant(self, peer: Peer, message: IncomingMessage) -> None:
        peer.granted[message.number] = message
        peer.pipe.expect(peer.number, len(peer.granted))

    def _on_rest(self, rank: int) -> None:
        peer = self.peers[rank]
        number, nbytes = peer.pipe.rest(peer.number)
        message = peer.granted.pop(number, None)
        if message is None or message.receive is None or nbytes != message.nbytes - message.attached:
            raise peer.pipe.garbled(peer.number)
        peer.pipe.expect(peer.number, len(peer.granted))
        message.complete = True
        peer.arriving = message
        peer.pipe.accept(peer.number, message.receive.address + message.attached, nbytes, message)

    def _on_arrived(self, rank: int) -> None:
        peer = self.peers[rank]
        message, peer.arriving = peer.arriving, None
        assert message is not None
        message.arrived = True
        if message.receive is not None:
            self._settle(message, message.receive)

    def _settle(self, message: IncomingMessage, receive: Receive) -> None:
        """Continue a matched message after all bytes that were under way have arrived."""
        fits = receive.fits(message.kind, message.nbytes)
        if message.address and fits:
            receive.put(message.address, message.attached)
            message.address, message.keep = 0, None
        if fits and message.attached < message.nbytes and not message.complete:
            return  # this rank has asked for the rest, which has not arrived yet
        if message.source != self.rank:
            self._send_ack(message, TAKEN if fits else MISFIT)
            return
        self._conclude(message, receive)

    def _send_ack(self, message: IncomingMessage, decision: int) -> None:
        """Acknowledge a message, now or when the pipe has space."""
        peer = self.peers[message.source]
        if peer.owed or not self._acknowledge(peer, message, decision):
            peer.owed.append((message, decision))
            peer.pipe.note_owed(peer.number, len(peer.owed))

    def _send_owed(self, rank: int) -> None:
        """Send the acks that a peer is owed, as far as the pipe has space."""
        peer = self.peers[rank]
        while peer.owed and self._acknowledge(peer, *peer.owed[0]):
            peer.owed.popleft()
        peer.pipe.note_owed(peer.number, len(peer.owed))

    def _acknowledge(self, peer: Peer, message: IncomingMessage, decision: int) -> bool:
        """Send an ack, which ends the message unless it is GO; return False if the pipe has no space."""
        receive = message.receive
        assert receive is not None
        ack = Ack(message.number, decision, receive.nbytes, receive.kind)
        if not peer.pipe.acknowledge(peer.number, ack):
            return False
        if decision != GO:
            self._conclude(message, receive)
        return True

    def _conclude(self, message: IncomingMessage, receive: Receive) -> None:
        if receive.fits(message.kind, message.nbytes):
            receive.note(message.source, message.kind, message.nbytes)
            self._end(receive, message.source)
        else:
            self._end(receive, error=receive.misfit(message.source, message.kind, message.nbytes))

    # ---- the end -----------------------------------------------------------------------------------

    def _end(self, transfer: Transfer, source: int | None = None, error: BaseException | None = None) -> None:
        if error is None and isinstance(transfer, Receive) and transfer.needs_copy_back:
            assert source is not None
            self.ended.append((transfer, source))
        else:
            transfer.complete(source, error)
        del self.live[transfer]

    def fail(self, error: BaseException) -> None:
        """End every operation with an error; the pipes are not used afterwards."""
        for transfer in list(self.live):
            self.live.pop(transfer, None)
            transfer.complete(None, error)
