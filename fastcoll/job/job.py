"""Job: the ranks that met in one store, and the factory of their groups."""

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
    """A job, as one of its ranks sees it. The members of its groups meet in the job's store (`lease.store`)."""

    lease: StoreLease
    choice: BackendChoice  # of the world
    timeout: float  # seconds; the default of every group
    # Whether this rank was admitted to a running job, and has not copied the state of the other ranks yet.
    is_joiner: bool = field(default=False, init=False)
    # The key prefixes of the groups besides the world.
    _places: dict[ProcessGroup, str] = field(default_factory=dict, init=False)
    # Key of a group that all members have left -> how many groups each rank must make before it is deleted.
    _over: dict[str, int] = field(default_factory=dict, init=False)
    _calls: Counter[str] = field(default_factory=Counter, init=False)

    def number(self, kind: str) -> int:
        """Return how often this was called for `kind` before. Ranks that make the same calls get equal numbers."""
        self._calls[kind] += 1
        return self._calls[kind] - 1

    def make_group(
        self, name: str, key: str, ranks: Sequence[int], timeout: float, choice: BackendChoice
    ) -> ProcessGroup:
        """Make a group of the global ranks `ranks`; collective among them."""
        members = [self.lease.members[rank] for rank in ranks]
        store, rank = PrefixStore(key, self.lease.store), ranks.index(self.lease.rank)
        return make_group(choice, store, name, members, rank, timeout, self.lease.members)

    @contextmanager
    def making(self, ranks: Sequence[int], doing: str, counted: bool = True) -> Iterator[None]:
        """Run the block that makes a group of `ranks`; its errors begin with `doing`.

        `counted` means that all ranks of the job make this call: the lease then counts the call when the block ends,
        even with an error. If the store is lost because rank 0 died, the error is PeerDiedError.
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
                error.args = (f"{doing}: {error}",)  # the backend's error names the step, not the call
            raise
        if counted:
            self.lease.settle()

    def keep_place(self, group: ProcessGroup, place: str) -> None:
        """Record the key prefix of a group: `group<number>/...`, or `members.../...` if only the members made it."""
        self._places[group] = place

    def left(self, group: ProcessGroup) -> None:
        """Record that this rank has left a group. The last member to leave deletes the group's keys.

        The members' requests for the group (subgroups.py) stay in the store until every rank of the world has finished
        this call of new_group, because a rank that has left out a call detects this by reading these requests.
        """
        place = self._places.pop(group, None)
        if place is None:
            return
        key, is_counted = place.partition("/")[0], place.startswith("group")
        with suppress(StoreError):  # rank 0, which serves the store, is gone or stopped
            all_left = self.lease.store.retire(f"{place if is_counted else key}/", group.size)
            if all_left and is_counted:
                # A rank that has finished this call has made this many groups: the world first, then group0.
                self._over[key] = int(key.removeprefix("group")) + 2
                settled = self.lease.settled_by_all()
                for over in [over for over, needed in self._over.items() if settled >= needed]:
                    self.lease.store.retire(f"{over}/", 1)
                    del self._over[over]


def make_world(
    lease: StoreLease, choice: BackendChoice, timeout: float, doing: str
) -> tuple[Job, ProcessGroup]:
    """Make a job of the ranks that have met in a store, and its default group; collective.

    Args:
        timeout: seconds, for this and for every call on the group; also the job's default.
        doing: the beginning of error messages.
    """
    job, ranks = Job(lease, choice, timeout), range(len(lease.members))
    with job.making(ranks, doing):
        world = job.make_group("WORLD", "world", ranks, timeout, choice)
    return job, world
