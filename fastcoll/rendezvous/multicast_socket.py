"""Datagrams to and from a multicast group, on the default interface and on loopback."""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import time
from collections.abc import Iterator

from ..errors import ResourceError

_HOPS = 8
_FLOOD = 10_000
_LOOPBACK = "lo"


class MulticastSocket:
    """A member of the group at `address`:`port`. A context manager; for one thread.

    Raises:
        ResourceError: no interface can join the group, or the port cannot be shared.
    """

    def __init__(self, address: str, port: int) -> None:
        self._family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._address = address
        self._port = port
        self._receiver = socket.socket(self._family, socket.SOCK_DGRAM)
        self._senders: list[socket.socket] = []
        try:
            self._open()
        except OSError as error:
            self.close()
            raise ResourceError(f"cannot join the multicast group {address} port {port}: {error}") from error

    def send(self, data: bytes) -> None:
        """Send to the group on every interface that takes it. Never blocks.

        Raises:
            ResourceError: no interface took it.
        """
        errors = []
        for sender in self._senders:
            try:
                sender.sendto(data, (self._address, self._port))
            except BlockingIOError:
                return
            except OSError as error:
                errors.append(error)
        if len(errors) == len(self._senders):
            raise ResourceError(f"nothing can be sent to the multicast group {self._address}: {errors[0]}")

    def receive(self, seconds: float, size: int) -> Iterator[bytes]:
        """The datagrams that are there and that come within `seconds`; longer ones are cut at `size` + 1.

        Ends early after a flood, so that the caller gets to look at its own deadline.
        """
        deadline = time.monotonic() + seconds
        for _ in range(_FLOOD):
            left = max(deadline - time.monotonic(), 0.0)
            if not select.select([self._receiver], [], [], left)[0]:
                return
            with contextlib.suppress(BlockingIOError):
                yield self._receiver.recv(size + 1)

    def close(self) -> None:
        """Leave the group. Closing twice is fine."""
        for each in (self._receiver, *self._senders):
            each.close()

    def __enter__(self) -> MulticastSocket:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open(self) -> None:
        self._receiver.setblocking(False)
        self._receiver.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Bound to the group's own address, so that nothing else comes in at this port.
        self._receiver.bind((self._address, self._port))
        refused: OSError | None = None
        for interface in (0, socket.if_nametoindex(_LOOPBACK)):
            try:
                self._join(interface)
            except OSError as error:
                refused = error
        if not self._senders:
            assert refused is not None, "an interface either joined or refused"
            raise refused

    def _join(self, interface: int) -> None:
        """Join and send on one interface; 0 is the one that the route to the group takes."""
        group = socket.inet_pton(self._family, self._address)
        sender = socket.socket(self._family, socket.SOCK_DGRAM)
        try:
            sender.setblocking(False)
            if self._family == socket.AF_INET:
                nowhere = bytes(4)
                self._receiver.setsockopt(
                    socket.IPPROTO_IP,
                    socket.IP_ADD_MEMBERSHIP,
                    group + nowhere + struct.pack("@i", interface),
                )
                sender.setsockopt(
                    socket.IPPROTO_IP, socket.IP_MULTICAST_IF, nowhere * 2 + struct.pack("@i", interface)
                )
                sender.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_LOOP, 1)
                sender.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_TTL, _HOPS)
            else:
                self._receiver.setsockopt(
                    socket.IPPROTO_IPV6, socket.IPV6_JOIN_GROUP, group + struct.pack("@I", interface)
                )
                sender.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_MULTICAST_IF, interface)
                sender.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_MULTICAST_LOOP, 1)
                sender.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_MULTICAST_HOPS, _HOPS)
        except BaseException:
            sender.close()
            raise
        self._senders.append(sender)
