"""All ranks register in a store and learn who the others are.

The first to come lays down the terms (world size, backend, version), which everyone else compares
with its own. Each claims its rank and registers under it; rank 0 collects the registrations, many with
one message, and publishes the list as one short value. So n ranks cost the store some 8 n messages and not
n * n. A failure that anyone finds is published in the list's place.

Keys, all under "join/", besides those of Ending:

    first           a counter: who makes it 1 sets terms
    terms           the registration of the first that came
    claim/<rank>    a counter: who makes it 1 owns the rank
    member/<rank>   that rank's registration
    missing         the ranks that rank 0 still waits for, as text
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Sequence
from itertools import islice
from typing import NoReturn

from ..core.members import Member
from ..errors import FastcollError, PeerDiedError, StoreTimeoutError, UsageError
from .ending import FAILED, MET, Ending, raise_failure
from .member_list import pack, unpack
from .store import Store, listed
from .table import MAX_KEYS_PER_REQUEST
from .waiting import LateWarning, fetch_for, wait_for

__all__ = ["check_rank", "join", "registered", "wait_for"]

logger = logging.getLogger("fastcoll")

_FIRST, _TERMS, _MISSING = "join/first", "join/terms", "join/missing"
# How long the second to claim a rank waits for the first one's registration, to name it.
_NAMING_SECONDS = 2.0


def join(store: Store, rank: int, world_size: int, backend: str, timeout: float) -> list[Member]:
    """Meet all other ranks; the members in the order of their ranks.

    Every rank of the world must call this once with the same store; a store that is used again needs
    a PrefixStore of its own each time.

    Args:
        timeout: seconds.

    Raises:
        UsageError: the rank is out of range or claimed twice, or world size, backend or version
            differ between ranks; raised on all that wait, naming both processes.
        PeerDiedError: a process that had registered has ended.
        StoreTimeoutError: ranks did not come in time; the message names them.
        StoreError: the store is gone.
    """
    check_rank(rank, world_size)
    return _Meeting(store, Member.here(rank, world_size, backend), timeout).run()


def registered(store: Store, rank: int) -> Member | None:
    """Who has registered under `rank` in a store that ranks join by; None when nobody has. Never blocks."""
    value = store.peek([_member_key(rank)])[0]
    return None if value is None else Member.from_bytes(value)


def check_rank(rank: int, world_size: int) -> None:
    """Refuse a rank that is none of `world_size`.

    Raises:
        UsageError: it is out of range, or the world is empty.
    """
    if world_size < 1:
        raise UsageError(f"world_size must be 1 or more, got {world_size}")
    if not 0 <= rank < world_size:
        raise UsageError(f"rank {rank} is not in a world of {world_size}; ranks are 0 to {world_size - 1}")


class _Meeting:
    def __init__(self, store: Store, me: Member, timeout: float) -> None:
        self._store = store
        self._me = me
        self._timeout = timeout
        self._started = time.monotonic()
        self._late = LateWarning()
        self._ending = Ending(store, "join")
        self._known: dict[int, Member] = {}
        self._watched: list[Member] = []
        # The ranks to learn of: all on rank 0, the one that collects on the others.
        self._sought: dict[int, None] = dict.fromkeys(range(me.world_size) if me.rank == 0 else [0])
        self._told_missing = ""

    def run(self) -> list[Member]:
        self._agree_on_terms()
        self._claim_rank()
        self._store.set(_member_key(self._me.rank), self._me.to_bytes())
        members = self._collect() if self._me.rank == 0 else self._receive_list()
        logger.debug("joined as %s of %d", self._me, len(members))
        return members

    def _agree_on_terms(self) -> None:
        if self._store.add(_FIRST, 1) == 1:
            self._store.set(_TERMS, self._me.to_bytes())
            return
        first = Member.from_bytes(self._wait([_TERMS])[0])
        self._watched.append(first)
        for what, field in (("world size", "world_size"), ("backend", "backend"), ("version", "version")):
            theirs, ours = getattr(first, field), getattr(self._me, field)
            if theirs != ours:
                self._fail(
                    UsageError(
                        f"the ranks disagree about the {what}: {first} has {theirs}, {self._me} has {ours}; start "
                        "all with the same"
                    )
                )

    def _claim_rank(self) -> None:
        if self._store.add(f"join/claim/{self._me.rank}", 1) == 1:
            return
        first = self._claimant()
        if first is not None and first.is_process(self._me):
            self._fail(
                UsageError(
                    f"{self._me} joins for the second time: its first try has failed, or goes on in another thread; "
                    "let all ranks start again"
                )
            )
        name = "one that has not registered" if first is None else first.where
        self._fail(
            UsageError(
                f"rank {self._me.rank} is claimed by two processes, {name} and {self._me.where}; "
                "give each process a rank of its own"
            )
        )

    def _claimant(self) -> Member | None:
        """Who was first to claim this rank; None when it does not register in time."""
        key = _member_key(self._me.rank)
        with contextlib.suppress(StoreTimeoutError, PeerDiedError):
            wait_for(self._store, [key], self._watched, min(self._left(), _NAMING_SECONDS), "joining")
        return registered(self._store, self._me.rank)

    def _collect(self) -> list[Member]:
        """On rank 0: wait for every registration, and publish the list."""
        while self._sought:
            block = list(islice(self._sought, MAX_KEYS_PER_REQUEST))
            values = self._wait([_member_key(rank) for rank in block])
            self._learn(block, values)
        members = [self._known[rank] for rank in range(self._me.world_size)]
        if not self._ending.decide(MET, pack(members)):
            self._receive_list()
        return members

    def _receive_list(self) -> list[Member]:
        """On the other ranks: wait for the list of rank 0."""
        end = self._wait([self._ending.key])[0]
        self._raise_if_failed(end)
        return unpack(Member, end[1:], self._me.world_size)

    def _wait(self, keys: Sequence[str]) -> list[bytes]:
        doing = f"joining as {self._me}"
        try:
            return fetch_for(
                self._store,
                keys,
                self._watched,
                self._left(),
                doing,
                self._look_around,
                missing=lambda: f"rank(s) {self._missing()}",
                late=self._late,
                crowd=1 if self._me.rank == 0 else self._me.world_size,
            )
        except PeerDiedError as error:
            self._ending.fail(error)
            raise
        except StoreTimeoutError as error:
            late = StoreTimeoutError(
                f"{doing}: not all of {self._me.world_size} ranks came within {self._timeout:g} s; missing: "
                f"{self._missing()}"
            )
            if self._me.rank == 0:
                self._ending.fail(late)
            raise late from error

    def _look_around(self) -> None:
        """Between two short waits: has someone failed, and who has come?"""
        sought = list(self._sought)
        end, *values = self._store.peek([self._ending.key, *map(_member_key, sought)])
        if end is not None:
            self._raise_if_failed(end)
        self._learn(sought, values)
        if self._me.rank == 0 and self._told_missing != self._missing():
            self._told_missing = self._missing()
            self._store.set(_MISSING, self._told_missing)

    def _learn(self, ranks: Sequence[int], values: Sequence[bytes | None]) -> None:
        for rank, value in zip(ranks, values, strict=True):
            if value is None or rank in self._known:
                continue
            member = self._known[rank] = Member.from_bytes(value)
            self._sought.pop(rank, None)
            if member not in self._watched[:1]:  # the one that set the terms is
                self._watched.append(member)

    def _missing(self) -> str:
        """The ranks that have not come, as far as this rank can tell."""
        if self._me.rank == 0:
            return listed(list(self._sought))
        if 0 not in self._known:
            return "0 (it collects the others)"
        told = self._store.peek([_MISSING])[0]
        return "not known yet" if told is None else told.decode()

    def _fail(self, error: FastcollError) -> NoReturn:
        self._ending.fail(error)
        raise error

    def _raise_if_failed(self, end: bytes) -> None:
        if end[:1] == FAILED:
            raise_failure(end[1:])

    def _left(self) -> float:
        return max(self._started + self._timeout - time.monotonic(), 0.0)


def _member_key(rank: int) -> str:
    return f"join/member/{rank}"
