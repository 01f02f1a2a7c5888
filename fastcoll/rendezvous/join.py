"""How processes become ranks with a list of all members, through meetings in a store (assemble.py).

`join` is for processes that have ranks. The first process publishes its world size, backend and version, and all other
processes compare these with their own. Each process claims its rank and writes its registration (a Member); rank 0
publishes the list of all members.

`arrive` is for processes that have no rank, or only request one. Each process takes the next place from a counter and
writes a record (an Arrival) at this place; the process at place 0 assigns the ranks.

Keys, besides those of the meetings "join" and "arrivals" (assemble.py):

    join/first          a counter: the process that makes it 1 writes `terms`
    join/terms          the registration of that process
    join/claim/<rank>   a counter: the process that makes it 1 owns the rank
    arrivals/count      a counter: how many places are taken
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from ..errors import PeerDiedError, StoreError, StoreTimeoutError, UsageError
from ..store.store import StalledError, Store, listed
from ..store.waiting import fetch_for
from ..system.processes import Member, ProcessId, dead_among, forget, this_process
from .assemble import FAILED, MET, MOVED, Ending, Meeting, compact, expand, member_key, pack, unpack

logger = logging.getLogger("fastcoll")

_JOIN, _ARRIVALS = "join", "arrivals"
# If two processes claim the same rank, the second waits this long for the registration of the first, because the error
# names both.
_NAMING_SECONDS = 2.0


def join(
    store: Store,
    rank: int,
    world_size: int,
    backend: str,
    timeout: float,
    between: Callable[[], None] | None = None,
    began: float | None = None,
) -> list[Member]:
    """Meet all other ranks; return the members by rank. `between` and `began`: as for Meeting.

    Every rank of the world must call this once with the same store. Use a store for one call only; for another call,
    pass a PrefixStore with a new prefix.

    Raises:
        UsageError: the rank is out of range or claimed twice, or world size, backend or version differ between ranks.
            All waiting ranks raise this error, which names both processes.
        PeerDiedError: a registered process died.
        StoreTimeoutError: ranks did not come in time; the message names them.
        StoreError: the store is gone.
    """
    check_rank(rank, world_size)
    me = Member.here(rank, world_size, backend)
    with _Joining(store, me, timeout, between, began) as joining:
        joining.agree_on_terms()
        joining.claim_rank()
        everybody = joining.members
        published = joining.gather(
            me.to_bytes(), lambda _: pack([everybody[rank] for rank in range(world_size)])
        )
        members = unpack(Member, published, world_size)
    logger.debug("joined as %s of %d", me, world_size)
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
        me: Member,
        timeout: float,
        between: Callable[[], None] | None,
        began: float | None,
    ) -> None:
        doing = f"joining as {me}"
        super().__init__(store, _JOIN, me.rank, me.world_size, timeout, doing, "", between, began)
        self._me = me
        self.members: dict[int, Member] = {}

    def agree_on_terms(self) -> None:
        """Publish this process's world size, backend and version if it is the first; else compare them.

        UsageError: they differ from those of the first process.
        """
        if self.store.add("join/first", 1) == 1:
            self.publish("terms", self._me.to_bytes())
            return
        first = Member.from_bytes(self.receive("terms"))
        self.watched.append(first)
        for what, field in (("world size", "world_size"), ("backend", "backend"), ("version", "version")):
            theirs, ours = getattr(first, field), getattr(self._me, field)
            if theirs != ours:
                raise UsageError(
                    f"the ranks disagree about the {what}: {first} has {theirs}, {self._me} has {ours}; start all "
                    "with the same"
                )

    def claim_rank(self) -> None:
        """Claim this process's rank; UsageError: another process has claimed the rank."""
        rank = self._me.rank
        if self.store.add(f"join/claim/{rank}", 1) == 1:
            return
        with contextlib.suppress(StoreTimeoutError, PeerDiedError):
            grace = min(self.left(), _NAMING_SECONDS)
            fetch_for(self.store, [member_key(_JOIN, rank)], self.watched, grace, "joining")
        first = registered(self.store, rank)
        if first is not None and first.is_process(self._me):
            raise UsageError(
                f"{self._me} joins for the second time: its first attempt has failed, or is running in another thread; "
                "restart all ranks"
            )
        name = "one that has not registered" if first is None else first.where
        raise _claimed_twice(rank, name, self._me.where)

    def wait(self, keys: Sequence[str], missing: Callable[[], str] | None = None) -> list[bytes]:
        try:
            return super().wait(keys, lambda: f"rank(s) {self.missing()}{_turned_away()}")
        except StalledError:
            raise
        except StoreTimeoutError as error:
            raise StoreTimeoutError(
                f"{self.doing}: not all of {self.size} ranks came within {self.timeout:g} s; missing: "
                f"{self.missing()}{_turned_away()}"
            ) from error

    def learned(self, place: int, value: bytes) -> None:
        member = self.members[place] = Member.from_bytes(value)
        if member not in self.watched[:1]:  # `agree_on_terms` has added the first process to `watched`
            self.watched.append(member)


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
