"""How a process joins a running job, through a store that outlives the ranks; joiners and rank 0 poll the store.

A joiner registers and waits. Rank 0 checks that a waiting joiner is alive (`called`, `here`), then invites it to an
attempt. In an attempt, all ranks and the invited joiners meet under the attempt's keys and make a new world beside the
old one. The first process that writes the outcome of an attempt decides it. A process writes MADE after it has passed a
barrier of the new world, which proves that every member has that world; it writes OFF after a failure. After MADE all
processes use the new world; after OFF none does, and the ranks keep the old one.

Keys, under elastic/:

    registered      the number of joiners so far; count has the number of joiners that have set waiting/<n>
    waiting/<n>     joiner n waits
    gone/<n>        joiner n has ended; it sets this itself, or the store's server does when the joiner's process ends
    called/<n>      rank 0 asks whether joiner n is alive; here/<n> is the answer
    invited/<n>     JSON: the attempt, the joiner's rank and the size of the world
    attempts        the number of attempts so far; outcome/<a>: see above
    world<a>/...    the keys of attempt a: those of its meeting and those of the new job
    first/<k>/...   the keys of attempt k of the first meeting (beginning.py); start/... has the outcomes of these
    cleared         world<a>/ is deleted for all attempts before this number
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
from ..errors import FastcollError, GroupError, RendezvousError, StoreError
from ..rendezvous.attempts import Attempts
from ..store import PrefixStore, Store
from ..store.waiting import fetch_for
from ..system.processes import this_process
from .job import Job

_log = logging.getLogger("fastcoll")

FORMING_SECONDS = 30.0
"""How long the members of an attempt wait for one another before its outcome is OFF."""
_STORE_SECONDS = 10.0  # the store must answer a joiner within this time
_TRIES = 5  # the largest number of attempts in which one joiner takes part
_MADE, _OFF = b"made", b"off"


class JobEndedError(RendezvousError):
    """The job ended before this joiner was admitted."""


class Invitation(NamedTuple):
    """An invitation to an attempt: its number, and the joiner's rank and the size of the world in that attempt."""

    attempt: int
    rank: int
    size: int


