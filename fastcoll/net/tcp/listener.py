"""The sockets on which a process accepts connections of other ranks, and the thread that sees to their openings.

A connection that has proven that it belongs to a group is handed to that group; whatever else comes is dropped, and
each host that sends such is logged once. An opening holds 112 bytes and one descriptor for at most 10 s, and when 256
are under way the oldest gives way, so that idle connections keep nobody out.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice

from ... import config
from ...errors import ResourceError
from ...rendezvous.address import shown
from ...rendezvous.secret import warn_if_open
from .interfaces import Interface, family_of, tune
from .opening import Answering, Endpoint, Opening, OpeningError, Turned

logger = logging.getLogger("fastcoll")

OPENING_SECONDS = 10.0
MOST_OPENINGS = 256
_MOST_HOSTS = 256
_ACCEPTS_AT_ONCE = 64
_PAUSE_SECONDS = 0.2  # how long no connection is taken after the process ran out of descriptors
_OUT_OF_DESCRIPTORS = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)

Deliver = Callable[[Opening, socket.socket], None]
"""Takes a connection over, on the listener's thread; must not block."""


@dataclass
class _Pending:
    """A connection whose opening is under way."""

    socket: socket.socket
    host: str
    answering: Answering
    deadline: float


class Listener:
    """Listening sockets on some addresses of this machine, each on one of `ports`, or ResourceError."""

    def __init__(self, interfaces: Sequence[Interface]) -> None:
        self._sockets: list[socket.socket] = []
        self._endpoints: dict[tuple[bytes, int], tuple[Endpoint, Deliver]] = {}
        self._pending: dict[int, _Pending] = {}
        self._blamed: set[str] = set()
        self._paused_until = 0.0
        self._stopped = False
        try:
            self._sockets += map(_listen, interfaces)
        except BaseException:
            self._close_sockets()
            raise
        self.ports: list[int] = [each.getsockname()[1] for each in self._sockets]
        self._selector = selectors.DefaultSelector()
        self._wake_read, self._wake_write = socket.socketpair()
        self._selector.register(self._wake_read, selectors.EVENT_READ)
        self._listen_again()
        self._thread = threading.Thread(target=self._run, name="fastcoll-listener", daemon=True)
        self._thread.start()

    def join(self, endpoint: Endpoint, deliver: Deliver) -> None:
        """From now on hand connections for this group to `deliver`."""
        self._endpoints[endpoint.group, endpoint.rank] = (endpoint, deliver)

    def leave(self, endpoint: Endpoint) -> None:
        """Drop connections for this group from now on."""
        self._endpoints.pop((endpoint.group, endpoint.rank), None)

    def close(self) -> None:
        """Stop, and end the thread. Closing twice is fine."""
        self._stopped = True
        with contextlib.suppress(OSError):  # closed by the thread, or not open any more
            self._wake_write.send(b"x")
        if self._thread is not threading.current_thread():
            self._thread.join()
        self._wake_write.close()

    def close_inherited(self) -> None:
        """In a child of fork: close the copies of all descriptors. The parent's selector is left as it is."""
        self._close_sockets()
        self._wake_write.close()

    def _run(self) -> None:
        try:
            while not self._stopped:
                self._turn()
        finally:
            self._close_sockets()

    def _turn(self) -> None:
        due = [pending.deadline for pending in islice(self._pending.values(), 1)]  # the oldest one's
        due += [self._paused_until] if self._paused_until else []
        patience = max(min(due) - time.monotonic(), 0.0) if due else None
        for key, _ in self._selector.select(patience):
            if key.fileobj in self._sockets:
                self._accept(key.fileobj)
            elif key.fileobj is self._wake_read:
                self._wake_read.recv(16)
            elif key.fd in self._pending:
                self._serve(self._pending[key.fd])
        now = time.monotonic()
        for late in [pending for pending in self._pending.values() if pending.deadline <= now]:
            self._drop(late, f"did not open within {OPENING_SECONDS:g} s")
        if self._paused_until and self._paused_until <= now:
            self._listen_again()

    def _accept(self, listening: socket.socket) -> None:
        for _ in range(_ACCEPTS_AT_ONCE):
            try:
                connection, address = listening.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in _OUT_OF_DESCRIPTORS:
                    self._pause(error)
                return
            if len(self._pending) >= MOST_OPENINGS:
                self._drop(next(iter(self._pending.values())), f"one of more than {MOST_OPENINGS} openings")
            try:
                tune(connection)
            except OSError:  # it is gone already
                connection.close()
                continue
            deadline = time.monotonic() + OPENING_SECONDS
            pending = _Pending(connection, str(address[0]), Answering(self._endpoint), deadline)
            self._pending[connection.fileno()] = pending
            self._selector.register(connection, selectors.EVENT_READ)

    def _pause(self, error: OSError) -> None:
        logger.warning(
            "no more connections can be taken (%s); raise the limit with ulimit -n", error.strerror
        )
        for each in self._sockets:
            with contextlib.suppress(KeyError):  # paused a moment ago
                self._selector.unregister(each)
        self._paused_until = time.monotonic() + _PAUSE_SECONDS

    def _listen_again(self) -> None:
        self._paused_until = 0.0
        for each in self._sockets:
            self._selector.register(each, selectors.EVENT_READ)

    def _endpoint(self, group: bytes, rank: int) -> Endpoint | None:
        entry = self._endpoints.get((group, rank))
        return None if entry is None else entry[0]

    def _serve(self, pending: _Pending) -> None:
        """Take what has come. Never more is read than the opening still wants: the rest is the group's."""
        answering = pending.answering
        try:
            data = pending.socket.recv(answering.wants)
            if not data:
                raise OpeningError("closed before its opening was complete")
            _send(pending.socket, answering.take(data))
        except BlockingIOError:
            return
        except (OpeningError, OSError) as error:
            if isinstance(error, Turned):
                with contextlib.suppress(OSError):
                    _send(pending.socket, error.answer)
            self._drop(pending, str(error))
        else:
            if answering.theirs is not None and not answering.wants:
                self._hand_over(pending, answering.theirs)

    def _hand_over(self, pending: _Pending, theirs: Opening) -> None:
        entry = self._endpoints.get((theirs.group, theirs.peer))
        self._forget(pending)
        if entry is None:  # the group has gone meanwhile
            pending.socket.close()
            return
        try:
            entry[1](theirs, pending.socket)
        except Exception:  # what one group makes of it must not end the thread that serves all
            logger.exception("a connection from %s could not be taken over", pending.host)
            pending.socket.close()

    def _drop(self, pending: _Pending, reason: str) -> None:
        self._forget(pending)
        pending.socket.close()
        known = pending.host in self._blamed or len(self._blamed) >= _MOST_HOSTS
        if not known:
            self._blamed.add(pending.host)
        level = logging.DEBUG if known else logging.WARNING
        logger.log(level, "dropped a connection from %s: %s", pending.host, reason)

    def _forget(self, pending: _Pending) -> None:
        self._selector.unregister(pending.socket)
        del self._pending[pending.socket.fileno()]

    def _close_sockets(self) -> None:
        for pending in self._pending.values():
            pending.socket.close()
        self._pending.clear()
        for each in self._sockets:
            each.close()
        if hasattr(self, "_selector"):
            self._selector.close()
            self._wake_read.close()


