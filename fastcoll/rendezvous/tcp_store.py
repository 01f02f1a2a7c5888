"""TCPStore: a store that one process serves and all reach over TCP."""

from __future__ import annotations

import os
import threading
from datetime import timedelta
from typing import Any

from ..core.arguments import whole
from ..errors import StoreError, StoreTimeoutError, UsageError
from .address import shown
from .secret import job_secret
from .store import DEFAULT_TIMEOUT
from .table import Request
from .table_store import TableStore
from .tcp_connection import LostError, TCPConnection, connect
from .tcp_server import release, serve
from .wire import Status

_ARRIVED, _ALL_HERE = "fastcoll/workers", "fastcoll/workers/all"


class TCPStore(TableStore):
    """The store served by the master on `host_name`:`port`.

    Thread safe: a call that blocks does not hold up another thread's, which takes a connection of its
    own. A lost server is never reconnected to: every call raises StoreError from then on. A forked
    child must open a store of its own.

    Args:
        host_name: name or address of the master's machine; the server listens there only.
        port: its port; 0 lets the master take a free one.
        world_size: how many processes open the store, the master included; None does not count.
        is_master: serve the store in this process.
        timeout: of blocking operations, and of getting connected.
        wait_for_workers: the master waits in here until `world_size` processes have come.
        multi_tenant: share the server of an earlier master on this port in this process.
        master_listen_fd: a listening socket for the master to serve at, which it closes in the end.
        use_libuv: of no effect, as is `libuvBackend`; torch has several servers.

    Raises:
        UsageError: an argument cannot be meant.
        ResourceError: the port is in use; the message names the holder where it can be seen.
        StoreTimeoutError: no server, or not all workers, within `timeout`.

    Example:
        >>> with TCPStore("localhost", 0, is_master=True) as store:
        ...     store.add("visits", 1)
        1
    """

    libuvBackend = False

    def __init__(
        self,
        host_name: str,
        port: int,
        world_size: int | None = None,
        is_master: bool = False,
        timeout: timedelta | float = DEFAULT_TIMEOUT,
        wait_for_workers: bool = True,
        multi_tenant: bool = False,
        master_listen_fd: int | None = None,
        use_libuv: bool = True,
    ) -> None:
        self._timeout = self._limit(timeout)
        port, world_size = _checked_arguments(host_name, port, world_size, is_master)
        self._secret = job_secret()
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._idle: list[TCPConnection] = []
        self._busy: set[TCPConnection] = set()
        self._server = (
            serve(host_name, port, self._secret, multi_tenant, master_listen_fd) if is_master else None
        )
        self.host = host_name
        self.port = port if self._server is None else self._server.port
        try:
            first = connect(_reachable(self.host), self.port, self._secret, self._timeout)
            self._instance = first.instance
            self.local_address = first.local_address
            self._idle.append(first)
            if world_size is not None and world_size > 0:
                self._count_workers(world_size, is_master and wait_for_workers)
        except BaseException:
            self.close()
            raise

    def close(self, linger: float = 0.0) -> None:
        """Disconnect; the master also stops serving. Calls under way on other threads fail.

        Args:
            linger: seconds the master waits, at most, for the other clients to leave first.
        """
        if self._pid != os.getpid():
            self._close_inherited()
            return
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
            for connection in self._busy:
                connection.interrupt()
        for connection in idle:
            connection.close()
        server, self._server = self._server, None
        if server is not None:
            release(server, linger)

    def leave(self, linger: float) -> None:
        self.close(linger)

    def clone(self) -> TCPStore:
        """A client more, never the master."""
        return TCPStore(_reachable(self.host), self.port, timeout=self._timeout)

    def _close_inherited(self) -> None:
        """In a forked child: close our copies and leave the parent's connections and server alone."""
        self._closed = True
        for connection in [*self._idle, *self._busy]:
            connection.close()

    def _ask(self, request: Request) -> list[bytes] | bytes:
        connection = self._borrow()
        try:
            status, fields = connection.ask(request)
        except BaseException as error:
            self._give_back(connection, usable=False)
            if self._closed and isinstance(error, LostError):
                raise StoreError("this TCPStore was closed while a call waited in it") from error
            raise
        self._give_back(connection, usable=True)
        if status is Status.TIMEOUT:
            return fields[0]
        if status is Status.REFUSED:
            raise StoreError(fields[0].decode())
        return fields

    def _borrow(self) -> TCPConnection:
        if self._pid != os.getpid():
            raise UsageError(
                f"this TCPStore belongs to process {self._pid} and came here by a fork; open a TCPStore of "
                f"its own in process {os.getpid()}, or start processes with the spawn method"
            )
        with self._lock:
            connection = self._idle.pop() if self._idle else None
            if connection is not None:
                self._busy.add(connection)
                return connection
        connection = self._another()
        with self._lock:
            if not self._closed:
                self._busy.add(connection)
                return connection
        connection.close()
        raise StoreError("this TCPStore was closed while a call was under way")

    def _another(self) -> TCPConnection:
        """One more connection to the same server."""
        try:
            connection = connect(_reachable(self.host), self.port, self._secret, timeout=0.0)
        except StoreTimeoutError as error:
            if isinstance(error.__cause__, ConnectionError):
                raise StoreError(self._lost()) from error
            raise
        if connection.instance != self._instance:
            connection.close()
            raise StoreError(self._lost())
        return connection

    def _give_back(self, connection: TCPConnection, usable: bool) -> None:
        with self._lock:
            self._busy.discard(connection)
            if usable and not self._closed:
                self._idle.append(connection)
                return
        connection.close()

    def _lost(self) -> str:
        return f"the process that holds the store at {shown(self.host, self.port)} (rank 0) is gone"

    def _count_workers(self, world_size: int, wait: bool) -> None:
        if self.add(_ARRIVED, 1) == world_size:
            self.set(_ALL_HERE, b"")
        if not wait:
            return
        try:
            self.wait([_ALL_HERE])
        except StoreTimeoutError as error:
            raise StoreTimeoutError(
                f"{self.add(_ARRIVED, 0)} of {world_size} processes opened the store at "
                f"{shown(self.host, self.port)} within {self._timeout:g} s"
            ) from error


def _checked_arguments(host: Any, port: Any, world_size: Any, is_master: bool) -> tuple[int, int | None]:
    """The port and the world size, as plain integers."""
    if not isinstance(host, str):
        raise UsageError(f"host_name is {host!r}, a {type(host).__name__}; give a name or an address as text")
    port = whole("port", port)
    world_size = None if world_size is None else whole("world_size", world_size)
    if not 0 <= port <= 65535:
        raise UsageError(f"a store's port is 0 to 65535, got {port}")
    if port == 0 and not is_master:
        raise UsageError("port 0 takes a free port and is for the master only; give the master's port")
    if world_size is not None and (world_size < -1 or world_size == 0):
        raise UsageError(f"world_size counts the processes that open the store, got {world_size}")
    return port, world_size


def _reachable(host: str) -> str:
    """Where to connect to for a server that listens on `host`: not on "all addresses"."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
