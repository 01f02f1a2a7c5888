"""A store's server as a state machine without sockets.

On a connection each side first sends an opening and, if there is a secret, a proof that it has the secret (opening.py).
Then the client sends requests, and the server sends answers, in frames (frames.py).

A *peer* is the other end of a connection. It has one request under way at a time, which bounds what is queued for it. A
peer is dropped if it violates the protocol, or if it sends further bytes before its request is answered. The server
checks an opening before it waits for the proof, and the header of a frame before it waits for the body.

Time limits: a peer must send its opening within OPENING_SECONDS. That is enough, because a peer that is dropped before
the server has answered its opening tries again. After the answer the peer regards the connection as established, and
does not try again, although its process may be stopped or starved. So it has at least the store's timeout to send its
proof, and then to send each request.

Limits of numbers: at most MOST_OPENINGS peers are without an answer to their opening, and at most MOST_OPENINGS peers
have an answer and have not sent their proof. Each of these costs one descriptor and at most 112 bytes. Beyond either
limit the oldest peer is dropped. When no descriptor is left, a new connection replaces the oldest peer without an
answer. If there is none, it replaces the peer that was answered first and has not sent its proof, but only
OPENING_SECONDS or more after that answer.
"""

from __future__ import annotations

import heapq
import itertools
import os
from collections.abc import Callable, Generator
from contextlib import suppress
from dataclasses import dataclass, field

from ..errors import StoreError
from .frames import (
    HEADER,
    ProtocolError,
    ReplyStatus,
    check_request_header,
    check_texts,
    decode_request,
    encode_frame,
)
from .opening import (
    GROUP_SIZE,
    Answering,
    ConnectionKind,
    Endpoint,
    Opening,
    OpeningError,
    OpeningResult,
    Role,
    Turned,
)
from .table import CHANGING, Op, StoreRequest, Table

OPENING_SECONDS = 5.0
# The limit of peers without an answer, and that of answered peers without a proof. It is twice what a server accepts at
# once (serving.py), so even if all ranks connect at once, no peer whose opening has arrived is dropped.
MOST_OPENINGS = 2048
# A peer has at least this many seconds to send a request after its first byte, enough for 8 MiB at 140 kB/s.
FRAME_SECONDS = 60.0


@dataclass(slots=True)
class _Peer:
    """One connection: its state, its unread bytes, and its request while the request waits for keys."""

    steps: Generator[None, None, None]  # StoreServer._converse
    answering: Answering
    buffer: bytearray = field(default_factory=bytearray)
    is_open: bool = False  # the handshake is complete
    deadline: float | None = None
    waiting: StoreRequest | None = None  # the request, while a key of it is missing
    missing: bytes = b""  # the missing key under which the peer is parked
    place: int = 0  # index of `missing` among the keys of the request
    will: StoreRequest | None = None  # the peer's last WILL request (table.Op)

    def take(self, count: int) -> bytes:
        data = bytes(self.buffer[:count])
        del self.buffer[:count]
        return data

    def check_silent(self) -> None:
        if self.buffer:
            raise ProtocolError("sent data before its request was answered")


