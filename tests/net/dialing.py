"""What the dialing side of a connection does in a test, over a plain socket, and what becomes of it."""

from __future__ import annotations

import contextlib
import socket

from fastcoll.store.opening import Dialing

LIMIT = 60.0  # seconds, which only end a test that hangs


def proof_of(dialing: Dialing, connection: socket.socket) -> bytes:
    """Send the opening, and return the proof that the answer asks for, to be sent now or later; empty: none."""
    connection.sendall(dialing.opening)
    proof = b""
    while dialing.wants:
        proof = dialing.take(receive(connection, dialing.wants))
    return proof


def receive(connection: socket.socket, count: int) -> bytes:
    """So many bytes, which may come in pieces."""
    connection.settimeout(LIMIT)
    data = bytearray()
    while len(data) < count:
        piece = connection.recv(count - len(data))
        assert piece, "the other side closed the connection"
        data += piece
    return bytes(data)


def is_dropped(connection: socket.socket) -> bool:
    """Whether the other side ends the connection, whatever it sends before that; TimeoutError: it does not."""
    connection.settimeout(LIMIT)
    with contextlib.suppress(ConnectionResetError):
        while connection.recv(4096):
            pass
    return True
