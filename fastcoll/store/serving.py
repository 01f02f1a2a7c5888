"""A thread that accepts connections and serves them: the common part of a store's server and the listener for ranks.

A forked child does not have this thread. The child closes its copies of the sockets, because clients would not notice
the parent's death while a copy is open.
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

# At most this many connections are accepted in a row. The number is large, because while the accept queue is full, the
# kernel drops new connections.
_ACCEPTS_AT_ONCE = 1024
_MOST_HOSTS = 256  # hosts whose dropped connections are remembered
_LISTED = 4  # hosts that an error text names
_PAUSE_SECONDS = 0.2  # how long no connection is accepted after the system ran out of a resource
_MOST_SECONDS_ASLEEP = 3600.0  # epoll takes at most 2**31 - 1 ms; deadlines may be years away
_END_SECONDS = 10.0  # how long `close` waits for the thread beyond `linger`
_OUT_OF_SOMETHING = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class SocketServer(ABC):
    """A server: listening sockets, which it owns, and a daemon thread `name`, which serves their connections.

    Of the methods below, other threads call only `close` and `close_inherited`.

    Attributes:
        key: the key by which `acquire` finds this server; None: `acquire` never finds it.
        selector: `accepted` registers each connection here, with the `data` that `serve` gets.
    """

    def __init__(self, name: str, sockets: Sequence[socket.socket], key: Hashable) -> None:
        self.key = key
        self.blamed: dict[str, str] = {}  # host -> why its first dropped connection was dropped
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
        """Take ownership of a connection, and register it with the selector."""

    @abstractmethod
    def serve(self, data: Any, events: int) -> None:
        """Handle a ready connection; an earlier event of the same poll may have closed it."""

    @abstractmethod
    def next_deadline(self) -> float | None:
        """Return when `expire` is next due, or None."""

    @abstractmethod
    def expire(self, now: float) -> None:
        """Handle the deadlines that have passed. Called after all events."""

    @abstractmethod
    def refuse(self, listening: socket.socket, error: OSError) -> None:
        """Handle an accept that failed because a resource is exhausted: log it, and `pause`."""

    @abstractmethod
    def connections(self) -> Iterable[socket.socket]:
        """Return the open connections."""

    def blame(self, host: str, reason: str) -> None:
        """Log why a connection was dropped, as a warning the first time for each host, else as a debug message.

        If `reason` is empty, do nothing.
        """
        known = host in self.blamed or len(self.blamed) >= _MOST_HOSTS
        if reason and not known:
            self.blamed[host] = reason
        if reason:
            level = logging.DEBUG if known else logging.WARNING
            logger.log(level, "dropped a connection from %s: %s", host, reason)

    def pause(self) -> None:
        """Accept no connection for 0.2 s."""
        for each in self._sockets:
            with contextlib.suppress(KeyError):  # already paused
                self.selector.unregister(each)
        self._paused_until = time.monotonic() + _PAUSE_SECONDS

    def close(self, linger: float = 0.0) -> None:
        """Stop when all clients have disconnected, at the latest after `linger` seconds. Closing twice is fine."""
        self._stop_at = time.monotonic() + linger
        with contextlib.suppress(OSError):  # the thread may have ended already
            self._wake_write.send(b"x")
        if self._thread is not threading.current_thread():
            # A garbage collection may call this in a thread that holds a lock that the server's thread needs, such as
            # that of a log handler. So the wait is bounded.
            self._thread.join(linger + _END_SECONDS)
        self._wake_write.close()

    def close_descriptors(self) -> None:
        """Close all descriptors except the socket by which `close` wakes the thread."""
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
        # On an overloaded machine this thread may run only after a deadline, although the peer's bytes arrived before
        # it. So events are handled first, and `expire` gets the time at which the poll began.
        asked = time.monotonic()
        left = None if due is None else min(max(due - asked, 0.0), _MOST_SECONDS_ASLEEP)
        for key, events in self.selector.select(left):
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

_lock = threading.RLock()  # a garbage collection inside it may release a server
_users: dict[SocketServer, int] = {}


def acquire(key: Hashable, make: Callable[[], T]) -> T:
    """Return this process's server with that key, or a new one; its last `release` closes it."""
    with _lock:
        found: Any = next((each for each in list(_users) if key is not None and each.key == key), None)
        server: T = found or make()
        _users[server] = _users.get(server, 0) + 1
        if server.key is None and key is not None:  # a garbage collection has closed it meanwhile
            del _users[server]
            return acquire(key, make)
        return server


def turned_away() -> str:
    """Return the hosts whose connections this process's servers have dropped, and why, for error messages."""
    blamed = [each for server in list(_users) for each in server.blamed.copy().items()]
    dropped = "; ".join(f"from {host}: {reason}" for host, reason in blamed[:_LISTED])
    return f" (turned away: {dropped})" if dropped else ""


def release(server: SocketServer, linger: float = 0.0) -> None:
    """End one use of a server; if it was the last use, close the server."""
    with _lock:
        _users[server] -= 1
        if _users[server] > 0:
            return
        server.key = None
    server.close(linger)
    _users.pop(server, None)


def _drop_inherited() -> None:
    """In a child of fork: replace the lock, which may be held, and close the copies of all sockets."""
    global _lock
    _lock = threading.RLock()
    for server in _users:
        server.close_inherited()
    _users.clear()


at_fork("servers", _drop_inherited)
