"""The store's server without sockets: bytes in, answers and dropped peers out.

A peer goes OPENING -> (PROVING, with a secret ->) READY, and between READY and PARKED while it waits
for keys. It has one request under way at a time, which bounds what is queued for it: bytes behind a
request that is not answered yet drop it, as does anything that breaks the protocol, an opening that takes
longer than OPENING_SECONDS and a request that takes longer than FRAME_SECONDS to come. Nothing longer
than the opening is kept before it is right, and nothing longer than a header before that is.
"""

from __future__ import annotations

import heapq
import itertools
import os
from dataclasses import dataclass, field
from enum import Enum, auto

from ..errors import StoreError
from .secret import PROOF_SIZE, is_proof
from .table import CHANGING, Op, Request, Table
from .wire import (
    HEADER,
    HELLO,
    INSTANCE_SIZE,
    MAGIC,
    NONCE_SIZE,
    PROTOCOL,
    Hello,
    ProtocolError,
    Role,
    Status,
    Verdict,
    check_request_header,
    decode_request,
    encode_frame,
    prove,
)

OPENING_SECONDS = 5.0
# How long a request may take to come once it has begun: 8 MiB at 140 kB/s.
FRAME_SECONDS = 60.0


class Stage(Enum):
    """How far a peer has come."""

    OPENING = auto()
    PROVING = auto()
    READY = auto()
    PARKED = auto()


@dataclass(slots=True)
class _Peer:
    deadline: float | None
    stage: Stage = Stage.OPENING
    buffer: bytearray = field(default_factory=bytearray)
    expected_proof: bytes = b""
    waiting: Request | None = None
    missing: bytes = b""
    place: int = 0  # of `missing` among the keys it waits for


