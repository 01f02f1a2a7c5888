"""Notices that a rank left or failed the group, as messages of MPI."""

from __future__ import annotations

import logging
from typing import Any

from ...core.monitor import LEAVING
from ..tcp.control import Control
from ..tcp.notice import NOTICE_SIZE, Notice, NoticeError
from .library import Library

logger = logging.getLogger("fastcoll")


class MpiControl(Control):
    """What the ranks of a communicator say of themselves. Every rank sends two notices to each other at the most.

    MPI does not tell when a rank dies (mpiexec ends the others then), so `lost` stays empty.

    Args:
        comm: the group's communicator.
        tag: of notices.
    """

    def __init__(self, library: Library, comm: Any, tag: int) -> None:
        super().__init__(comm.size)
        self._library = library
        self._comm = comm
        self._tag = tag
        self.peers = {peer for peer in range(comm.size) if peer != comm.rank}
        self._sent: list[Any] = []

    def say(self, notice: Notice) -> None:
        """Send a notice to all peers. MPI keeps a copy of messages as short as this."""
        data = notice.to_bytes()
        byte = self._library.MPI.BYTE
        with self._lock, self._library.lock:
            for peer in self.peers:
                self._sent.append(self._comm.Isend([data, byte], peer, self._tag))

    def is_over(self) -> bool:
        """Whether every peer has left or failed, and all that was said has been taken."""
        self.look(again=True)
        with self._library.lock:
            self._sent = [request for request in self._sent if not request.Test()]
        over = {peer for peer, notice in self.heard.items() if notice.state != LEAVING}
        return not self._sent and over >= self.peers

    def close(self) -> None:
        """Nothing: the communicator is freed when everybody has left."""

    def close_inherited(self) -> None:
        """Nothing: MPI does not live on in a child of fork."""

    def _read(self) -> None:
        MPI = self._library.MPI
        with self._library.lock:
            while message := self._comm.Improbe(MPI.ANY_SOURCE, self._tag):
                status, data = MPI.Status(), bytearray(NOTICE_SIZE)
                message.Recv([data, MPI.BYTE], status)
                try:
                    self._hear(status.Get_source(), Notice.from_bytes(bytes(data), self._size))
                except NoticeError as error:
                    logger.warning("group rank %d sent what cannot be read: %s", status.Get_source(), error)
