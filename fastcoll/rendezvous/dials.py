"""Dialing: a rank opens several connections at a time, without blocking.

A dial is the attempt to open one connection: a TCP connect and the handshake (store/opening.py), after which the
connection is encrypted if FASTCOLL_ENCRYPT=1 (store/encryption.py). It is repeated if
nothing listens at the peer's address, if the peer is unreachable, or if it drops the connection during the handshake,
because the peer may lack descriptors, or the network may not be up yet. It is not repeated if the process at the peer's
address has another version of fastcoll or another secret.
"""

from __future__ import annotations

import errno
import os
import select
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress

from ..errors import RendezvousError, ResourceError
from ..store.encryption import encrypt
from ..store.opening import ConnectionKind, Dialing, Endpoint, OpeningError, RefusedError, Role
from ..system.address import (
    PORTLESS_SECONDS,
    no_descriptor,
    portless,
    raise_limit,
    shown,
)
from ..system.interfaces import Interface, family_of, tune

LOOK_SECONDS = 0.05
RETRY_FIRST, RETRY_MOST = 0.01, 0.25
_IP_BIND_ADDRESS_NO_PORT = getattr(socket, "IP_BIND_ADDRESS_NO_PORT", 24)  # Python 3.12 has the name

Wish = tuple[int, int] | float
"""A descriptor and the poll events to wait for, or a time until which there is nothing to do."""


class Dial:
    """A dial to a group rank, from the interface `source` to the peer's address `target`.

    Args:
        name: the peer in error messages, as in "rank 1".

    Attributes:
        connection: the socket, once `is_done`.
        reason: why the last try failed.
        does_not_fit: the dial has failed for good, because the process at the peer's address has another version or
            secret.
        refused_since: the time since which every try has found that no process listens at the peer's address; None:
            the latest try failed for another reason.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        peer: int,
        name: str,
        kind: ConnectionKind,
        stream: int,
        source: Interface,
        target: tuple[str, int],
    ) -> None:
        self.peer, self._name = peer, name
        self.where = f"{shown(*target)} from {source}"
        self.reason = "no answer"
        self.refused_since: float | None = None
        self.is_done = self.does_not_fit = False
        self.waits_for: Wish = 0.0
        self._socket: socket.socket | None = None
        self._steps = self._tries(lambda: Dialing(endpoint, peer, kind, stream), source, target)

    @property
    def connection(self) -> socket.socket:
        assert self._socket is not None, "the dial is done"
        return self._socket

    def step(self) -> None:
        """Proceed as far as possible without blocking; then `waits_for` is the event that the dial waits for.

        RendezvousError, ResourceError: the dial has failed for good; do not call this again.
        """
        self.waits_for = next(self._steps, 0.0)

    def close(self) -> None:
        """Abandon the dial, or close the connection."""
        if self._socket is not None:
            self._socket.close()
        self._socket = None

    def _tries(
        self, begin: Callable[[], Dialing], source: Interface, target: tuple[str, int]
    ) -> Iterator[Wish]:
        pause, portless_since = RETRY_FIRST, float("inf")
        while True:
            lacking = None
            try:
                yield from self._try(begin(), source, target)
                self.is_done = True
                return
            except RefusedError as error:
                with suppress(OSError):
                    self.connection.send(error.answer)
                self.close()
                self.does_not_fit = True
                raise RendezvousError(f"{self._name} at {self.where} cannot be joined: {error}") from error
            except OpeningError as error:
                self.reason, refused = str(error), False
            except OSError as error:
                self.reason, refused = error.strerror or str(error), error.errno == errno.ECONNREFUSED
                lacking = portless(error, self.where) or _exhausted(error, self.where)
            self.close()
            now = time.monotonic()
            portless_since = min(portless_since, now) if lacking else float("inf")
            if lacking and now - portless_since >= PORTLESS_SECONDS:
                raise lacking
            self.refused_since = (self.refused_since or now) if refused else None
            while time.monotonic() < now + pause:
                yield now + pause
            pause = min(2 * pause, RETRY_MOST)

    def _try(self, dialing: Dialing, source: Interface, target: tuple[str, int]) -> Iterator[Wish]:
        made = self._socket = socket.socket(family_of(source.address), socket.SOCK_STREAM)
        tune(made)
        # Without this option, `bind` reserves a local port for all destinations, and the ports may run out.
        made.setsockopt(socket.IPPROTO_IP, _IP_BIND_ADDRESS_NO_PORT, 1)
        made.bind((source.address, 0))
        while (status := made.connect_ex(target)) in (errno.EINPROGRESS, errno.EALREADY):
            yield made.fileno(), select.POLLOUT
        # On loopback, a connect to a port without a listener can connect to itself.
        status = status or (errno.ECONNREFUSED if made.getsockname() == made.getpeername() else 0)
        if status:
            raise OSError(status, os.strerror(status))
        made.send(dialing.opening)
        while dialing.wants:
            yield made.fileno(), select.POLLIN
            try:
                data = made.recv(dialing.wants)
            except BlockingIOError:
                continue
            if not data:
                raise OpeningError("it closed the connection during the opening")
            if reply := dialing.take(data):
                made.send(reply)
        encrypt(made, dialing.seed, Role.DIALS)


def _exhausted(error: OSError, where: str) -> ResourceError | None:
    """Return the error if no descriptor was free and the limit cannot be raised; else None, and the dial is retried."""
    lacking = no_descriptor(error, f"cannot connect to {where}")
    return None if lacking and raise_limit("connections") else lacking


def dial_all(
    dials: Sequence[Dial], look: Callable[[], None], stands: Callable[[Dial], None] = lambda _: None
) -> None:
    """Complete all dials, and pass each to `stands` as soon as its connection is open.

    `look` is called about every 50 ms; if it raises, the unfinished dials are closed. RendezvousError: a peer has
    another version or secret. ResourceError: this host has no port or descriptor left.
    """
    looked = time.monotonic()
    waiting, ready = dict.fromkeys(dials), list(dials)
    try:
        while True:
            for dial in ready:
                dial.step()
                if dial.is_done:
                    del waiting[dial]
                    stands(dial)
            if not waiting:
                return
            ready = _wait_for(waiting, time.monotonic() + LOOK_SECONDS)
            if time.monotonic() - looked >= LOOK_SECONDS:
                look()
                looked = time.monotonic()
    except BaseException:
        for dial in waiting:
            dial.close()
        raise


def dial_until(dial: Dial, end: float) -> bool:
    """Proceed with one dial until it is open, or until `end`; return whether it is open. Errors: see `dial_all`."""
    while True:
        dial.step()
        if dial.is_done or time.monotonic() >= end:
            return dial.is_done
        _wait_for([dial], end)


def _wait_for(dials: Iterable[Dial], end: float) -> list[Dial]:
    """Wait until one of the dials can proceed, or until `end`; return those that can proceed."""
    poller, polled, paused = select.poll(), dict[int, Dial](), dict[Dial, float]()
    for dial in dials:
        if isinstance(dial.waits_for, tuple):
            poller.register(*dial.waits_for)
            polled[dial.waits_for[0]] = dial
        else:
            paused[dial] = dial.waits_for
    end = min([end, *paused.values()])
    ready = [polled[fd] for fd, _ in poller.poll(1000 * max(end - time.monotonic(), 0.0) + 0.5)]
    return ready + [dial for dial, until in paused.items() if until <= time.monotonic()]
