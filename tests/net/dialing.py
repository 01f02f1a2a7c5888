"""The dialing side of a connection, over a plain socket, for tests of the accepting side."""

from __future__ import annotations

import contextlib
import socket

from fastcoll.store.opening import Dialing

LIMIT = 60.0  # seconds, which only end a test that hangs


def proof_of(dialing: Dialing, connection: socket.socket) -> bytes:
    """Send the opening; return the proof that the answer asks for, to send now or later; empty: it asks for none."""
    connection.sendall(dialing.opening)
    proof = b""
    while dialing.wants:
        proof = dialing.take(receive(connection, dialing.wants))
    return proof


def receive(connection: socket.socket, count: int) -> bytes:
    """Receive so many bytes, which may arrive in parts."""
    connection.settimeout(LIMIT)
    data = bytearray()
    while len(data) < count:
        transfer = connection.recv(count - len(data))
        assert transfer, "the other side closed the connection"
        data += transfer
    return bytes(data)


def is_dropped(connection: socket.socket) -> bool:
    """Return whether the other side closes the connection, whatever it sends before. TimeoutError: it does not."""
    connection.settimeout(LIMIT)
    with contextlib.suppress(ConnectionResetError):
        while connection.recv(4096):
            pass
    return True
