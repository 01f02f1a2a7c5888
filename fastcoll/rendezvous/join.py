"""All ranks register in a store and learn who the others are.

The first to come lays down the terms (world size, backend, version), which everyone else compares
with its own. Each claims its rank and registers under it; rank 0 collects the registrations and
publishes the list, so that n ranks cost n looks and not n * n. A failure that anyone finds is
published too, and all raise it within a slice of waiting.

Keys, all under "join/":

    first           a counter: who makes it 1 sets terms
    terms           the registration of the first that came
    claim/<rank>    a counter: who makes it 1 owns the rank
    member/<rank>   that rank's registration
    missing         the ranks that rank 0 still waits for, as text
    all             the list of registrations
    failed          why this world cannot be
"""

from __future__ import annotations

import contextlib
import json
import logging
import time
from typing import NoReturn

from ..errors import FastcollError, PeerDiedError, StoreError, StoreTimeoutError, UsageError
from ..members import Member
from .store import Store, listed
from .waiting import LateWarning, wait_for

__all__ = ["check_rank", "join", "registered", "wait_for"]

logger = logging.getLogger("fastcoll")

_FIRST, _TERMS, _MISSING, _ALL, _FAILED = (
    f"join/{name}" for name in ("first", "terms", "missing", "all", "failed")
)
_KINDS: dict[str, type[FastcollError]] = {
    kind.__name__: kind for kind in (UsageError, PeerDiedError, StoreTimeoutError)
}
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
    key = _member_key(rank)
    return Member.from_bytes(store.get(key)) if store.check([key]) else None


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
        self._known: dict[int, Member] = {}
        self._watched: list[Member] = []

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
        self._wait(_TERMS)
        first = Member.from_bytes(self._store.get(_TERMS))
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
        for rank in range(self._me.world_size):
            self._wait(_member_key(rank))
            self._learn(rank)
        members = [self._known[rank] for rank in range(self._me.world_size)]
        self._store.set(_ALL, json.dumps([member.to_bytes().decode() for member in members]))
        return members

    def _receive_list(self) -> list[Member]:
        """On the other ranks: wait for the list of rank 0."""
        self._wait(_ALL)
        texts = json.loads(self._store.get(_ALL))
        return [Member.from_bytes(text.encode()) for text in texts]

    def _wait(self, key: str) -> None:
        doing = f"joining as {self._me}"
        try:
            wait_for(
                self._store,
                [key],
                self._watched,
                self._left(),
                doing,
                self._look_around,
                missing=lambda: f"rank(s) {self._missing()}",
                late=self._late,
            )
        except PeerDiedError as error:
            with contextlib.suppress(StoreError):  # the store may have died with the peer
                self._publish(error)
            raise
        except StoreTimeoutError as error:
            late = StoreTimeoutError(
                f"{doing}: not all of {self._me.world_size} ranks came within {self._timeout:g} s; missing: "
                f"{self._missing()}"
            )
            if self._me.rank == 0:
                self._publish(late)
            raise late from error

    def _look_around(self) -> None:
        """Between two short waits: has someone failed, and who has come?"""
        if self._store.check([_FAILED]):
            self._raise_published()
        for rank in range(self._me.world_size) if self._me.rank == 0 else (0,):
            if rank not in self._known and self._store.check([_member_key(rank)]):
                self._learn(rank)
        if self._me.rank == 0:
            self._store.set(_MISSING, self._missing())

    def _learn(self, rank: int) -> None:
        if rank in self._known:
            return
        member = self._known[rank] = Member.from_bytes(self._store.get(_member_key(rank)))
        if member not in self._watched:  # the one that set the terms is
            self._watched.append(member)

    def _missing(self) -> str:
        """The ranks that have not come, as far as this rank can tell."""
        if self._me.rank == 0:
            return listed([rank for rank in range(self._me.world_size) if rank not in self._known])
        if 0 not in self._known:
            return "0 (it collects the others)"
        return self._store.get(_MISSING).decode() if self._store.check([_MISSING]) else "not known yet"

    def _fail(self, error: FastcollError) -> NoReturn:
        self._publish(error)
        raise error

    def _publish(self, error: FastcollError) -> None:
        ranks = error.ranks if isinstance(error, PeerDiedError) else ()
        record = {"kind": type(error).__name__, "text": str(error), "ranks": list(ranks)}
        self._store.set(_FAILED, json.dumps(record))

    def _raise_published(self) -> NoReturn:
        data = self._store.get(_FAILED)
        try:
            record = json.loads(data)
            kind, text = _KINDS[record["kind"]], str(record["text"])
            ranks = [int(rank) for rank in record["ranks"]]
        except (ValueError, KeyError, TypeError) as error:
            raise StoreError(f"why joining failed cannot be read: {data[:80]!r}") from error
        if kind is PeerDiedError:
            raise PeerDiedError(text, ranks)
        raise kind(text)

    def _left(self) -> float:
        return max(self._started + self._timeout - time.monotonic(), 0.0)


def _member_key(rank: int) -> str:
    return f"join/member/{rank}"
