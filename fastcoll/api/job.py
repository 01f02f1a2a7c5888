"""Job: what the ranks of one job share besides their groups, from start to end.

That is the store in which they met, who they are, and a count, for each rank, of the groups it is done
making. The count lets rank 0, which hosts the TCP store, leave without cutting anybody off.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from ..core.group import ProcessGroup
from ..core.processes import Member, dead_among
from ..errors import AbortedError, GroupError, ResourceError, StoreError, StoreTimeoutError
from ..rendezvous import PrefixStore, Store
from ..rendezvous.waiting import LateWarning, raise_if_dying
from .backends import BackendChoice, MakeGroup

_log = logging.getLogger("fastcoll")
_POLL_SECONDS = 0.01
# How long rank 0 stays at most, in seconds, when Ctrl-C ended its last making of a group.
_INTERRUPTED_SECONDS = 0.5
# How long a rank tries to say that it has left: rank 0 may be stopped, or out of reach.
_LAST_WORD_SECONDS = 1.0
# Added to the count of a rank that leaves: more than any number of groups.
_LEFT = 1 << 30


@dataclass(eq=False)
class Job:
    """One job, as seen by one of its ranks."""

    store: Store  # the job's own part of the store
    members: Sequence[Member]  # every rank of the world
    rank: int
    choice: BackendChoice  # of the world
    make: MakeGroup  # makes groups of that backend
    timeout: float  # seconds; the default of every group
    close_store: Callable[[], None]  # lets go of the store behind `store`
    is_joiner: bool = field(default=False, init=False)  # this rank was admitted to a running job
    _places: dict[ProcessGroup, str] = field(default_factory=dict, init=False)  # of groups besides the world
    _over: dict[str, int] = field(default_factory=dict, init=False)  # keys of such that all have left
    _calls: Counter[str] = field(default_factory=Counter, init=False)
    _settled: int = field(default=0, init=False)
    _interrupted: bool = field(default=False, init=False)

    def number(self, kind: str) -> int:
        """How often this was called for `kind` before: calls in the same order get the same number."""
        self._calls[kind] += 1
        return self._calls[kind] - 1

    def make_group(
        self, name: str, key: str, ranks: Sequence[int], timeout: float, make: MakeGroup
    ) -> ProcessGroup:
        """Meet the other members of a new group; collective over `ranks`, which are global."""
        members = [self.members[rank] for rank in ranks]
        return make(PrefixStore(key, self.store), name, members, ranks.index(self.rank), timeout)

    @contextmanager
    def making(self, ranks: Sequence[int], doing: str, counted: bool = True) -> Iterator[None]:
        """One making of a group of `ranks`; if all ranks take part it is `counted` when it ends, well or not.

        `doing` starts the message when a member died, and when the store was lost because its holder did.
        """
        try:
            yield
        except BaseException as error:
            if counted:
                self.settle(interrupted=not isinstance(error, Exception))
            if isinstance(error, OSError) and (lacking := _no_descriptor(error, doing)):
                raise lacking from error
            if isinstance(error, StoreError) and not isinstance(error, StoreTimeoutError):
                raise_if_dying([self.members[rank] for rank in sorted({0, *ranks})], doing, error)
            if isinstance(error, GroupError) and not str(error).startswith(doing):
                error.args = (f"{doing}: {error}",)  # a backend knows the step, and not of which call
            raise
        if counted:
            self.settle()

    def keep_place(self, group: ProcessGroup, place: str) -> None:
        """A group was made at this place of the store: `group<number>/...`, or another that only members know."""
        self._places[group] = place

    def left(self, group: ProcessGroup) -> None:
        """This rank has left a group; when all have, its keys leave the store.

        What its members had asked for stays a while longer, for ranks of the world that have not called new_group as
        often yet: they find out so that they have left a call out.
        """
        place = self._places.pop(group, None)
        if place is None:
            return
        key, is_counted = place.partition("/")[0], place.startswith("group")
        with suppress(StoreError):  # its holder is gone, or stopped
            all_left = self.store.retire(f"{place if is_counted else key}/", group.size)
            if all_left and is_counted:
                self._over[key] = (
                    int(key.removeprefix("group")) + 2
                )  # so many are made by then, with the world
                self._retire_settled()

    def _retire_settled(self) -> None:
        counts = self.store.peek([f"settled/{member.rank}" for member in self.members])
        settled = min(int(count or 0) for count in counts)
        for key in [key for key, needed in self._over.items() if settled >= needed]:
            self.store.retire(f"{key}/", 1)
            del self._over[key]

    def settle(self, interrupted: bool = False) -> None:
        """Tell that this rank is done with one more making of a group; after an `interrupted` one nobody waits long."""
        self._settled += 1
        self._interrupted = interrupted
        self._count(1)

    def leave(self, patience: float, gone: Sequence[Member] = (), farewell: str = "") -> None:
        """Let go of the store; rank 0 first waits, `patience` seconds at most, until nobody needs it but those `gone`.

        The `farewell` is read by ranks that wait for this one to make a group.
        """
        before = self.store.timeout  # which a user's store keeps
        try:
            if self.rank == 0:
                self._await_others(
                    min(patience, _INTERRUPTED_SECONDS) if self._interrupted else patience, gone
                )
            self.store.set_timeout(min(before.total_seconds(), _LAST_WORD_SECONDS))
            with suppress(StoreError):  # as in _count
                self.store.set(f"farewell/{self.rank}", farewell)
            self._count(_LEFT)
        finally:
            self.store.set_timeout(before)
            self.close_store()

    def _await_others(self, patience: float, gone: Sequence[Member]) -> None:
        """Wait for the living ranks in the job that have not made as many groups as this one."""
        started, warning = time.monotonic(), LateWarning()
        while True:
            try:
                counts = self.store.peek([f"settled/{member.rank}" for member in self.members])
            except StoreError:  # the store went first, so nobody can need it
                return
            late = [m for m, n in zip(self.members, counts, strict=True) if int(n or 0) < self._settled]
            over = [*gone, *dead_among(late)]
            names = ", ".join(str(member) for member in late if member not in over)
            if not names:
                return
            if (waited := time.monotonic() - started) >= patience:
                _log.warning("the store is closed after %.1f s, though %s may still need it", waited, names)
                return
            warning.look("keeping the store open", f"{names}: fewer groups made than rank 0".__str__)
            time.sleep(_POLL_SECONDS)

    def _count(self, amount: int) -> None:
        with suppress(StoreError):  # whoever would read it is gone
            self.store.add(f"settled/{self.rank}", amount)

    def raise_if_left(self, ranks: Sequence[int], doing: str) -> None:
        """Raise AbortedError, with what it said, if one of these ranks has left the job: it makes no group any more."""
        words = self.store.peek([f"farewell/{rank}" for rank in ranks], 0)
        if gone := [(rank, said.decode()) for rank, said in zip(ranks, words, strict=True) if said]:
            told = ", ".join(f"{self.members[rank]} {said}" for rank, said in gone)
            raise AbortedError(f"{doing}: {told}", [rank for rank, _ in gone])


def _no_descriptor(error: OSError, doing: str) -> ResourceError | None:
    from ..rendezvous.address import no_descriptor  # imports sockets

    return no_descriptor(error, doing)


def times_settled(store: Store, rank: int) -> int:
    """How many makings of groups `rank` is done with. Never blocks."""
    return int(store.peek([f"settled/{rank}"])[0] or 0)


def has_left(store: Store, rank: int) -> bool:
    """Whether `rank` has left its job. Never blocks."""
    return times_settled(store, rank) >= _LEFT
