"""The recovery endpoint over TCP: a rank sends the port of its store to the survivors that connect to its listener.

It needs only the addresses at which the members of the group listen, so it works after the group has failed.
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
_SEEK_SECONDS = 0.05  # maximum time of one `seek`; if the connection takes longer, the next `seek` continues


class TcpRecoveryEndpoint(RecoveryEndpoint):
    """Sends the port of this rank's store to each rank that asks for it.

    A rank that asks before the port is known gets it later. Each rank makes a new connection to ask; the mesh closes
    these connections.
    """

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
        except (OSError, RendezvousError):  # the next `seek` asks again, and raises if the rank has ended
            return None
        return (self._mesh.address(rank), *_PORT.unpack(data)) if len(data) == _PORT.size else None

    def _arrived(self, connection: socket.socket) -> None:
        """Send the port to a rank that asks, at once or when the port is known.

        Called on the listener's thread.
        """
        with self._lock:
            if self._port:
                self._answer(connection)
            else:
                self._asking.append(connection)

    def _answer(self, connection: socket.socket) -> None:
        with suppress(OSError):
            connection.send(_PORT.pack(self._port))
