"""Ranks for processes that come without one: who comes first is counted first.

Each process writes itself into the store as an arrival; once as many have come as the world has
ranks, everyone computes the same ranks from the same list. Keys, all under "arrivals/":

    count      a counter, the number of the last arrival
    <number>   that arrival
    end        "full", or why this meeting is over; set once, by whoever comes first
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from ..errors import StoreError, UsageError
from ..processes import ProcessId, read_process, this_process
from .store import Store, listed
from .waiting import LateWarning, wait_for

_COUNT, _END = "arrivals/count", "arrivals/end"
_FULL = b"full"


class FullError(UsageError):
    """The world had all its processes before this one came."""

    def __init__(self, arrivals: Sequence[Arrival]) -> None:
        names = ", ".join(arrival.process.where for arrival in arrivals)
        super().__init__(f"all {len(arrivals)} places were taken, by {names}")
        self.arrivals = list(arrivals)


class MovedError(Exception):
    """This meeting is over; the process should look for another."""


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
        if arrival.rank is None:
            continue
        if arrival.rank in asked:
            both = f"{asked[arrival.rank].process.where} and {arrival.process.where}"
            raise UsageError(
                f"rank {arrival.rank} is claimed by two processes, {both}; give each process a rank of its "
                "own, or none of them any"
            )
        asked[arrival.rank] = arrival
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
        PeerDiedError, StoreTimeoutError, StoreError: as `wait_for`.
    """
    deadline = time.monotonic() + timeout
    me = Arrival(this_process(), rank, world_size)
    number = store.add(_COUNT, 1)
    if number > world_size:
        others = [Arrival.from_bytes(store.get(_key(other))) for other in range(1, world_size + 1)]
        for other in others:
            _check_same_world(other, me)
        raise FullError(others)
    store.set(_key(number), me.to_bytes())
    if between is not None:
        between()
    meeting = _Arrivals(store, me, between)
    for place in range(1, world_size + 1):
        meeting.wait(place, max(deadline - time.monotonic(), 0.0))
    if store.compare_set(_END, b"", _FULL) != _FULL:
        raise MovedError
    return assign(meeting.known)[number - 1]


def call_off(store: Store) -> bool:
    """End the meeting before it is full; whether that was still possible."""
    return store.compare_set(_END, b"", b"moved") != _FULL


class _Arrivals:
    """The arrivals as they become known, each compared with our own."""

    def __init__(self, store: Store, me: Arrival, between: Callable[[], None] | None) -> None:
        self.known: list[Arrival] = []
        self._store = store
        self._me = me
        self._between = between
        self._processes: list[ProcessId] = []
        self._doing = f"{me.process.where} meets {me.world_size} processes"
        self._late = LateWarning()

    def wait(self, number: int, timeout: float) -> None:
        wait_for(
            self._store,
            [_key(number)],
            self._processes,
            timeout,
            self._doing,
            self._look_around,
            missing=self._missing,
            late=self._late,
        )
        arrival = Arrival.from_bytes(self._store.get(_key(number)))
        _check_same_world(arrival, self._me)
        self.known.append(arrival)
        self._processes.append(arrival.process)
        assign(self.known)

    def _missing(self) -> str:
        """Who has not come: by rank when all that came asked for one, else how many."""
        size = self._me.world_size
        here = self.known if self._me in self.known else [*self.known, self._me]
        asked = {arrival.rank for arrival in here}
        if None in asked:
            missing = f"{size - len(here)} more"
        else:
            missing = f"rank(s) {listed([rank for rank in range(size) if rank not in asked])}"
        return f"{missing} (here: {listed([arrival.process.where for arrival in here])})"

    def _look_around(self) -> None:
        if self._store.check([_END]) and self._store.get(_END) != _FULL:
            raise MovedError
        if self._between is not None:
            self._between()


def _check_same_world(theirs: Arrival, mine: Arrival) -> None:
    if theirs.world_size != mine.world_size:
        raise UsageError(
            f"the processes disagree about the world size: {theirs.process.where} has {theirs.world_size}, "
            f"{mine.process.where} has {mine.world_size}; start all with the same"
        )


def _key(number: int) -> str:
    return f"arrivals/{number}"
