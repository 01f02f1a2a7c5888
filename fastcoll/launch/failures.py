"""How the launchers of a job without generations publish failures, so that the ranks of all nodes end.

In such a job, a failure does not restart all ranks; generations.py is for jobs that restart them.

Node 0's launcher serves a store on a separate port, and all launchers connect to the store with the job's secret. The
launcher whose rank fails first sets the key `failed`; the others read it and end their ranks. The unexpected end of a
launcher, for example by SIGKILL, is a failure as well. So each launcher except node 0's leaves a *will* with the store,
that is, the server sets `failed` if the launcher's connection is lost. If node 0's launcher dies, the store disappears
before `failed` is set; by this the others detect its death. A launcher that cannot connect to the store runs its ranks
without the store; after a failure on another node, these ranks end only when their groups fail.

Node 0's launcher serves the store until its ranks have ended. After a failure, it serves the store for up to 5 s more,
until the launchers of all nodes have read the failure; some launchers may still be starting.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Sequence
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
_CONNECT_SECONDS = 600.0  # how long the other launchers wait for node 0's launcher to start
_TRY_SECONDS = 2.0  # per attempt to connect; between attempts, the thread checks whether it must end
_FIRST_SECONDS = 2.0  # ranks start after this time even if their launcher has not connected
_LOOK_SECONDS = 5.0  # how long the server holds one request for `failed`, if it is not set
_LAST_SECONDS = 5.0  # how long an exiting launcher waits for its failure to reach the other launchers
_POLL_SECONDS = 0.05


@dataclass(frozen=True)
class Failure:
    """The failure of a rank or a launcher on any node.

    Attributes:
        code: the launchers' exit code; 0 if the ranks must end for another reason than a failure.
        text: the line that launchers log.
        leaves: whether the launcher that publishes the failure ends.
    """

    code: int
    text: str
    leaves: bool = False


def left(number: int) -> Failure:
    """Return the failure that this launcher publishes when signal `number` ends it."""
    how = describe_exit(-number)
    return Failure(128 + number, f"the launcher on host {os.uname().nodename} was ended: {how}", leaves=True)


def not_run(error: OSError) -> Failure:
    """Return the failure of a node whose ranks cannot be run: no memory for a process, or a log that cannot be made."""
    about = f": {error.filename}" if error.filename else ""
    return Failure(1, f"the ranks on {os.uname().nodename} cannot be run: {error.strerror or error}{about}")


def _text(failure: Failure) -> str:
    return json.dumps(asdict(failure))


class NodeFailures:
    """One launcher's connection to the store of failures.

    A thread connects to the store and waits for the first failure. The end of the `with` block disconnects.

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
        # Wait, because the other launchers do not notice the death of a launcher that has not connected yet.
        self._has_met.wait(_FIRST_SECONDS)
        return self

    def __exit__(self, kind: type[BaseException] | None = None, *_: object) -> None:
        end = time.monotonic() + _LAST_SECONDS
        if kind is not None:
            self.publish(self._end(f"was ended by {kind.__name__}"))
        if self._own is not None:
            self._thread.join(_LAST_SECONDS)  # the thread ends when it has read the failure or lost the store
        with self._lock:
            self._closed, store, self._store = True, self._store, None
        if store is not None and self._rank == 0:
            # Wait until all launchers have read the failure, including those that are starting.
            while self._first is not None and store.add(_READERS, 0) < self._count and time.monotonic() < end:
                time.sleep(_POLL_SECONDS)
            store.compare_set(_FAILED, "", _OVER)
        if store is not None:
            # On node 0, this first waits for the other launchers to disconnect.
            store.close(max(0.0, end - time.monotonic()))
        # With a limit, because the thread may still be resolving a host name.
        self._thread.join(_LAST_SECONDS)

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
        """Publish that a process of this node has failed, in a job that may go on without it. Never blocks.

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

    def end_joining(self, joiners: Sequence[str]) -> None:
        """Mark the job as ended unless one of these joiners is a rank by now, so that none waits. Never blocks."""

        def end() -> None:
            with contextlib.suppress(StoreError):  # the launcher ends at the same moment
                if (store := self._store) is not None and not Attempts(store).have_joined(joiners):
                    Attempts(store).end()

        threading.Thread(target=end, name="fastcoll-joining", daemon=True).start()

    def _open(self) -> None:
        """Serve the store or connect to it; then publish the failure of this node, if there was one meanwhile.

        Node 0's launcher serves the store. Each other launcher tries to connect for up to 600 s, or until it ends.
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
        with contextlib.suppress(StoreError):  # node 0's launcher has ended, so nobody can read it
            store.compare_set(_FAILED, "", _text(failure))

    def _follow(self) -> None:
        """Wait until a rank has failed, or until the launcher of node 0 or this launcher ends."""
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
            except ConnectionError:  # the store disappeared before `failed` was set
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
        """Return the failure for the case that this launcher ends before its ranks; `how` says how it ended."""
        where = f"node {self._rank} (pid {os.getpid()} on {os.uname().nodename})"
        return Failure(1, f"the launcher of {where} {how}")
