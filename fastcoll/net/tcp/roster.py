"""How the members of a group learn of one another's addresses, through the group's store.

The first member draws the group's name and token; each member listens before it tells where, so whoever knows an
address finds the group there. Who cannot go on says so (refusal.py), and all raise the same error. Keys:

    net/group       the group's name, token and version of IP, from its first member
    net/place/<r>   where group rank r listens
    net/all         all of these, put together by the first member, so that n ranks cost n looks
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ... import config
from ...config import MOST_STREAMS
from ...core.members import Member
from ...errors import StoreError, UsageError
from ...rendezvous import Store
from ...rendezvous.compact import compact, expand
from ...rendezvous.secret import job_secret
from ...rendezvous.waiting import fetch_for
from .interfaces import IPV4, IPV6, Interface, choose_here
from .listener import Deliver, Listener
from .listeners import acquire, release
from .opening import GROUP_SIZE, TOKEN_SIZE, Seat, derive_key
from .refusal import Refusal

_GROUP, _ALL = "net/group", "net/all"
_MOST_BYTES = 4096  # of one rank's record in the list of all
_DOING = "making a group over the network"
_MOST_NAMES = 16


@dataclass(frozen=True)
class Place:
    """Where a rank listens: its interfaces, their addresses and a port on each."""

    names: tuple[str, ...]
    addresses: tuple[str, ...]
    ports: tuple[int, ...]

    @classmethod
    def of(cls, listener: Listener, interfaces: Sequence[Interface]) -> Place:
        names = tuple(each.name for each in interfaces)
        return cls(names, tuple(each.address for each in interfaces), tuple(listener.ports))

    @classmethod
    def from_record(cls, record: Any) -> Place:
        """The place that `dataclasses.asdict` made into `record`.

        Raises:
            StoreError: the record is anything else.
        """
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
class _Terms:
    """What the first member lays down."""

    group: bytes
    token: bytes
    family: int
    streams: int

    def to_bytes(self) -> bytes:
        record = asdict(self) | {"group": self.group.hex(), "token": self.token.hex()}
        return json.dumps(record).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> _Terms:
        """What `to_bytes` made.

        Raises:
            StoreError: anything else.
        """
        record = _loads(data)
        try:
            group, token = bytes.fromhex(record["group"]), bytes.fromhex(record["token"])
            family, streams = record["family"], record["streams"]
            if len(group) != GROUP_SIZE or len(token) != TOKEN_SIZE:
                raise ValueError("a name or token of another length")
            if family not in (IPV4, IPV6) or type(streams) is not int or not 1 <= streams <= MOST_STREAMS:
                raise ValueError(f"family {family!r}, {streams!r} streams")
            return cls(group, token, family, streams)
        except (KeyError, TypeError, ValueError) as error:
            raise StoreError(f"the group's name cannot be read ({error}): {data[:80]!r}") from error


@dataclass(frozen=True)
class Roster:
    """What this rank needs to reach the others and to be reached.

    Attributes:
        seat: its own place in the group.
        interfaces: this machine's addresses that the group uses.
        places: where each rank listens.
        streams: data connections with each peer for large messages.
        listener: where this one does; `leave` lets go of it.
    """

    seat: Seat
    interfaces: list[Interface]
    places: list[Place]
    streams: int
    listener: Listener

    def leave(self) -> None:
        """Accept no more connections for this group."""
        self.listener.leave(self.seat)
        release(self.listener)


def gather(
    store: Store, members: Sequence[Member], rank: int, timeout: float, deliver: Deliver, refusal: Refusal
) -> Roster:
    """Tell where this rank listens and learn where the others do; collective.

    Args:
        store: the group's own.
        members: all ranks of the group.
        rank: this process's group rank.
        timeout: seconds.
        deliver: takes over the connections that come for this group.
        refusal: where a rank tells that it cannot go on.

    Raises:
        UsageError: an interface does not exist, or the ranks name different numbers of them; on every rank.
        ResourceError: a rank cannot listen; on every rank.
        PeerDiedError, StoreTimeoutError: a member died or did not come.
    """
    return _Gathering(store, members, rank, timeout, refusal).run(deliver)


class _Gathering:
    def __init__(
        self, store: Store, members: Sequence[Member], rank: int, timeout: float, refusal: Refusal
    ) -> None:
        self._store, self._members, self._rank = store, members, rank
        self._deadline = time.monotonic() + timeout
        self._refusal = refusal

    def run(self, deliver: Deliver) -> Roster:
        if self._rank == 0:
            interfaces = choose_here(self._store, self._members, None)
            terms = self._lay_down_terms(interfaces[0].family)
        else:
            terms = _Terms.from_bytes(self._read(_GROUP, lambda: str(self._members[0])))
            interfaces = choose_here(self._store, self._members, terms.family)
        secret = job_secret()
        key = derive_key(secret, terms.token)
        seat = Seat(terms.group, self._rank, len(self._members), key, bool(secret))
        listener = acquire(interfaces)
        roster = Roster(seat, interfaces, [], terms.streams, listener)
        try:
            listener.join(seat, deliver)
            self._store.set(_place_key(self._rank), json.dumps(asdict(Place.of(listener, interfaces))))
            roster.places.extend(self._collect() if self._rank == 0 else self._receive(len(interfaces)))
        except BaseException:
            roster.leave()
            raise
        return roster

    def _lay_down_terms(self, family: int) -> _Terms:
        streams: int = config.get("FASTCOLL_TCP_STREAMS")
        terms = _Terms(os.urandom(GROUP_SIZE), os.urandom(TOKEN_SIZE), family, streams)
        self._store.set(_GROUP, terms.to_bytes())
        return terms

    def _collect(self) -> list[Place]:
        """On the first member: wait for all addresses, and publish them."""
        keys = [_place_key(rank) for rank in range(len(self._members))]
        places = [Place.from_record(_loads(data)) for data in self._fetch(keys, self._missing)]
        for member, place in zip(self._members, places, strict=True):
            if len(place.names) != len(places[0].names):
                raise UsageError(
                    f"the ranks name different numbers of network interfaces: {self._members[0]} has {places[0]}, "
                    f"{member} has {place}; give every rank as many in FASTCOLL_SOCKET_IFNAME"
                )
        self._store.set(_ALL, compact([asdict(place) for place in places]))
        return places

    def _receive(self, interfaces: int) -> list[Place]:
        """On the other members: wait for all addresses."""
        records = expand(self._read(_ALL, self._missing), len(self._members) * _MOST_BYTES)
        if not isinstance(records, list) or len(records) != len(self._members):
            raise StoreError(f"the ranks' addresses cannot be read: {records!r:.80}")
        places = [Place.from_record(record) for record in records]
        if any(len(place.names) != interfaces for place in places):
            raise StoreError("the ranks' addresses cannot be read: they are not of as many interfaces")
        return places

    def _read(self, key: str, missing: Callable[[], str]) -> bytes:
        return self._fetch([key], missing)[0]

    def _fetch(self, keys: Sequence[str], missing: Callable[[], str]) -> list[bytes]:
        left = max(self._deadline - time.monotonic(), 0.0)
        crowd = 1 if self._rank == 0 else len(self._members)
        check = self._refusal.check
        return fetch_for(self._store, keys, self._members, left, _DOING, check, missing=missing, crowd=crowd)

    def _missing(self) -> str:
        """The first of those who have not told where they listen."""
        told = self._store.peek([_place_key(rank) for rank in range(len(self._members))])
        late = [str(member) for member, place in zip(self._members, told, strict=True) if place is None]
        return ", ".join(late[:_MOST_NAMES]) or f"{self._members[0]}, who collects the addresses"


def _place_key(rank: int) -> str:
    return f"net/place/{rank}"


def _loads(data: bytes) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise StoreError(f"what a rank wrote into the store cannot be read: {data[:80]!r}") from error
