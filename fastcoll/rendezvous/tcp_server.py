"""The thread that serves a TCP store: it moves bytes between sockets and the StoreServer, no more."""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import os
import selectors
import socket
import threading
import time
from dataclasses import dataclass

from .address import CURE, adopt_listener, listen, raise_limit, shown
from .secret import warn_if_open
from .store_protocol import StoreServer

logger = logging.getLogger("fastcoll")

_CHUNK = 64 << 10
_ACCEPTS_AT_ONCE = 1024  # all that wait, if they can be: the kernel turns others away
_PAUSE_SECONDS = 0.2  # how long no connection is taken after the system ran out of something
_SYSTEM_IS_OUT = (errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_MORE_DESCRIPTORS = 1024
_NOTHING = memoryview(b"")


@dataclass(slots=True)
class _Link:
    """One connection: what is still to be sent, and whether it is watched for room to send instead of read."""

    socket: socket.socket
    address: str
    out: memoryview = _NOTHING
    is_behind: bool = False


class TCPServer:
    """A store's server on `host`:`port` (0: a free one) or at a socket, on a daemon thread of its own."""

    def __init__(self, host: str, port: int, secret: bytes, listening: int | None = None) -> None:
        self._listener = listen(host, port) if listening is None else adopt_listener(listening)
        bound: str
        bound, self.port = self._listener.getsockname()[:2]
        warn_if_open(bound, f"{shown(bound, self.port)} (the store)")
        self.shared_at: tuple[str, int] | None = None  # where those who share it look for it
        self._core = StoreServer(secret)
        self._links: dict[int, _Link] = {}
        self._next_peer = 0
        self._paused_until: float | None = None
        # Given up for a moment where there is no other, to take a connection and refuse it.
        self._spare: int | None = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        self._has_refused = False
        self._stop_at: float | None = None
        self._selector = selectors.DefaultSelector()
        self._wake_read, self._wake_write = socket.socketpair()
        self._wake_read.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ, None)
        self._selector.register(self._wake_read, selectors.EVENT_READ, None)
        self._thread = threading.Thread(target=self._run, name=f"fastcoll-store-{self.port}", daemon=True)
        self._thread.start()

    def close(self, linger: float = 0.0) -> None:
        """Stop serving, after at most `linger` seconds for clients to leave by themselves. Closing twice is fine."""
        self._stop_at = time.monotonic() + linger
        with contextlib.suppress(OSError):  # the thread may have seen it already, and ended
            self._wake_write.send(b"x")
        self._thread.join()
        self._wake_write.close()

    def close_inherited(self) -> None:
        """In a child of fork: close the copies of all descriptors."""
        self._close_descriptors()
        self._wake_write.close()

    def _run(self) -> None:
        try:
            while self._stop_at is None or (self._links and time.monotonic() < self._stop_at):
                self._turn()
        finally:
            self._close_descriptors()

    def _turn(self) -> None:
        times = (self._core.next_deadline(), self._stop_at, self._paused_until)
        due = min((at for at in times if at is not None), default=None)
        for key, events in self._selector.select(None if due is None else max(due - time.monotonic(), 0.0)):
            if key.fileobj is self._listener:
                self._accept()
            elif key.fileobj is self._wake_read:
                with contextlib.suppress(BlockingIOError):
                    self._wake_read.recv(16)
            else:
                self._serve(key.data, events)
            self._carry_out()
        self._core.expire(time.monotonic())
        self._carry_out()
        if self._paused_until is not None and time.monotonic() >= self._paused_until:
            self._paused_until = None
            self._selector.register(self._listener, selectors.EVENT_READ, None)

    def _accept(self) -> None:
        for _ in range(_ACCEPTS_AT_ONCE):
            try:
                connection, address = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno == errno.EMFILE:
                    self._make_room_or_refuse()
                elif error.errno in _SYSTEM_IS_OUT:
                    logger.warning(
                        "the store cannot take more than %d connections: %s", len(self._links), error.strerror
                    )
                    self._selector.unregister(self._listener)
                    self._paused_until = time.monotonic() + _PAUSE_SECONDS
                return
            connection.setblocking(False)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            peer, self._next_peer = self._next_peer, self._next_peer + 1
            self._links[peer] = _Link(connection, str(address))
            self._selector.register(connection, selectors.EVENT_READ, peer)
            self._core.connect(peer, time.monotonic())

    def _make_room_or_refuse(self) -> None:
        """This process has no descriptor left: raise its limit, or tell whoever comes that it is too low."""
        if self._spare is not None:
            os.close(self._spare)
            self._spare = None
        if not raise_limit(_MORE_DESCRIPTORS, f"the store's {len(self._links)} connections and more"):
            with contextlib.suppress(OSError), self._listener.accept()[0] as connection:
                if not self._has_refused:
                    self._has_refused = True
                    logger.warning(
                        "the store takes no more than %d connections: this process has reached its limit of file "
                        "descriptors; %s",
                        len(self._links),
                        CURE,
                    )
                connection.setblocking(False)
                connection.send(self._core.refusal())
                connection.shutdown(socket.SHUT_WR)
                connection.recv(_CHUNK)  # a close with unread bytes is a reset
        with contextlib.suppress(OSError):
            self._spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)

    def _serve(self, peer: int, events: int) -> None:
        link = self._links.get(peer)
        if link is None:
            return
        if events & selectors.EVENT_WRITE:
            self._flush(peer, link)
            return
        try:
            data = link.socket.recv(_CHUNK)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if data:
            self._core.receive(peer, data, time.monotonic())
        else:
            self._close(peer)

    def _carry_out(self) -> None:
        """Send and close what the core decided."""
        outbox, self._core.outbox = self._core.outbox, []
        drops, self._core.drops = self._core.drops, []
        for peer, data in outbox:
            link = self._links.get(peer)
            if link is not None:
                link.out = memoryview(bytes(link.out) + data if link.out else data)
                self._flush(peer, link)
        for peer, reason in drops:
            if peer in self._links:
                logger.debug("store on port %d: dropped %s: %s", self.port, self._links[peer].address, reason)
                self._close(peer)

    def _flush(self, peer: int, link: _Link) -> None:
        """Send what can be sent. While some is left the peer is not read: it must take its answer first."""
        try:
            while link.out:
                link.out = link.out[link.socket.send(link.out) :] or _NOTHING
        except BlockingIOError:
            pass
        except OSError:
            self._close(peer)
            return
        if link.is_behind != bool(link.out):
            link.is_behind = bool(link.out)
            wanted = selectors.EVENT_WRITE if link.is_behind else selectors.EVENT_READ
            self._selector.modify(link.socket, wanted, peer)

    def _close(self, peer: int) -> None:
        self._core.disconnect(peer)
        link = self._links.pop(peer)
        self._selector.unregister(link.socket)
        link.socket.close()

    def _close_descriptors(self) -> None:
        for link in self._links.values():
            link.socket.close()
        self._listener.close()
        if self._spare is not None:
            os.close(self._spare)
            self._spare = None
        self._selector.close()
        self._wake_read.close()


_lock = threading.Lock()
_uses: dict[TCPServer, int] = {}


def serve(host: str, port: int, secret: bytes, share: bool, listening: int | None) -> TCPServer:
    """A new server, or with `share` this process's earlier one on that port; `release` ends the use."""
    _watch_forks()
    with _lock:
        shared = (each for each in _uses if share and each.shared_at == (host, port))
        server = next(shared, None) or TCPServer(host, port, secret, listening)
        if share:
            server.shared_at = host, server.port
        _uses[server] = _uses.get(server, 0) + 1
        return server


def release(server: TCPServer, linger: float) -> None:
    """End one use of a server; the last one closes it."""
    with _lock:
        _uses[server] -= 1
        if _uses[server] > 0:
            return
        server.shared_at = None
    server.close(linger)
    _uses.pop(server, None)


@functools.cache
def _watch_forks() -> None:
    """Start anew in children of fork, where the lock may be held. Once a process."""
    os.register_at_fork(after_in_child=_drop_inherited)


def _drop_inherited() -> None:
    """Close a forked child's copies of the sockets: no thread serves them there, and clients would not notice the
    parent's death while a copy is open."""
    global _lock
    _lock = threading.Lock()
    for server in _uses:
        server.close_inherited()
    _uses.clear()
