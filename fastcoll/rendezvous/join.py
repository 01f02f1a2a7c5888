"""How processes become ranks with a list of all members, through meetings in a store (assemble.py).

`join` is for processes that have ranks. Each process first claims its rank: by one request it writes its registration
(a Member) as that of its rank, and as the terms, unless these are there. Each process compares its world size, backend
and version with the terms, which are the first process's. Rank 0 compares those of all others, too, before it publishes
the list of all members, because a rank may register and then find that it differs.

`arrive` is for processes that have no rank, or only request one. Each process takes the next place from a counter and
writes a record (an Arrival) at this place; the process at place 0 assigns the ranks.

Keys, besides those of the meetings "join" and "arrivals" (assemble.py):

    join/terms          the registration of the first process
    arrivals/count      a counter: how many places are taken
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import ClassVar, NamedTuple

from ..errors import PeerDiedError, StoreError, StoreTimeoutError, UsageError
from ..store.store import StalledError, Store, listed
from ..system.processes import Member, ProcessId, dead_among, forget, this_process
from .assemble import FAILED, MET, MOVED, Ending, Meeting, compact, expand, member_key, pack, unpack

logger = logging.getLogger("fastcoll")

_JOIN, _ARRIVALS = "join", "arrivals"


class Claim(NamedTuple):
    """What a process has found when it claimed its rank in a store."""

    me: Member
    first: Member  # the first process that has claimed a rank
    owner: Member | None  # the process that had claimed this rank before; None: this process owns it


def claim(store: Store, rank: int, world_size: int, backend: str) -> Claim:
    """Register this process as `rank`, unless another process has. Never blocks.

    Raises:
        UsageError: the rank is out of range.
        StoreError: the store is gone, or has other data under the keys.
    """
    check_rank(rank, world_size)
    me = Member.here(rank, world_size, backend)
    found = store.set_new([f"{_JOIN}/terms", member_key(_JOIN, rank)], [me.to_bytes()] * 2)
    first, owner = (None if value is None else Member.from_bytes(value) for value in found)
    return Claim(me, first or me, owner)


def join(
    store: Store,
    rank: int,
    world_size: int,
    backend: str,
    timeout: float,
    between: Callable[[], None] | None = None,
    began: float | None = None,
    claimed: Claim | None = None,
) -> list[Member]:
    """Meet all other ranks; return the members by rank. `between` and `began`: as for Meeting.

    `claimed`: the result of `claim` in this store; None: this function claims the rank.

    Every rank of the world must call this once with the same store. Use a store for one call only; for another call,
    pass a PrefixStore with a new prefix.

    Raises:
        UsageError: the rank is out of range or claimed twice, or world size, backend or version differ between ranks.
            All waiting ranks raise this error, which names both processes.
        PeerDiedError: a registered process died.
        StoreTimeoutError: ranks did not come in time; the message names them.
        StoreError: the store is gone.
    """
    began = began or time.monotonic()
    claimed = claimed or claim(store, rank, world_size, backend)
    with _Joining(store, claimed, timeout, between, began) as joining:
        joining.check()
        everybody = joining.members
        published = joining.collect(lambda _: pack([everybody[rank] for rank in range(world_size)]))
        members = unpack(Member, published, world_size)
    logger.debug("joined as %s of %d", claimed.me, world_size)
    return members


def registered(store: Store, rank: int) -> Member | None:
    """Return the process that has registered as `rank` by `join` in this store, or None. Never blocks."""
    value = store.peek([member_key(_JOIN, rank)])[0]
    return None if value is None else Member.from_bytes(value)


def has_failed(store: Store) -> bool:
    """Return whether a `join` in this store has failed, or will fail because its first process has died.

    Never blocks.
    """
    end, first = store.peek([f"{_JOIN}/end", f"{_JOIN}/terms"])
    if end is not None or first is None:
        return end is not None and end[:1] == FAILED
    process = Member.from_bytes(first)
    died = dead_among([process])
    forget([process])
    return bool(died)


def check_rank(rank: int, world_size: int) -> None:
    """Raise if the rank is not in a world of `world_size`, or the world is empty."""
    if world_size < 1:
        raise UsageError(f"world_size must be 1 or more, got {world_size}")
    if not 0 <= rank < world_size:
        raise UsageError(f"rank {rank} is not in a world of {world_size}; ranks are 0 to {world_size - 1}")


class _Joining(Meeting):
    def __init__(
        self,
        store: Store,
        claimed: Claim,
        timeout: float,
        between: Callable[[], None] | None,
        began: float,
    ) -> None:
        me = claimed.me
        doing = f"joining as {me}"
        super().__init__(store, _JOIN, me.rank, me.world_size, timeout, doing, "", between, began)
        self._claimed = claimed
        self.members: dict[int, Member] = {}

    def check(self) -> None:
        """Compare the terms, and check that this process owns its rank.

        UsageError: they differ from those of the first process, or another process has claimed the rank before.
        """
        me, first, owner = self._claimed
        if first is not me:
            self.watched.append(first)
        self._compare(me)
        if owner is None:
            return
        if owner.is_process(me):
            raise UsageError(
                f"{me} joins for the second time: its first attempt has failed, or is running in another thread; "
                "restart all ranks"
            )
        raise _claimed_twice(me.rank, owner.where, me.where)

    def _compare(self, member: Member) -> None:
        """Raise UsageError if a member's terms differ from those of the first process."""
        first = self._claimed.first
        for what, field in (("world size", "world_size"), ("backend", "backend"), ("version", "version")):
            theirs, ours = getattr(first, field), getattr(member, field)
            if theirs != ours:
                raise UsageError(
                    f"the ranks disagree about the {what}: {first} has {theirs}, {member} has {ours}; start all with "
                    "the same"
                )

    def wait(
        self,
        keys: Sequence[str],
        missing: Callable[[], str] | None = None,
        first: Callable[[timedelta], list[bytes]] | None = None,
    ) -> list[bytes]:
        try:
            return super().wait(keys, lambda: f"rank(s) {self.missing()}{_turned_away()}", first)
        except StalledError:
            raise
        except PeerDiedError as error:
            # Rank 0 may serve the store. If this process does not know it yet, and the store is lost, rank 0 may have
            # died first, and the dead process because of that.
            if 0 not in self.members and isinstance(error.__cause__, StoreError):
                raise PeerDiedError(
                    f"{error}; the store is lost, too: {error.__cause__}", error.ranks
                ) from error
            raise
        except StoreTimeoutError as error:
            raise StoreTimeoutError(
                f"{self.doing}: not all of {self.size} ranks came within {self.timeout:g} s; missing: "
                f"{self.missing()}{_turned_away()}"
            ) from error

    def learned(self, place: int, value: bytes) -> None:
        member = self.members[place] = Member.from_bytes(value)
        if member not in self.watched[:1]:  # `check` has added the first process to `watched`
            self.watched.append(member)
        self._compare(member)


