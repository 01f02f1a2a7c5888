"""Job: the ranks that met in one store, and what makes groups of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from ..core.group import ProcessGroup
from ..errors import GroupError, StoreError, StoreTimeoutError
from ..store import PrefixStore
from ..store.waiting import raise_if_dying
from .backends import BackendChoice, make_group
from .lease import StoreLease


@dataclass(eq=False)
class Job:
    """One job, as seen by one of its ranks: it makes groups whose members meet in the store of the lease."""

    lease: StoreLease
    choice: BackendChoice  # of the world
    timeout: float  # seconds; the default of every group
    is_joiner: bool = field(default=False, init=False)  # this rank was admitted to a running job
    _places: dict[ProcessGroup, str] = field(default_factory=dict, init=False)  # of groups besides the world
    _over: dict[str, int] = field(default_factory=dict, init=False)  # keys of such that all have left
    _calls: Counter[str] = field(default_factory=Counter, init=False)

    def number(self, kind: str) -> int:
        """How often this was called for `kind` before: calls in the same order get the same number."""
        self._calls[kind] += 1
        return self._calls[kind] - 1

    def make_group(
        self, name: str, key: str, ranks: Sequence[int], timeout: float, choice: BackendChoice
    ) -> ProcessGroup:
        """Meet the other members of a new group; collective over `ranks`, which are global."""
        members = [self.lease.members[rank] for rank in ranks]
        store, rank = PrefixStore(key, self.lease.store), ranks.index(self.lease.rank)
        return make_group(choice, store, name, members, rank, timeout)

    @contextmanager
    def making(self, ranks: Sequence[int], doing: str, counted: bool = True) -> Iterator[None]:
        """One making of a group of `ranks`; if all ranks take part it is `counted` when it ends, well or not.

        `doing` starts the message when a member died, and when the store was lost because its holder did.
        """
        try:
            yield
        except BaseException as error:
            if counted:
                self.lease.settle(interrupted=not isinstance(error, Exception))
            if isinstance(error, OSError):
                from ..system.address import no_descriptor  # imports sockets

                if lacking := no_descriptor(error, doing):
                    raise lacking from error
            if isinstance(error, StoreError) and not isinstance(error, StoreTimeoutError):
                raise_if_dying([self.lease.members[rank] for rank in sorted({0, *ranks})], doing, error)
            if isinstance(error, GroupError) and not str(error).startswith(doing):
                error.args = (f"{doing}: {error}",)  # a backend knows the step, and not of which call
            raise
        if counted:
            self.lease.settle()

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
            all_left = self.lease.store.retire(f"{place if is_counted else key}/", group.size)
            if all_left and is_counted:
                self._over[key] = (
                    int(key.removeprefix("group")) + 2
                )  # so many are made by then, with the world
                self._retire_settled()

    def _retire_settled(self) -> None:
        settled = self.lease.settled_by_all()
        for key in [key for key, needed in self._over.items() if settled >= needed]:
            self.lease.store.retire(f"{key}/", 1)
            del self._over[key]


def make_world(
    lease: StoreLease, choice: BackendChoice, timeout: float, doing: str
) -> tuple[Job, ProcessGroup]:
    """Make a job of the ranks that have met in a store, and its default group; collective.

    Args:
        timeout: seconds, for this and for every call on the group; the job's default, too.
        doing: how messages call this.
    """
    job, ranks = Job(lease, choice, timeout), range(len(lease.members))
    with job.making(ranks, doing):
        world = job.make_group("WORLD", "world", ranks, timeout, choice)
    return job, world
