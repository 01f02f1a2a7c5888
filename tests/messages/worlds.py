"""Worlds of ranks in one process that send messages to one another, over each kind of pipe.

Ranks are threads. Kernels release the GIL, and ranks share nothing but the pipes.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from net.meshes import until
from together import together

from fastcoll.arrays.arrays import import_array
from fastcoll.core.message import Status
from fastcoll.core.monitor import IN_ORDER, Monitor
from fastcoll.core.operands import ANY_TAG
from fastcoll.core.work import Work
from fastcoll.errors import AbortedError
from fastcoll.kernels.primitives import address_of
from fastcoll.net.tcp import mail_frames
from fastcoll.net.tcp.pipe import TcpPipe
from fastcoll.p2p.engine import Engine
from fastcoll.shm import context_layout
from fastcoll.shm import rings as ring_words
from fastcoll.shm.context import BackoffCounts
from fastcoll.shm.layout import Layout
from fastcoll.shm.monitor import ShmMonitor
from fastcoll.shm.pipe import RingPipe
from fastcoll.shm.segment import Segment, new_name, unlink
from fastcoll.system.processes import Member, dead_among

RING = 4096
_CONTEXT = np.zeros(context_layout.MEMO, np.int64)  # of a group that is not shut
DEADLINE = 60.0
COMPILES = 240.0  # seconds in which the kernels of a first call are compiled, on any machine


class Rank:
    """One rank's engine, with the public arguments."""

    def __init__(self, rank: int, monitor: Monitor, mailbox: Engine) -> None:
        self.rank, self.monitor, self.mailbox = rank, monitor, mailbox

    def send(self, x: Any, dst: int, tag: int = 0) -> None:
        self.mailbox.send(import_array(x, writable=False), dst, tag)

    def recv(self, x: Any, src: int | None = None, tag: int = 0, status: Status | None = None) -> int:
        return self.mailbox.recv(import_array(x, writable=True), src, tag, status)

    def isend(self, x: Any, dst: int, tag: int = 0) -> Work:
        return self.mailbox.isend(import_array(x, writable=False), dst, tag)

    def irecv(self, x: Any, src: int | None = None, tag: int = 0, status: Status | None = None) -> Work:
        return self.mailbox.irecv(import_array(x, writable=True), src, tag, status)

    def probe(self, src: int | None = None, tag: int = ANY_TAG) -> tuple[int, ...]:
        return fields(self.mailbox.probe(src, tag))

    def iprobe(self, src: int | None = None, tag: int = ANY_TAG) -> tuple[int, ...] | None:
        found = self.mailbox.iprobe(src, tag)
        return found and fields(found)

    def await_on_the_way(self, dst: int, count: int) -> None:
        """Wait until `count` messages have gone out to `dst` and have no ack."""
        peer = self.mailbox._exchange.peers[dst]
        until(lambda: len(peer.unacked) == count and peer.entering is None)

    def stay_awake(self) -> None:
        """Start the progress thread and wait until rings take requests of Python, which need it."""
        self.mailbox.stay_awake()
        rings = [pipe for pipe in self.mailbox.pipes if isinstance(pipe, RingPipe)]
        until(lambda: all(pipe.table[ring_words.REQUESTS + ring_words.AWAKE] for pipe in rings))

    def is_blocked(self) -> bool:
        """Whether a blocking call is under way."""
        return any(self.busy_pipes())

    def busy_pipes(self) -> list[bool]:
        """Return for each pipe whether a thread holds it."""
        pipes: Any = self.mailbox.pipes
        words = [mail_frames if isinstance(pipe, TcpPipe) else ring_words for pipe in pipes]
        return [bool(pipe.table[module.BUSY]) for pipe, module in zip(pipes, words, strict=True)]

    def has_begun(self, dst: int) -> bool:
        """Whether a part of a message to `dst` has gone out."""
        pipe, number = pipe_to(self, dst)
        word = ring_words.OUT_HEAD if isinstance(pipe, RingPipe) else mail_frames.OUT_POSITION
        return bool(pipe.word(number, word) > 0)


def fields(status: Status) -> tuple[int, ...]:
    return status.source, status.tag, status.count, status.nbytes


