"""Recovery after the death of a rank: `abort` fails a group on all ranks, `shrink` makes a new group of the survivors.

The survivors use a new group only after a barrier on it has succeeded, which proves that every member has made it. If a
rank dies before that, the survivors meet again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

from ..core.group import ProcessGroup
from ..core.operands import positive_seconds
from ..core.work import Timeout
from ..errors import GroupError, PeerDiedError, RendezvousError
from ..rendezvous.regroup import Level, Regroup, Regrouped
from ..store import PrefixStore
from ..system.processes import Member, gone_among
from .backends import make_group
from .groups import Group, entered, groups, of_job
from .job import Job, make_world
from .lease import StoreLease
from .leaving import close
from .world import current_job, replace_job

# How long to look for a dead member after the survivors have failed to make a group.
_SEEN_SECONDS = 0.5
_POLL_SECONDS = 0.002
_SHRUNK = ", shrunk to "  # in a shrunk group's name, between the old group's name and the new size


def abort(group: Group = None, reason: str = "abort() was called") -> None:
    """Fail a group now, on all ranks: waiting calls and pending works raise AbortedError. Any thread may call this.

    Args:
        group: None: the default group.
        reason: part of the error on all ranks.

    Raises:
        NotInitializedError: there is no such group.
        UsageError: this process is not in the group.
    """
    entered(group).abort(reason)


def shrink(group: Group = None, timeout: Timeout = None) -> ProcessGroup:
    """Make a new group of the surviving ranks of a failed group; collective among them.

    Survivors keep their processes and their memory. All get the same group, even if more ranks die meanwhile. If the
    group is the default group, the result is the new default group: its ranks are renumbered in the old order, rank 0
    serves the store, and all other groups are destroyed. Otherwise the members keep their global ranks.

    A group that has not failed is aborted first, so ranks that wait in one of its calls return. Pending works end with
    the old group's error.

    Args:
        group: None: the default group.
        timeout: seconds or timedelta within which the other ranks must call this; None: the group's timeout.

    Returns:
        The new group, of one rank if no other rank is left.

    Raises:
        CollectiveTimeoutError: a rank neither died nor called this in time, for example because it is stopped.
        UnavailableError: MPI cannot continue after the death of a rank; or `group_from_store` made the group.
        NotInitializedError: there is no such group.
        UsageError: this process is not in the group.

    A network partition looks like the death of the other side: each side then continues on its own. If that matters,
    check the new group's size.

    Examples:
        >>> try:
        ...     dist.all_reduce(x)
        ... except dist.GroupError:
        ...     dist.shrink()
    """
    old = of_job(group, "shrink")
    job = current_job()
    limit = positive_seconds(timeout, old.timeout)
    regroup = Regroup(_level(old, old.monitor.members), old.rank, limit, f"shrinking the group {old.name}")
    old.abort("shrink() was called")
    make = _world_of if old is groups.world else _part_of
    made: list[ProcessGroup] = []
    with ExitStack() as stack:
        stack.callback(lambda: close(made))
        while True:
            met = regroup.meet()
            with ExitStack() as undo:
                undo.callback(met.store.close)
                try:
                    new, settle = make(job, old, met)
                    made.append(new)
                    regroup.levels.append(_level(new, met.members))
                    new.barrier()
                except (GroupError, RendezvousError):
                    if not _someone_died(met.members):
                        raise
                    continue
                made.remove(new)
                undo.pop_all()
                settle()
                return new


def _level(group: ProcessGroup, members: Sequence[Member]) -> Level:
    """Return a group as a Level (rendezvous/regroup.py), through which survivors look for one another.

    `members` are the group's members, each with its rank before `shrink`, because a new default group renumbers them.
    """

    def gone() -> list[int]:
        monitor, others = group.monitor, [rank for rank in range(group.size) if rank != group.rank]
        dead = set(gone_among([monitor.members[rank] for rank in others]))
        reported = monitor.failure.ranks if isinstance(monitor.failure, PeerDiedError) else ()
        return [
            rank
            for rank in others
            if (member := monitor.members[rank]) in dead or member.rank in reported or monitor.has_left(rank)
        ]

    return Level(members, group.backend.recovery_endpoint(), gone)


def _someone_died(members: Sequence[Member]) -> bool:
    """Return whether one of these processes is dead, or is found dead within half a second."""
    deadline = time.monotonic() + _SEEN_SECONDS
    while not (gone := gone_among(members)) and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
    return bool(gone)


Settle = Callable[[], None]
"""A function that replaces the old group by the new one. It is called when every member has the new group."""


def _world_of(job: Job, old: ProcessGroup, met: Regrouped) -> tuple[ProcessGroup, Settle]:
    """Make a new job of the survivors, and its default group."""
    size = len(met.members)
    members = [replace(member, rank=rank, world_size=size) for rank, member in enumerate(met.members)]
    rank = met.members.index(job.lease.members[job.lease.rank])
    lease = StoreLease(PrefixStore("fastcoll", met.store), members, rank, met.store.close)
    doing = "making the default group of the survivors"
    left, world = make_world(lease, job.choice, old.timeout, doing)
    left.timeout = job.timeout
    return world, partial(replace_job, left, world)


def _part_of(job: Job, old: ProcessGroup, met: Regrouped) -> tuple[ProcessGroup, Settle]:
    """Make a group of the survivors, which keep their global ranks."""
    choice, rank = groups.backends[old], met.members.index(job.lease.members[job.lease.rank])
    name = f"{old.name.partition(_SHRUNK)[0]}{_SHRUNK}{len(met.members)}"
    store, crowd = PrefixStore("group", met.store), job.lease.members
    new = make_group(choice, store, name, met.members, rank, old.timeout, crowd)

    def settle() -> None:
        del groups.backends[old]
        groups.add(new, choice)
        close([old])
        job.left(old)
        met.store.close()

    return new, settle
