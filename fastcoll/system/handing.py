"""Hand an open file to another process of this user, over a Unix socket in the abstract namespace.

The kernel removes the name of such a socket with its last descriptor, so a killed process leaves nothing behind.
"""

from __future__ import annotations

import os
import struct
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import socket

_SECONDS = 5.0  # for a connection whose receiver is stopped


def listen_for_files() -> tuple[socket.socket, str]:
    """Return a listening socket that does not block, and its name, which the kernel has chosen."""
    import socket  # here, because `import fastcoll` imports no sockets

    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    listener.bind("")
    listener.listen(1024)
    return listener, listener.getsockname()[1:].decode()


def hand_over(fd: int, name: str) -> None:
    """Send a file to the process that listens at `name`. OSError: there is none, or it is stopped."""
    import socket

    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sender:
        sender.settimeout(_SECONDS)
        sender.connect(f"\0{name}")
        socket.send_fds(sender, [b"\0"], [fd])


def receive_file(connection: socket.socket) -> tuple[int, int] | None:
    """Return the file that a sender has handed over, and the sender's pid; None: no file, or another user."""
    import socket

    size = struct.calcsize("3i")
    pid, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    if user != os.geteuid():
        return None
    connection.settimeout(_SECONDS)
    _, fds, _, _ = socket.recv_fds(connection, 1, 1, socket.MSG_CMSG_CLOEXEC)
    return (fds[0], pid) if fds else None
