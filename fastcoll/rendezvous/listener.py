"""The sockets on which a process accepts connections of other ranks, and how the members of a group exchange addresses.

A connection begins with a handshake (store/opening.py): each side sends an opening, and then its proof that it has the
group's key. After that, the listener encrypts the connection if FASTCOLL_ENCRYPT=1, and hands it to its group. It drops
all other connections, and logs the first one from each host as a warning.

A connection is *pending* until its handshake is complete. A pending connection takes at most 112 bytes and one
descriptor. Its opening must be complete within 10 s; a rank whose connection is dropped before that dials again. A rank
whose opening was answered regards the connection as established, and may be stopped or starved before it sends its
proof; so the listener waits for the proof for the group's timeout. Strangers get no answer, because they do not have
the group's name, 16 random bytes. When 256 connections are pending, the oldest one without a complete opening is
dropped. If all openings are complete and only proofs are missing, the oldest connection is dropped. So connections that
send nothing cannot keep ranks out.

Members exchange addresses through the group's store. The first member draws the group's name and token, and publishes
them ("terms"). A member listens for the group before it publishes its address, so every dial to a published address
finds the group.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import selectors
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from .. import config
from ..config import MOST_STREAMS
from ..errors import RendezvousError, ResourceError, StoreError, UsageError
from ..store import serving
from ..store.encryption import encrypt, encrypts
from ..store.opening import (
    GROUP_SIZE,
    SAME_ENCRYPTION,
    TOKEN_SIZE,
    Answering,
    ConnectionKind,
    Endpoint,
    Opening,
    OpeningError,
    Role,
    Turned,
    derive_key,
)
from ..store.secret import SAME_SECRET, job_secret, proof, warn_if_open
from ..store.serving import release
from ..store.views import local_address
from ..system.address import (
    PORTLESS_SECONDS,
    no_descriptor,
    no_port,
    raise_limit,
    shown,
)
from ..system.interfaces import IPV4, IPV6, Interface, choose_here, family_of, tune
from ..system.processes import Member
from .assemble import GroupMeeting, loads

__all__ = ["Listener", "acquire", "release"]

logger = logging.getLogger("fastcoll")

OPENING_SECONDS = 10.0
MOST_OPENINGS = 256

Deliver = Callable[[Opening, socket.socket], None]
"""Receives a connection whose handshake is complete, on the listener's thread; must not block."""


@dataclass
class _Pending:
    """A connection whose handshake is not complete yet."""

    socket: socket.socket
    host: str
    answering: Answering
    deadline: float


