"""How the launchers of a job without generations publish failures, so that the ranks of all nodes end.

In a job without generations, failed ranks do not make the launchers start all ranks again (generations.py does that).
Node 0's launcher serves a store on a separate port, and all launchers connect to it with the job's secret. The first
failure is set there under the key `failed`. The unexpected end of a launcher, as by SIGKILL, is a failure as well: each
launcher except node 0's leaves a will with the store, which is a value that the server sets when the launcher's
connection is lost. If the store disappears before the end of the job is set in it, node 0's launcher is lost. A
launcher that cannot reach the store goes on without it; its ranks then end only when their groups fail.

Node 0 serves the store until its ranks have ended. After a failure, it goes on for up to 5 s until the launchers of all
nodes have read the failure, including launchers that start a little later.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from .. import failpoints
from ..errors import FastcollError, StoreError, StoreTimeoutError
from ..rendezvous.attempts import Attempts, Loss, Standing
from .lifeline import describe_exit

if TYPE_CHECKING:
    from ..store import TCPStore

_FAILED, _READERS = "failed", "readers"
_OVER = "null"  # the value of `failed` after node 0's ranks have ended without a failure
_GONE = "ended unexpectedly, or is unreachable"
_CONNECT_SECONDS = 600.0  # for node 0's launcher to start
_TRY_SECONDS = 2.0  # per attempt to connect, and so the longest delay before the thread sees that it must end
_FIRST_SECONDS = 2.0  # ranks start after this time even if their launcher has not connected
_LOOK_SECONDS = 5.0  # how long the server holds one request for `failed`, if it is not set
_LAST_SECONDS = 5.0  # for a failure to reach the other launchers while this one exits
_POLL_SECONDS = 0.05


@dataclass(frozen=True)
class Failure:
    """The failure of a rank or a launcher on any node.

    Attributes:
        code: the launchers' exit code; 0 if the ranks must end for another reason than a failure.
        text: the line that launchers log.
        leaves: whether the launcher itself ends.
    """

    code: int
    text: str
    leaves: bool = False


def left(number: int) -> Failure:
    """Return what this launcher publishes when a signal ends it."""
    how = describe_exit(-number)
    return Failure(128 + number, f"the launcher on host {os.uname().nodename} was ended: {how}", leaves=True)


def _text(failure: Failure) -> str:
    return json.dumps(asdict(failure))


class NodeFailures:
    """One launcher's connection to the store of failures.

    A thread connects and waits for the first failure. As a context manager it disconnects at the end.

    Args:
        count: the number of nodes.
        address, port: where node 0's launcher serves the store.
    """

    def __init__(self, count: int, node_rank: int, address: str, port: int) -> None:
        self._count, self._rank, self._address, self._port = count, node_rank, address, port
        self._lock = threading.Lock()
        self._store: TCPStore | None = None
        self._own: Failure | None = None
        self._first: Failure | None = None
        self._closed = False
        self._has_met = threading.Event()  # set when this launcher has connected, or has given up
        self._thread = threading.Thread(target=self._follow, name="fastcoll-nodes", daemon=True)

    def __enter__(self) -> NodeFailures:
        # Node 0 listens before its ranks start, so that no process of the job takes the port.
        if self._rank == 0:
            self._open()
        self._thread.start()
        self._has_met.wait(_FIRST_SECONDS)  # no launcher notices if this one dies before it has connected
        return self

    def __exit__(self, kind: type[BaseException] | None = None, *_: object) -> None:
        end = time.monotonic() + _LAST_SECONDS
        if kind is not None:
            self.publish(self._end(f"was ended by {kind.__name__}"))
        if self._own is not None:
            self._thread.join(_LAST_SECONDS)  # the thread ends when it has read the failure, or cannot
        with self._lock:
            self._closed, store, self._store = True, self._store, None
        if store is not None and self._rank == 0:
            # Wait until all launchers have read the failure, including those that are starting.
            while self._first is not None and store.add(_READERS, 0) < self._count and time.monotonic() < end:
                time.sleep(_POLL_SECONDS)
            store.compare_set(_FAILED, "", _OVER)
        if store is not None:
            # Node 0's server waits for the others to disconnect.
            store.close(max(0.0, end - time.monotonic()))
        self._thread.join(_LAST_SECONDS)  # the thread may still be resolving a host name

    @property
    def address(self) -> str:
        """HOST:PORT of the store; empty if node 0's launcher could not serve it."""
        from ..system.address import shown

        if self._rank != 0:
            return shown(self._address, self._port)
        return "" if self._store is None else shown(self._address, self._store.port)

    def failure(self) -> Failure | None:
        """Return the first failure that a launcher of the job has published, or None. Never blocks."""
        return self._first

    def publish(self, failure: Failure) -> None:
        """Publish a failure of this node; only the first failure of the job is kept. Never blocks."""
        with self._lock:
            self._own, store = self._own or failure, self._store
        if store is not None:  # on a thread, because node 0 may be unreachable by now
            threading.Thread(target=self._write, args=(store, failure), daemon=True).start()

    def report(self, loss: Loss) -> Future[Standing | None]:
        """Publish that an elastic job has lost a process of this node. Never blocks.

        The future's result is the job's state after the loss; None if the store cannot be reached.
        """
        answer = Future[Standing | None]()

        def ask() -> None:
            standing, store = None, self._store
            try:
                with contextlib.suppress(StoreError):
                    standing = None if store is None else Attempts(store).report(loss)
            finally:
                answer.set_result(standing)

        threading.Thread(target=ask, name="fastcoll-loss", daemon=True).start()
        return answer

    def _open(self) -> None:
        """Serve the store or connect to it, then publish what has failed here meanwhile.

        Node 0's launcher serves it. The others try to connect until they end, but for at most 600 s.
        """
        # Imported here, because it imports sockets and jobs of one node need none.
        from ..store import TCPStore

        end, store = time.monotonic() + _CONNECT_SECONDS, None
        while store is None and not self._closed:
            try:
                store = TCPStore(self._address, self._port, is_master=self._rank == 0, timeout=_TRY_SECONDS)
            except FastcollError as error:
                is_late = isinstance(error, StoreTimeoutError)
                if is_late and time.monotonic() <= end:
                    continue
                sys.stderr.write(
                    "fastcoll.launch: the nodes' launchers cannot meet, so a failure elsewhere does not end the ranks "
                    f"here at once: {f'gave up after {_CONNECT_SECONDS:g} s: ' if is_late else ''}{error}\n"
                )
                return
        with self._lock:
            closed, own = self._closed, self._own
            self._store = None if closed else store
        if store is not None and closed:
            store.close()
        elif store is not None and own is not None:
            self._write(store, own)

    def _write(self, store: TCPStore, failure: Failure) -> None:
        with contextlib.suppress(StoreError):  # node 0 has ended, so no launcher can read it
            store.compare_set(_FAILED, "", _text(failure))

    def _follow(self) -> None:
        """Wait for the first failure, or until node 0's launcher or this one ends."""
        if self._rank != 0:
            self._open()
        with contextlib.ExitStack() as leaving:
            leaving.callback(self._has_met.set)
            if (store := self._store) is None:
                return
            try:
                if self._rank != 0:
                    leaving.callback(store.close)  # node 0's server waits for this launcher to disconnect
                    failpoints.reach("launch.before_will")
                    leaving.callback(store.bequeath(_FAILED, _text(self._end(_GONE))))
                self._has_met.set()
                store.add(_READERS, 1)
                self._first = self._await_failure(store)
            except ConnectionError:  # the store disappeared before the end of the job was set
                self._first = Failure(1, f"the launcher of node 0 ({self._address}) {_GONE}")
            except (StoreError, ValueError, TypeError):
                pass  # the store was closed, or the value is not a failure

    def _await_failure(self, store: TCPStore) -> Failure | None:
        """Return the first failure, or None when the job ends without one."""
        while not self._closed:
            with contextlib.suppress(StoreTimeoutError):
                fields = json.loads(store.fetch([_FAILED], _LOOK_SECONDS)[0])
                return fields and Failure(**fields)
        return None

    def _end(self, how: str) -> Failure:
        """Return the failure to publish if this launcher ends before its ranks."""
        where = f"node {self._rank} (pid {os.getpid()} on {os.uname().nodename})"
        return Failure(1, f"the launcher of {where} {how}")
