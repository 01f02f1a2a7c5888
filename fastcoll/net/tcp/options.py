"""The options that connections between ranks have."""

from __future__ import annotations

import socket

# The kernel probes a connection that is silent for 2 s, and then every 2 s, and gives up 8 s after the last sign of
# life of the other host. A stopped process's kernel answers.
_PROBE_AFTER_SECONDS = 2
_PROBE_SECONDS = 2
_PROBES = 3
_SILENT_MILLISECONDS = 8000


def tune(connection: socket.socket) -> None:
    """Make a connection nonblocking, and let it send small pieces at once and probe a silent peer."""
    connection.setblocking(False)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _PROBE_AFTER_SECONDS)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _PROBE_SECONDS)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _PROBES)


def watch(connection: socket.socket) -> None:
    """Give a control connection up 8 s after the host at its other end was last heard of, data under way or not.

    Not for others: TCP_USER_TIMEOUT also ends a connection whose reader leaves its buffer full for so long, though
    it lives and is only busy (Linux 6.18, 3 s: ETIMEDOUT after 3.5 s). Two notices never fill a buffer.
    """
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _SILENT_MILLISECONDS)


def family_of(address: str) -> socket.AddressFamily:
    """IPv6 for an address with colons, else IPv4."""
    return socket.AF_INET6 if ":" in address else socket.AF_INET
