"""Where the survivors of a group over TCP meet: a rank that is asked for it at its listener says at which port it
serves a store, as soon as it does.

It needs nothing of the group but to know where its members listen, so it works when the group has failed.
"""

from __future__ import annotations

import socket
import struct
import threading
import time
from contextlib import suppress

from ...core.backend import RecoveryEndpoint
from ...errors import RendezvousError
from .mesh import Mesh

_PORT = struct.Struct("!I")
_SEEK_SECONDS = 0.05  # at one time: a connection that takes longer is gone on with the next time


class TcpRecoveryEndpoint(RecoveryEndpoint):
    """Those that ask wait, each on a connection of its own, which is the mesh's to close."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self.host = mesh.address(mesh.rank)
        self._port = 0
        self._lock = threading.Lock()
        self._asking: list[socket.socket] = []
        self._asked: dict[int, socket.socket] = {}
        mesh.on_seek(self._arrived)

    def offer(self, port: int) -> None:
        with self._lock:
            self._port = port
            while port and self._asking:
                self._answer(self._asking.pop())

    def seek(self, rank: int) -> tuple[str, int] | None:
        deadline = time.monotonic() + _SEEK_SECONDS
        connection = self._asked.pop(rank, None)
        try:
            if connection is None:
                connection = self._mesh.seek(rank, deadline)
            connection.settimeout(max(deadline - time.monotonic(), 0.001))
            data = connection.recv(_PORT.size)
        except ConnectionRefusedError:
            raise
        except TimeoutError:
            if connection is not None:
                self._asked[rank] = connection
            return None
        except (OSError, RendezvousError):  # it is asked anew, if it lives
            return None
        return (self._mesh.address(rank), *_PORT.unpack(data)) if len(data) == _PORT.size else None

    def _arrived(self, connection: socket.socket) -> None:
        """On the listener's thread."""
        with self._lock:
            if self._port:
                self._answer(connection)
            else:
                self._asking.append(connection)

    def _answer(self, connection: socket.socket) -> None:
        with suppress(OSError):
            connection.send(_PORT.pack(self._port))
