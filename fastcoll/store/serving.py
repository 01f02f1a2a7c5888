"""A thread that accepts connections and serves them: what a store's server and the listener for ranks have in common.

A child of fork has no such thread, so it closes its copies of all sockets: clients would not notice the parent's death
while a copy is open.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import selectors
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, TypeVar

from ..system.forks import at_fork

logger = logging.getLogger("fastcoll")

_ACCEPTS_AT_ONCE = 1024  # all that wait, if they can be: the kernel turns others away
_MOST_HOSTS = 256
_LISTED = 4
_PAUSE_SECONDS = 0.2  # how long no connection is taken after the system ran out of something
_OUT_OF_SOMETHING = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class SocketServer(ABC):
    """Listening sockets, which it owns, and the daemon thread `name`. Everything but `close` runs on that thread.

    Attributes:
        key: by what `acquire` finds it; None: by nothing.
        selector: where `accepted` registers connections, with the data that `serve` is called with.
    """

    def __init__(self, name: str, sockets: Sequence[socket.socket], key: Hashable) -> None:
        self.key = key
        self.blamed: dict[str, str] = {}  # by host, why its first connection was dropped
        self.selector = selectors.DefaultSelector()
        self._sockets = list(sockets)
        self._paused_until: float | None = None
        self._stop_at: float | None = None
        self._wake_read, self._wake_write = socket.socketpair()
        self._wake_read.setblocking(False)
        self.selector.register(self._wake_read, selectors.EVENT_READ)
        self._listen_again()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @abstractmethod
    def accepted(self, connection: socket.socket, host: str) -> None:
        """Take a connection over, and watch it."""

    @abstractmethod
    def serve(self, data: Any, events: int) -> None:
        """A connection is ready; another one's event may have closed it a moment ago."""

    @abstractmethod
    def next_deadline(self) -> float | None:
        """When `expire` is next due, or None."""

    @abstractmethod
    def expire(self, now: float) -> None:
        """Do what is due. Called after all events."""

    @abstractmethod
    def refuse(self, listening: socket.socket, error: OSError) -> None:
        """This process or the system is out of something, so that no connection can be taken. Say so, and `pause`."""

    @abstractmethod
    def connections(self) -> Iterable[socket.socket]:
        """Those that are open."""

    def blame(self, host: str, reason: str) -> None:
        """Say why a connection was dropped, loudly the first time that a host sends such; nothing without a reason."""
        known = host in self.blamed or len(self.blamed) >= _MOST_HOSTS
        if reason and not known:
            self.blamed[host] = reason
        if reason:
            level = logging.DEBUG if known else logging.WARNING
            logger.log(level, "dropped a connection from %s: %s", host, reason)

    def pause(self) -> None:
        """Take no connection for a moment."""
        for each in self._sockets:
            with contextlib.suppress(KeyError):  # paused a moment ago
                self.selector.unregister(each)
        self._paused_until = time.monotonic() + _PAUSE_SECONDS

    def close(self, linger: float = 0.0) -> None:
        """Stop, after at most `linger` seconds for clients to leave by themselves. Closing twice is fine."""
        self._stop_at = time.monotonic() + linger
        with contextlib.suppress(OSError):  # the thread may have seen it already, and ended
            self._wake_write.send(b"x")
        if self._thread is not threading.current_thread():
            self._thread.join()
        self._wake_write.close()

    def close_descriptors(self) -> None:
        """Close everything but the waking end."""
        for each in [*self.connections(), *self._sockets, self._wake_read]:
            each.close()
        self.selector.close()

    def close_inherited(self) -> None:
        """In a child of fork: close the copies of all descriptors."""
        self.close_descriptors()
        self._wake_write.close()

    def _run(self) -> None:
        try:
            while self._stop_at is None or (any(self.connections()) and time.monotonic() < self._stop_at):
                self._turn()
        finally:
            self.close_descriptors()

    def _turn(self) -> None:
        times = (self.next_deadline(), self._stop_at, self._paused_until)
        due = min((at for at in times if at is not None), default=None)
        # Nobody is late whose bytes have come: on a starved machine this thread may sleep past any deadline.
        asked = time.monotonic()
        for key, events in self.selector.select(None if due is None else max(due - time.monotonic(), 0.0)):
            if key.fileobj in self._sockets:
                self._accept(key.fileobj)
            elif key.fileobj is self._wake_read:
                with contextlib.suppress(BlockingIOError):
                    self._wake_read.recv(16)
            else:
                self.serve(key.data, events)
        self.expire(asked)
        if self._paused_until is not None and time.monotonic() >= self._paused_until:
            self._listen_again()

    def _accept(self, listening: socket.socket) -> None:
        for _ in range(_ACCEPTS_AT_ONCE):
            try:
                connection, address = listening.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in _OUT_OF_SOMETHING:
                    self.refuse(listening, error)
                return
            self.accepted(connection, str(address[0]))

    def _listen_again(self) -> None:
        self._paused_until = None
        for each in self._sockets:
            self.selector.register(each, selectors.EVENT_READ)


T = TypeVar("T", bound=SocketServer)

_lock = threading.Lock()
_users: dict[SocketServer, int] = {}


def acquire(key: Hashable, make: Callable[[], T]) -> T:
    """This process's server with that key, for as long as somebody has it; None: a new one."""
    with _lock:
        found: Any = next((each for each in _users if key is not None and each.key == key), None)
        server: T = found or make()
        _users[server] = _users.get(server, 0) + 1
        return server


def turned_away() -> str:
    """Whom this process's servers have turned away, and why, to stand behind who has not come; empty: nobody."""
    blamed = [each for server in list(_users) for each in server.blamed.copy().items()]
    told = "; ".join(f"from {host}: {reason}" for host, reason in blamed[:_LISTED])
    return f" (turned away: {told})" if told else ""


def release(server: SocketServer, linger: float = 0.0) -> None:
    """End one use of a server; the last one closes it."""
    with _lock:
        _users[server] -= 1
        if _users[server] > 0:
            return
        server.key = None
    server.close(linger)
    _users.pop(server, None)


def _drop_inherited() -> None:
    """In a child of fork, where the lock may be held."""
    global _lock
    _lock = threading.Lock()
    for server in _users:
        server.close_inherited()
    _users.clear()


at_fork("servers", _drop_inherited)
