"""How the launchers of a job's nodes tell one another that a rank has failed, so that all of them end.

They meet in a store, as ranks do, which node 0's launcher serves on a port of its own, with the job's secret. The
first failure is set there, and every node counts itself when it has read it. A launcher that cannot reach the store
goes on without: its ranks then end when their groups fail. The store is served until node 0's ranks have ended, and
after a failure until all nodes have read it, those included that are started a little later.
"""

from __future__ import annotations

import contextlib
import json
import sys
import threading
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from ..errors import FastcollError, StoreError, StoreTimeoutError
from ..rendezvous.detect import port_beside

if TYPE_CHECKING:
    from ..rendezvous import TCPStore

_FAILED, _READ = "failed", "read"
_CONNECT_SECONDS = 600.0  # for node 0's launcher to be started
_TRY_SECONDS = 2.0  # of them at a time: so long goes a thread on that is to end
_LOOK_SECONDS = 5.0  # a wait for the key; the server answers at its end
_LAST_SECONDS = 5.0  # for a failure to reach the others, as this launcher ends
_POLL_SECONDS = 0.05


@dataclass(frozen=True)
class Failure:
    """A rank's failure, on any node: the launchers' exit code, and what to say of it."""

    code: int
    text: str


class Nodes:
    """This node's part; a thread connects and waits for news. A context manager: leaves the others.

    Args:
        count: the number of nodes.
        node_rank: this node's number; number 0 serves the store.
        address, port: where.
    """

    def __init__(self, count: int, node_rank: int, address: str, port: int) -> None:
        self._count, self._rank, self._address, self._port = count, node_rank, address, port
        self._lock = threading.Lock()
        self._store: TCPStore | None = None
        self._told: Failure | None = None
        self._known: Failure | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._follow, name="fastcoll-nodes", daemon=True)

    def __enter__(self) -> Nodes:
        # Node 0 listens before its ranks start, so that nothing of the job takes the port.
        if self._rank == 0:
            self._open()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        end = time.monotonic() + _LAST_SECONDS
        if self._told is not None:
            self._thread.join(_LAST_SECONDS)  # it ends when it has read what was told, or cannot
        with self._lock:
            self._closed, store = True, self._store
        if store is not None:
            if self._known is not None and self._rank == 0:
                self._await_readers(store, end)
            store.close()
        self._thread.join(_LAST_SECONDS)  # a name that is looked up may take longer

    def failure(self) -> Failure | None:
        """The first failure of any node that has told of one. Never blocks."""
        return self._known

    def tell(self, failure: Failure) -> None:
        """Let the others know of a failure here, unless one was told before. Never blocks."""
        with self._lock:
            self._told, store = failure, self._store
        if store is not None:  # on a thread, as node 0 may be out of reach by now
            threading.Thread(target=self._publish, args=(store, failure), daemon=True).start()

    def _open(self) -> None:
        try:
            store = self._meet()
        except FastcollError as error:
            sys.stderr.write(
                f"fastcoll.launch: the nodes' launchers cannot meet, so a failure elsewhere does not end the ranks "
                f"here at once: {error}\n"
            )
            return
        if store is None:
            return
        with self._lock:
            if not self._closed:
                self._store = store
            told = self._told
        if self._closed:
            store.close()
        elif told is not None:
            self._publish(store, told)

    def _meet(self) -> TCPStore | None:
        """The store, once node 0 serves it; None when this launcher ends before."""
        from ..rendezvous import TCPStore  # sockets and all that, for jobs of one node in vain

        end = time.monotonic() + _CONNECT_SECONDS
        while not self._closed:
            try:
                return TCPStore(self._address, self._port, is_master=self._rank == 0, timeout=_TRY_SECONDS)
            except StoreTimeoutError as error:
                if time.monotonic() > end:
                    raise StoreTimeoutError(f"{_CONNECT_SECONDS:g} s were in vain: {error}") from error
        return None

    def _publish(self, store: TCPStore, failure: Failure) -> None:
        with contextlib.suppress(StoreError):  # node 0 has ended, and cannot tell the others any more
            store.compare_set(_FAILED, "", json.dumps(asdict(failure)))

    def _follow(self) -> None:
        """Wait for the first failure; ends with it, or when node 0's launcher or this one ends."""
        if self._rank != 0:
            self._open()
        while (store := self._store) is not None and self._known is None and not self._closed:
            try:
                store.wait([_FAILED], _LOOK_SECONDS)
                self._known = Failure(**json.loads(store.get(_FAILED)))
                store.add(_READ, 1)
            except StoreTimeoutError:
                continue
            except (StoreError, ValueError, TypeError):
                return

    def _await_readers(self, store: TCPStore, end: float) -> None:
        """On node 0: wait until all know of the failure, also those that are being started."""
        while store.add(_READ, 0) < self._count and time.monotonic() < end:
            time.sleep(_POLL_SECONDS)


def default_port(master_port: int) -> int:
    """Where launchers meet by default."""
    return port_beside(master_port, away=10000)
