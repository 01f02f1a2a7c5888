"""tcp:// with a multicast address: candidates find one another and elect a leader, in whose store ranks are assigned.

An announcement is one datagram:

    offset  bytes  field
    0       8      magic "FASTMC1\\n"
    8       n      JSON of an Announcement, at most 1,200 bytes
    8+n     32     HMAC-SHA256 over all of the above, when there is a job secret

All other datagrams, and those with another secret, are ignored.

Datagrams may be lost, so they only serve to elect a leader. The leader opens a TCP store, and announces its address (an
*offer*). The others connect to the store, and ranks are assigned there. Each candidate has a random nonce. A candidate
that receives several offers follows the offer with the lowest nonce. A candidate that receives no offer waits until it
knows as many candidates as the world has ranks, itself included. Then the candidate with the lowest nonce leads at
once, the one with the next nonce a second later, and so on, in case the candidates with lower nonces are dead. So two
may lead at the same time. A leader that receives an offer with a lower nonce than its own cancels its own meeting,
unless this meeting has ended already.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import select
import socket
import struct
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

from ..errors import ResourceError, StoreError, StoreTimeoutError, UsageError
from ..store.secret import PROOF_SIZE, is_proof, job_secret, proof
from ..store.store import Rendezvous, listed
from ..store.tcp_store import TCPStore
from ..store.waiting import LateWarning, raise_if_dead
from ..system.address import own_address, shown
from ..system.processes import ProcessId, forget, this_process
from .assemble import MovedError
from .join import FullError, arrive, call_off

FRESH_SECONDS = 1.5  # a candidate that has sent nothing for longer is not counted
STEP_SECONDS = 1.0  # how long a candidate gives each candidate with a lower nonce to lead
_ANNOUNCE_SECONDS = 0.1
_CONNECT_SECONDS = 2.0
# How long a leader that has cancelled its meeting keeps its store, and how long one that has failed, so that followers
# can read the reason in the store.
_GIVING_WAY_SECONDS = 2.0
_FAILED_SECONDS = 0.5
_LEAVE_COPIES = 3  # an important announcement is sent this many times, because datagrams may be lost
_HOPS = 8  # the TTL of datagrams
_FLOOD = 10_000  # `receive` ends after this many datagrams
_IPV4_OPTIONS = socket.IPPROTO_IP, socket.IP_MULTICAST_IF, socket.IP_MULTICAST_LOOP, socket.IP_MULTICAST_TTL
_IPV6_OPTIONS = (
    socket.IPPROTO_IPV6, socket.IPV6_MULTICAST_IF, socket.IPV6_MULTICAST_LOOP, socket.IPV6_MULTICAST_HOPS,
)  # fmt: skip
_MAGIC = b"FASTMC1\n"
MAX_DATAGRAM = len(_MAGIC) + 1200 + PROOF_SIZE


def meet_by_multicast(
    address: str, port: int, rank: int | None, world_size: int, timeout: float, group_name: str = ""
) -> Rendezvous:
    """Meet the processes that announce themselves at a multicast address; for `rank` and errors see `arrive`.

    `group_name` and the job's secret distinguish jobs that use the same address.
    ResourceError: this machine cannot join the multicast group.
    """
    secret = job_secret()
    with MulticastSocket(address, port) as group:
        me = Announcement(
            job_digest(group_name), os.urandom(16).hex(), time.time(), world_size, **vars(this_process())
        )
        candidate = _Candidate(group, shown(address, port), me, secret, timeout)
        try:
            return candidate.meet(own_address(address), rank)
        finally:
            candidate.leave()


@dataclass(frozen=True)
class Announcement(ProcessId):
    """The announcement of a candidate, with the identity of its process, whose death the other candidates detect."""

    job: str  # a digest of the group name; announcements of other jobs are ignored
    nonce: str  # 32 hex digits, new for each call of `meet_by_multicast`; the candidate with the lowest leads
    time: float  # the candidate's start, in seconds since the epoch, for people who read datagrams
    world_size: int
    address: str = ""  # the address of the candidate's store
    port: int = 0  # the port of the candidate's store; 0: it has no store, so this is no offer
    leaving: bool = False  # the candidate has stopped looking for others, and its death is not a failure

    def seal(self, secret: bytes) -> bytes:
        """Return the datagram."""
        message = _MAGIC + self.to_bytes()
        return message + _mac(secret, message)

    @classmethod
    def unseal(cls, data: bytes, secret: bytes) -> Announcement | None:
        """Return the announcement in a datagram; None if it is not an announcement with this secret."""
        end = len(data) - (PROOF_SIZE if secret else 0)
        message, mac = data[:end], data[end:]
        if not message.startswith(_MAGIC) or not is_proof(mac, _mac(secret, message)):
            return None
        try:
            found = cls.from_bytes(message[len(_MAGIC) :])
        except StoreError:
            return None
        return found if 0 <= found.port <= 65535 and found.world_size >= 1 else None


def job_digest(group_name: str) -> str:
    """Return the digest by which candidates of jobs with different group names ignore one another."""
    return hashlib.sha256(b"fastcoll group " + group_name.encode()).hexdigest()[:32]


def _mac(secret: bytes, message: bytes) -> bytes:
    return proof(secret, "fastcoll multicast", [message]) if secret else b""


class Election:
    """The state of one candidate, without I/O: the candidates that it knows, and whether it leads or whom it follows.

    All times are seconds of one clock.
    """

    def __init__(self, nonce: str, world_size: int) -> None:
        self.nonce = nonce
        self.world_size = world_size
        self._received: dict[str, tuple[Announcement, float]] = {}
        self._left: dict[str, Announcement] = {}
        self._passed_over: set[str] = set()
        self._enough_since: float | None = None

    def record(self, announcement: Announcement, now: float) -> None:
        """Record an announcement of a candidate of this job."""
        if announcement.leaving:
            self._left[announcement.nonce] = announcement
            self._received.pop(announcement.nonce, None)
        elif announcement.nonce != self.nonce and announcement.nonce not in self._left:
            self._received[announcement.nonce] = (announcement, now)

    def names(self, now: float) -> list[str]:
        """Return the names of the other candidates, for messages."""
        left = [f"{each.where} (which has left)" for each in self._left.values()]
        return [each.where for each in self.fresh(now)] + left

    def there(self) -> list[Announcement]:
        """Return the other candidates that have not left; their death ends the meeting."""
        return [announcement for announcement, _ in self._received.values()]

    def pass_over(self, nonce: str) -> None:
        """Ignore a candidate, because its store cannot be reached or its world is full."""
        self._passed_over.add(nonce)
        self._enough_since = None

    def fresh(self, now: float) -> list[Announcement]:
        """Return the other candidates that have lately sent an announcement, the lowest nonce first."""
        nonces = sorted(self._received.keys() - self._passed_over)
        return [
            self._received[nonce][0] for nonce in nonces if now - self._received[nonce][1] <= FRESH_SECONDS
        ]

    def offer(self, now: float) -> Announcement | None:
        """Return the offer to follow, the one with the lowest nonce; None: there is no offer."""
        return next((candidate for candidate in self.fresh(now) if candidate.port), None)

    def gives_way(self, now: float) -> bool:
        """Return whether this leader has received an offer with a lower nonce than its own."""
        offer = self.offer(now)
        return offer is not None and offer.nonce < self.nonce

    def should_lead(self, now: float) -> bool:
        """Return whether this candidate has to lead now, if there is no offer."""
        others = self.fresh(now)
        if len(others) + 1 < self.world_size:
            self._enough_since = None
            return False
        if self._enough_since is None:
            self._enough_since = now
        place = sum(other.nonce < self.nonce for other in others)
        return now - self._enough_since >= place * STEP_SECONDS


class _Candidate:
    """This process, while it looks for the other processes of its world."""

    def __init__(
        self, group: MulticastSocket, where: str, me: Announcement, secret: bytes, timeout: float
    ) -> None:
        self._group, self._where, self._me, self._timeout = group, where, me, timeout
        self._secret = secret
        self._deadline = time.monotonic() + timeout
        self._late = LateWarning()
        self._election = Election(me.nonce, me.world_size)

    def meet(self, address: str, rank: int | None) -> Rendezvous:
        """Lead or follow, until a meeting is full."""
        while True:
            offer = self.await_offer()
            try:
                return self.lead(address, rank) if offer is None else self.follow(offer, rank)
            except MovedError:
                continue

    def leave(self) -> None:
        """Announce that this process leaves; the others then neither wait for it nor fail when it dies."""
        forget(self._election.there())
        self._me = replace(self._me, leaving=True)
        with contextlib.suppress(ResourceError):  # the network has gone
            for _ in range(_LEAVE_COPIES):
                self._announce()

    def await_offer(self) -> Announcement | None:
        """Announce this process until there is an offer to follow; return it, or None if this process has to lead."""
        me, size = self._me.where, self._me.world_size
        while True:
            self._announce()
            self._listen(_ANNOUNCE_SECONDS)
            now = time.monotonic()
            offer = self._election.offer(now)
            if offer is not None or self._election.should_lead(now):
                return offer
            others = f"heard {listed(self._election.names(now)) or 'nobody'}"
            if now >= self._deadline:
                raise StoreTimeoutError(
                    f"fewer than {size} processes met at {self._where} within {self._timeout:g} s; {me} {others}"
                )
            self._late.look(
                f"{me} at {self._where}", partial("{} processes to meet; {}".format, size, others)
            )

    def lead(self, address: str, rank: int | None) -> Rendezvous:
        """Open a store, and announce it until all processes of the world have come to it."""
        store = TCPStore(address, 0, is_master=True, timeout=self._timeout)

        def keep_leading() -> None:
            self._announce()
            self._listen(0.0)
            if self._election.gives_way(time.monotonic()) and call_off(store):
                raise MovedError

        try:
            self._me = replace(self._me, address=address, port=store.port)
            return self._arrive(store, rank, keep_leading)
        except BaseException as error:
            # After Ctrl-C close the store at once.
            failed = _FAILED_SECONDS if isinstance(error, Exception) else 0.0
            store.close(_GIVING_WAY_SECONDS if isinstance(error, MovedError) else failed)
            raise
        finally:
            self._me = replace(self._me, address="", port=0)

    def follow(self, offer: Announcement, rank: int | None) -> Rendezvous:
        """Connect to the store of another candidate, and get a rank there.

        MovedError: the store cannot be reached, its meeting was cancelled, or its world is full.
        """
        try:
            grace = min(max(self._deadline - time.monotonic(), 0.0), _CONNECT_SECONDS)
            store = TCPStore(offer.address, offer.port, timeout=grace)
        except StoreTimeoutError as error:
            self._election.pass_over(offer.nonce)
            raise MovedError from error
        try:
            store.set_timeout(self._timeout)
            return self._arrive(store, rank, lambda: self._listen(0.0))
        except BaseException as error:
            store.close()
            if not isinstance(error, FullError | MovedError):
                raise
            self._election.pass_over(offer.nonce)
            raise MovedError from error

    def _arrive(self, store: TCPStore, rank: int | None, between: Callable[[], None]) -> Rendezvous:
        size, began = self._me.world_size, self._deadline - self._timeout
        mine = arrive(store, rank, size, self._timeout, between, began)
        return Rendezvous(store, mine, size, store.local_address)

    def _announce(self) -> None:
        self._group.send(self._me.seal(self._secret))

    def _listen(self, seconds: float) -> None:
        for data in self._group.receive(seconds, MAX_DATAGRAM):
            other = Announcement.unseal(data, self._secret)
            if other is None or other.job != self._me.job:
                continue
            if other.world_size != self._me.world_size and not other.leaving:
                for _ in range(_LEAVE_COPIES):  # the other candidate must receive this world size, too
                    self._announce()
                raise UsageError(
                    f"the processes at {self._where} disagree about the world size: {other.where} has "
                    f"{other.world_size}, {self._me.where} has {self._me.world_size}; start all with the same, or give "
                    "each job a group_name"
                )
            self._election.record(other, time.monotonic())
        raise_if_dead(self._election.there(), f"meeting at {self._where}")


class MulticastSocket:
    """A socket in the multicast group at `address`:`port`. A context manager; for one thread."""

    def __init__(self, address: str, port: int) -> None:
        self._family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._address, self._port = address, port
        self._receiver = socket.socket(self._family, socket.SOCK_DGRAM)
        self._senders: list[socket.socket] = []
        try:
            self._open()
        except OSError as error:
            self.close()
            raise ResourceError(f"cannot join the multicast group {address} port {port}: {error}") from error

    def send(self, data: bytes) -> None:
        """Send to the group on every interface; ResourceError if none accepts the datagram. Never blocks."""
        errors = []
        for sender in self._senders:
            try:
                sender.sendto(data, (self._address, self._port))
            except BlockingIOError:
                return
            except OSError as error:
                errors.append(error)
        if len(errors) == len(self._senders):
            raise ResourceError(f"cannot send to the multicast group {self._address}: {errors[0]}")

    def receive(self, seconds: float, size: int) -> Iterator[bytes]:
        """Yield the datagrams that arrive within `seconds`, each cut off after `size` + 1 bytes.

        End after 10,000 datagrams, so that the caller can check its own deadline during a flood.
        """
        deadline, poller = time.monotonic() + seconds, select.poll()
        poller.register(self._receiver, select.POLLIN)
        for _ in range(_FLOOD):
            if not poller.poll(1000 * max(deadline - time.monotonic(), 0.0)):
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
        # Bound to the group's address, so that the socket receives no other datagrams to this port.
        self._receiver.bind((self._address, self._port))
        refused: OSError | None = None
        for interface in (0, socket.if_nametoindex("lo")):
            try:
                self._join(interface)
            except OSError as error:
                refused = error
        if not self._senders:
            assert refused is not None, "an interface either joined or refused"
            raise refused

    def _join(self, interface: int) -> None:
        """Join the group on an interface, and open a socket that sends there; 0: that of the route to the group."""
        group, number = socket.inet_pton(self._family, self._address), struct.pack("@i", interface)
        sender = socket.socket(self._family, socket.SOCK_DGRAM)
        try:
            sender.setblocking(False)
            if self._family == socket.AF_INET:
                level, leaves_by, loops, hops = _IPV4_OPTIONS
                self._receiver.setsockopt(level, socket.IP_ADD_MEMBERSHIP, group + bytes(4) + number)
                sender.setsockopt(level, leaves_by, bytes(8) + number)
            else:
                level, leaves_by, loops, hops = _IPV6_OPTIONS
                self._receiver.setsockopt(level, socket.IPV6_JOIN_GROUP, group + number)
                sender.setsockopt(level, leaves_by, interface)
            sender.setsockopt(level, loops, 1)
            sender.setsockopt(level, hops, _HOPS)
        except BaseException:
            sender.close()
            raise
        self._senders.append(sender)