class Listener(serving.SocketServer):
    """Listening sockets on addresses of this machine; `ports` has their ports.

    Raises:
        ResourceError: a socket cannot listen.
    """

    def __init__(self, interfaces: Sequence[Interface]) -> None:
        self._endpoints: dict[tuple[bytes, int], tuple[Endpoint, Deliver, float]] = {}
        self._pending: dict[int, _Pending] = {}
        # Times of the first and the last failure to accept a connection, and the error.
        self._lacking: tuple[float, float, OSError] | None = None
        with contextlib.ExitStack() as opened:
            sockets = [opened.enter_context(_listen(each)) for each in interfaces]
            self.ports: list[int] = [each.getsockname()[1] for each in sockets]
            super().__init__("fastcoll-listener", sockets, tuple(interfaces))
            opened.pop_all()

    def join(self, endpoint: Endpoint, deliver: Deliver, timeout: float) -> None:
        """Start handing connections for this group to `deliver`.

        A dialing rank has `timeout` seconds to send its proof, but at least 10 s.
        """
        self._endpoints[endpoint.group, endpoint.rank] = (endpoint, deliver, max(timeout, OPENING_SECONDS))

    def leave(self, endpoint: Endpoint) -> None:
        """Stop accepting connections for this group."""
        self._endpoints.pop((endpoint.group, endpoint.rank), None)

    def opens_for(self, endpoint: Endpoint) -> bool:
        """Return whether a connection for this group was answered and is not handed over yet.

        The rank that has dialed regards such a connection as established. Any thread may call this.
        """
        openings = [pending.answering.theirs for pending in list(self._pending.values())]
        return any(each and (each.group, each.peer) == (endpoint.group, endpoint.rank) for each in openings)

    def next_deadline(self) -> float | None:
        return min((pending.deadline for pending in self._pending.values()), default=None)

    def expire(self, now: float) -> None:
        for late in [pending for pending in self._pending.values() if pending.deadline <= now]:
            what = "open" if late.answering.theirs is None else "send its proof"
            self._drop(late, f"did not {what} in time")

    def connections(self) -> Iterable[socket.socket]:
        return [pending.socket for pending in self._pending.values()]

    def accepted(self, connection: socket.socket, host: str) -> None:
        self._make_room()
        try:
            tune(connection)
        except OSError:  # the connection is gone already
            connection.close()
            return
        deadline = time.monotonic() + OPENING_SECONDS
        self._pending[connection.fileno()] = _Pending(connection, host, Answering(self._endpoint), deadline)
        self.selector.register(connection, selectors.EVENT_READ, connection.fileno())

    def _make_room(self) -> None:
        """Drop pending connections until a new one fits: the oldest without a complete opening, else the oldest.

        Before a connection without a complete opening is dropped, its data is read once more. If this completes the
        opening, the connection stays.
        """
        while len(self._pending) >= MOST_OPENINGS:
            silent = [each for each in self._pending.values() if each.answering.theirs is None]
            oldest = silent[0] if silent else next(iter(self._pending.values()))
            if silent:
                self.serve(oldest.socket.fileno(), selectors.EVENT_READ)
            if oldest.socket.fileno() in self._pending and (not silent or oldest.answering.theirs is None):
                self._drop(oldest, f"one of more than {MOST_OPENINGS} openings")

    def refuse(self, listening: socket.socket, error: OSError) -> None:
        if error.errno == errno.EMFILE and raise_limit("connections of other ranks"):
            return
        now = time.monotonic()
        if self._lacking is None or now - self._lacking[1] > PORTLESS_SECONDS:
            logger.warning(
                "no more connections can be accepted (%s); raise the limit with ulimit -n", error.strerror
            )
            self._lacking = now, now, error
        self._lacking = self._lacking[0], now, error
        self.pause()

    def lack(self) -> ResourceError | None:
        """Return the error if this process has lacked descriptors to accept connections for 2 s or more; else None.

        Any thread may call this.
        """
        if (lacking := self._lacking) is None or lacking[1] - lacking[0] < PORTLESS_SECONDS:
            return None
        recent = time.monotonic() - lacking[1] < PORTLESS_SECONDS
        return no_descriptor(lacking[2], "cannot take a connection") if recent else None

    def _endpoint(self, theirs: Opening) -> Endpoint | None:
        entry = self._endpoints.get((theirs.group, theirs.peer))
        return None if entry is None or theirs.kind is ConnectionKind.STORE else entry[0]

    def serve(self, data: int, events: int) -> None:
        """Read from a pending connection, but no more than the handshake needs: later bytes are for the group."""
        pending = self._pending.get(data)
        if pending is None:
            return
        answering = pending.answering
        try:
            received = pending.socket.recv(answering.wants)
            if not received:
                raise OpeningError(answering.ended())
            if answer := answering.take(received):
                self._allow_proof(pending, answering.theirs)
                _send(pending.socket, answer)
        except BlockingIOError:
            return
        except (OpeningError, OSError) as error:
            if isinstance(error, Turned):
                with contextlib.suppress(OSError):
                    _send(pending.socket, error.answer)
            self._drop(pending, str(error))
        else:
            if answering.theirs is not None and not answering.wants:
                self._hand_over(pending, answering.theirs)

    def _allow_proof(self, pending: _Pending, theirs: Opening | None) -> None:
        """Give an answered rank its group's timeout to send the proof. If the group has been left, change nothing."""
        entry = theirs and self._endpoints.get((theirs.group, theirs.peer))
        if entry:
            pending.deadline = time.monotonic() + entry[2]

    def _hand_over(self, pending: _Pending, theirs: Opening) -> None:
        entry = self._endpoints.get((theirs.group, theirs.peer))
        self._forget(pending)
        if entry is None:  # the group has gone meanwhile
            pending.socket.close()
            return
        try:
            encrypt(pending.socket, pending.answering.seed, Role.ANSWERS)
            entry[1](theirs, pending.socket)
        except Exception:  # a failure in one group must not end the thread that serves all groups
            logger.exception("a connection from %s could not be handed over", pending.host)
            pending.socket.close()

    def _drop(self, pending: _Pending, reason: str) -> None:
        self._forget(pending)
        pending.socket.close()
        self.blame(pending.host, reason)

    def _forget(self, pending: _Pending) -> None:
        self.selector.unregister(pending.socket)
        del self._pending[pending.socket.fileno()]


