"""Worlds of ranks in one process that send messages to one another, over each kind of pipe.

Ranks are threads. Kernels release the GIL, and ranks share nothing but the pipes.
"""

from __future__ import annotations

import socket
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from net.meshes import until

from fastcoll.arrays.arrays import import_array
from fastcoll.core.message import Status
from fastcoll.core.monitor import IN_ORDER, Monitor
from fastcoll.core.operands import ANY_TAG
from fastcoll.core.work import Work
from fastcoll.kernels.primitives import address_of
from fastcoll.net.tcp import mail_frames
from fastcoll.net.tcp.pipe import TcpPipe
from fastcoll.p2p.engine import Engine
from fastcoll.shm import context_layout
from fastcoll.shm import rings as ring_words
from fastcoll.shm.layout import Layout
from fastcoll.shm.monitor import ShmMonitor
from fastcoll.shm.pipe import RingPipe
from fastcoll.shm.segment import Segment, new_name, unlink
from fastcoll.system.processes import Member, dead_among

RING = 4096
_CONTEXT = np.zeros(context_layout.MEMO, np.int64)  # of a group that is not shut
DEADLINE = 60.0


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


class World(ABC):
    """Some ranks in one process."""

    def __init__(self, size: int, timeout: float = DEADLINE, members: list[Member] | None = None) -> None:
        self.members = members or [Member.here(rank, size, "shm") for rank in range(size)]
        self._segments: list[Segment] = []
        self.meshes: list[PairMesh] = []
        self.meshes += [PairMesh(self.meshes, rank) for rank in range(size)]
        self._published = [(IN_ORDER, "")] * size
        self._prepare()
        self.ranks = []
        for rank in range(size):
            monitor = self._monitor(rank)
            self.ranks.append(
                Rank(rank, monitor, Engine(self._routes(rank, monitor), rank, monitor, timeout))
            )

    @abstractmethod
    def _prepare(self) -> None:
        """Make the segments."""

    def _add_segment(self, size: int) -> None:
        name = new_name()
        self._segments.append(Segment.create(name, Layout(size, 4096, RING)))
        unlink(name)

    def _monitor(self, rank: int) -> Monitor:
        return ListMonitor(self._published, self.members, rank)

    @abstractmethod
    def _routes(self, rank: int, monitor: Monitor) -> list[Any]:
        """Return, by rank, the pipe to it and its number there."""

    def run(self, *programs: Callable[[Rank], None]) -> None:
        """Run a program for each rank at the same time; raise the first error."""
        errors: list[BaseException] = []

        def guarded(program: Callable[[Rank], None], rank: Rank) -> None:
            try:
                program(rank)
            except BaseException as error:
                errors.append(error)

        threads = [
            threading.Thread(target=guarded, args=pair, daemon=True)
            for pair in zip(programs, self.ranks, strict=True)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(DEADLINE if not errors else 5.0)
        if errors:
            raise errors[0]
        assert not any(thread.is_alive() for thread in threads), "a rank hangs"

    def close(self) -> None:
        for rank in self.ranks:
            rank.mailbox.close(None)
        left = [thread.name for thread in threading.enumerate() if thread.name == "fastcoll-messages"]
        assert not left, "an engine's thread outlives it"
        self._release()

    def _release(self) -> None:
        for shared in (*self._segments, *self.meshes):
            shared.close()


class RingWorld(World):
    """A world over one segment."""

    def _prepare(self) -> None:
        self._add_segment(len(self.members))

    def _monitor(self, rank: int) -> Monitor:
        return ShmMonitor(self._segments[0], self.members, rank)

    def _routes(self, rank: int, monitor: Monitor) -> list[Any]:
        pipe = _ring_pipe(self._segments[0], rank, monitor)
        return [(pipe, peer) for peer in range(len(self.members))]


class WireWorld(World):
    """A world over TCP connections."""

    def _prepare(self) -> None: ...

    def _routes(self, rank: int, monitor: Monitor) -> list[Any]:
        pipe = TcpPipe(self.meshes[rank], monitor, 20_000)
        return [(pipe, peer) for peer in range(len(self.members))]


class NodeWorld(World):
    """A world of two ranks on each node, over segments inside nodes and TCP connections between them."""

    def _prepare(self) -> None:
        size = len(self.members)
        self._nodes = [list(range(first, min(first + 2, size))) for first in range(0, size, 2)]
        for node in self._nodes:
            self._add_segment(len(node))

    def _routes(self, rank: int, monitor: Monitor) -> list[Any]:
        local = self._nodes[rank // 2]
        rings = _ring_pipe(self._segments[rank // 2], rank % 2, monitor)
        # None if all ranks are on one node, since no engine would close it.
        wire = TcpPipe(self.meshes[rank], monitor, 20_000) if len(local) < len(self.members) else None
        routes: list[Any] = [(wire, peer) for peer in range(len(self.members))]
        for index, peer in enumerate(local):
            routes[peer] = (rings, index)
        return routes


def _ring_pipe(segment: Segment, index: int, monitor: Monitor) -> RingPipe:
    return RingPipe(segment.address, segment.layout, index, monitor, (0, 100), address_of(_CONTEXT))


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


def pattern(nbytes: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)
