"""The control connections of one rank in a group: what its peers say of themselves, and whose connection broke.

Notices are sent without blocking and read whenever somebody looks; there is no thread. Every rank sends three notices
at the most, which the kernel's buffers always have room for.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import select
import socket
import threading
import time

from ...core.monitor import LEAVING
from .notice import NOTICE_SIZE, Notice, NoticeError
from .options import watch

logger = logging.getLogger("fastcoll")
_LOOK_AGAIN_SECONDS = 0.002
_NOTICES_AT_ONCE = 4


class Control:
    """Thread-safe; `look` from a signal handler in the middle of another finds what that one has found.

    Args:
        size: ranks of the group.

    Attributes:
        heard: group rank -> what came from it: the first notice, or the one after LEAVING.
        lost: group rank -> how its connection ended, for messages; no news when it has said why before.
        peers: group ranks that there is, or was, a connection with.
    """

    def __init__(self, size: int) -> None:
        self.heard: dict[int, Notice] = {}
        self.lost: dict[int, str] = {}
        self.peers: set[int] = set()
        self._size = size
        self._lock = threading.RLock()
        self._looking = False
        self._looked = 0.0
        self._links: dict[int, tuple[int, socket.socket, bytearray]] = {}
        self._poller = select.poll()
        self._said: list[bytes] = []

    def add(self, peer: int, connection: socket.socket) -> None:
        """Take over a connection with a peer; there may be several."""
        with self._lock:
            self.peers.add(peer)
            with contextlib.suppress(OSError):  # it broke already, which the next look finds out
                watch(connection)
            self._links[connection.fileno()] = (peer, connection, bytearray())
            self._poller.register(connection, select.POLLIN)
            for data in self._said:
                _send(connection, data)

    def say(self, notice: Notice) -> None:
        """Send a notice to all peers, and to those that connect later."""
        data = notice.to_bytes()
        with self._lock:
            self._said.append(data)
            for _, connection, _ in list(self._links.values()):
                _send(connection, data)

    def look(self, again: bool = False) -> None:
        """Take in what has come; not more often than every 2 ms unless `again`. Never blocks."""
        if not again and time.monotonic() - self._looked < _LOOK_AGAIN_SECONDS:
            return
        if not self._lock.acquire(blocking=False):
            return  # another thread is about it
        try:
            if not self._looking:
                self._looking = True
                try:
                    self._read()
                finally:
                    self._looking = False
        finally:
            self._lock.release()

    def close(self) -> None:
        """Close all connections, after reading what is there: unread data would turn the end into a reset."""
        with self._lock:
            self.look(again=True)
            for fd in list(self._links):
                self._unlink(fd)

    def close_inherited(self) -> None:
        """In a child of fork: close the copies of all connections, which stay open in the parent."""
        for _, connection, _ in list(self._links.values()):
            connection.close()

    def _read(self) -> None:
        # More than once, since a notice may come in pieces and has its connection's end behind it.
        for _ in range(_NOTICES_AT_ONCE):
            for fd, _ in self._poller.poll(0):
                if fd in self._links:
                    self._read_from(fd)
        self._looked = time.monotonic()

    def _read_from(self, fd: int) -> None:
        peer, connection, buffer = self._links[fd]
        try:
            data = connection.recv(NOTICE_SIZE - len(buffer))
            buffer += data
            if not data:
                self._lose(fd, peer, "it closed the connection")
            elif len(buffer) == NOTICE_SIZE:
                self._hear(peer, Notice.from_bytes(bytes(buffer), self._size))
                buffer.clear()
        except BlockingIOError:
            return
        except NoticeError as error:
            logger.warning("group rank %d sent what cannot be read: %s", peer, error)
            self._lose(fd, peer, str(error))
        except OSError as error:
            vanished = error.errno in (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH)
            self._lose(fd, peer, "its host cannot be reached" if vanished else str(error.strerror))

    def _hear(self, peer: int, notice: Notice) -> None:
        if peer not in self.heard or self.heard[peer].state == LEAVING:
            self.heard[peer] = notice

    def _lose(self, fd: int, peer: int, how: str) -> None:
        self._unlink(fd)
        self.lost.setdefault(peer, how)

    def _unlink(self, fd: int) -> None:
        _, connection, _ = self._links.pop(fd)
        self._poller.unregister(fd)
        connection.close()


def _send(connection: socket.socket, data: bytes) -> None:
    with contextlib.suppress(OSError):  # it broke, which the next look finds out
        connection.send(data)
