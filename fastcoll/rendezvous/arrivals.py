"""Ranks for processes that come without one: who comes first is counted first.

Each process writes itself into the store as an arrival. The first one collects the arrivals, many with one
message; once as many have come as the world has ranks, it writes down each one's rank and ends the meeting.
Keys, all under "arrivals/", besides those of Ending:

    count           a counter, the number of the last arrival
    <number>        that arrival
    rank/<number>   its rank
    missing         who has not come yet, as text
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import takewhile
from typing import NoReturn

from ..core.processes import ProcessId, read_process, this_process
from ..errors import FastcollError, PeerDiedError, StoreError, StoreTimeoutError, UsageError
from .ending import FAILED, MET, MOVED, Ending, raise_failure
from .store import Store, listed
from .table import MAX_KEYS_PER_REQUEST
from .waiting import LateWarning, fetch_for

_COUNT, _MISSING = "arrivals/count", "arrivals/missing"
# No more, however many wait: `between` keeps a multicast leader's announcements fresh.
_MOST_AT_ONCE = 1000


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
        others = [Arrival.from_bytes(value) for value in store.multi_get(_keys(range(1, world_size + 1)))]
        for other in others:
            _check_same_world(other, me)
        raise FullError(others)
    store.set(_key(number), me.to_bytes())
    if between is not None:
        between()
    return _Meeting(store, me, number, deadline, between).run()


def call_off(store: Store) -> bool:
    """End the meeting before it is full; whether that was still possible."""
    return Ending(store, "arrivals").decide(MOVED)


class _Meeting:
    """The arrivals as they become known: to the first all, to the others the first."""

    def __init__(
        self, store: Store, me: Arrival, number: int, deadline: float, between: Callable[[], None] | None
    ) -> None:
        self._store = store
        self._me = me
        self._number = number
        self._deadline = deadline
        self._between = between
        self._ending = Ending(store, "arrivals")
        self._known: list[Arrival] = []
        self._processes: list[ProcessId] = []
        self._doing = f"{me.process.where} meets {me.world_size} processes"
        self._told_missing = ""
        self._late = LateWarning()

    def run(self) -> int:
        """Meet the others; this process's rank."""
        if self._number == 1:
            self._collect()
        else:
            self._learn(self._wait(_keys([1])))
        self._end(self._wait([self._ending.key])[0])
        rank = self._wait([f"arrivals/rank/{self._number}"])[0]
        if not rank.isdigit() or int(rank) >= self._me.world_size:
            raise StoreError(f"a rank cannot be read: {rank[:80]!r}")
        return int(rank)

    def _collect(self) -> None:
        """As the first: wait for all, and write down their ranks."""
        size = self._me.world_size
        while (here := len(self._known)) < size:
            values = self._wait(_keys(range(here + 1, min(here + MAX_KEYS_PER_REQUEST, size) + 1)))
            self._learn(values[len(self._known) - here :])
        ranks = [str(rank) for rank in assign(self._known)]
        self._store.multi_set([f"arrivals/rank/{number}" for number in range(1, size + 1)], ranks)
        self._ending.decide(MET)

    def _end(self, end: bytes) -> None:
        if end[:1] == MOVED:
            raise MovedError
        if end[:1] == FAILED:
            raise_failure(end[1:])

    def _wait(self, keys: Sequence[str]) -> list[bytes]:
        try:
            return fetch_for(
                self._store,
                keys,
                self._processes,
                max(self._deadline - time.monotonic(), 0.0),
                self._doing,
                self._look_around,
                missing=self._missing,
                late=self._late,
                crowd=min(self._me.world_size, _MOST_AT_ONCE) if self._number > 1 else 1,
            )
        except PeerDiedError as error:
            self._fail(error)
        except StoreTimeoutError as error:
            if self._number > 1:
                raise
            self._fail(error)

    def _look_around(self) -> None:
        if self._number == 1:
            self._learn_more()
        elif (end := self._store.peek([self._ending.key])[0]) is not None:
            self._end(end)
        if self._between is not None:
            self._between()

    def _learn_more(self) -> None:
        """Take in whoever has come, and tell the others who has not."""
        coming = _keys(range(len(self._known) + 1, self._me.world_size + 1))
        end, *values = self._store.peek([self._ending.key, *coming])
        if end is not None:
            self._end(end)
        # Numbers are given in order, so whoever stands behind a gap is seen at the next look.
        self._learn([value for value in takewhile(lambda value: value is not None, values) if value])
        if self._told_missing != self._missing():
            self._told_missing = self._missing()
            self._store.set(_MISSING, self._told_missing)

    def _learn(self, values: Sequence[bytes]) -> None:
        for value in values:
            arrival = Arrival.from_bytes(value)
            self._known.append(arrival)
            self._processes.append(arrival.process)
        try:
            for arrival in self._known[len(self._known) - len(values) :]:
                _check_same_world(arrival, self._me)
            assign(self._known)
        except UsageError as error:
            self._fail(error)

    def _fail(self, error: FastcollError) -> NoReturn:
        self._ending.fail(error)
        raise error

    def _missing(self) -> str:
        """Who has not come: by rank when all that came asked for one, else how many."""
        if self._number > 1:
            told = self._store.peek([_MISSING])[0]
            return "others, not known yet" if told is None else told.decode()
        size = self._me.world_size
        here = self._known or [self._me]
        asked = {arrival.rank for arrival in here}
        if None in asked:
            missing = f"{size - len(here)} more"
        else:
            missing = f"rank(s) {listed([rank for rank in range(size) if rank not in asked])}"
        return f"{missing} (here: {listed([arrival.process.where for arrival in here])})"


def _check_same_world(theirs: Arrival, mine: Arrival) -> None:
    if theirs.world_size != mine.world_size:
        raise UsageError(
            f"the processes disagree about the world size: {theirs.process.where} has {theirs.world_size}, "
            f"{mine.process.where} has {mine.world_size}; start all with the same"
        )


def _key(number: int) -> str:
    return f"arrivals/{number}"


def _keys(numbers: Sequence[int]) -> list[str]:
    return [_key(number) for number in numbers]
