"""The thread that serves a TCP store: it moves bytes between the sockets and a StoreServer (store_protocol.py)."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import selectors
import socket
import time
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

from ..system.address import (
    CURE,
    inherit_listener,
    listen,
    name_of,
    place_of,
    probe,
    raise_limit,
    shown,
)
from .encryption import encrypt, encrypts
from .opening import Role
from .secret import is_users, warn_if_open
from .serving import SocketServer
from .store_protocol import StoreServer

logger = logging.getLogger("fastcoll")

_CHUNK = 64 << 10
# A client whose host is silent this long is probed. Clients probe the server sooner, because their calls wait for it.
_PROBE_AFTER_SECONDS = 30
_NOTHING = memoryview(b"")


@dataclass(slots=True)
class _Link:
    """A connection, and the bytes that are still to be sent on it.

    While there are such bytes (`is_behind`), the connection is polled for writing and not for reading.
    """

    socket: socket.socket
    host: str
    out: memoryview = _NOTHING
    is_behind: bool = False


class TCPServer(SocketServer):
    """A store's server on `host`:`port` (0: a free port), or on the listening socket with the descriptor `listening`.

    `share`: whether other TCPStores of this process can use this server, found by its host and port. `timeout`: as for
    StoreServer.
    """

    def __init__(
        self, host: str, port: int, secret: bytes, timeout: float, share: bool, listening: int | None
    ) -> None:
        listener = listen(host, port) if listening is None else inherit_listener(listening)
        bound: str
        bound, self.port = listener.getsockname()[:2]
        warn_if_open(f"{shown(bound, self.port)} (the store)")
        name = name_of(host, self.port) if is_users() else b""
        self._core = StoreServer(secret, timeout, name, encrypts())
        self._links: dict[int, _Link] = {}  # by descriptor
        # A spare descriptor, closed for a moment when no other is free, to accept a connection and refuse it.
        self._spare: int | None = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        self._has_refused = False
        super().__init__(f"fastcoll-store-{self.port}", [listener], (host, self.port) if share else None)

    def accepted(self, connection: socket.socket, host: str) -> None:
        connection.setblocking(False)
        probe(connection, _PROBE_AFTER_SECONDS)
        peer, place = connection.fileno(), partial(place_of, *connection.getsockname()[:2])
        self._links[peer] = _Link(connection, host)
        self.selector.register(connection, selectors.EVENT_READ, peer)
        self._core.connect(peer, time.monotonic(), place)
        self._carry_out()

    def serve(self, data: int, events: int) -> None:
        link = self._links.get(data)
        if link is None:
            return
        if events & selectors.EVENT_WRITE:
            self._flush(data, link)
            return
        try:
            received = link.socket.recv(_CHUNK)
        except BlockingIOError:
            return
        except OSError:
            received = b""
        if received:
            self._core.receive(data, received, time.monotonic())
        else:
            self._core.end(data)
        self._carry_out()

    def next_deadline(self) -> float | None:
        return self._core.next_deadline()

    def expire(self, now: float) -> None:
        self._core.expire(now)
        self._carry_out()

    def connections(self) -> Iterable[socket.socket]:
        return [link.socket for link in self._links.values()]

    def refuse(self, listening: socket.socket, error: OSError) -> None:
        """Handle an accept that failed because a resource is exhausted.

        If this process has no free descriptor, raise its limit. If the limit cannot be raised, drop a peer without a
        proof (StoreServer.give_way) and accept the new connection. If there is no such peer, close the new connection
        and log that the limit is too low. If another resource is exhausted, only log and pause.
        """
        if error.errno != errno.EMFILE:
            logger.warning(
                "the store cannot take more than %d connections: %s", len(self._links), error.strerror
            )
            self.pause()
            return
        self._close_spare()
        if not raise_limit(f"the store's {len(self._links)} connections and more"):
            # The accept may fail because no connection waits: EMFILE is reported before the kernel looks for one.
            with contextlib.suppress(OSError):
                connection, address = listening.accept()
                if self._core.give_way(time.monotonic()):
                    self.accepted(connection, str(address[0]))
                else:
                    self._turn_away(connection)
        with contextlib.suppress(OSError):
            self._spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)

    def _turn_away(self, connection: socket.socket) -> None:
        """Log that the limit of descriptors is too low, and close the connection."""
        with connection:
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
            # A close with unread bytes would send a reset, and the client might then not read the refusal.
            connection.recv(_CHUNK)

    def close_descriptors(self) -> None:
        super().close_descriptors()
        self._close_spare()

    def _carry_out(self) -> None:
        """Send the bytes, and close and encrypt the connections, that the StoreServer has listed."""
        outbox, self._core.outbox = self._core.outbox, []
        drops, self._core.drops = self._core.drops, []
        encrypting, self._core.encrypting = self._core.encrypting, []
        for peer, data in outbox:
            link = self._links.get(peer)
            if link is not None:
                link.out = memoryview(bytes(link.out) + data if link.out else data)
                self._flush(peer, link)
        for peer, reason in drops:
            if peer in self._links:
                self.blame(self._links[peer].host, reason and f"{reason} (the store, port {self.port})")
                self._close(peer)
        for peer, seed, received in encrypting:
            if (link := self._links.get(peer)) is None:
                continue
            refused = ""
            self.selector.unregister(link.socket)
            try:
                encrypt(link.socket, seed, Role.ANSWERS, received)
            except OSError as error:
                refused = f"its connection could not be encrypted: {error.strerror}"
            self.selector.register(link.socket, selectors.EVENT_READ, peer)
            if refused:
                self.blame(link.host, refused)
                self._close(peer)

    def _flush(self, peer: int, link: _Link) -> None:
        """Send without blocking. While bytes are left, poll only for writing: the peer must read its answer first."""
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
            self.selector.modify(link.socket, wanted, peer)

    def _close(self, peer: int) -> None:
        self._core.disconnect(peer)
        link = self._links.pop(peer)
        self.selector.unregister(link.socket)
        link.socket.close()

    def _close_spare(self) -> None:
        if self._spare is not None:
            os.close(self._spare)
            self._spare = None
