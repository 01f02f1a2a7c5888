"""tcp:// with a multicast address: candidates find one another, one leads, ranks are assigned."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import time
from collections.abc import Iterator
from dataclasses import replace

from ..core.processes import forget, this_process
from ..errors import ResourceError, StoreTimeoutError, UsageError
from .address import own_address, shown
from .assemble import MovedError
from .election import MAX_DATAGRAM, Announcement, Election, job_digest
from .join import FullError, arrive, call_off
from .secret import job_secret
from .store import Rendezvous, listed
from .tcp_store import TCPStore
from .waiting import LateWarning, death_among

_ANNOUNCE_SECONDS = 0.1
_CONNECT_SECONDS = 2.0
# How long a leader that gave way, or failed, keeps its store, for followers to learn why.
_GIVING_WAY_SECONDS = 2.0
_FAILED_SECONDS = 0.5
_FAREWELLS = 3


def meet_by_multicast(
    address: str, port: int, rank: int | None, world_size: int, timeout: float, group_name: str = ""
) -> Rendezvous:
    """Meet the other processes that announce themselves at a multicast address.

    Ranks go by arrival, except for those that ask for one. `group_name`, and the job's secret where
    there is one, keep jobs apart that use the same address.

    Raises:
        UsageError: world sizes differ, or two processes ask for one rank; both are named.
        PeerDiedError: a process that had come has ended.
        StoreTimeoutError: not all came in time; the message names those that did.
        ResourceError: the machine cannot take part in the group.
    """
    with MulticastSocket(address, port) as group:
        candidate = _Candidate(group, shown(address, port), world_size, timeout, group_name)
        try:
            return candidate.meet(own_address(address), rank)
        finally:
            candidate.leave()


class _Candidate:
    """This process while it looks for the others."""

    def __init__(
        self, group: MulticastSocket, where: str, world_size: int, timeout: float, group_name: str
    ) -> None:
        self._group = group
        self._where = where
        self._timeout = timeout
        self._deadline = time.monotonic() + timeout
        self._secret = job_secret()
        self._job = job_digest(group_name)
        self._process = this_process()
        self._started = time.time()
        self._late = LateWarning()
        self._election = Election(os.urandom(16).hex(), world_size)
        self._address, self._port = "", 0

    def meet(self, address: str, rank: int | None) -> Rendezvous:
        """Lead or follow, until a meeting is full."""
        while True:
            offer = self.await_offer()
            try:
                return self.lead(address, rank) if offer is None else self.follow(offer, rank)
            except MovedError:
                continue

    def leave(self) -> None:
        """Tell the others not to wait for this process, and not to mind its end."""
        forget(self._election.processes())
        farewell = replace(self._myself(), leaving=True).to_bytes(self._secret)
        with contextlib.suppress(ResourceError):  # the network has gone
            for _ in range(_FAREWELLS):
                self._group.send(farewell)

    def await_offer(self) -> Announcement | None:
        """Announce and listen until there is an offer to follow; None: this process is to lead."""
        while True:
            self._announce()
            self._listen(_ANNOUNCE_SECONDS)
            now = time.monotonic()
            offer = self._election.offer(now)
            if offer is not None:
                return offer
            if self._election.should_lead(now):
                return None
            if now >= self._deadline:
                raise self._alone(now)
            self._late.look(f"{self._myself().where} at {self._where}", self._missing)

    def lead(self, address: str, rank: int | None) -> Rendezvous:
        """Offer a store until the world is full."""
        store = TCPStore(address, 0, is_master=True, timeout=self._timeout)
        try:
            self._address, self._port = address, store.port
            assigned = arrive(
                store, rank, self._election.world_size, self._left(), lambda: self._keep_leading(store)
            )
            return Rendezvous(store, assigned, self._election.world_size, store.local_address)
        except BaseException as error:
            store.close(_linger(error))
            raise
        finally:
            self._address, self._port = "", 0

    def follow(self, offer: Announcement, rank: int | None) -> Rendezvous:
        """Go to the store of another."""
        try:
            store = TCPStore(offer.address, offer.port, timeout=min(self._left(), _CONNECT_SECONDS))
        except StoreTimeoutError as error:
            self._election.pass_over(offer.nonce)
            raise MovedError from error
        store.set_timeout(self._timeout)
        try:
            assigned = arrive(store, rank, self._election.world_size, self._left(), lambda: self._listen(0.0))
            return Rendezvous(store, assigned, self._election.world_size, store.local_address)
        except (FullError, MovedError) as error:
            store.close()
            self._election.pass_over(offer.nonce)
            raise MovedError from error
        except BaseException:
            store.close()
            raise

    def _keep_leading(self, store: TCPStore) -> None:
        self._announce()
        self._listen(0.0)
        if self._election.lower_offer(time.monotonic()) is not None and call_off(store):
            raise MovedError

    def _announce(self) -> None:
        self._group.send(self._myself().to_bytes(self._secret))

    def _listen(self, seconds: float) -> None:
        for data in self._group.receive(seconds, MAX_DATAGRAM):
            announcement = Announcement.from_bytes(data, self._secret)
            if announcement is None or announcement.job != self._job:
                continue
            if announcement.world_size != self._election.world_size and not announcement.leaving:
                self._disagree(announcement)
            self._election.hear(announcement, time.monotonic())
        died = death_among(self._election.processes(), f"meeting at {self._where}")
        if died is not None:
            raise died

    def _disagree(self, other: Announcement) -> None:
        for _ in range(_FAREWELLS):  # the other must hear of us, too
            self._announce()
        mine = self._myself()
        raise UsageError(
            f"the processes at {self._where} disagree about the world size: {other.where} has {other.world_size}, "
            f"{mine.where} has {mine.world_size}; start all with the same, or give each job a group_name"
        )

    def _myself(self) -> Announcement:
        return Announcement(
            job=self._job,
            nonce=self._election.nonce,
            process=self._process,
            time=self._started,
            world_size=self._election.world_size,
            address=self._address,
            port=self._port,
        )

    def _alone(self, now: float) -> StoreTimeoutError:
        return StoreTimeoutError(
            f"fewer than {self._election.world_size} processes met at {self._where} within {self._timeout:g} s; "
            f"{self._myself().where} heard {self._heard(now)}"
        )

    def _missing(self) -> str:
        return f"{self._election.world_size} processes to meet; heard {self._heard(time.monotonic())}"

    def _heard(self, now: float) -> str:
        return listed(self._election.names(now)) or "nobody"

    def _left(self) -> float:
        return max(self._deadline - time.monotonic(), 0.0)


def _linger(error: BaseException) -> float:
    """How long a store outlives the end of its meeting; Ctrl-C ends it at once."""
    if isinstance(error, MovedError):
        return _GIVING_WAY_SECONDS
    return _FAILED_SECONDS if isinstance(error, Exception) else 0.0


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
