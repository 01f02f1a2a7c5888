"""How a process joins a job that runs: in a store that outlives the ranks, which joiners and rank 0 look at.

A joiner registers and waits. Rank 0 asks those that wait whether they are there, and those that have answered are
invited: all ranks and they join in a place of the attempt's own and make the new world beside the old one. The
outcome of an attempt is decided once, in the store, by who is first: MADE by one that has passed a barrier of the new
world, as all have it then; OFF by one that could not. Everybody obeys it, so there is one world.

Keys, under elastic/:

    registered      joiners so far: their numbers; count: of these, whose waiting/<n> is there
    waiting/<n>     joiner n waits; gone/<n>: it has gone, which the store's server says if need be
    called/<n>      rank 0 asks, and here/<n> answers
    invited/<n>     JSON: the attempt, the joiner's rank and the size of the world
    attempts        attempts so far: their numbers; outcome/<a> as above
    world<a>/...    where those of attempt a meet, and their job's part of the store
    first/<k>/...   the same for the attempts of the first meeting (beginning.py); start/...: their outcomes
    cleared         attempts before this one have no world<a>/ any more
    over            the job has ended
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from typing import NamedTuple

from ..core.group import ProcessGroup
from ..errors import FastcollError, GroupError, RendezvousError, StoreError, UsageError
from ..rendezvous.attempts import Attempts
from ..store import PrefixStore, Store
from ..store.waiting import fetch_for
from ..system.processes import this_process
from .job import Job

_log = logging.getLogger("fastcoll")

FORMING_SECONDS = 30.0
"""How long those of an attempt wait for one another; then it is off."""
_STORE_SECONDS = 10.0  # until the store must answer a joiner
_TRIES = 5
_MADE, _OFF = b"made", b"off"


class JobEndedError(RendezvousError):
    """There is nothing left to do for a joiner."""


class Invitation(NamedTuple):
    """What a joiner will be."""

    attempt: int
    rank: int
    size: int


class JoinQueue:
    """The store at `address`, HOST:PORT, as one process has it, which must answer within `backoff` seconds.

    Raises:
        UsageError: the address is none.
        StoreError: no store is there.
    """

    def __init__(self, address: str, grace: float) -> None:
        from ..store import TCPStore  # sockets are for those who meet over the network

        host, _, port = address.rpartition(":")
        if not host or not port.isdigit():
            raise UsageError(f"an elastic job's store (FASTCOLL_ELASTIC) is at HOST:PORT, got {address!r}")
        self._store = TCPStore(host.strip("[]"), int(port), timeout=grace)
        self._keys = PrefixStore("elastic", self._store)
        self.attempts = Attempts(self._store)
        self._settled = 0  # so many have registered, of whom nobody waits any more

    def close(self) -> None:
        """Let go of the store. Twice is fine."""
        self._store.close()

    def place(self, name: str) -> tuple[Store, Callable[[], None]]:
        """Where those of an attempt meet, on a connection of its own, and what closes that."""
        store = self._store.clone()
        return PrefixStore(f"elastic/{name}", store), store.close

    def attempts_apart(self) -> tuple[Attempts, Callable[[], None]]:
        """Return `attempts` on a connection of its own, and a function that closes that."""
        store = self._store.clone()
        return Attempts(store), store.close

    def decide(self, attempt: int, made: bool) -> bool:
        """Whether the attempt's world counts; `made` is how it went here, for when this is the first to say."""
        outcome = self._keys.compare_set(f"outcome/{attempt}", b"", _MADE if made else _OFF)
        return outcome == _MADE

    # ---- rank 0 --------------------------------------------------------------------------------------------------

    def open(self) -> None:
        """The job goes on, perhaps after an earlier part of it was over."""
        self._keys.delete_key("over")
        self._settled = 0

    def shut(self) -> None:
        """The job is over: nobody need wait any more."""
        self._keys.set("over", b"1")

    def ready(self) -> tuple[list[int], bool]:
        """The joiners that wait and have answered, and whether others have just been asked. Does not wait."""
        count = int(self._keys.peek(["count"])[0] or 0)
        if count == self._settled:
            return [], False
        names = set(self._keys.list_keys())
        waiting = sorted(int(name.removeprefix("waiting/")) for name in names if name.startswith("waiting/"))
        for n in [n for n in waiting if f"gone/{n}" in names]:
            waiting.remove(n)
            self._forget(n, "waiting", "called", "here", "gone")
        if not waiting:
            self._settled = count
        asked = [n for n in waiting if f"called/{n}" not in names]
        for n in asked:
            self._keys.set(f"called/{n}", b"1")
        return [n for n in waiting if f"here/{n}" in names], bool(asked)

    def next_attempt(self) -> int:
        """The number of a new attempt."""
        return self._keys.add("attempts", 1)

    def invite(self, attempt: int, joiners: Sequence[int], size: int) -> None:
        """Invite joiners to be the ranks behind the `size` that there are, which ends their wait."""
        for rank, n in enumerate(joiners, size):
            place = {"attempt": attempt, "rank": rank, "size": size + len(joiners)}
            self._keys.set(f"invited/{n}", json.dumps(place))
            self._forget(n, "waiting", "called", "here")

    def gone(self, joiners: Sequence[int]) -> list[int]:
        """Which of them have gone without a word. Does not wait."""
        found = self._keys.peek([f"gone/{n}" for n in joiners])
        return [n for n, each in zip(joiners, found, strict=True) if each is not None]

    def clear(self, attempt: int) -> None:
        """Forget the places of all attempts before this one, in whose world all ranks are now."""
        first = int(self._keys.peek(["cleared"])[0] or 1)
        for name in ["first", *(f"world{before}" for before in range(first, attempt))]:
            self._keys.retire(f"{name}/", 1)
        self._keys.set("cleared", str(attempt))

    def _forget(self, n: int, *names: str) -> None:
        for name in names:
            self._keys.delete_key(f"{name}/{n}")

    # ---- a joiner ----------------------------------------------------------------------------------------------

    def wait(self, timeout: float, began: float) -> tuple[Invitation, Callable[[], None]]:
        """Register and wait to be invited; return the invitation, and a function that withdraws the will.

        The will: the store's server sets gone/<n> when this process ends. `timeout` counts from `began`, a value of
        time.monotonic().

        Raises:
            RendezvousError: the job is over.
            StoreTimeoutError: nobody has invited this process in time.
            StoreError: the store is gone.
        """
        n, deadline = self._keys.add("registered", 1), began + timeout
        withdraw = self._store.bequeath(f"elastic/gone/{n}", "1")
        try:
            self._keys.set(f"waiting/{n}", this_process().to_bytes())
            self._keys.add("count", 1)
            self._hear(f"called/{n}", deadline, timeout)
            self._keys.set(f"here/{n}", b"1")
            invited = json.loads(self._hear(f"invited/{n}", deadline, timeout))
            self._forget(n, "invited")
            return Invitation(**invited), withdraw
        except BaseException:
            with suppress(StoreError):
                self._keys.set(f"gone/{n}", b"1")
            withdraw()
            raise

    def _hear(self, key: str, deadline: float, timeout: float) -> bytes:
        def look() -> None:
            if self._keys.peek(["over"])[0] is not None:
                raise JobEndedError("the job has ended before this joiner could join it")

        left = max(deadline - time.monotonic(), 0.0)
        doing = "joining as a joiner"
        return fetch_for(self._keys, [key], [], left, doing, look, lambda: "the job's ranks", limit=timeout)[
            0
        ]


