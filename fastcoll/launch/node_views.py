"""Let `python -m fastcoll top` on one node show the ranks of the others, while it runs.

The launchers of several nodes meet at a store (failures.py, gathering.py), whose address the ranks have in
FASTCOLL_LAUNCHERS. There `top` counts up a key, several times in a second. Each launcher waits for the key; when it is
there, the launcher starts a process (tools/node_view.py) that reads the ranks of its node and writes what it sees into
the store, until nobody has asked for some seconds. So a job at which nobody looks costs a connection, and a request in
20 s.

    top/asked     a counter; `top` adds to it as long as it runs
    top/nodes     how many launchers have a number; the first is 0
    top/view/N    what launcher N has seen last (tools/other_nodes.py), while its process runs
"""

from __future__ import annotations

import os
import subprocess
import threading
from contextlib import suppress
from typing import TYPE_CHECKING

from ..errors import StoreError, StoreTimeoutError
from .nodes import python_main

if TYPE_CHECKING:
    from ..store import TCPStore

ASKED, NODES = "top/asked", "top/nodes"
_TRY_SECONDS = 2.0  # per attempt to connect
_LOOK_SECONDS = 20.0  # how long the server holds one request for `asked`, if it is not set
_PAUSE_SECONDS = 1.0  # between two attempts, and between two processes, if the first ends although `top` runs


def view_key(number: int) -> str:
    """Return the key under which the launcher with this number shows its ranks."""
    return f"top/view/{number}"


class NodeViews:
    """Shows this node's ranks on request, until the end of the `with` block. Nothing here blocks the caller.

    Args:
        address: HOST:PORT of the launchers' store.
    """

    def __init__(self, address: str) -> None:
        self._address = address
        self._lock = threading.Lock()
        self._store: TCPStore | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="fastcoll-views", daemon=True)

    def __enter__(self) -> NodeViews:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        with self._lock:
            if self._process is not None:
                self._process.kill()
            if self._store is not None:
                self._store.close()

    def _follow(self) -> None:
        number: int | None = None
        # If the store is lost or closed, the job is at its end. If no process can be started, none is shown.
        with suppress(StoreError, OSError):
            while not self._closed.is_set():
                with suppress(StoreTimeoutError):
                    store = self._store or self._open()
                    store.fetch([ASKED], _LOOK_SECONDS)
                    number = store.add(NODES, 1) - 1 if number is None else number
                    self._show(number)
                    store.delete_key(view_key(number))
                self._closed.wait(_PAUSE_SECONDS)

    def _open(self) -> TCPStore:
        """Connect to the store; StoreTimeoutError: the launcher that serves it has not started yet."""
        from ..store.tcp_store import client_of  # imports sockets

        store = client_of("FASTCOLL_LAUNCHERS", self._address, _TRY_SECONDS)
        with self._lock:
            self._store = store
            if self._closed.is_set():
                store.close()
        return store

    def _show(self, number: int) -> None:
        """Run the process that shows the ranks, to its end."""
        command = [*python_main("fastcoll.tools.node_view"), str(os.getpid()), str(number)]
        environment = {**os.environ, "FASTCOLL_LAUNCHERS": self._address}
        with self._lock:
            if self._closed.is_set():
                return
            # A session of its own, so that Ctrl-C does not reach it. Its texts would disturb those of the ranks.
            self._process = subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip
        self._process.wait()