def _turned_away() -> str:
    from ..store.serving import turned_away  # imports sockets

    return turned_away()


def _claimed_twice(rank: int, one: str, other: str, instead: str = "") -> UsageError:
    return UsageError(
        f"rank {rank} is claimed by two processes, {one} and {other}; give each process its own rank{instead}"
    )


class FullError(UsageError):
    """Other processes, `arrivals`, had taken all places before the process `me` came."""

    def __init__(self, arrivals: Sequence[Arrival], me: Arrival) -> None:
        names, first = ", ".join(arrival.where for arrival in arrivals), arrivals[0]
        differ = f"; {_disagreement(first, me)}" if first.world_size != me.world_size else ""
        super().__init__(f"all {len(arrivals)} places were taken, by {names}{differ}")
        self.arrivals = list(arrivals)


@dataclass(frozen=True)
class Arrival(ProcessId):
    """A process that wants to be a rank; `rank` is the rank that it requests, or -1."""

    called: ClassVar[str] = "an arrival"

    rank: int
    world_size: int

    def claim(self, asked: dict[int, Arrival]) -> None:
        """Enter this process into `asked` under the rank that it requests; UsageError: another process requests it."""
        if self.rank != -1 and (other := asked.setdefault(self.rank, self)) is not self:
            raise _claimed_twice(self.rank, other.where, self.where, ", or give a rank to none of them")

    def check_same_world(self, mine: Arrival) -> None:
        """Raise UsageError if this process has another world size than `mine`."""
        if self.world_size != mine.world_size:
            raise UsageError(f"{_disagreement(self, mine)}; start all with the same")


