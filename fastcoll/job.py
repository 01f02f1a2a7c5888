"""Job: what the ranks of one job share besides their groups, from start to end.

That is the store in which they met, who they are, and a count, for each rank, of the groups it is done
making. The count lets rank 0, which hosts the TCP store, leave without cutting anybody off.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from .backends import BackendChoice, Make
from .config import get as setting
from .errors import StoreError
from .group import ProcessGroup
from .members import Member, dead_among
from .rendezvous import PrefixStore, Store

_log = logging.getLogger("fastcoll")
_POLL_SECONDS = 0.01


class Job:
    """One job, as seen by one of its ranks.

    Attributes:
        store: the job's own part of the store.
        members: every rank of the world.
        rank: this process's place among them.
        choice: the backend of the world.
        make: makes groups of that backend.
        timeout: seconds; the default of every group.
    """

    def __init__(
        self,
        store: Store,
        members: Sequence[Member],
        rank: int,
        choice: BackendChoice,
        make: Make,
        timeout: float,
        close_store: Callable[[], None],
    ) -> None:
        self.store = store
        self.members = list(members)
        self.rank = rank
        self.choice = choice
        self.make = make
        self.timeout = timeout
        self._close_store = close_store
        self._calls: dict[str, int] = {}
        self._settled = 0

    def number(self, kind: str) -> int:
        """How often this was called for `kind` before: calls in the same order get the same number."""
        count = self._calls.get(kind, 0)
        self._calls[kind] = count + 1
        return count

    def make_group(
        self, name: str, key: str, ranks: Sequence[int], timeout: float, make: Make
    ) -> ProcessGroup:
        """Meet the other members of a new group; collective over `ranks`, which are global."""
        members = [self.members[rank] for rank in ranks]
        return make(PrefixStore(key, self.store), name, members, ranks.index(self.rank), timeout)

    def settle(self) -> None:
        """Tell that this rank is done with one more making of a group, well or not."""
        self._settled += 1
        self.store.add(_settled_key(self.rank), 1)

    def leave(self, patience: float) -> None:
        """Let go of the store; rank 0 first waits, `patience` seconds at most, until nobody needs it."""
        try:
            if self.rank == 0:
                self._await_others(patience)
        finally:
            self._close_store()

    def _await_others(self, patience: float) -> None:
        started = time.monotonic()
        warn_after: float = setting("FASTCOLL_WARN_AFTER")
        while late := self._unsettled():
            waited = time.monotonic() - started
            names = ", ".join(map(str, late))
            if waited >= patience:
                _log.warning(
                    "rank 0 closes the store after %.0f s, though %s may still need it", waited, names
                )
                return
            if waited >= warn_after:
                _log.warning("rank 0 keeps the store open for %s: fewer groups made than rank 0", names)
                warn_after = patience
            time.sleep(_POLL_SECONDS)

    def _unsettled(self) -> list[Member]:
        """The living ranks that have not made as many groups as this one."""
        try:
            late = [m for m in self.members if times_settled(self.store, m.rank) < self._settled]
        except StoreError:  # the store went first, so nobody can need it
            return []
        dead = dead_among(late)
        return [member for member in late if member not in dead]


def times_settled(store: Store, rank: int) -> int:
    """How many makings of groups `rank` is done with. Never blocks."""
    return store.add(_settled_key(rank), 0)


def _settled_key(rank: int) -> str:
    return f"settled/{rank}"
