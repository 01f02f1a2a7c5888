"""Connections as a pipe for messages: each rank dials one to each peer that it sends to, at its first message."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import termios
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ...core.monitor import Monitor
from ...core.status import DONE, UNMINDED
from ...errors import AbortedError, GroupError, PeerDiedError
from ...kernels import waiting
from ...kernels.primitives import address_of, cells_of
from ...kernels.sockets import CLOSED
from ...p2p.pipe import TAKEN, Ack, Begun, Header, Pipe
from ...p2p.transfers import Send
from . import mail_answers, mail_kernels
from . import mail_words as words
from .mail_frames import ACKS, BUFFER, EAGER, FRAME, GARBLED, WINDOW

_BUDGET = 50_000_000  # ns that a kernel may wait before Python looks at signals, deadlines and peers
# How long a rank whose peer has closed a connection waits for the reason, which travels on another one.
_REASON_SECONDS = 2.0
# Between processes of one host what is on the way stays in the caches so: 64 MiB take 12.8 ms instead of 16 to 18, and
# smaller messages as long as before (2-core AMD EPYC, Linux 6.18). Other hosts' buffers are the kernel's to tune.
_LOCAL_SNDBUF = 256 << 10


class Mesh(Protocol):
    """What dials and accepts; it owns the sockets."""

    rank: int

    def dial_mail(self, peer: int) -> socket.socket:
        """The connection to a peer."""

    def on_mail(self, callback: Callable[[int, socket.socket], None]) -> None:
        """Give `callback` what peers dial."""


class TcpPipe(Pipe):
    """The connections for messages that begin or end at one rank.

    Close it before the mesh.

    Args:
        mesh: the group's.
        vigil: the group's.
        spin: ns that a waiting thread tries again before it sleeps.

    Attributes:
        address: what the kernels take as `m`.
        table: the mail's words.
        rows: the peers' words.
    """

    eager = EAGER
    window = WINDOW

    def __init__(self, mesh: Mesh, vigil: Monitor, spin: int) -> None:
        size = len(vigil.members)
        self._mesh = mesh
        self._vigil = vigil
        self.rows = np.zeros((size, words.ROW_WORDS), np.int64)
        self.rows[:, [words.OUT_FD, words.IN_FD]] = -1
        self._pollfds = np.zeros((2, 2 * size + 1), np.int64)
        self._buffers: dict[tuple[int, int], NDArray[Any]] = {}
        self._dialed = [False] * size
        self._lost: dict[int, float] = {}
        self._lock = threading.Lock()  # the bell's descriptor, and what is kept of a connection
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.table = self._make_table(spin, size)
        self.address = address_of(self.table)
        self._cells = cells_of(self.rows)
        self._words = cells_of(self.table)
        self._minder: threading.Thread | None = None
        mesh.on_mail(self._accepted)

    def _make_table(self, spin: int, size: int) -> NDArray[np.int64]:
        table = np.zeros(words.MAIL_WORDS, np.int64)
        table[waiting.BUDGET] = _BUDGET
        table[words.BELL_FD] = self._bell
        table[words.CHANNELS] = address_of(self.rows)
        table[words.SIZE], table[words.RANK] = size, self._mesh.rank
        table[words.SPIN] = spin
        table[words.POLLFDS], table[words.OWNERS] = map(address_of, self._pollfds)
        return table

    def word(self, peer: int, index: int) -> int:
        """A word of the row of `peer`."""
        return self._cells[peer * words.ROW_WORDS + index]

    def _set(self, peer: int, index: int, value: int) -> None:
        self._cells[peer * words.ROW_WORDS + index] = value

    # ---- connections -----------------------------------------------------------------------------

    def is_ready(self, peer: int) -> bool:
        return self._dialed[peer]

    def prepare(self, peer: int) -> None:
        connection = self._mesh.dial_mail(peer)
        connection.setblocking(False)
        if _is_local(connection):
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _LOCAL_SNDBUF)
        with self._lock:
            if not self.is_ready(peer) and self._bell >= 0:
                self._give_buffers(peer, {words.OUT_BUFFER: BUFFER, words.ACK_BUFFER: ACKS})
                self.rows[peer, words.OUT_FD] = connection.fileno()
                self._dialed[peer] = True

    def _accepted(self, peer: int, connection: socket.socket) -> None:
        connection.setblocking(False)
        with self._lock:
            if self.rows[peer, words.IN_FD] >= 0 or self._bell < 0:
                connection.close()  # a rank dials once
                return
            self._give_buffers(peer, {words.IN_BUFFER: BUFFER, words.ANSWER: FRAME})
            self.rows[peer, words.IN_FD] = connection.fileno()
        self.ring_bell()

    def _give_buffers(self, peer: int, sizes: dict[int, int]) -> None:
        for word, nbytes in sizes.items():
            buffer = self._buffers[peer, word] = np.zeros(nbytes // 8, np.int64)
            self.rows[peer, word] = address_of(buffer)

    def check(self, peer: int | None) -> None:
        for rank in range(len(self.rows)) if peer is None else (peer,):
            reason = self.word(rank, words.OUT_GONE) or self.word(rank, words.IN_GONE)
            if not reason or self._vigil.has_left(rank):
                continue
            since = self._lost.setdefault(rank, time.monotonic())
            if reason == GARBLED or time.monotonic() - since > _REASON_SECONDS:
                raise self._broken(rank, reason)

    def _broken(self, peer: int, reason: int) -> GroupError:
        if reason == GARBLED:
            return self.garbled(peer)
        why = "it was closed" if reason == CLOSED else os.strerror(-reason)
        return PeerDiedError(
            f"{self._vigil.name(peer)} is gone: the connection for messages is over ({why})",
            [self._vigil.members[peer].rank],
        )

    def garbled(self, peer: int) -> GroupError:
        """The error for a peer that sent what no rank sends."""
        return AbortedError(
            f"{self._vigil.name(peer)} sent what is no message of fastcoll; the connection is of no use any more",
            [self._vigil.members[peer].rank],
        )

    def has_unread(self, peer: int) -> bool:
        fd = self.word(peer, words.IN_FD)
        if fd < 0:
            return False
        in_kernel = struct.unpack("i", fcntl.ioctl(fd, termios.FIONREAD, bytes(4)))[0]
        return bool(in_kernel or self.word(peer, words.IN_HAVE) > self.word(peer, words.IN_USED))

    def retire(self) -> None:
        """The mesh closes the connections."""
        self._words[words.STOP] = 1
        if self._minder is not None:
            self._minder.join()
        self.rows[:, [words.OUT_FD, words.IN_FD]] = -1
        with self._lock:
            os.close(self._bell)
            self._bell = -1

    # ---- whose turn it is ------------------------------------------------------------------------

    def ring_bell(self) -> None:
        with self._lock:
            if self._bell >= 0:
                # The word after the descriptor: a readable bell whose word is 0 would keep poll(2) from sleeping.
                os.eventfd_write(self._bell, 1)
                self.table[words.BELL] = 1

    def silence_bell(self) -> None:
        if self._words[words.BELL]:
            self._words[words.BELL] = 0
            with suppress(BlockingIOError):
                os.eventfd_read(self._bell)

    def set_behind(self, behind: bool) -> None:
        self._words[words.BEHIND] = behind

    def seize(self) -> bool:
        if waiting.seize.call(self.address + 8 * words.BUSY) != DONE:
            return False
        if self._words[words.DEFERRED] and mail_answers.flush.call(self.address) != DONE:
            self.let_go()
            return False
        return True

    def let_go(self) -> None:
        self._words[words.BUSY] = 0

    def is_mine(self) -> bool:
        return self._words[words.BUSY] == threading.get_ident()

    # ---- short cuts ------------------------------------------------------------------------------

    def send(self, array: NDArray[Any], peer: int, kind: int) -> int:
        status = mail_kernels.send.call(self.address, peer, array, array.nbytes, kind)
        if status == UNMINDED:
            self._mind_answers()
            return DONE
        return status

    def receive(self, array: NDArray[Any], source: int, kind: int) -> int:
        return mail_kernels.receive.call(self.address, source, array, array.nbytes, kind)

    def _mind_answers(self) -> None:
        """Start the thread that sends answers which stay deferred, unless there is one."""
        with self._lock:
            if not self._words[words.STOP] and (self._minder is None or not self._minder.is_alive()):
                self._minder = threading.Thread(target=self._mind, name="fastcoll-answers", daemon=True)
                self._minder.start()

    def _mind(self) -> None:
        patience = np.zeros(waiting.PATIENCE_WORDS, np.int64)
        patience[waiting.IDLE] = 1 << 30  # long naps
        mail_answers.mind.call(self.address, address_of(patience))

    def leave_send(self, peer: int) -> tuple[int, bool, bool]:
        resting = self.word(peer, words.SENDING) == 2
        self._set(peer, words.SENDING, 0)
        return self.word(peer, words.SENT), self._is_entering(peer), resting

    def leave_receive(self, source: int) -> Begun | None:
        peer = self._words[words.SOURCE] - 1 if source < 0 else source
        self._words[words.SOURCE] = 0
        stage = self.word(peer, words.IN_STAGE) if peer >= 0 else words.IDLE
        if stage == words.IDLE:
            return None
        arriving = stage in (words.ARRIVING, words.REST_ARRIVING)
        self._set(peer, words.IN_STAGE, words.ARRIVING if arriving else words.IDLE)
        asking = self.word(peer, words.ASKING) != 0
        self._set(peer, words.ASKING, 0)
        number = self.word(peer, words.TAKING)
        whole = stage in (words.REST_ARRIVING, words.ANSWERING)
        return Begun(peer, number, arriving, whole, asking)

    # ---- steps -----------------------------------------------------------------------------------

    def advance(self, handled: int, wait: bool) -> int:
        return mail_kernels.advance.call(self.address, handled, wait)

    def begin(self, peer: int, send: Send, attached: int) -> tuple[int, bool]:
        mail_kernels.begin.call(self.address, peer, send.address, send.nbytes, send.kind, attached)
        return self.word(peer, words.SENT), self._is_entering(peer)

    def _is_entering(self, peer: int) -> bool:
        return self.word(peer, words.OUT_POSITION) < self.word(peer, words.OUT_END)

    def begin_rest(self, peer: int, send: Send, number: int, attached: int) -> None:
        mail_kernels.rest.call(self.address, peer, send.address, send.nbytes, number, attached)

    def taken(self, peer: int) -> int:
        at = peer * words.ROW_WORDS + words.ACK_NUMBER
        return self._cells[at] if self._cells[at + 1] == TAKEN else 0

    def last_ack(self, peer: int) -> Ack:
        at = peer * words.ROW_WORDS + words.ACK_NUMBER
        return Ack(*self._cells[at : at + 4])

    def header(self, peer: int) -> Header:
        at = peer * words.ROW_WORDS + words.IN_NUMBER
        number, kind, nbytes, attached = self._cells[at : at + 4]
        return Header(kind, nbytes, number, attached)

    def rest(self, peer: int) -> tuple[int, int]:
        return self.word(peer, words.REST_NUMBER), self.word(peer, words.REST_NBYTES)

    def accept(self, peer: int, address: int, nbytes: int, keep: object) -> None:
        mail_kernels.accept.call(self.address, peer, address, nbytes)

    def acknowledge(self, peer: int, ack: Ack) -> bool:
        return mail_kernels.acknowledge.call(self.address, peer, *ack) == DONE

    def watch(self, peer: int, count: int) -> None:
        self._set(peer, words.WATCHED, count)

    def expect(self, peer: int, count: int) -> None:
        self._set(peer, words.EXPECTED, count)

    def note_owed(self, peer: int, count: int) -> None:
        self._set(peer, words.OWED, count)


def _is_local(connection: socket.socket) -> bool:
    """Whether both ends have the same address."""
    return bool(connection.getsockname()[0] == connection.getpeername()[0])
