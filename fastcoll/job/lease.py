"""StoreLease: one rank's use of the store in which the job's ranks have met. It ends when the rank leaves the job.

For each rank, the store has a count of the groups that this rank has finished making. Rank 0 serves a TCP store, so
before it leaves, it reads these counts and waits until no other rank needs the store.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from ..errors import AbortedError, StoreError
from ..store import Store
from ..store.store import limited
from ..store.waiting import LateWarning
from ..system.processes import Member, dead_among

_log = logging.getLogger("fastcoll")
_POLL_SECONDS = 0.01
# Before rank 0 leaves, it waits at most this long for other ranks if Ctrl-C interrupted the making of its last group.
_INTERRUPTED_SECONDS = 0.5
# How long a leaving rank tries to publish that it leaves. It fails if the store's server is stopped or out of reach.
_PUBLISH_SECONDS = 1.0
# A leaving rank adds this to its count. No rank makes so many groups, so a rank has left if its count is >= _LEFT.
_LEFT = 1 << 30


@dataclass(eq=False)
class StoreLease:
    """One rank's use of the store that the ranks of a job share."""

    store: Store  # the job's own part of the store
    members: Sequence[Member]  # every rank of the job
    rank: int
    close_store: Callable[[], None]  # releases the whole store, of which `store` is a part
    _settled: int = field(default=0, init=False)  # how many groups this rank has finished making
    _interrupted: bool = field(default=False, init=False)  # whether Ctrl-C ended the making of the last group

    def settle(self, interrupted: bool = False) -> None:
        """Count one more group that this rank has finished making.

        `interrupted`: Ctrl-C ended the making of the group. If it was the last group, `leave` then waits less.
        """
        self._settled += 1
        self._interrupted = interrupted
        self._count(1)

    def settled_by_all(self) -> int:
        """Return the number of groups that every rank has finished making, the lowest count. Never blocks."""
        return min(self._counts())

    def _counts(self) -> list[int]:
        counts = self.store.peek([f"settled/{member.rank}" for member in self.members])
        return [int(count or 0) for count in counts]

    def leave(self, grace: float, gone: Iterable[Member] = (), exit_reason: str = "") -> None:
        """Release the store. Rank 0 first waits until no living rank needs the store, but at most `grace` seconds.

        Args:
            gone: ranks that are known to be dead.
            exit_reason: why this rank leaves. Ranks that wait for this rank to make a group raise an error with it.
        """
        try:
            if self.rank == 0:
                self._await_others(min(grace, _INTERRUPTED_SECONDS) if self._interrupted else grace, gone)
            with limited(self.store, _PUBLISH_SECONDS):
                with suppress(StoreError):  # the store is gone or out of reach
                    self.store.set(f"exit_reason/{self.rank}", exit_reason)
                self._count(_LEFT)
        finally:
            self.close_store()

    def _await_others(self, grace: float, gone: Iterable[Member]) -> None:
        """Wait until every living rank has finished making as many groups as this rank."""
        started, warning = time.monotonic(), LateWarning()
        while True:
            try:
                counts = self._counts()
            except StoreError:  # the store is gone, so no rank can need it
                return
            late = [m for m, n in zip(self.members, counts, strict=True) if n < self._settled]
            over = [*gone, *dead_among(late)]
            names = ", ".join(str(member) for member in late if member not in over)
            if not names:
                return
            if (waited := time.monotonic() - started) >= grace:
                _log.warning("the store is closed after %.1f s, though %s may still need it", waited, names)
                return
            warning.look("keeping the store open", f"{names}: fewer groups made than rank 0".__str__)
            time.sleep(_POLL_SECONDS)

    def _count(self, amount: int) -> None:
        with suppress(StoreError):  # the store is gone or out of reach
            self.store.add(f"settled/{self.rank}", amount)

    def raise_if_left(self, ranks: Sequence[int], doing: str) -> None:
        """Raise AbortedError, with the exit reasons, if any of `ranks` has left the job.

        A rank that has left makes no more groups, so it is useless to wait for it.
        """
        reasons = self.store.peek([f"exit_reason/{rank}" for rank in ranks], 0)
        if gone := [(rank, reason.decode()) for rank, reason in zip(ranks, reasons, strict=True) if reason]:
            text = ", ".join(f"{self.members[rank]} {reason}" for rank, reason in gone)
            raise AbortedError(f"{doing}: {text}", [rank for rank, _ in gone])


def times_settled(store: Store, rank: int) -> int:
    """Return how many groups `rank` has finished making. Never blocks."""
    return int(store.peek([f"settled/{rank}"])[0] or 0)


def has_left(store: Store, rank: int) -> bool:
    """Return whether `rank` has left its job. Never blocks."""
    return times_settled(store, rank) >= _LEFT
