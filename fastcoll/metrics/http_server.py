"""The server of one node's metrics: a thread that reads the ranks' records, and prometheus_client's HTTP server."""

from __future__ import annotations

import errno
import random
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, NamedTuple

from ..config import MetricsAddress
from ..errors import ResourceError, UnavailableError, install
from ..record.record import RING
from ..system.address import port_holder, resolve, shown
from ..system.handing import listen_for_files, receive_file
from ..system.processes import has_ended, status_of
from .reading import RecordReader
from .totals import Totals, waiting

if TYPE_CHECKING:
    from http.server import ThreadingHTTPServer

    from prometheus_client.core import Metric

_LONGEST_PAUSE = 0.1  # s between two readings, which are also the samples of waiting
_SHORTEST_PAUSE = 0.001
_SHARE_OF_A_CORE = 0.05
_CLIENT_SECONDS = 10.0  # for a client that sends no request
_FILL = 0.4  # the part of the ring that may be filled between two readings at the rate of the last ones


class _Process(NamedTuple):
    reader: RecordReader
    start_time: int  # of the process, in ticks after boot; -1: it ended before its record was taken


class MetricsServer:
    """Serves the metrics of the ranks of this node until it is closed.

    Args:
        find: returns newly found records, each as the pid of the process and the file; None: this process is a
            launcher, whose ranks hand over their records at the name `socket`.

    Attributes:
        socket: for the setting FASTCOLL_METRICS_SOCKET of the ranks.

    Raises:
        UnavailableError: prometheus_client is not installed.
        ResourceError: the port is taken or not allowed.
    """

    def __init__(self, at: MetricsAddress, find: Callable[[], list[tuple[int, int]]] | None = None) -> None:
        self.totals, self._find = Totals(), find
        self._lock = threading.Lock()
        self._processes: dict[int, _Process] = {}
        self._pause, self._is_closed = _LONGEST_PAUSE, False
        self._last_read = self._sampled = time.monotonic()
        with ExitStack() as undo:
            self._selector = undo.enter_context(selectors.DefaultSelector())
            self._waker, self._wakes = socket.socketpair()
            undo.callback(self._waker.close)
            undo.callback(self._wakes.close)
            self._selector.register(self._wakes, selectors.EVENT_READ)
            self._files, self.socket = listen_for_files()
            undo.callback(self._files.close)
            self._selector.register(self._files, selectors.EVENT_READ)
            self._http = undo.enter_context(http_server(at, self))
            self._selector.register(self._http, selectors.EVENT_READ)
            self._thread = threading.Thread(target=self._run, name="fastcoll-metrics", daemon=True)
            self._thread.start()
            self._undo = undo.pop_all()

    def __enter__(self) -> MetricsServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the port and end the threads. Calling it twice is fine."""
        if self._is_closed:
            return
        self._is_closed = True
        self._waker.send(b"\0")
        self._thread.join()
        for process in self._processes.values():
            process.reader.close()
        self._undo.close()

    def let_go(self) -> None:
        """Close the sockets in a child made by fork, which has none of the threads."""
        self._is_closed = True
        self._undo.close()

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics, for prometheus_client."""
        with self._lock:
            self._read()
            yield from list(self.totals.metrics(is_launcher=self._find is None))

    def restarted(self) -> None:
        """Count a joiner that replaces a failed rank, or a new generation of all ranks of this node."""
        with self._lock:
            self.totals.restarted()

    def failed(self, code: int) -> None:
        """Count a rank's process that has failed; its exit code, -n for signal n."""
        with self._lock:
            self.totals.failed(code)

    # ---- the thread ------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._is_closed:
            # The pauses have random lengths, so that the samples are not in step with the job.
            ready = self._selector.select(self._pause * random.uniform(0.5, 1.0))
            if any(key.fileobj is self._http for key, _ in ready):
                with suppress(OSError):  # the client has closed the connection
                    self._http.process_request(*self._http.get_request())  # in a thread of its own
            with self._lock:
                began = time.thread_time()
                self._read()
                now = time.monotonic()
                readers = [process.reader for process in self._processes.values()]
                before, after = ({reader.rank: reader.places() for reader in readers} for _ in range(2))
                for rank, group in waiting(before, after):
                    self.totals.waited(rank, group, now - self._sampled)
                self._sampled = now
                least = (time.thread_time() - began) / _SHARE_OF_A_CORE
            self._pause = min(max(self._pause, least, _SHORTEST_PAUSE), max(least, _LONGEST_PAUSE))

    def _read(self) -> None:
        """Take the records of new processes, and read what is new in all records."""
        found = [] if self._find is None else self._find()
        with suppress(BlockingIOError):
            while True:
                connection, _ = self._files.accept()
                with connection, suppress(OSError):
                    if (received := receive_file(connection)) is not None:
                        found.append((received[1], received[0]))
        for pid, fd in found:
            old = self._processes.pop(pid, None)
            if old is not None:  # the process has left all groups of the old record
                self.totals.add(old.reader.rank, old.reader.news())
                old.reader.close()
            self._processes[pid] = _Process(RecordReader(fd), _start_time(pid))
        now, most = time.monotonic(), 0
        for pid, process in list(self._processes.items()):
            # A process that ends now writes nothing after this check, so the reading is complete if it has ended.
            is_last = _start_time(pid) != process.start_time or process.start_time < 0
            news = process.reader.news()
            self.totals.add(process.reader.rank, news)
            most = max([most, *(sum(calls.number for calls in each.calls) for each in news)])
            if is_last:
                process.reader.close()
                del self._processes[pid]
        self.totals.ranks = len(self._processes)
        passed, self._last_read = now - self._last_read, now
        self._pause = _FILL * RING * passed / most if most else _LONGEST_PAUSE


def http_server(at: MetricsAddress, collector: MetricsServer) -> ThreadingHTTPServer:
    """Return prometheus_client's HTTP server, which listens at `at`."""
    from http.server import ThreadingHTTPServer

    try:
        from prometheus_client import CollectorRegistry, MetricsHandler
    except ImportError as error:
        raise UnavailableError(
            f"FASTCOLL_METRICS needs prometheus_client, which is not installed: {install('metrics')}"
        ) from error
    registry = CollectorRegistry(auto_describe=False)
    registry.register(collector)  # type: ignore[arg-type,unused-ignore]
    handler = type("Handler", (MetricsHandler.factory(registry),), {"timeout": _CLIENT_SECONDS})
    where = shown(*at)
    try:
        family, address = resolve(at.host, at.port)[0]
        server = type("Server", (ThreadingHTTPServer,), {"address_family": family})(address, handler)
    except OSError as error:
        text = f"FASTCOLL_METRICS={where}: no metrics can be served there: "
        if error.errno == errno.EADDRINUSE:
            holder = port_holder(at.port) or "a process that cannot be seen from here"
            raise ResourceError(f"{text}port {at.port} is in use by {holder}; choose another port") from error
        raise ResourceError(f"{text}{error.strerror or error}") from error
    server.socket.setblocking(False)
    return server  # type: ignore[no-any-return]


def _start_time(pid: int) -> int:
    """Return when a process started, in ticks after boot; -1: it has ended."""
    with suppress(OSError):
        status = status_of(pid)
        return -1 if has_ended(status) else int(status[19])
    return -1
