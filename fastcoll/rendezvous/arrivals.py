"""Ranks for processes that come without one: who comes first is counted first.

Each process counts itself in the store, and brings itself to a meeting at the place that it has counted; the first one
gives out the ranks. Keys: those of the meeting "arrivals", and the counter "arrivals/count".
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from ..core.processes import ProcessId, read_process, this_process
from ..errors import StoreError, UsageError
from .assemble import MOVED, Ending, Meeting, member_key
from .compact import compact, expand
from .store import Store, listed

_NAME = "arrivals"


class FullError(UsageError):
    """The world had all its processes before this one came."""

    def __init__(self, arrivals: Sequence[Arrival]) -> None:
        names = ", ".join(arrival.process.where for arrival in arrivals)
        super().__init__(f"all {len(arrivals)} places were taken, by {names}")
        self.arrivals = list(arrivals)


@dataclass(frozen=True)
class Arrival:
    """One process that wants to take part, with the rank it asks for, if any."""

    process: ProcessId
    rank: int | None
    world_size: int

    def to_bytes(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Arrival:
        """The arrival that `to_bytes` wrote.

        Raises:
            StoreError: anything else.
        """
        try:
            record = json.loads(data)
            rank, world_size = record["rank"], record["world_size"]
            if not (rank is None or type(rank) is int) or type(world_size) is not int:
                raise ValueError("rank and world_size must be whole numbers")
            return cls(read_process(record["process"]), rank, world_size)
        except (ValueError, KeyError, TypeError) as error:
            raise StoreError(f"an arrival cannot be read ({error}): {data[:80]!r}") from error


def assign(arrivals: Sequence[Arrival]) -> list[int]:
    """The rank of each arrival: the one it asks for, else the lowest that nobody does.

    Raises:
        UsageError: two ask for one rank.
    """
    asked: dict[int, Arrival] = {}
    for arrival in arrivals:
        _give(arrival, asked)
    free = iter(rank for rank in range(len(arrivals)) if rank not in asked)
    return [next(free) if arrival.rank is None else arrival.rank for arrival in arrivals]


def arrive(
    store: Store, rank: int | None, world_size: int, timeout: float, between: Callable[[], None] | None = None
) -> int:
    """Come to the meeting in `store` and wait for the others; this process's rank.

    Args:
        between: called once this process is written in, and a few times a second while it waits.

    Raises:
        FullError: others have filled the world.
        MovedError: the meeting was called off.
        UsageError: two ask for one rank, or world sizes differ; both processes are named.
        PeerDiedError, StoreTimeoutError, StoreError: as `assemble`.
    """
    me = Arrival(this_process(), rank, world_size)
    place = store.add("arrivals/count", 1) - 1
    if place >= world_size:
        values = store.multi_get([member_key(_NAME, other) for other in range(world_size)])
        others = [Arrival.from_bytes(value) for value in values]
        for other in others:
            _check_same_world(other, me)
        raise FullError(others)
    with _Arriving(store, me, place, timeout, between) as arriving:
        ranks = expand(arriving.gather(me.to_bytes(), _ranks), 16 * world_size)
        if 0 not in arriving.known:  # the others may have met before this process came
            _check_same_world(Arrival.from_bytes(store.get(member_key(_NAME, 0))), me)
        if not isinstance(ranks, list) or len(ranks) != world_size or ranks[place] not in range(world_size):
            raise StoreError(f"a rank cannot be read: {ranks!r:.80}")
        return int(ranks[place])


def call_off(store: Store) -> bool:
    """End the meeting before it is full; whether that was still possible."""
    return Ending(store, _NAME).decide(MOVED)


def _ranks(arrivals: Sequence[bytes]) -> bytes:
    return compact(assign([Arrival.from_bytes(each) for each in arrivals]))


class _Arriving(Meeting):
    def __init__(
        self, store: Store, me: Arrival, place: int, timeout: float, between: Callable[[], None] | None
    ) -> None:
        doing = f"{me.process.where} meets {me.world_size} processes"
        super().__init__(store, _NAME, place, me.world_size, timeout, doing)
        self._me = me
        self._here: list[Arrival] = []
        self._asked: dict[int, Arrival] = {}
        self._between = between or (lambda: None)

    def between(self) -> None:
        self._between()

    def learned(self, place: int, value: bytes) -> None:
        arrival = Arrival.from_bytes(value)
        self._here.append(arrival)
        self.watched.append(arrival.process)
        _check_same_world(arrival, self._me)
        _give(arrival, self._asked)

    def names(self, places: Sequence[int]) -> str:
        """By rank when all that came asked for one, else how many."""
        if self.place:
            return "the first that came"
        here = self._here or [self._me]
        if any(arrival.rank is None for arrival in here):
            missing = f"{self.size - len(here)} more"
        else:
            missing = f"rank(s) {listed([rank for rank in range(self.size) if rank not in self._asked])}"
        return f"{missing} (here: {listed([arrival.process.where for arrival in here])})"


def _give(arrival: Arrival, asked: dict[int, Arrival]) -> None:
    """Enter the rank that an arrival asks for."""
    if arrival.rank is None:
        return
    other = asked.setdefault(arrival.rank, arrival)
    if other is not arrival:
        raise UsageError(
            f"rank {arrival.rank} is claimed by two processes, {other.process.where} and {arrival.process.where}; "
            "give each process a rank of its own, or none of them any"
        )


def _check_same_world(theirs: Arrival, mine: Arrival) -> None:
    if theirs.world_size != mine.world_size:
        raise UsageError(
            f"the processes disagree about the world size: {theirs.process.where} has {theirs.world_size}, "
            f"{mine.process.where} has {mine.world_size}; start all with the same"
        )
