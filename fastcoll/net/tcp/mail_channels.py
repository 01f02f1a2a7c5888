"""Connections as channels for messages: each rank dials one to each peer that it sends to, at its first message."""

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

from ...core.monitor import Vigil
from ...core.status import DONE
from ...errors import AbortedError, GroupError, PeerDiedError
from ...kernels import waiting
from ...kernels.primitives import address_of
from ...kernels.sockets import CLOSED
from ...p2p.channels import Ack, Channels, Header
from ...p2p.transfers import Send
from . import mail_answers, mail_kernels
from . import mail_words as words
from .mail_frames import ACKS, BUFFER, FRAME, GARBLED
from .mail_sweep import EVENTS

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


class MailChannels(Channels):
    """The state of all connections for messages that begin or end at one rank.

    Args:
        mesh: the group's.
        vigil: the group's.
        spin: ns that a waiting thread tries again before it sleeps.

    Attributes:
        spin: that.
        address: what the kernels take as `m`.
        table: the mail's words.
        rows: the peers' words.
    """

    def __init__(self, mesh: Mesh, vigil: Vigil, spin: int) -> None:
        self.size = size = len(vigil.members)
        self.spin = spin
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
        self.table = self._make_table(spin)
        self.address = address_of(self.table)
        mesh.on_mail(self._accepted)

    def _make_table(self, spin: int) -> NDArray[np.int64]:
        table = np.zeros(words.MAIL_WORDS, np.int64)
        table[waiting.BUDGET] = _BUDGET
        table[words.BELL_FD] = self._bell
        table[words.CHANNELS] = address_of(self.rows)
        table[words.SIZE], table[words.RANK] = self.size, self._mesh.rank
        table[words.SPIN] = spin
        table[words.POLLFDS], table[words.OWNERS] = map(address_of, self._pollfds)
        return table

    def hurry(self, hurried: bool) -> None:
        """Whether whoever drives the connections comes back as soon as nothing is ready; set by who has them."""
        self.table[words.SPIN] = 0 if hurried else self.spin
        self.table[waiting.BUDGET] = 0 if hurried else _BUDGET

    def word(self, peer: int, index: int) -> int:
        """A word of the row of `peer`."""
        return int(self.rows[peer, index])

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
        for rank in range(self.size) if peer is None else (peer,):
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
        """Use no connection any more; the mesh closes them."""
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

    def has_rung(self) -> bool:
        """Whether the bell waits for an answer."""
        return bool(self.table[words.BELL] != 0)

    def silence_bell(self) -> None:
        if self.has_rung():
            self.table[words.BELL] = 0
            with suppress(BlockingIOError):
                os.eventfd_read(self._bell)

    def set_behind(self, behind: bool) -> None:
        self.table[words.BEHIND] = behind

    def seize(self) -> bool:
        if waiting.seize.call(self.address + 8 * words.BUSY) != DONE:
            return False
        if self.table[words.DEFERRED] and mail_answers.flush.call(self.address) != DONE:
            self.let_go()
            return False
        return True

    def let_go(self) -> None:
        self.table[words.BUSY] = 0

    def is_mine(self) -> bool:
        return int(self.table[words.BUSY]) == threading.get_ident()

    # ---- a blocking call -------------------------------------------------------------------------

    def send(self, array: NDArray[Any], peer: int, kind: int, resumed: bool) -> int:
        return mail_kernels.send.call(self._handle(resumed), peer, array, array.nbytes, kind)

    def receive(self, array: NDArray[Any], source: int, kind: int, resumed: bool) -> int:
        return mail_kernels.receive.call(self._handle(resumed), source, array, array.nbytes, kind)

    def _handle(self, resumed: bool) -> int:
        return self.address | (mail_kernels.RESUMED if resumed else mail_kernels.ORDERED)

    def adopt_send(self, send: Send) -> bool:
        self.rows[send.peer, words.SENDING] = 0
        return self.word(send.peer, words.OUT_POSITION) < self.word(send.peer, words.OUT_END)

    def adopt_receive(self, peer: int | None) -> int | None:
        source = int(self.table[words.SOURCE]) - 1 if peer is None else peer
        self.table[words.SOURCE] = 0
        return source if source >= 0 and self.word(source, words.IN_STAGE) != words.IDLE else None

    def take_stage(self, peer: int) -> int:
        """How far an adopted receive is, as IN_STAGE says; from here on the courier sets it."""
        stage = self.word(peer, words.IN_STAGE)
        arriving = stage in (words.ARRIVING, words.REST_ARRIVING)
        self.rows[peer, words.IN_STAGE] = words.ARRIVING if arriving else words.IDLE
        return stage

    def take_asking(self, peer: int) -> bool:
        """Whether an adopted receive still has to say GO; from here on the courier does."""
        asking = self.word(peer, words.ASKING) != 0
        self.rows[peer, words.ASKING] = 0
        return asking

    # ---- the courier's steps ---------------------------------------------------------------------

    def advance(self) -> tuple[int, int] | None:
        event = mail_kernels.advance.call(self.address)
        return None if event < 0 else (event % EVENTS, event // EVENTS)

    def begin(self, send: Send, attached: int) -> None:
        mail_kernels.begin.call(self.address, send.peer, send.address, send.nbytes, send.kind, attached)

    def begin_rest(self, send: Send, number: int, attached: int) -> None:
        """Make all but the first `attached` bytes of a message what enters."""
        mail_kernels.rest.call(self.address, send.peer, send.address, send.nbytes, number, attached)

    def last_sent(self, peer: int) -> int:
        return self.word(peer, words.SENT)

    def last_ack(self, peer: int) -> Ack:
        row = self.rows[peer, words.ACK_NUMBER : words.ACK_KIND + 1]
        number, verdict, nbytes, kind = map(int, row)
        return Ack(number, verdict, nbytes, kind)

    def header(self, peer: int) -> Header:
        row = self.rows[peer, words.IN_NUMBER : words.IN_ATTACHED + 1]
        number, kind, nbytes, attached = map(int, row)
        return Header(kind, nbytes, number, attached)

    def rest(self, peer: int) -> tuple[int, int]:
        """Number and bytes of the rest whose header was read last."""
        return self.word(peer, words.REST_NUMBER), self.word(peer, words.REST_NBYTES)

    def accept(self, peer: int, address: int, nbytes: int, keep: object) -> None:
        mail_kernels.accept.call(self.address, peer, address, nbytes)

    def acknowledge(self, peer: int, ack: Ack) -> bool:
        return mail_kernels.acknowledge.call(self.address, peer, *ack) == DONE

    def watch(self, interest: NDArray[Any]) -> None:
        self.rows[:, words.WATCHED] = interest

    def expect(self, peer: int, count: int) -> None:
        """How many rests of a peer's messages have been asked for."""
        self.rows[peer, words.EXPECTED] = count

    def note_unacked(self, peer: int, count: int) -> None:
        self.rows[peer, words.UNACKED] = count

    def note_owed(self, peer: int, count: int) -> None:
        self.rows[peer, words.OWED] = count


def _is_local(connection: socket.socket) -> bool:
    """Whether both ends have the same address."""
    return bool(connection.getsockname()[0] == connection.getpeername()[0])