def _send(connection: socket.socket, data: bytes) -> None:
    """Send an answer. It is sent completely or not at all, because a fresh connection's buffer is far larger."""
    if data and connection.send(data) < len(data):
        raise OpeningError("does not read the answer to its opening")


def _listen(interface: Interface) -> socket.socket:
    """Return a listening socket on an address, with a port in FASTCOLL_PORT_RANGE."""
    ports: range = config.get("FASTCOLL_PORT_RANGE") or range(1)
    first = os.getpid() % len(ports)  # so that the ranks of a node do not all try the same port
    refused: OSError | None = None
    for port in (*ports[first:], *ports[:first]):
        try:
            listening = socket.create_server(
                (interface.address, port), family=family_of(interface.address), backlog=socket.SOMAXCONN
            )
        except OSError as error:
            refused = error
            if error.errno != errno.EADDRINUSE:
                break
        else:
            listening.setblocking(False)
            warn_if_open(shown(interface.address, listening.getsockname()[1]))
            return listening
    assert refused is not None, "a range has a port"
    if refused.errno == errno.EADDRINUSE and not ports[0]:
        raise no_port(f"cannot listen on {interface}") from refused
    where = f"ports {ports[0]}-{ports[-1]} of {interface}" if ports[0] else str(interface)
    raise ResourceError(
        f"cannot listen on {where}: {os.strerror(refused.errno or 0)}; choose with FASTCOLL_SOCKET_IFNAME and "
        "FASTCOLL_PORT_RANGE"
    ) from refused


def acquire(interfaces: Sequence[Interface]) -> Listener:
    """Return this process's listener on these interfaces, or a new one; its last `release` closes it."""
    return serving.acquire(tuple(interfaces), partial(Listener, interfaces))


@dataclass(frozen=True)
class ListenAddresses:
    """The addresses at which a rank listens: its interfaces, with an address and a port for each."""

    names: tuple[str, ...]
    addresses: tuple[str, ...]
    ports: tuple[int, ...]

    @classmethod
    def from_record(cls, record: Any) -> ListenAddresses:
        """Return the addresses in a `record` made by `dataclasses.asdict`, or raise StoreError."""
        try:
            place = cls(*(tuple(record[key]) for key in ("names", "addresses", "ports")))
            texts = all(type(text) is str for text in (*place.names, *place.addresses))
            ports = all(type(port) is int and 0 < port < 65536 for port in place.ports)
            if not (texts and ports and len(place.names) == len(place.addresses) == len(place.ports) > 0):
                raise ValueError("fields of another type or length")
            return place
        except (KeyError, TypeError, ValueError) as error:
            raise StoreError(f"a rank's address cannot be read ({error}): {record!r:.80}") from error

    def __str__(self) -> str:
        return f"{len(self.names)} ({', '.join(name or '?' for name in self.names)})"


@dataclass(frozen=True)
class Roster:
    """What `gather` returns: this rank's endpoint, interfaces and listener, and the addresses of all ranks.

    `places` has the addresses, by rank. `streams` is the number of data connections between two ranks.
    """

    endpoint: Endpoint
    interfaces: list[Interface]
    places: list[ListenAddresses]
    streams: int
    listener: Listener

    def leave(self, grace: float = 0.0) -> None:
        """Stop accepting connections for this group, after up to `grace` seconds for pending, answered ones."""
        until = time.monotonic() + grace
        while self.listener.opens_for(self.endpoint) and time.monotonic() < until:
            time.sleep(0.001)
        self.listener.leave(self.endpoint)
        release(self.listener)