Start = Callable[
    [Store, int, int, Callable[[], None], Callable[[ProcessGroup], None], float, float],
    tuple[Job, ProcessGroup],
]
"""Joins a world in a store: (store, rank, size, close, confirm, timeout, began).

`close` closes the store. `confirm` raises unless the new world counts. `timeout` counts from `began`, a value of
time.monotonic().
"""


def come_in(address: str, name: str, timeout: float, start: Start) -> tuple[Job, ProcessGroup]:
    """Join the job at whose store this process is a joiner; `timeout` is for being invited, in seconds.

    `name` is the launcher's name for this process, or a name that the process has chosen.
    An attempt that is off, as another joiner has died or does not fit, is followed by the next one.
    """
    began, join_queue = time.monotonic(), JoinQueue(address, _STORE_SECONDS)
    with closing(join_queue):
        for again in reversed(range(_TRIES)):
            invited, withdraw = join_queue.wait(timeout, began)

            def confirm(world: ProcessGroup, attempt: int = invited.attempt) -> None:
                if not join_queue.decide(attempt, passes_barrier(world)):
                    raise RendezvousError("another joiner, or a rank of the job, could not join")
                join_queue.attempts.join(name)

            store, close = join_queue.place(f"world{invited.attempt}")
            try:
                now = time.monotonic()
                job, world = start(store, invited.rank, invited.size, close, confirm, FORMING_SECONDS, now)
                job.is_joiner = True
                return job, world
            except BaseException as error:
                with suppress(StoreError):
                    join_queue.decide(invited.attempt, False)
                if not again or not isinstance(error, FastcollError):
                    raise
                _log.info("joining as a joiner: once more, as %s", error)
            finally:
                withdraw()
    raise AssertionError("the last try returns or raises")


def passes_barrier(world: ProcessGroup) -> bool:
    """Whether a barrier on a new world succeeds: all have it then."""
    try:
        world.fast.barrier()
    except GroupError:
        return False
    return True
