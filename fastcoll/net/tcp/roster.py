"""How the members of a group learn of one another's addresses, through the group's store.

The first member draws the group's name and token ("terms"); each member listens before it tells where, so whoever
knows an address finds the group there.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ... import config
from ...config import MOST_STREAMS
from ...core.processes import Member
from ...errors import StoreError, UsageError
from ...rendezvous.assemble import GroupMeeting, loads
from ...rendezvous.opening import GROUP_SIZE, TOKEN_SIZE, Endpoint, derive_key
from ...rendezvous.secret import job_secret
from .interfaces import IPV4, IPV6, Interface, choose_here
from .listener import Deliver, Listener, acquire, release


@dataclass(frozen=True)
class Place:
    """Where a rank listens: its interfaces, their addresses and a port on each."""

    names: tuple[str, ...]
    addresses: tuple[str, ...]
    ports: tuple[int, ...]

    @classmethod
    def from_record(cls, record: Any) -> Place:
        """The place that `dataclasses.asdict` made into `record`; StoreError: it is anything else."""
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
    """What this rank needs to reach the others and to be reached; `places` is where each rank listens."""

    endpoint: Endpoint
    interfaces: list[Interface]
    places: list[Place]
    streams: int
    listener: Listener

    def leave(self) -> None:
        """Accept no more connections for this group."""
        self.listener.leave(self.endpoint)
        release(self.listener)


def gather(meeting: GroupMeeting, members: Sequence[Member], rank: int, deliver: Deliver) -> Roster:
    """Tell where this rank listens and learn where the others do; collective. `deliver` takes over what comes.

    Raises:
        UsageError: an interface does not exist, or the ranks name different numbers of them; on every rank.
        ResourceError: a rank cannot listen; on every rank.
        PeerDiedError, StoreTimeoutError: a member died or did not come.
    """
    store = meeting.store
    if rank == 0:
        interfaces = choose_here(store, members, None)
        group, token = os.urandom(GROUP_SIZE), os.urandom(TOKEN_SIZE)
        family, streams = interfaces[0].family, config.get("FASTCOLL_TCP_STREAMS")
        terms = {"group": group.hex(), "token": token.hex(), "family": family, "streams": streams}
        meeting.say("terms", json.dumps(terms).encode())
    else:
        data = meeting.hear("terms")
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
        interfaces = choose_here(store, members, family)

    def check_numbers(records: Sequence[Any]) -> None:
        first, *others = map(Place.from_record, records)
        for member, place in zip(members[1:], others, strict=True):
            if len(place.names) != len(first.names):
                raise UsageError(
                    f"the ranks name different numbers of network interfaces: {members[0]} has {first}, {member} has "
                    f"{place}; give every rank as many in FASTCOLL_SOCKET_IFNAME"
                )

    secret = job_secret()
    endpoint = Endpoint(group, rank, len(members), derive_key(secret, token), bool(secret))
    listener = acquire(interfaces)
    roster = Roster(endpoint, interfaces, [], streams, listener)
    try:
        listener.join(endpoint, deliver)
        names = tuple(each.name for each in interfaces)
        mine = asdict(Place(names, tuple(each.address for each in interfaces), tuple(listener.ports)))
        records = meeting.assemble(mine, check_numbers)
        roster.places.extend(map(Place.from_record, records))
        if any(len(place.names) != len(interfaces) for place in roster.places):
            raise StoreError("the ranks' addresses cannot be read: they are not of as many interfaces")
    except BaseException:
        roster.leave()
        raise
    return roster