def _terms(
    meeting: GroupMeeting, members: Sequence[Member], rank: int
) -> tuple[list[Interface], bytes, bytes, int]:
    """Return this rank's interfaces, and what the first member chose: the group's name, token and number of streams."""
    store = meeting.store
    if rank == 0:
        interfaces = choose_here(local_address(store), members, None)
        group, token = os.urandom(GROUP_SIZE), os.urandom(TOKEN_SIZE)
        family, streams = interfaces[0].family, config.get("FASTCOLL_TCP_STREAMS")
        terms = {"group": group.hex(), "token": token.hex(), "family": family, "streams": streams}
        meeting.publish("terms", json.dumps(terms).encode())
    else:
        data = meeting.receive("terms")
        terms = loads(data)
        try:
            group, token = bytes.fromhex(terms["group"]), bytes.fromhex(terms["token"])
            family, streams = terms["family"], terms["streams"]
            if len(group) != GROUP_SIZE or len(token) != TOKEN_SIZE:
                raise ValueError("a name or token of another length")
            if family not in (IPV4, IPV6) or type(streams) is not int or not 1 <= streams <= MOST_STREAMS:
                raise ValueError(f"family {family!r}, {streams!r} streams")
        except (KeyError, TypeError, ValueError) as error:
            raise StoreError(f"the group's name cannot be read ({error}): {data[:80]!r}") from error
        interfaces = choose_here(local_address(store), members, family)
    return interfaces, group, token, streams


def gather(meeting: GroupMeeting, members: Sequence[Member], rank: int, deliver: Deliver) -> Roster:
    """Exchange the addresses of all members; collective. `deliver` receives the connections of the other ranks.

    Raises, on every rank:
        UsageError: an interface does not exist, or the ranks name different numbers of interfaces.
        ResourceError: a rank cannot listen.
        RendezvousError: the ranks' secrets differ, or only some ranks have FASTCOLL_ENCRYPT=1.
        PeerDiedError, StoreTimeoutError: a member died or did not come.
    """
    interfaces, group, token, streams = _terms(meeting, members, rank)

    def check(records: Sequence[Any]) -> None:
        first, *others = map(ListenAddresses.from_record, records)
        for member, record in zip(members, records, strict=True):
            if record.get("same") != records[0].get("same"):
                raise RendezvousError(f"{member} has another secret than {members[0]}; {SAME_SECRET}")
            if record.get("encrypts") != records[0].get("encrypts"):
                which = (member, members[0]) if record.get("encrypts") else (members[0], member)
                raise RendezvousError(
                    f"{which[0]} encrypts its connections, {which[1]} does not; {SAME_ENCRYPTION}"
                )
        for member, place in zip(members[1:], others, strict=True):
            if len(place.names) != len(first.names):
                raise UsageError(
                    f"the ranks name different numbers of network interfaces: {members[0]} has {first}, {member} has "
                    f"{place}; give every rank the same number in FASTCOLL_SOCKET_IFNAME"
                )

    secret = job_secret()
    endpoint = Endpoint(group, rank, len(members), derive_key(secret, token), bool(secret), encrypts())
    listener = acquire(interfaces)
    roster = Roster(endpoint, interfaces, [], streams, listener)
    try:
        listener.join(endpoint, deliver, meeting.timeout)
        names = tuple(each.name for each in interfaces)
        place = ListenAddresses(names, tuple(each.address for each in interfaces), tuple(listener.ports))
        # By comparing these proofs, all ranks detect now if their secrets differ, before a connection fails because of
        # it.
        same = proof(endpoint.key, "fastcoll group, the same secret", ()).hex()
        mine = {**asdict(place), "same": same, "encrypts": endpoint.encrypts}
        records = meeting.assemble(mine, check)
        roster.places.extend(map(ListenAddresses.from_record, records))
        if any(len(place.names) != len(interfaces) for place in roster.places):
            raise StoreError("the ranks' addresses cannot be read: their numbers of interfaces differ")
    except BaseException:
        roster.leave()
        raise
    return roster