class StoreServer:
    """The state machine over all connections. Not thread safe.

    The driver, which has the sockets, calls `connect`, `receive`, `end`, `disconnect` and `expire`; times are in
    seconds. After each call the driver sends what is in `outbox` (peer, bytes), closes the connections in `drops`
    (peer, reason), encrypts those in `encrypting` (peer, seed, received bytes of TLS), and empties all three.
    """

    def __init__(self, secret: bytes, timeout: float, name: bytes = b"", encrypts: bool = False) -> None:
        """Make a server without connections.

        `timeout`: the store's timeout, which is also the clients' timeout. `name`: if the secret does not identify the
        job, the digest that clients of this store send in the group field of their opening (address.name_of); else
        empty. `encrypts`: connections are encrypted after the handshake.
        """
        self.outbox: list[tuple[int, bytes]] = []
        self.drops: list[tuple[int, str]] = []
        self.encrypting: list[tuple[int, bytes, bytes]] = []
        self._me = Endpoint(os.urandom(GROUP_SIZE), 0, 2, secret, bool(secret), encrypts)
        self._proof_seconds = max(timeout, OPENING_SECONDS)
        self._frame_seconds = max(timeout, FRAME_SECONDS)
        self._name = name
        self._table = Table()
        self._peers: dict[int, _Peer] = {}
        # Peers without an answer to their opening; and answered peers without a proof, with the time of the answer.
        # Both have the oldest first.
        self._opening: dict[int, None] = {}
        self._proving: dict[int, float] = {}
        # Peers that wait for a key (parked peers). A peer is registered under one missing key of its request at a time;
        # when that key is set, the peer is registered under its next missing key.
        self._parked: dict[bytes, set[int]] = {}
        # A heap of (deadline, number, peer); the number breaks ties. An entry that is not its peer's current deadline
        # is skipped.
        self._deadlines: list[tuple[float, int, int]] = []
        self._numbers = itertools.count()
        self._now = 0.0

    def connect(self, peer: int, now: float, place: Callable[[], bytes] = bytes) -> None:
        """Register a connection under `peer`, any unused number.

        `place` returns the digest of the address at which the server has accepted the connection (address.py). Making
        it takes 10 us, and it is needed only if the client was given another host name or port.
        """
        me, name = self._me, self._name
        answering = Answering(
            lambda at: me if at.kind is ConnectionKind.STORE and at.peer == me.rank else None,
            lambda at: not name or at.group == name or at.place == place(),
        )
        if len(self._opening) >= MOST_OPENINGS:
            # The dropped client retries.
            self._drop(next(iter(self._opening)), f"one of more than {MOST_OPENINGS} openings")
        self._peers[peer] = _Peer(self._converse(peer), answering)
        self._opening[peer] = None
        self._set_deadline(peer, now + OPENING_SECONDS)

    def give_way(self, now: float) -> bool:
        """Drop a peer that has not sent its proof, to free its descriptor; return False if none may be dropped."""
        oldest = next(iter(self._opening or self._proving), None)
        if oldest is None or now - self._proving.get(oldest, float("-inf")) < OPENING_SECONDS:
            return False
        self._drop(oldest, "it had not sent its proof when all descriptors were in use")
        return True

    def end(self, peer: int) -> None:
        """Drop a connection that the peer has ended."""
        state = self._peers[peer]
        self._drop(peer, "" if state.is_open else state.answering.ended())

    def disconnect(self, peer: int) -> None:
        """Forget a closed connection, and execute the peer's will: set the key of its WILL request, if it sent one."""
        state = self._peers.pop(peer, None)
        self._opening.pop(peer, None)
        self._proving.pop(peer, None)
        if state is not None:
            self._unpark(peer, state)
            state.steps.close()
            if state.will is not None:
                self._execute(state.will)

    def receive(self, peer: int, data: bytes, now: float) -> None:
        """Handle received bytes, split in any way."""
        state = self._peers.get(peer)
        if state is None:
            return
        state.buffer += data
        self._now = now
        try:
            next(state.steps)
        except (ProtocolError, OpeningError) as error:
            self._drop(peer, str(error))

    def expire(self, now: float) -> None:
        """Answer or drop every peer whose deadline has passed."""
        while (due := self.next_deadline()) is not None and due <= now:
            peer = heapq.heappop(self._deadlines)[2]
            state = self._peers[peer]
            if state.waiting is not None:
                count, keys = self._table.missing(state.waiting)
                self._unpark(peer, state)
                self.outbox.append((peer, encode_frame(ReplyStatus.TIMEOUT, [b"%d" % count, *keys])))
            elif state.is_open:
                self._drop(peer, f"did not complete a request within {self._frame_seconds:g} s")
            elif peer in self._proving:
                self._drop(peer, f"did not send its proof within {self._proof_seconds:g} s")
            else:
                self._drop(peer, f"did not open within {OPENING_SECONDS:g} s")

    def next_deadline(self) -> float | None:
        """Return when `expire` is next due, or None."""
        while self._deadlines and not self._still_due(self._deadlines[0]):
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None

    def refusal(self) -> bytes:
        """Return an opening that rejects a client because the server is full.

        The driver sends it, and closes the connection.
        """
        return Opening.of(self._me, Role.ANSWERS, ConnectionKind.STORE, 0, 1, OpeningResult.FULL).to_bytes()

    def _converse(self, peer: int) -> Generator[None, None, None]:
        """Handle a peer's bytes, from its opening on; `receive` resumes this generator when bytes have arrived."""
        state = self._peers[peer]
        while state.answering.wants:
            if not state.buffer:
                yield
                continue
            try:
                reply = state.answering.take(state.take(state.answering.wants))
            except Turned as error:
                self.outbox.append((peer, error.answer))
                raise
            if reply:
                self.outbox.append((peer, reply))
                del self._opening[peer]
                if len(self._proving) >= MOST_OPENINGS:
                    self._drop(next(iter(self._proving)), f"one of more than {MOST_OPENINGS} without a proof")
                self._proving[peer] = self._now
                self._set_deadline(peer, self._now + self._proof_seconds)
        state.is_open, state.deadline = True, None
        self._opening.pop(peer, None)
        self._proving.pop(peer, None)
        if seed := state.answering.seed:
            self.encrypting.append((peer, seed, state.take(len(state.buffer))))
        while True:
            yield from self._until(HEADER.size, peer, state)
            length = check_request_header(bytes(state.buffer[: HEADER.size]))
            yield from self._until(HEADER.size + length, peer, state)
            state.deadline = None
            request = decode_request(state.take(HEADER.size), state.take(length))
            check_texts(request.keys)
            state.check_silent()
            if request.op is Op.WILL:
                state.will = request if request.keys else None
            if request.op is Op.EXCHANGE:
                put, request = request.parts()
                answer = self._answer_to(put)
                if answer[0] == ReplyStatus.REFUSED:
                    self.outbox.append((peer, answer))
                    continue
                self._wake(put.keys[0])
            missing = self._table.first_missing(request)
            if missing is None:
                self.outbox.append((peer, self._answer_to(request)))
                if request.op in CHANGING and request.op is not Op.DELETE:
                    for key in request.keys:
                        self._wake(key)
                continue
            state.waiting, state.place = request, 0
            self._park(peer, state, missing)
            self._set_deadline(peer, self._now + request.timeout)
            while state.waiting is not None:
                state.check_silent()
                yield

    def _until(self, count: int, peer: int, state: _Peer) -> Generator[None, None, None]:
        """Yield until `count` bytes have arrived; at a request's first byte, set the deadline for its other bytes."""
        while len(state.buffer) < count:
            if state.is_open and state.buffer and state.deadline is None:
                self._set_deadline(peer, self._now + self._frame_seconds)
            yield

    def _answer_to(self, request: StoreRequest) -> bytes:
        try:
            return encode_frame(ReplyStatus.OK, self._table.apply(request))
        except StoreError as error:
            return encode_frame(ReplyStatus.REFUSED, [str(error).encode()])

    def _execute(self, will: StoreRequest) -> None:
        key, value = will.keys[0], will.values[0]
        with suppress(StoreError):  # the table is full
            if self._table.get(key) is None:
                self._table.put(key, value)
                self._wake(key)

    def _wake(self, key: bytes) -> None:
        """Answer the peers that wait for `key`, or park them under their next missing key."""
        if key not in self._parked or self._table.get(key) is None:
            return
        # Equal requests share one answer object: with 10,000 ranks, thousands of copies would fill the memory.
        answers: dict[tuple[Op, tuple[bytes, ...]], bytes] = {}
        for peer in sorted(self._parked.pop(key)):
            state = self._peers[peer]
            request = state.waiting
            assert request is not None, "a parked peer waits"
            missing = self._still_missing(state, request)
            if missing is not None:
                self._park(peer, state, missing)
                continue
            state.waiting = state.deadline = None
            same = request.op, request.keys
            if same not in answers or request.op is Op.POP:
                answers[same] = self._answer_to(request)
            self.outbox.append((peer, answers[same]))

    def _still_missing(self, state: _Peer, request: StoreRequest) -> bytes | None:
        """Return the next missing key, or None. The search starts at the last missing key, to check each key once."""
        for place in range(state.place, len(request.keys)):
            if self._table.get(request.keys[place]) is None:
                state.place = place
                return request.keys[place]
        return self._table.first_missing(request)  # an earlier key may have been deleted

    def _park(self, peer: int, state: _Peer, key: bytes) -> None:
        state.missing = key
        self._parked.setdefault(key, set()).add(peer)

    def _unpark(self, peer: int, state: _Peer) -> None:
        if state.waiting is not None:
            waiting = self._parked[state.missing]
            waiting.discard(peer)
            if not waiting:
                del self._parked[state.missing]
            state.waiting = state.deadline = None

    def _drop(self, peer: int, reason: str) -> None:
        self.drops.append((peer, reason))
        self.disconnect(peer)

    def _set_deadline(self, peer: int, deadline: float) -> None:
        self._peers[peer].deadline = deadline
        if len(self._deadlines) > 4 * len(self._peers) + 64:
            self._deadlines = [item for item in self._deadlines if self._still_due(item)]
            heapq.heapify(self._deadlines)
        heapq.heappush(self._deadlines, (deadline, next(self._numbers), peer))

    def _still_due(self, item: tuple[float, int, int]) -> bool:
        deadline, _, peer = item
        return peer in self._peers and self._peers[peer].deadline == deadline
