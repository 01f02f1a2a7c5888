"""Going on after a rank has died: `abort` ends a group everywhere, `shrink` makes a new one of those that are left.

A new group counts once a barrier on it has succeeded: then all its members have it. If a rank dies before, those that
are left meet again.
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
from .groups import Group, entered, groups
from .job import Job, make_world
from .lease import StoreLease
from .leaving import close
from .world import current_job, replace_job

# How long a death that has broken the making of a group may take to be seen.
_SEEN_SECONDS = 0.5
_POLL_SECONDS = 0.002
_SHRUNK = ", shrunk to "  # of a group's name


def abort(group: Group = None, reason: str = "abort() was called") -> None:
    """Fail a group now, on all ranks: calls that wait and works that are pending raise AbortedError. From any thread.

    Args:
        group: None: the default group.
        reason: what the other ranks read of it.

    Raises:
        NotInitializedError: there is no such group.
        UsageError: this process is not in the group.
    """
    entered(group).abort(reason)


def shrink(group: Group = None, timeout: Timeout = None) -> ProcessGroup:
    """Make a new group of those ranks of a failed one that are left; collective among them.

    Survivors keep their processes and their memory. All get the same group, also when more ranks die meanwhile. Of the
    default group the result is the new default group: its ranks are numbered anew, in the old order, rank 0 serves the
    store, and all other groups are destroyed. Of another group the result has the global ranks as before.

    A group that has not failed is aborted first, so that ranks that wait in a call of it come out. Works that are
    pending end with the old group's error.

    Args:
        group: None: the default group.
        timeout: seconds or timedelta for the others to come; None: the group's.

    Returns:
        The new group, of one rank if nobody else is left.

    Raises:
        CollectiveTimeoutError: a rank neither died nor called this in time, as one that is stopped.
        UnavailableError: MPI does not outlive the death of a rank.
        NotInitializedError: there is no such group.
        UsageError: this process is not in the group.

    A network that has come apart looks like the death of the other side: each side then goes on by itself. Look at the
    new group's size where that matters.

    Example:
        >>> try:
        ...     dist.all_reduce(x)
        ... except dist.GroupError:
        ...     dist.shrink()
    """
    job, old = current_job(), entered(group)
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
    """A group as one in which survivors seek one another; `members` as they are called in the first one."""

    def gone() -> list[int]:
        monitor, others = group.monitor, [rank for rank in range(group.size) if rank != group.rank]
        dead = set(gone_among([monitor.members[rank] for rank in others]))
        told = monitor.failure.ranks if isinstance(monitor.failure, PeerDiedError) else ()
        return [
            rank
            for rank in others
            if (member := monitor.members[rank]) in dead or member.rank in told or monitor.has_left(rank)
        ]

    return Level(members, group.backend.recovery_endpoint(), gone)


def _someone_died(members: Sequence[Member]) -> bool:
    """Whether one of these processes is gone, or will be seen to be in a moment."""
    deadline = time.monotonic() + _SEEN_SECONDS
    while not (gone := gone_among(members)) and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
    return bool(gone)


Settle = Callable[[], None]
"""Puts a new group in the place of the old one, once all have it."""


def _world_of(job: Job, old: ProcessGroup, met: Regrouped) -> tuple[ProcessGroup, Settle]:
    """A new job of those that are left, and its default group."""
    size = len(met.members)
    members = [replace(member, rank=rank, world_size=size) for rank, member in enumerate(met.members)]
    rank = met.members.index(job.lease.members[job.lease.rank])
    lease = StoreLease(PrefixStore("fastcoll", met.store), members, rank, met.store.close)
    doing = "making the default group of those that are left"
    left, world = make_world(lease, job.choice, old.timeout, doing)
    left.timeout = job.timeout
    return world, partial(replace_job, left, world)


def _part_of(job: Job, old: ProcessGroup, met: Regrouped) -> tuple[ProcessGroup, Settle]:
    """A group of those that are left, with their global ranks."""
    choice, rank = groups.backends[old], met.members.index(job.lease.members[job.lease.rank])
    name = f"{old.name.partition(_SHRUNK)[0]}{_SHRUNK}{len(met.members)}"
    new = make_group(choice, PrefixStore("group", met.store), name, met.members, rank, old.timeout)

    def settle() -> None:
        del groups.backends[old]
        groups.add(new, choice)
        close([old])
        job.left(old)
        met.store.close()

    return new, settle
