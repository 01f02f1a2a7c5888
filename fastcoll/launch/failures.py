"""How the launchers of a job's nodes publish that a rank has failed, so that all of them end."""

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
_OVER = "null"  # in the place of a failure: node 0's ranks have ended well
_GONE = "ended unexpectedly, or is unreachable"
_CONNECT_SECONDS = 600.0  # for node 0's launcher to be started
_TRY_SECONDS = 2.0  # of them at a time: so long goes a thread on that is to end
_FIRST_SECONDS = 2.0  # that ranks wait for their launcher to meet the others
_LOOK_SECONDS = 5.0  # a wait for the key; the server answers at its end
_LAST_SECONDS = 5.0  # for a failure to reach the others, as this launcher ends
_POLL_SECONDS = 0.05


@dataclass(frozen=True)
class Failure:
    """A rank's failure or a launcher's, on any node: the launchers' exit code, and what to say of it.

    0 stands for a reason to end ranks that is no failure. `leaves`: the launcher itself ends.
    """

    code: int
    text: str
    leaves: bool = False


def left(number: int) -> Failure:
    """What the others are to know of this launcher, which a signal ends."""
    how = describe_exit(-number)
    return Failure(128 + number, f"the launcher on host {os.uname().nodename} was ended: {how}", leaves=True)


def _text(failure: Failure) -> str:
    return json.dumps(asdict(failure))


class NodeFailures:
    """This node's part, of so many; a thread connects and waits for news. A context manager: leaves the others."""

    def __init__(self, count: int, node_rank: int, address: str, port: int) -> None:
        self._count, self._rank, self._address, self._port = count, node_rank, address, port
        self._lock = threading.Lock()
        self._store: TCPStore | None = None
        self._own: Failure | None = None
        self._first: Failure | None = None
        self._closed = False
        self._has_met = threading.Event()  # or cannot
        self._thread = threading.Thread(target=self._follow, name="fastcoll-nodes", daemon=True)

    def __enter__(self) -> NodeFailures:
        # Node 0 listens before its ranks start, so that nothing of the job takes the port.
        if self._rank == 0:
            self._open()
        self._thread.start()
        self._has_met.wait(_FIRST_SECONDS)  # a death before that is seen by nobody
        return self

    def __exit__(self, kind: type[BaseException] | None = None, *_: object) -> None:
        end = time.monotonic() + _LAST_SECONDS
        if kind is not None:
            self.publish(self._end(f"was ended by {kind.__name__}"))
        if self._own is not None:
            self._thread.join(_LAST_SECONDS)  # it ends when it has read what was told, or cannot
        with self._lock:
            self._closed, store, self._store = True, self._store, None
        if store is not None and self._rank == 0:
            # Until all know of a failure, also those that are being started.
            while self._first is not None and store.add(_READERS, 0) < self._count and time.monotonic() < end:
                time.sleep(_POLL_SECONDS)
            store.compare_set(_FAILED, "", _OVER)
        if store is not None:
            store.close(max(0.0, end - time.monotonic()))  # node 0's is left by all others first
        self._thread.join(_LAST_SECONDS)  # a name that is looked up may take longer

    @property
    def address(self) -> str:
        """HOST:PORT of the store; empty where node 0's launcher could not make it."""
        from ..system.address import shown

        if self._rank != 0:
            return shown(self._address, self._port)
        return "" if self._store is None else shown(self._address, self._store.port)

    def failure(self) -> Failure | None:
        """The first failure of any node that has told of one. Never blocks."""
        return self._first

    def publish(self, failure: Failure) -> None:
        """Let the others know of a failure here, unless one was told before. Never blocks."""
        with self._lock:
            self._own, store = self._own or failure, self._store
        if store is not None:  # on a thread, as node 0 may be out of reach by now
            threading.Thread(target=self._write, args=(store, failure), daemon=True).start()

    def report(self, loss: Loss) -> Future[Standing | None]:
        """Publish a loss on this node to all processes of an elastic job. Never blocks.

        The result is the job's state at that time; None if the store cannot be reached.
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
        """Reach the store, once node 0 serves it, unless this launcher ends before."""
        from ..store import TCPStore  # sockets and all that, for jobs of one node in vain

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
        with contextlib.suppress(StoreError):  # node 0 has ended, and cannot tell the others any more
            store.compare_set(_FAILED, "", _text(failure))

    def _follow(self) -> None:
        """Wait for the first failure; ends with it, or when node 0's launcher or this one ends."""
        if self._rank != 0:
            self._open()
        with contextlib.ExitStack() as leaving:
            leaving.callback(self._has_met.set)
            if (store := self._store) is None:
                return
            try:
                if self._rank != 0:
                    leaving.callback(store.close)  # node 0's waits for that
                    failpoints.reach("launch.before_will")
                    leaving.callback(store.bequeath(_FAILED, _text(self._end(_GONE))))
                self._has_met.set()
                store.add(_READERS, 1)
                self._first = self._await_failure(store)
            except ConnectionError:  # the store is gone, and did not say that the job is over
                self._first = Failure(1, f"the launcher of node 0 ({self._address}) {_GONE}")
            except (StoreError, ValueError, TypeError):
                pass  # it was closed, or holds something else

    def _await_failure(self, store: TCPStore) -> Failure | None:
        """The first failure, or None when the job is over without one."""
        while not self._closed:
            with contextlib.suppress(StoreTimeoutError):
                fields = json.loads(store.fetch([_FAILED], _LOOK_SECONDS)[0])
                return fields and Failure(**fields)
        return None

    def _end(self, how: str) -> Failure:
        """What the others are to know if this launcher ends before its ranks have."""
        where = f"node {self._rank} (pid {os.getpid()} on {os.uname().nodename})"
        return Failure(1, f"the launcher of {where} {how}")
