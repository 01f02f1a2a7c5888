"""Dialing other ranks: any number of connections at a time, each tried again until it stands.

A peer that is refused, unreachable or drops the opening is tried again (it may be short of descriptors, or the
network between only just coming up); one that does not fit is not.
"""

from __future__ import annotations

import errno
import os
import select
import socket
import time
from collections.abc import Callable, Sequence

from ...errors import RendezvousError
from ...rendezvous.address import shown
from .interfaces import Interface, family_of, tune
from .opening import Dialing, Endpoint, Kind, OpeningError, RefusedError

_LOOK_SECONDS = 0.05
_RETRY_FIRST, _RETRY_MOST = 0.01, 0.25


class Dial:
    """One connection to a peer, in the making.

    Args:
        endpoint: this rank's in the group.
        peer: group rank of the other end.
        kind, stream: of the connection.
        source: which of this machine's addresses it leaves from.
        address, port: where the peer listens.

    Attributes:
        connection: the socket, once `is_done`.
        reason: why the last try failed.
        refused_since: when the first of the last tries was, at which nothing listened there; None: others failed.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        peer: int,
        kind: Kind,
        stream: int,
        source: Interface,
        address: str,
        port: int,
    ) -> None:
        self.peer = peer
        self.where = f"{shown(address, port)} from {source}"
        self.reason = "no answer"
        self.refused_since: float | None = None
        self.is_done = False
        self._source, self._address, self._port = source, address, port
        self._renew: Callable[[], Dialing] = lambda: Dialing(endpoint, peer, kind, stream)
        self._pause, self._not_before = _RETRY_FIRST, 0.0
        self._socket: socket.socket | None = None
        self._dialing: Dialing | None = None

    @property
    def connection(self) -> socket.socket:
        assert self._socket is not None, "it stands"
        return self._socket

    def waits_for(self) -> tuple[int, int] | None:
        """A descriptor and the poll events that it waits for; None: only time."""
        if self._socket is None or self.is_done:
            return None
        return self._socket.fileno(), select.POLLOUT if self._dialing is None else select.POLLIN

    def seconds_to_wait(self, now: float) -> float:
        """How long nothing can be done but for the descriptor."""
        return _LOOK_SECONDS if self._socket is not None else max(self._not_before - now, 0.0)

    def step(self) -> None:
        """Go as far as possible without blocking.

        Raises:
            RendezvousError: the peer does not fit, so trying again does not help.
        """
        try:
            if self._socket is None:
                if time.monotonic() >= self._not_before:
                    self._start()
            elif self._dialing is None:
                self._open(self._socket)
            else:
                self._shake_hands(self._socket, self._dialing)
        except BlockingIOError:
            return
        except RefusedError as error:
            self.close()
            raise RendezvousError(f"the rank at {self.where} cannot be joined: {error}") from error
        except OpeningError as error:
            self._try_again(str(error))
        except OSError as error:
            self._try_again(error.strerror or str(error), error.errno == errno.ECONNREFUSED)

    def close(self) -> None:
        """Give up, or close what was made."""
        if self._socket is not None:
            self._socket.close()
        self._socket = self._dialing = None

    def _start(self) -> None:
        self._socket = socket.socket(family_of(self._address), socket.SOCK_STREAM)
        tune(self._socket)
        # Without this the kernel takes a port for every connection of the machine, not for this destination.
        self._socket.setsockopt(socket.IPPROTO_IP, _IP_BIND_ADDRESS_NO_PORT, 1)
        self._socket.bind((self._source.address, 0))
        status = self._socket.connect_ex((self._address, self._port))
        if status not in (0, errno.EINPROGRESS):
            raise OSError(status, os.strerror(status))

    def _open(self, connecting: socket.socket) -> None:
        status = connecting.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if status:
            raise OSError(status, os.strerror(status))
        if connecting.getsockname() == _peer_name(connecting):
            # A loopback port that nobody listens on can connect to itself.
            raise OSError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))
        self._dialing = self._renew()
        connecting.send(self._dialing.opening)

    def _shake_hands(self, connected: socket.socket, dialing: Dialing) -> None:
        while dialing.wants:
            data = connected.recv(dialing.wants)
            if not data:
                raise OpeningError("it closed the connection during the opening")
            reply = dialing.take(data)
            if reply:
                connected.send(reply)
        self.is_done = True

    def _try_again(self, reason: str, is_refused: bool = False) -> None:
        self.close()
        self.reason = reason
        self.refused_since = (self.refused_since or time.monotonic()) if is_refused else None
        self._not_before = time.monotonic() + self._pause
        self._pause = min(2 * self._pause, _RETRY_MOST)


def _peer_name(connecting: socket.socket) -> object:
    try:
        return connecting.getpeername()
    except OSError as error:
        if error.errno == errno.ENOTCONN:
            raise BlockingIOError from None
        raise


_IP_BIND_ADDRESS_NO_PORT = getattr(socket, "IP_BIND_ADDRESS_NO_PORT", 24)  # Python 3.12 has the name


def dial_all(
    dials: Sequence[Dial], look: Callable[[], None], stands: Callable[[Dial], None] = lambda _: None
) -> None:
    """Bring all connections about.

    Args:
        look: called at least every 50 ms while some do not stand; what it raises ends the others.
        stands: takes over each connection as soon as it stands.

    Raises:
        RendezvousError: a peer does not fit.
    """
    looked = time.monotonic()
    waiting = list(dials)
    try:
        while True:
            for dial in list(waiting):
                dial.step()
                if dial.is_done:
                    waiting.remove(dial)
                    stands(dial)
            if not waiting:
                return
            _wait(waiting)
            if time.monotonic() - looked >= _LOOK_SECONDS:
                look()
                looked = time.monotonic()
    except BaseException:
        for dial in waiting:
            dial.close()
        raise


def _wait(dials: Sequence[Dial]) -> None:
    """Sleep until one of them can go on, 50 ms at most."""
    poller = select.poll()
    now = time.monotonic()
    for dial in dials:
        waits = dial.waits_for()
        if waits is not None:
            poller.register(*waits)
    poller.poll(1000 * min(dial.seconds_to_wait(now) for dial in dials) + 0.5)
