"""What the dialing side of a connection does in a test, over a plain socket, and what becomes of it."""

from __future__ import annotations

import contextlib
import socket

from fastcoll.rendezvous.opening import Dialing

LIMIT = 60.0  # seconds, which only end a test that hangs


def proof_of(dialing: Dialing, connection: socket.socket) -> bytes:
    """Send the opening, and return the proof that the answer asks for, to be sent now or later; empty: none."""
    connection.settimeout(LIMIT)
    connection.sendall(dialing.opening)
    proof = b""
    while dialing.wants:
        data = connection.recv(dialing.wants)
        assert data, "the other side closed the connection"
        proof = dialing.take(data)
    return proof


def is_dropped(connection: socket.socket) -> bool:
    """Whether the other side ends the connection, whatever it sends before that; TimeoutError: it does not."""
    connection.settimeout(LIMIT)
    with contextlib.suppress(ConnectionResetError):
        while connection.recv(4096):
            pass
    return True