def _send(connection: socket.socket, data: bytes) -> None:
    """An answer is far smaller than the buffer of a fresh connection, so it is sent whole or not at all."""
    if data and connection.send(data) < len(data):
        raise OpeningError("does not take the answer to its opening")


def _listen(interface: Interface) -> socket.socket:
    """A listening socket on one address, in FASTCOLL_PORT_RANGE."""
    ports: range = config.get("FASTCOLL_PORT_RANGE") or range(1)
    first = os.getpid() % len(ports)  # so that the ranks of a node do not all try the same one
    refused: OSError | None = None
    for port in (*ports[first:], *ports[:first]):
        try:
            listening = socket.create_server(
                (interface.address, port), family=family_of(interface.address), backlog=socket.SOMAXCONN
            )
        except OSError as error:
            refused = error
            if error.errno != errno.EADDRINUSE:
                break
        else:
            listening.setblocking(False)
            warn_if_open(interface.address, shown(interface.address, listening.getsockname()[1]))
            return listening
    assert refused is not None, "a range has a port"
    where = f"ports {ports[0]}-{ports[-1]} of {interface}" if ports[0] else str(interface)
    raise ResourceError(
        f"cannot listen on {where}: {os.strerror(refused.errno or 0)}; choose with FASTCOLL_SOCKET_IFNAME and "
        "FASTCOLL_PORT_RANGE"
    ) from refused


_lock = threading.Lock()
_listeners: dict[tuple[Interface, ...], tuple[Listener, int]] = {}


def acquire(interfaces: Sequence[Interface]) -> Listener:
    """This process's listener on these addresses, for as long as somebody has it."""
    key = tuple(interfaces)
    with _lock:
        listener, users = _listeners[key] if key in _listeners else (Listener(key), 0)
        _listeners[key] = (listener, users + 1)
        return listener


def release(listener: Listener) -> None:
    """End one use of a listener; the last one closes it."""
    with _lock:
        for key, (each, users) in list(_listeners.items()):
            if each is listener and users > 1:
                _listeners[key] = (each, users - 1)
                return
            if each is listener:
                del _listeners[key]
    listener.close()


def _drop_inherited() -> None:
    """In a child of fork, where the thread is not."""
    global _lock
    _lock = threading.Lock()
    for listener, _ in _listeners.values():
        listener.close_inherited()
    _listeners.clear()


os.register_at_fork(after_in_child=_drop_inherited)
