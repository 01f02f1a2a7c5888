"""A pipe for messages over TCP: one connection with each peer for both directions, made at the first message."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import termios
import threading
import time
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...core.monitor import Monitor
from ...core.status import DONE, NEEDS_FLUSHER
from ...errors import AbortedError, GroupError, PeerDiedError
from ...kernels import waiting
from ...kernels.primitives import address_of
from ...kernels.shared_words import publish_in
from ...kernels.sockets import CLOSED
from ...p2p.pipe import Ack, Begun, Header, WordPipe
from ...p2p.transfers import Send
from ...system.address import no_descriptor, raise_limit
from . import mail_frames as f
from . import mail_kernels as kernels
from .mesh import Mesh

_BUDGET = 50_000_000  # ns after which a waiting kernel returns, so that Python checks signals and peers
# When a peer has closed a connection, how long this rank waits for the reason, which arrives on another connection.
_REASON_SECONDS = 2.0
# With a send buffer of this size, bytes in flight between processes of one host stay in the caches: 64 MiB take 12.8 ms
# instead of 16 to 18, and smaller messages take as long as without it (2-core AMD EPYC, Linux 6.18). For connections to
# other hosts, the kernel tunes the size.
_LOCAL_SNDBUF = 256 << 10


class TcpPipe(WordPipe):
    """The connections for the messages of one rank.

    The mesh owns the sockets. Call `retire` before the mesh is closed.
    """

    eager = f.EAGER
    window = f.WINDOW

    def __init__(self, mesh: Mesh, monitor: Monitor, spin: int) -> None:
        size = len(monitor.members)
        self._mesh = mesh
        self._monitor = monitor
        super().__init__(f, f.MAIL_WORDS, f.ROW_WORDS, size)
        self.rows[:, f.ARMED_KIND] = -1
        self.rows[:, f.FD] = -1
        self._pollfds = np.zeros((2, size + 1), np.int64)
        self._buffers: dict[tuple[int, int], NDArray[Any]] = {}
        self._lost: dict[int, float] = {}
        # Held while a connection is added, and while the bell's descriptor is used. With the bell, other threads wake
        # the thread that drives this pipe. Reentrant: a signal handler may interrupt the holder.
        self._lock = threading.RLock()
        self._bell = _make_bell()
        self.table[waiting.BUDGET] = _BUDGET
        self.table[f.BELL_FD] = self._bell
        self.table[f.CHANNELS] = address_of(self.rows)
        self.table[f.SIZE], self.table[f.RANK] = size, mesh.rank
        self.table[f.SPIN] = spin
        self.table[f.POLLFDS], self.table[f.OWNERS] = map(address_of, self._pollfds)
        self._ack_flusher: threading.Thread | None = None
        mesh.on_mail(self._take)

    # ---- connections -----------------------------------------------------------------------------

    def is_ready(self, peer: int) -> bool:
        return self.word(peer, f.FD) >= 0

    def prepare(self, peer: int) -> None:
        self._take(peer, self._mesh.mail(peer))

    def _take(self, peer: int, connection: socket.socket) -> None:
        """Begin to use the connection with a peer, unless one is in use."""
        with self._lock:
            if self.is_ready(peer) or self._bell < 0:
                return
            connection.setblocking(False)
            with suppress(OSError):  # the connection is broken; its first use will find that
                if connection.getsockname()[:1] == connection.getpeername()[:1]:
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _LOCAL_SNDBUF)
            for word, nbytes in (
                (f.IN_BUFFER, f.BUFFER),
                (f.OUT_BUFFER, f.BUFFER),
                (f.OUT_VECTOR, f.VECTOR),
                (f.ACK_FRAME, f.FRAME),
            ):
                buffer = self._buffers[peer, word] = np.zeros(nbytes // 8, np.int64)
                self.rows[peer, word] = address_of(buffer)
            publish_in(self.rows.reshape(-1), peer * f.ROW_WORDS + f.FD, connection.fileno())
        self.ring_bell()

    def check(self, peer: int | None) -> None:
        for rank in range(len(self.rows)) if peer is None else (peer,):
            reason = self.word(rank, f.OUT_GONE) or self.word(rank, f.IN_GONE)
            if not reason or self._monitor.has_left(rank):
                continue
            since = self._lost.setdefault(rank, time.monotonic())
            if reason == f.GARBLED:
                raise self.garbled(rank)
            if time.monotonic() - since > _REASON_SECONDS:
                why = "it was closed" if reason == CLOSED else os.strerror(-reason)
                raise PeerDiedError(
                    f"{self._monitor.name(rank)} is gone: the connection for messages is lost ({why})",
                    [self._monitor.members[rank].rank],
                )

    def garbled(self, peer: int) -> GroupError:
        return AbortedError(
            f"{self._monitor.name(peer)} sent an invalid frame on the connection for messages",
            [self._monitor.members[peer].rank],
        )

    def has_unread(self, peer: int) -> bool:
        fd = self.word(peer, f.FD)
        if fd < 0:
            return False
        in_kernel = struct.unpack("i", fcntl.ioctl(fd, termios.FIONREAD, bytes(4)))[0]
        return bool(in_kernel or self.word(peer, f.IN_HAVE) > self.word(peer, f.IN_USED))

    def retire(self) -> None:
        """Stop the ack flusher and forget the connections, which the mesh closes."""
        self.words[f.STOP] = 1
        if self._ack_flusher is not None:
            self._ack_flusher.join()
        self.rows[:, f.FD] = -1
        with self._lock:
            os.close(self._bell)
            self._bell = -1

    # ---- which thread drives it ------------------------------------------------------------------------

    def ring_bell(self) -> None:
        with self._lock:
            if self._bell >= 0:
                # BELL is set last. Otherwise, `silence_bell` could clear BELL before the descriptor is written. The
                # descriptor would then stay readable while BELL is 0, and poll(2) would always return at once.
                os.eventfd_write(self._bell, 1)
                self.table[f.BELL] = 1

    def silence_bell(self) -> None:
        if self.words[f.BELL]:
            self.words[f.BELL] = 0
            with self._lock, suppress(BlockingIOError):
                if self._bell >= 0:
                    os.eventfd_read(self._bell)

    def seize(self) -> bool:
        if waiting.seize.call(self.address + 8 * f.BUSY) != DONE:
            return False
        if self.words[f.DEFERRED] and kernels.flush.call(self.address) != DONE:
            self.let_go()
            return False
        return True

    # ---- short cuts ------------------------------------------------------------------------------

    def send(self, array: NDArray[Any], peer: int, kind: int) -> int:
        status = kernels.send.call(self.address, peer, array, array.nbytes, kind)
        if status == NEEDS_FLUSHER:
            self.start_ack_flusher()
            return DONE
        return status

    def receive(self, array: NDArray[Any], source: int, kind: int) -> int:
        return kernels.receive.call(self.address, source, array, array.nbytes, kind)

    def post_send(self, array: NDArray[Any], peer: int, kind: int) -> tuple[int, bool] | None:
        code = kernels.post_send.call(self.address, peer, array, array.nbytes, kind)
        return None if code < 0 else (code >> 1, code & 1 != 0)

    def post_receive(self, array: NDArray[Any], source: int, kind: int) -> int:
        return kernels.post_receive.call(self.address, source, array, array.nbytes, kind)

    def note_stored(self, count: int) -> None:
        self.words[f.STORED] = count

    def is_armed(self, peer: int) -> bool:
        return self.word(peer, f.ARMED_KIND) >= 0

    def disarm(self, peer: int) -> None:
        self.put(peer, f.ARMED_KIND, -1)

    def complete(self, handled: int, peer: int, number: int) -> int:
        return kernels.complete.call(self.address, handled, peer, number)

    def start_ack_flusher(self) -> None:
        """Start the ack flusher, the thread that sends acks which stay deferred, unless it runs already."""

        def flush_deferred() -> None:
            backoff = np.zeros(waiting.BACKOFF_WORDS, np.int64)
            backoff[waiting.IDLE] = 1 << 30  # long naps
            kernels.flush_deferred.call(self.address, address_of(backoff))

        with self._lock:
            if not self.words[f.STOP] and (self._ack_flusher is None or not self._ack_flusher.is_alive()):
                self._ack_flusher = threading.Thread(
                    target=flush_deferred, name="fastcoll-answers", daemon=True
                )
                self._ack_flusher.start()

    def leave_send(self, peer: int) -> tuple[int, bool, bool]:
        resting = self.word(peer, f.SENDING) == 2
        self.put(peer, f.SENDING, 0)
        return self.word(peer, f.SENT), self._is_entering(peer), resting

    def leave_receive(self, source: int) -> Begun | None:
        peer = self.words[f.SOURCE] - 1 if source < 0 else source
        self.words[f.SOURCE] = 0
        stage = self.word(peer, f.IN_STAGE) if peer >= 0 else f.IDLE
        if stage == f.IDLE:
            return None
        arriving = stage in (f.ARRIVING, f.REST_ARRIVING)
        self.put(peer, f.IN_STAGE, f.ARRIVING if arriving else f.IDLE)
        asking = self.word(peer, f.ASKING) != 0
        self.put(peer, f.ASKING, 0)
        number = self.word(peer, f.TAKING)
        is_complete = stage in (f.REST_ARRIVING, f.ANSWERING)
        return Begun(peer, number, arriving, is_complete, asking)

    # ---- steps -----------------------------------------------------------------------------------

    def advance(self, handled: int, wait: bool) -> int:
        return kernels.advance.call(self.address, handled, wait)

    def begin(self, peer: int, send: Send, attached: int) -> tuple[int, bool]:
        kernels.begin.call(self.address, peer, send.address, send.nbytes, send.kind, attached)
        return self.word(peer, f.SENT), self._is_entering(peer)

    def _is_entering(self, peer: int) -> bool:
        return self.word(peer, f.OUT_POSITION) < self.word(peer, f.OUT_END)

    def begin_rest(self, peer: int, send: Send, number: int, attached: int) -> None:
        kernels.rest.call(self.address, peer, send.address, send.nbytes, number, attached)

    def header(self, peer: int) -> Header:
        at = peer * f.ROW_WORDS + f.IN_NUMBER
        number, kind, nbytes, attached = self.cells[at : at + 4]
        return Header(kind, nbytes, number, attached)

    def rest(self, peer: int) -> tuple[int, int]:
        return self.word(peer, f.REST_NUMBER), self.word(peer, f.REST_NBYTES)

    def accept(self, peer: int, address: int, nbytes: int, keep: object) -> None:
        kernels.accept.call(self.address, peer, address, nbytes)

    def acknowledge(self, peer: int, ack: Ack) -> bool:
        return kernels.acknowledge.call(self.address, peer, *ack) == DONE

    def expect(self, peer: int, count: int) -> None:
        self.put(peer, f.EXPECTED, count)


def _make_bell() -> int:
    """Return an eventfd; ResourceError: no descriptor is free, and the limit cannot be raised."""
    try:
        return os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
    except OSError as error:
        lacking = no_descriptor(error, "making a group over the network")
        if lacking is None or not raise_limit("groups"):
            raise lacking or error from error
    return _make_bell()