class World:
    """Some ranks in one process. Those of a node share a segment; all others have TCP connections."""

    PER_NODE = 2  # ranks; 0: there are no segments

    def __init__(self, size: int, timeout: float = DEADLINE, members: list[Member] | None = None) -> None:
        self.members = members or [Member.here(rank, size, "shm") for rank in range(size)]
        self.meshes: list[PairMesh] = []
        self.meshes += [PairMesh(self.meshes, rank) for rank in range(size)]
        self._published = [(IN_ORDER, "")] * size
        firsts = range(0, size, self.PER_NODE) if self.PER_NODE else ()
        self._nodes = [range(first, min(first + self.PER_NODE, size)) for first in firsts]
        self.segments = [_segment(len(node)) for node in self._nodes]
        self.ranks = []
        for rank in range(size):
            monitor = self._monitor(rank)
            engine = Engine(self._routes(rank, monitor), rank, monitor, timeout)
            self.ranks.append(Rank(rank, monitor, engine))

    def _monitor(self, rank: int) -> Monitor:
        return ListMonitor(self._published, self.members, rank)

    def _routes(self, rank: int, monitor: Monitor) -> list[Any]:
        """Return, by rank, the pipe to it and its number there."""
        size = len(self.members)
        # None if all ranks are on one node, since no engine would close it.
        wire = TcpPipe(self.meshes[rank], monitor, 20_000) if size > self.PER_NODE else None
        routes: list[Any] = [(wire, peer) for peer in range(size)]
        if self.PER_NODE:
            node, index = divmod(rank, self.PER_NODE)
            rings = _ring_pipe(self.segments[node], index, monitor)
            for number, peer in enumerate(self._nodes[node]):
                routes[peer] = (rings, number)
        return routes

    def run(self, *programs: Callable[[Rank], None]) -> None:
        """Run a program for each rank at the same time; raise the first error."""
        errors: list[BaseException] = []

        def guarded(program: Callable[[Rank], None], rank: Rank) -> None:
            try:
                program(rank)
            except BaseException as error:
                errors.append(error)
                rank.monitor.fail(AbortedError("its program failed"))  # so that no other rank waits for it

        calls = (partial(guarded, *pair) for pair in zip(programs, self.ranks, strict=True))
        together(*calls, deadline=COMPILES)
        if errors:
            raise errors[0]

    def close(self) -> None:
        for rank in self.ranks:
            rank.mailbox.close(None)
        left = [thread.name for thread in threading.enumerate() if thread.name == "fastcoll-messages"]
        assert not left, "an engine's thread outlives it"
        self._release()

    def _release(self) -> None:
        for shared in (*self.segments, *self.meshes):
            shared.close()


class RingWorld(World):
    """A world on one node."""

    PER_NODE = 1 << 20

    def _monitor(self, rank: int) -> Monitor:
        return ShmMonitor(self.segments[0], self.members, rank)


class WireWorld(World):
    """A world over TCP connections alone."""

    PER_NODE = 0


class NodeWorld(World):
    """A world over both: two ranks on each node."""


def _segment(size: int) -> Segment:
    name = new_name()
    segment = Segment.create(name, Layout(size, 4096, RING))
    unlink(name)
    return segment


def _ring_pipe(segment: Segment, index: int, monitor: Monitor) -> RingPipe:
    return RingPipe(segment, index, monitor, BackoffCounts(0, 100, 100), address_of(_CONTEXT))


class ListMonitor(Monitor):
    """A monitor whose ranks publish their states in a list."""

    def __init__(self, published: list[tuple[int, str]], members: Sequence[Member], rank: int) -> None:
        super().__init__(members, rank)
        self._published = published

    def _publish(self, state: int, reason: str) -> None:
        self._published[self.rank] = (state, reason)

    def _states(self) -> list[int]:
        return [state for state, _ in self._published]

    def _reason(self, rank: int) -> str:
        return self._published[rank][1]

    def _dead(self, working: Sequence[Member]) -> list[Member]:
        return dead_among(working)


class PairMesh:
    """Connects the ranks of a world over loopback. Tests may break the sockets in `connections`."""

    def __init__(self, meshes: list[PairMesh], rank: int) -> None:
        self.rank = rank
        self.connections: dict[int, socket.socket] = {}
        self.others: list[socket.socket] = []
        """More sockets to close at the end."""
        self._meshes = meshes
        self._callback: Callable[[int, socket.socket], None] | None = None

    def mail(self, peer: int) -> socket.socket:
        with _pairing:
            if peer not in self.connections:
                here, there = tcp_pair()
                self.connections[peer] = here
                self._meshes[peer].take(self.rank, there)
            return self.connections[peer]

    def take(self, peer: int, connection: socket.socket) -> None:
        self.connections[peer] = connection
        assert self._callback is not None
        self._callback(peer, connection)

    def on_mail(self, callback: Callable[[int, socket.socket], None]) -> None:
        self._callback = callback

    def close(self) -> None:
        for connection in (*self.connections.values(), *self.others):
            connection.close()


_pairing = threading.Lock()


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        here = socket.create_connection(server.getsockname())
        there, _ = server.accept()
    for connection in (here, there):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return here, there


def pipe_to(me: Rank, dst: int) -> tuple[Any, int]:
    return me.mailbox._routes[dst]


def taken(me: Rank, count: int, src: int, tag: int = 0, dtype: Any = np.uint8) -> np.ndarray:
    """Receive an array from a rank, in a blocking call; return it."""
    got = np.zeros(count, dtype)
    assert me.recv(got, src, tag) == src
    return got


def pattern(nbytes: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)
