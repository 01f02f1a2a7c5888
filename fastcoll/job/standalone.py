"""Standalone groups, which need no default group, because their members meet in a store that the caller gives.

Each is its own job, and a process may be in several. They are for libraries that bring their own ranks and store:
actors, plug-ins, torch's backend. At exit, a process leaves the groups that the program has not destroyed. A child made
by fork has none of its parent's groups.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from typing import Any

from .. import config
from ..core.group import ProcessGroup
from ..core.operands import positive_seconds, whole
from ..core.work import Timeout
from ..errors import GroupError, StoreError, UsageError
from ..rendezvous.join import join
from ..store import HashStore, PrefixStore, Store, imported
from ..system.processes import Member, forget, set_process_rank, this_process
from .backends import load, make_group, parse_backend
from .groups import Standalone, groups
from .leaving import ExitHook, leave

_log = logging.getLogger("fastcoll")


def group_from_store(
    store: Store | Any,
    rank: int,
    world_size: int,
    timeout: Timeout = None,
    group_name: str = "",
    backend: str | None = None,
) -> ProcessGroup:
    """Make a group of processes that share a store, with or without `init_process_group`; collective among them.

    The group is its own job: all functions take it as `group=`, except `shrink`, `split_group`, `new_subgroups` and
    collectives of `fastcoll.jax`. Its group ranks are also its global ranks, and `destroy_process_group(group)` ends
    it. A process may be in any number of such groups.

    Args:
        store: a store of fastcoll or torch.distributed. It is used while the group is made and left, and stays open.
        rank, world_size: this process's rank in the group, and the number of its members.
        timeout: seconds or timedelta, for meeting and for every call on the group; None: FASTCOLL_TIMEOUT (1800 s).
        group_name: must differ between sets of members that use one store; the same members may use a name again.
        backend: as for `init_process_group`.

    Returns:
        The group.

    Raises:
        UsageError: an argument is wrong, or the members' arguments do not fit together.
        UnavailableError: the backend is not available, or cannot join these nodes.
        RendezvousError: the others did not join in time (StoreTimeoutError), or the store is lost.
        PeerDiedError: a member that had joined died before all had joined.

    Examples:
        >>> group = dist.group_from_store(store, rank, 4)
        >>> dist.all_reduce(x, group=group)
    """
    from urllib.parse import quote  # slow to import

    config.check()
    limit = positive_seconds(timeout, config.get("FASTCOLL_TIMEOUT"))
    rank, world_size = whole("rank", rank), whole("world_size", world_size)
    if not 0 <= rank < world_size:
        raise UsageError(f"rank is {rank} and world_size is {world_size}; rank goes from 0 to world_size - 1")
    # Each use of a store is its own job, with its own keys, and each process counts its own uses. So if two processes
    # claim the same rank, the counts of both are equal, so they meet in one job, and its ranks get an error.
    ours, me = PrefixStore("fastcoll", imported(store)), this_process()
    place = f"group/{quote(group_name, safe='')}"  # no other group's keys begin with it
    use = ours.add(f"{place}/use/{me.boot_id}/{me.pid}/{me.start_time}", 1) - 1
    return make(
        PrefixStore(f"{place}/{use}", ours),
        group_name or "group",
        rank,
        world_size,
        limit,
        backend,
    )


def make(
    store: Store,
    name: str,
    rank: int,
    size: int,
    timeout: float,
    backend: str | None = None,
    *,
    ranks: Sequence[int] = (),
    world_size: int | None = None,
    began: float | None = None,
    members: Sequence[Member] = (),
) -> ProcessGroup:
    """Make a group whose members meet in a part of a store that no other job uses; collective.

    Args:
        rank, size: this process's group rank, and the number of members.
        timeout: seconds, for this and for every call on the group.
        ranks, world_size: the members' global ranks, in the order of their group ranks, and the size of the world. By
            default, global ranks are equal to group ranks, and the world has the group's size.
        began: the time.monotonic() from which `timeout` counts; None: now.
        members: all members, if every member has this list from another group; the ranks then need not exchange it.
    """
    began = began or time.monotonic()
    choice = parse_backend(backend)
    load(choice)  # before this rank joins, so that the others do not wait for the import
    ranks = ranks or range(size)
    set_process_rank(ranks[rank])
    if ranks[rank] == 0:
        config.warn_of_unknown()
    # A group of one rank needs no meeting. It gets a store of its own, because other ranks may use the same name.
    job = store if size > 1 else HashStore()
    members = members or join(job, rank, size, str(choice), timeout, began=began)
    with ExitStack() as undo:
        undo.callback(forget, members)
        known = [
            replace(member, rank=each, world_size=world_size or size)
            for member, each in zip(members, ranks, strict=True)
        ]
        crowd = [member for other in list(groups.standalone.values()) for member in other.members]
        group = make_group(choice, PrefixStore("group", job), name, known, rank, timeout, crowd)
        undo.pop_all()
    _exit_hook.set_once()
    groups.standalone[group] = Standalone(choice, known, partial(job.retire, "", size))
    return group


def leave_groups(left: Sequence[ProcessGroup], error: BaseException | None) -> GroupError | None:
    """Leave the groups that this rank has not left before; return the error of `leave` (leaving.py), or None."""
    known = {group: groups.standalone.pop(group) for group in left if group in groups.standalone}
    try:
        return leave(list(known), error)
    finally:
        for each in known.values():
            forget(each.members)
            with suppress(StoreError):  # the store may be gone, or closed
                each.retire()


def leave_all(error: BaseException | None) -> GroupError | None:
    """Leave all standalone groups. The exit hook calls this."""
    return leave_groups(list(groups.standalone), error)


def _leave_at_exit(error: BaseException | None) -> GroupError | None:
    if groups.standalone:
        _log.info("destroy_process_group was not called; leaving at exit")
    return leave_all(error)


_exit_hook = ExitHook(_leave_at_exit)