class JoinQueue:
    """The queue of joiners, in the store at `address`, HOST:PORT; the store must answer within `grace` seconds.

    Raises:
        UsageError: the address is not HOST:PORT.
        StoreError: there is no store at the address.
    """

    def __init__(self, address: str, grace: float) -> None:
        from ..store.tcp_store import client_of  # imports sockets

        self._store = client_of("FASTCOLL_ELASTIC", address, grace)
        self._keys = PrefixStore("elastic", self._store)
        self.attempts = Attempts(self._store)
        self._settled = 0  # the value of `count` the last time that rank 0 found no joiner waiting

    def close(self) -> None:
        """Close the store. Calling it twice is fine."""
        self._store.close()

    def place(self, name: str) -> tuple[Store, Callable[[], None]]:
        """Return the part `name` of the store, on its own connection, and a function that closes that connection."""
        store = self._store.clone()
        return PrefixStore(f"elastic/{name}", store), store.close

    def attempts_apart(self) -> tuple[Attempts, Callable[[], None]]:
        """Return an object like `attempts` with its own connection, and a function that closes that connection."""
        store = self._store.clone()
        return Attempts(store), store.close

    def decide(self, attempt: int, made: bool) -> bool:
        """Return whether the outcome of an attempt is MADE. If no process has decided it yet, `made` decides it."""
        outcome = self._keys.compare_set(f"outcome/{attempt}", b"", _MADE if made else _OFF)
        return outcome == _MADE

    # ---- rank 0 --------------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Mark the job as running, even if `shut` has marked it as ended before."""
        self._keys.delete_key("over")
        self._settled = 0

    def shut(self) -> None:
        """Mark the job as ended; every waiting joiner then raises JobEndedError."""
        self.attempts.end()

    def ready(self) -> tuple[list[int], bool]:
        """Ask new joiners whether they are alive. Never blocks.

        Return the waiting joiners that have answered, and whether this call has asked any.
        """
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
        """Return the number of a new attempt."""
        return self._keys.add("attempts", 1)

    def invite(self, attempt: int, joiners: Sequence[int], size: int) -> None:
        """Invite joiners, which then stop waiting, to become the ranks `size`, `size` + 1 and so on."""
        for rank, n in enumerate(joiners, size):
            place = {"attempt": attempt, "rank": rank, "size": size + len(joiners)}
            self._keys.set(f"invited/{n}", json.dumps(place))
            self._forget(n, "waiting", "called", "here")

    def gone(self, joiners: Sequence[int]) -> list[int]:
        """Return those of the joiners whose processes have ended. Never blocks."""
        found = self._keys.peek([f"gone/{n}" for n in joiners])
        return [n for n, each in zip(joiners, found, strict=True) if each is not None]

    def clear(self, attempt: int) -> None:
        """Delete the keys of all attempts before `attempt`. Call this once every rank is in the world of `attempt`."""
        first = int(self._keys.peek(["cleared"])[0] or 1)
        for name in ["first", *(f"world{before}" for before in range(first, attempt))]:
            self._keys.retire(f"{name}/", 1)
        self._keys.set("cleared", str(attempt))

    def _forget(self, n: int, *names: str) -> None:
        for name in names:
            self._keys.delete_key(f"{name}/{n}")

    # ---- a joiner ----------------------------------------------------------------------------------------------

    def wait(self, timeout: float, began: float) -> tuple[Invitation, Callable[[], None]]:
        """Register and wait for an invitation; return it, and a function that withdraws this joiner's will.

        The will asks the store's server to set gone/<n> when this process ends. `timeout` counts from `began`, a value
        of time.monotonic().

        Raises:
            RendezvousError: the job has ended.
            StoreTimeoutError: rank 0 did not invite this process in time.
            StoreError: the store is gone.
        """
        n, deadline = self._keys.add("registered", 1), began + timeout
        withdraw = self._store.bequeath(f"elastic/gone/{n}", "1")
        try:
            self._keys.set(f"waiting/{n}", this_process().to_bytes())
            self._keys.add("count", 1)
            self._await_key(f"called/{n}", deadline, timeout)
            self._keys.set(f"here/{n}", b"1")
            invited = json.loads(self._await_key(f"invited/{n}", deadline, timeout))
            self._forget(n, "invited")
            return Invitation(**invited), withdraw
        except BaseException:
            with suppress(StoreError):
                self._keys.set(f"gone/{n}", b"1")
            withdraw()
            raise

    def _await_key(self, key: str, deadline: float, timeout: float) -> bytes:
        def look() -> None:
            if self._keys.peek(["over"])[0] is not None:
                raise JobEndedError("the job has ended before this joiner could join it")

        left = max(deadline - time.monotonic(), 0.0)
        doing = "joining a running job"
        return fetch_for(self._keys, [key], [], left, doing, look, lambda: "the job's ranks", limit=timeout)[
            0
        ]


Start = Callable[
    [Store, int, int, Callable[[], None], Callable[[ProcessGroup], None], float, float],
    tuple[Job, ProcessGroup],
]
"""Joins a world in a store: (store, rank, size, close, confirm, timeout, began).

`close` closes the store. `confirm` raises if the outcome of the attempt is not MADE. `timeout` counts from `began`, a
value of time.monotonic().
"""


def come_in(address: str, name: str, timeout: float, start: Start) -> tuple[Job, ProcessGroup]:
    """Join the job whose store is at `address`; wait for invitations until `timeout` seconds have passed.

    `name` is the launcher's name for this process, or a name that the process has chosen. If an attempt fails, for
    example because another joiner died or passed other arguments, this process waits for the next invitation. It takes
    part in at most five attempts.
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
                _log.info("joining a running job: trying again, because %s", error)
            finally:
                withdraw()
    raise AssertionError("the last try returns or raises")


def passes_barrier(world: ProcessGroup) -> bool:
    """Return whether a barrier on a new world succeeds, which proves that every member has that world."""
    try:
        world.fast.barrier()
    except GroupError:
        return False
    return True
