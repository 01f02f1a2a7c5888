"""Link: one connection to another worker, of which the side that dialed makes calls, and the other answers.

Any thread sends, one after the other, each message whole. One thread at a time reads.
"""

from __future__ import annotations

import select
import socket
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from .wire import Assembler, Piece, Received

if TYPE_CHECKING:
    from .agent import WorkerInfo

_LOOK_MILLISECONDS = 100
_MOST_PIECES = 256


class Link:
    """A connection, which it owns, to or from `worker`.

    Attributes:
        pending: the calls made over it that are not answered yet, by their numbers.
        said_goodbye: how the other side has left in order, once it has.
    """

    def __init__(self, connection: socket.socket, worker: WorkerInfo, dialed: bool) -> None:
        self.worker, self.dialed = worker, dialed
        self.pending: dict[int, Any] = {}
        self.said_goodbye: str | None = None
        self.is_closed = False
        self._socket = connection
        self._assembler = Assembler()
        self._sending = threading.Lock()

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, pieces: Sequence[Piece]) -> None:
        """Send a message, and wait until the kernel has all of it; OSError: the other side is gone."""
        with self._sending:
            if len(pieces) == 1:
                try:
                    sent = self._socket.send(pieces[0])
                except BlockingIOError:
                    sent = 0
                if sent == len(pieces[0]):
                    return
                pieces = [memoryview(pieces[0])[sent:]]
            try:
                self._send_rest([memoryview(piece).cast("B") for piece in pieces if len(piece)])
            except BaseException:
                self.shut()  # the other side has a part of a message
                raise

    def _send_rest(self, left: list[memoryview]) -> None:
        while left:
            try:
                sent = self._socket.sendmsg(left[:_MOST_PIECES])
            except BlockingIOError:
                self._await_room()
                continue
            while left and sent >= left[0].nbytes:
                sent -= left.pop(0).nbytes
            if sent:
                left[0] = left[0][sent:]

    def _await_room(self) -> None:
        poller = select.poll()
        poller.register(self._socket, select.POLLOUT)
        while not poller.poll(_LOOK_MILLISECONDS):
            if self.is_closed:
                raise ConnectionError("the connection was closed")

    def read(self) -> list[Received] | None:
        """The messages that have come, without waiting; None: the other side has ended."""
        found: list[Received] = []
        while True:
            space = self._assembler.space
            try:
                nbytes = self._socket.recv_into(space)
            except BlockingIOError:
                return found
            except OSError:
                return found or None
            if not nbytes:
                return found or None
            found += self._assembler.came(nbytes)
            if found or nbytes < space.nbytes:
                return found

    def shut(self) -> None:
        """End the connection in both directions; whoever reads sees its end."""
        self.is_closed = True
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.is_closed = True
        self._socket.close()
