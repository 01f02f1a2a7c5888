"""Groups besides the default one: new_group, and functions that divide the world into groups.

All members must pass the same ranks. So each rank writes its request into the store, and a group is made only when
all its members have made the same request (group_requests.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any
from zlib import crc32

from ..core.group import ProcessGroup
from ..core.operands import WORLD_OF_ONE, check_unused, positive_seconds, whole, wholes
from ..core.work import Timeout
from ..errors import FastcollError, UsageError
from ..failpoints import reach
from .backends import Backend, BackendChoice, is_mpi_initialised, load, parse_backend
from .group_requests import GroupRequest, publish_refusal
from .groups import Group, GroupMember, NonMember, get_backend_config, groups, of_job
from .job import Job
from .world import current_job

Made = ProcessGroup | NonMember


def new_group(
    ranks: Sequence[int] | None = None,
    timeout: Timeout = None,
    backend: str | None = None,
    pg_options: None = None,
    use_local_synchronization: bool = False,
    group_desc: str | None = None,
    device_id: Any = None,
    sort_ranks: bool = True,
) -> Made:
    """Make a group of some ranks of the world.

    Every rank of the world calls this, members and non-members, in the same order for all groups. Only the members
    wait for one another; with NCCL all ranks do, because they split the world's communicator, and for the first group
    over MPI, because they initialise MPI. If a rank leaves out the call for a group that it is not in, its next call
    logs a warning and is matched with the next call of the others.

    Args:
        ranks: global ranks, in any order. None: all.
        timeout: seconds or timedelta, for making the group and for every call on it; None: the world's.
        backend: as for `init_process_group`; None: the world's.
        pg_options: must be None; no backend has options.
        use_local_synchronization: only members call this; rank 0 of the world must not leave before they return.
        group_desc: a name for error messages.
        device_id: as for `init_process_group`.
        sort_ranks: order the group ranks by global rank; False: keep the order of `ranks`, which all ranks must share.

    Returns:
        The group; `GroupMember.NON_GROUP_MEMBER` on ranks outside it.

    Raises:
        UsageError: `ranks` is empty, has duplicates, or ranks that do not exist; another argument is wrong.
        MismatchError: members passed different `ranks`, or another member's arguments are wrong; the message has both.
        PeerDiedError, StoreTimeoutError: a member died, or did not call this in time.

    Examples:
        >>> even = dist.new_group(range(0, dist.get_world_size(), 2))
    """
    job = current_job()
    try:
        check_unused(pg_options, device_id)
        chosen = _checked_ranks(ranks, len(job.lease.members), sort_ranks)
        choice = job.choice if backend is None else parse_backend(backend)
        limit = positive_seconds(timeout, job.timeout)
    except Exception as error:
        if not use_local_synchronization:  # the members of the group wait for this rank's request
            with suppress(FastcollError, OSError), job.making([], "new_group"):
                publish_refusal(job.lease, f"group{job.number('all')}", error)
        raise
    # If the world has an NCCL communicator, split it, so that the group gets its own.
    world, in_order = groups.world, chosen == sorted(chosen)
    nccl = choice.by_device.get("cuda") == Backend.NCCL and world.failure is None
    splits = not use_local_synchronization and in_order and nccl and world.gpus.splits()
    # MPI_Init waits for all ranks, without a timeout, so they first wait for one another in the store.
    initialises = choice.initialises_mpi and not use_local_synchronization and not is_mpi_initialised()
    reach("new_group.enter")
    with job.making(chosen, f"new_group({chosen})", counted=not use_local_synchronization):
        key = _agreed_key(job, chosen, choice, limit, use_local_synchronization, splits or initialises)
        if key is None:
            return GroupMember.NON_GROUP_MEMBER
        if initialises:
            load(choice)
        group = None
        if job.lease.rank in chosen:
            name = f"{group_desc} ({key})" if group_desc else key
            # If some ranks have left out calls of new_group, another group may have the same key, so add a checksum.
            place = f"{key}/{crc32(repr(chosen).encode()):08x}"
            group = job.make_group(name, place, chosen, limit, choice)
            job.keep_place(group, place)
        reach("new_group.after_made")
        if splits:
            groups.world.gpus.split(group)
        if group is None:
            return GroupMember.NON_GROUP_MEMBER
        groups.add(group, choice)
        return group


def _checked_ranks(ranks: Sequence[int] | None, size: int, sort_ranks: bool) -> list[int]:
    """Return the ranks of a new group in a world of `size` ranks.

    Raises:
        UsageError: there are none, or there are duplicates, or ranks that do not exist.
    """
    given = list(range(size)) if ranks is None else wholes("ranks", ranks)
    chosen = sorted(given)
    if not chosen or len(set(chosen)) < len(chosen) or chosen[0] < 0 or chosen[-1] >= size:
        raise UsageError(
            f"ranks is {given}; expected at least one of the ranks 0..{size - 1}, each at most once"
            + (WORLD_OF_ONE if size == 1 else "")
        )
    return chosen if sort_ranks else given


def _agreed_key(
    job: Job,
    ranks: Sequence[int],
    choice: BackendChoice,
    timeout: float,
    only_members: bool,
    waits_for_all: bool,
) -> str | None:
    """Request a group, and wait until others have made the same request; return the group's key in the store.

    Args:
        only_members: only the members of the group make this call.
        waits_for_all: wait for all ranks of the world, not only for the members.

    Returns:
        None if this rank is no member and waits for no rank.
    """
    asked = range(len(job.lease.members)) if waits_for_all else ranks
    while True:
        # The key has the number of this call. Calls that all ranks make are counted together; calls that only members
        # make are counted for each set of members.
        if only_members:
            label = f"members{crc32(repr(sorted(ranks)).encode()):08x}x{len(ranks)}"
            key = f"{label}-{job.number(label)}"
        else:
            key = f"group{job.number('all')}"
        request = GroupRequest(job.lease, key, ranks, str(choice))
        if not only_members or job.lease.rank in ranks:
            request.publish()
            reach("new_group.after_request")
        if job.lease.rank not in ranks and not waits_for_all:
            return None
        if request.is_agreed(asked, timeout, waits_for_all):
            return key
        job.lease.settle()


def new_subgroups(
    group_size: int | None = None,
    group: Group = None,
    timeout: Timeout = None,
    backend: str | None = None,
    pg_options: None = None,
    group_desc: str | None = None,
) -> tuple[Made, list[Made]]:
    """Divide the world, or another group, into groups of `group_size` neighbouring ranks.

    Args:
        group_size: must divide the number of ranks; None: the number of ranks on each node.
        group: the group to divide; only its members call this, and rank 0 of the world must not leave meanwhile. None:
            the world.
        timeout, backend, pg_options, group_desc: as for `new_group`.

    Returns:
        The group of this rank, and all groups.

    Raises:
        UsageError: `group_size` does not divide the number of ranks; or it is None, and the nodes have different
            numbers of ranks.
        UnavailableError: `group_from_store` made the group.
    """
    ranks = of_job(group, "new_subgroups").ranks
    if group_size is None:
        members = current_job().lease.members
        sizes = set(Counter(members[rank].node for rank in ranks).values())
        if len(sizes) != 1:
            raise UsageError(f"the nodes have {sorted(sizes)} ranks; give group_size")
        size = sizes.pop()
    else:
        size = whole("group_size", group_size)
    if size < 1 or len(ranks) % size:
        raise UsageError(f"group_size is {size}; it must divide the {len(ranks)} ranks of the group")
    parts = [ranks[start : start + size] for start in range(0, len(ranks), size)]
    only_members = group is not None and group is not groups.world
    return _new_groups(parts, timeout, backend, pg_options, group_desc, only_members)


def new_subgroups_by_enumeration(
    ranks_per_subgroup_list: Sequence[Sequence[int]],
    timeout: Timeout = None,
    backend: str | None = None,
    pg_options: None = None,
    group_desc: str | None = None,
) -> tuple[Made, list[Made]]:
    """Make several groups without common ranks; every rank of the world calls this.

    Args:
        ranks_per_subgroup_list: the global ranks of each group.
        timeout, backend, pg_options, group_desc: as for `new_group`.

    Returns:
        The group of this rank (`GroupMember.NON_GROUP_MEMBER` if it is in none), and all groups.

    Raises:
        UsageError: a rank is in two groups, or as for `new_group`.
    """
    parts = _checked_parts("ranks_per_subgroup_list", ranks_per_subgroup_list)
    return _new_groups(parts, timeout, backend, pg_options, group_desc, False)


def split_group(
    parent_pg: Group = None,
    split_ranks: Sequence[Sequence[int]] | None = None,
    timeout: Timeout = None,
    pg_options: None = None,
    group_desc: str | None = None,
    backend: str | None = None,
) -> ProcessGroup | None:
    """Divide a group into several; every member calls this, and rank 0 of the world must not leave meanwhile.

    Args:
        parent_pg: the group to divide; None: the world.
        split_ranks: the ranks of each new group, as ranks in `parent_pg`, no rank twice. Each new group keeps the order
            of `parent_pg`.
        timeout, pg_options, group_desc: as for `new_group`.
        backend: as for `new_group`; None: that of `parent_pg`.

    Returns:
        The group of this rank; None if it is in none. (Do not pass None to a collective, which takes it as the world.)

    Raises:
        UsageError: `split_ranks` is missing, has a rank twice, or a rank that is not in `parent_pg`.
        UnavailableError: `group_from_store` made `parent_pg`.
        MismatchError, PeerDiedError, StoreTimeoutError: as for `new_group`.
    """
    parent = of_job(parent_pg, "split_group").ranks
    parts = [sorted(part) for part in _checked_parts("split_ranks", split_ranks)]
    if not parts or any(not part or part[0] < 0 or part[-1] >= len(parent) for part in parts):
        raise UsageError(
            f"split_ranks is {split_ranks!r}; give lists of the ranks 0..{len(parent) - 1} of parent_pg"
        )
    only_members = parent_pg is not None and parent_pg is not groups.world
    if backend is None and only_members:
        backend = get_backend_config(parent_pg)
    chosen = [[parent[rank] for rank in part] for part in parts]
    own, _ = _new_groups(chosen, timeout, backend, pg_options, group_desc, only_members, sort_ranks=False)
    return own if isinstance(own, ProcessGroup) else None


def _new_groups(
    parts: Sequence[Sequence[int]],
    timeout: Timeout,
    backend: str | None,
    pg_options: None,
    group_desc: str | None,
    only_members: bool,
    sort_ranks: bool = True,
) -> tuple[Made, list[Made]]:
    made = [
        new_group(part, timeout, backend, pg_options, only_members, group_desc, None, sort_ranks)
        for part in parts
    ]
    own = [group for group in made if isinstance(group, ProcessGroup)]
    return (own[0] if own else GroupMember.NON_GROUP_MEMBER), made


def _checked_parts(name: str, parts: Any) -> list[list[int]]:
    """Return `parts` as lists of ranks; raise UsageError if they are something else, or have a rank in common."""
    if isinstance(parts, str) or not isinstance(parts, Iterable):
        raise UsageError(f"{name} is {parts!r}; give a list of lists of ranks")
    checked = [wholes(f"{name}[{index}]", part) for index, part in enumerate(parts)]
    times = Counter(rank for part in checked for rank in part)
    if twice := [rank for rank, n in times.items() if n > 1]:
        raise UsageError(f"rank {twice[0]} is listed twice in {checked}")
    return checked