class StoreServer:
    """The state machine over all connections. Not thread safe.

    The driver reports `connect`, `receive`, `disconnect` and `expire`, each with the time in seconds,
    and after each carries out what it finds in `outbox` and `drops`, and empties them.

    Attributes:
        outbox: (peer, bytes) to send, in order.
        drops: (peer, reason) of connections to close; the server has forgotten these peers.
    """

    def __init__(self, secret: bytes = b"", instance: bytes | None = None) -> None:
        self.outbox: list[tuple[int, bytes]] = []
        self.drops: list[tuple[int, str]] = []
        self._secret = secret
        self._instance = os.urandom(INSTANCE_SIZE) if instance is None else instance
        self._table = Table()
        self._peers: dict[int, _Peer] = {}
        # A parked peer stands under one missing key at a time, and moves on when that is set.
        self._parked: dict[bytes, set[int]] = {}
        # (deadline, number, peer), soonest first; an entry that its peer has outlived is skipped.
        self._deadlines: list[tuple[float, int, int]] = []
        self._numbers = itertools.count()

    def connect(self, peer: int, now: float) -> None:
        """A connection was accepted; `peer` is any number not in use."""
        self._peers[peer] = _Peer(None)
        self._set_deadline(peer, now + OPENING_SECONDS)

    def disconnect(self, peer: int) -> None:
        """The connection has ended."""
        state = self._peers.pop(peer, None)
        if state is not None:
            self._unpark(peer, state)

    def receive(self, peer: int, data: bytes, now: float) -> None:
        """Bytes came, split in any way."""
        state = self._peers.get(peer)
        if state is None:
            return
        state.buffer += data
        try:
            while peer in self._peers and self._advance(peer, state, now):
                pass
        except ProtocolError as error:
            self._drop(peer, str(error))

    def expire(self, now: float) -> None:
        """Answer or drop every peer whose deadline has passed."""
        while (due := self.next_deadline()) is not None and due <= now:
            peer = heapq.heappop(self._deadlines)[2]
            state = self._peers[peer]
            if state.stage is Stage.PARKED:
                self._unpark(peer, state)
                self.outbox.append((peer, encode_frame(Status.TIMEOUT, [state.missing])))
            elif state.stage is Stage.READY:
                self._drop(peer, f"did not complete a request within {FRAME_SECONDS:g} s")
            else:
                self._drop(peer, f"did not open within {OPENING_SECONDS:g} s")

    def next_deadline(self) -> float | None:
        """When `expire` is next due, or None."""
        while self._deadlines and not self._still_due(self._deadlines[0]):
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None

    def _advance(self, peer: int, state: _Peer, now: float) -> bool:
        """Take one step with what is buffered; whether there may be another."""
        match state.stage:
            case Stage.OPENING:
                return self._open(peer, state)
            case Stage.PROVING:
                return self._prove(state)
            case Stage.READY:
                return self._take_request(peer, state, now)
            case Stage.PARKED:
                _check_silent(state)
                return False

    def _open(self, peer: int, state: _Peer) -> bool:
        start = bytes(state.buffer[: len(MAGIC)])
        if not MAGIC.startswith(start):
            raise ProtocolError(f"not a fastcoll client: {start!r}")
        if len(state.buffer) < HELLO.size:
            return False
        client_bytes = _take(state.buffer, HELLO.size)
        client = Hello.from_bytes(client_bytes, Role.CLIENT)
        verdict = self._judge(client)
        server = self._hello(verdict)
        if verdict is not Verdict.WELCOME:
            self.outbox.append((peer, server))
            raise ProtocolError(f"turned away: {verdict.name.lower()} does not match")
        if self._secret:
            state.stage = Stage.PROVING
            state.expected_proof = prove(self._secret, Role.CLIENT, client_bytes, server)
            server += prove(self._secret, Role.SERVER, client_bytes, server)
        else:
            _let_in(state)
        self.outbox.append((peer, server))
        return True

    def refusal(self) -> bytes:
        """The opening for a connection that there is no room for; the driver sends it and closes."""
        return self._hello(Verdict.FULL)

    def _hello(self, verdict: Verdict) -> bytes:
        nonce = os.urandom(NONCE_SIZE)
        return Hello(Role.SERVER, nonce, bool(self._secret), verdict, PROTOCOL, self._instance).to_bytes()

    def _judge(self, client: Hello) -> Verdict:
        if client.protocol != PROTOCOL:
            return Verdict.PROTOCOL
        if client.has_secret != bool(self._secret):
            return Verdict.SECRET
        return Verdict.WELCOME

    def _prove(self, state: _Peer) -> bool:
        if len(state.buffer) < PROOF_SIZE:
            return False
        if not is_proof(_take(state.buffer, PROOF_SIZE), state.expected_proof):
            raise ProtocolError("does not know the job's secret")
        _let_in(state)
        return True

    def _take_request(self, peer: int, state: _Peer, now: float) -> bool:
        if len(state.buffer) < HEADER.size:
            return self._has_begun(peer, state, now)
        header = bytes(state.buffer[: HEADER.size])
        length = check_request_header(header)
        if len(state.buffer) < HEADER.size + length:
            return self._has_begun(peer, state, now)
        state.deadline = None
        del state.buffer[: HEADER.size]
        request = decode_request(header, _take(state.buffer, length))
        _check_silent(state)
        missing = self._table.first_missing(request)
        if missing is None:
            self._carry_out(peer, request)
        else:
            state.stage, state.waiting, state.place = Stage.PARKED, request, 0
            self._park(peer, state, missing)
            self._set_deadline(peer, now + request.timeout)
        return True

    def _has_begun(self, peer: int, state: _Peer, now: float) -> bool:
        """A part of a request is here: the rest must come in time."""
        if state.buffer and state.deadline is None:
            self._set_deadline(peer, now + FRAME_SECONDS)
        return False

    def _carry_out(self, peer: int, request: Request) -> None:
        self.outbox.append((peer, self._answer_to(request)))
        if request.op in CHANGING and request.op is not Op.DELETE:
            for key in request.keys:
                self._wake(key)

    def _answer_to(self, request: Request) -> bytes:
        try:
            return encode_frame(Status.OK, self._table.apply(request))
        except StoreError as error:
            return encode_frame(Status.REFUSED, [str(error).encode()])

    def _wake(self, key: bytes) -> None:
        """Let those who wait for `key` go, or wait for their next missing key."""
        if key not in self._parked or self._table.get(key) is None:
            return
        # Who waits for the same gets the same bytes: with 10,000 ranks, thousands of copies would fill the memory.
        answers: dict[tuple[Op, tuple[bytes, ...]], bytes] = {}
        for peer in sorted(self._parked.pop(key)):
            state = self._peers[peer]
            assert state.waiting is not None
            missing = self._still_missing(state, state.waiting)
            if missing is not None:
                self._park(peer, state, missing)
                continue
            request, state.waiting = state.waiting, None
            _let_in(state)
            same = request.op, request.keys
            if same not in answers or request.op is Op.POP:
                answers[same] = self._answer_to(request)
            self.outbox.append((peer, answers[same]))

    def _still_missing(self, state: _Peer, request: Request) -> bytes | None:
        """The first missing key at or behind the last one, so that many keys are not looked at again and again."""
        for place in range(state.place, len(request.keys)):
            if self._table.get(request.keys[place]) is None:
                state.place = place
                return request.keys[place]
        return self._table.first_missing(request)  # one before it may have been deleted

    def _park(self, peer: int, state: _Peer, key: bytes) -> None:
        state.missing = key
        self._parked.setdefault(key, set()).add(peer)

    def _unpark(self, peer: int, state: _Peer) -> None:
        if state.stage is not Stage.PARKED:
            return
        waiting = self._parked[state.missing]
        waiting.discard(peer)
        if not waiting:
            del self._parked[state.missing]
        state.waiting = None
        _let_in(state)

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


def _let_in(state: _Peer) -> None:
    state.stage, state.deadline = Stage.READY, None


def _check_silent(state: _Peer) -> None:
    if state.buffer:
        raise ProtocolError("spoke before its request was answered")


def _take(buffer: bytearray, count: int) -> bytes:
    data = bytes(buffer[:count])
    del buffer[:count]
    return data