def _disagreement(one: Arrival, other: Arrival) -> str:
    return (
        f"the processes disagree about the world size: {one.where} has {one.world_size}, {other.where} has "
        f"{other.world_size}"
    )


def assign(arrivals: Sequence[Arrival]) -> list[int]:
    """Return the rank of each arrival: the requested one, or else the lowest rank that no process requests."""
    asked: dict[int, Arrival] = {}
    for arrival in arrivals:
        arrival.claim(asked)
    free = iter(rank for rank in range(len(arrivals)) if rank not in asked)
    return [next(free) if arrival.rank == -1 else arrival.rank for arrival in arrivals]


def arrive(
    store: Store,
    rank: int | None,
    world_size: int,
    timeout: float,
    between: Callable[[], None] | None = None,
    began: float | None = None,
) -> int:
    """Join the meeting in `store`, and return this process's rank. `between`, `began`: as for Meeting.

    Raises:
        FullError: other processes have taken all places. Their world may have another size.
        MovedError: the meeting was cancelled.
        UsageError: two processes request one rank, or world sizes differ; the message names both processes.
        PeerDiedError, StoreTimeoutError, StoreError: as for `assemble`.
    """
    me = Arrival(-1 if rank is None else rank, world_size, **vars(this_process()))
    place = store.add("arrivals/count", 1) - 1
    end, first = store.peek([f"{_ARRIVALS}/end", member_key(_ARRIVALS, 0)])
    if place and first is not None and end is not None and end[:1] == MET:
        # The world met without this process.
        size = min(place, Arrival.from_bytes(first).world_size)
        values = store.multi_get([member_key(_ARRIVALS, other) for other in range(size)])
        raise FullError([Arrival.from_bytes(value) for value in values], me)
    if place >= world_size:
        values = store.multi_get([member_key(_ARRIVALS, other) for other in range(world_size)])
        others = [Arrival.from_bytes(value) for value in values]
        for other in others:
            other.check_same_world(me)
        raise FullError(others, me)
    with _Arriving(store, me, place, timeout, between, began) as arriving:
        published = arriving.gather(
            me.to_bytes(), lambda all_: compact(assign(list(map(Arrival.from_bytes, all_))))
        )
        ranks = expand(published, 16 * world_size)
        if 0 not in arriving.known and (first := store.peek([member_key(_ARRIVALS, 0)])[0]) is not None:
            # The meeting may have ended before this process read the record at place 0, and compared the world sizes.
            Arrival.from_bytes(first).check_same_world(me)
        if not isinstance(ranks, list) or len(ranks) != world_size or ranks[place] not in range(world_size):
            raise StoreError(f"a rank cannot be read: {ranks!r:.80}")
        return int(ranks[place])


def call_off(store: Store) -> bool:
    """Cancel the meeting, unless it has ended; return whether this call cancelled it."""
    return Ending(store, _ARRIVALS).decide(MOVED)


class _Arriving(Meeting):
    def __init__(
        self,
        store: Store,
        me: Arrival,
        place: int,
        timeout: float,
        between: Callable[[], None] | None,
        began: float | None,
    ) -> None:
        doing = f"{me.where} meets {me.world_size} processes"
        super().__init__(store, _ARRIVALS, place, me.world_size, timeout, doing, "", between, began)
        self._me = me
        self._arrived: list[Arrival] = []
        self._asked: dict[int, Arrival] = {}

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        super().__exit__(kind, error, trace)
        forget(self.watched)  # some of these processes may never call `join`, and so would be watched forever

    def learned(self, place: int, value: bytes) -> None:
        arrival = Arrival.from_bytes(value)
        self._arrived.append(arrival)
        self.watched.append(arrival)
        arrival.check_same_world(self._me)
        arrival.claim(self._asked)

    def names(self, places: Sequence[int]) -> str:
        """Return the missing ranks if all processes that came request ranks, else how many processes are missing."""
        if self.place:
            return "the first that came"
        here = self._arrived or [self._me]
        missing = f"{self.size - len(here)} more"
        if all(arrival.rank != -1 for arrival in here):
            missing = f"rank(s) {listed([rank for rank in range(self.size) if rank not in self._asked])}"
        return f"{missing} (here: {listed([arrival.where for arrival in here])})"
