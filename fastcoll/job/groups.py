"""The groups of this process, and the public functions that query them.

`groups.world` is the default group. Before `init_process_group` it is a stand-in that raises on every use, so
functions need not check whether there is a default group.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn, cast

from ..core.group import ProcessGroup
from ..core.operands import whole
from ..errors import AbortedError, NotInitializedError, UnavailableError, UsageError
from ..system.forks import at_fork
from ..system.processes import Member
from .backends import Backend, BackendChoice


class NonMember:
    """The result of `new_group` on a rank outside the group; calls on it warn and do nothing."""

    rank = -1
    size = -1

    def __repr__(self) -> str:
        return "GroupMember.NON_GROUP_MEMBER"


Group = ProcessGroup | NonMember | None
"""A `group` argument: a result of `new_group`, or None for the default group."""


class _NoWorld:
    """A stand-in for the default group while there is none: every use raises."""

    def __getattr__(self, name: str) -> NoReturn:
        raise NotInitializedError("there is no default process group; call init_process_group first")

    def __hash__(self) -> int:
        self.__getattr__("__hash__")


_NO_WORLD = cast(ProcessGroup, _NoWorld())


class Standalone(NamedTuple):
    """A group that is its own job (standalone.py): its backends, its members, and a function that deletes its keys."""

    choice: BackendChoice
    members: Sequence[Member]
    retire: Callable[[], object]


class Groups:
    """The registry of groups. `backends` has the default group and then the others, oldest first, with their backends.

    `standalone` has the groups that are their own jobs (standalone.py). In a child made by fork, `inherited` is the
    error that calls on the default group and on the other groups of the parent's job raise.
    """

    def __init__(self) -> None:
        self.standalone: dict[ProcessGroup, Standalone] = {}
        self.clear()

    @property
    def initialized(self) -> bool:
        """True if there is a default group."""
        return self.world is not _NO_WORLD

    def clear(self) -> None:
        """Forget all groups but the standalone ones, without closing them."""
        self.world = _NO_WORLD
        self.backends: dict[ProcessGroup, BackendChoice] = {}
        self.inherited: AbortedError | None = None

    def add(self, group: ProcessGroup, choice: BackendChoice) -> None:
        """Add a group; the first one becomes the default group."""
        self.backends[group] = choice
        if not self.initialized:
            self.world = group

    def disown(self) -> None:
        """Make every group unusable in a child made by fork; other ranks notice nothing."""
        error = AbortedError(
            f"the process groups belong to process {os.getppid()}, from which process {os.getpid()} was forked; call "
            "init_process_group in the new process, or start it by spawn"
        )
        if self.initialized:
            self.inherited = error
        for group in [*self.backends, *self.standalone]:
            group.disown(error)
        self.standalone.clear()


groups = Groups()
at_fork("groups", groups.disown)


class _GroupMember:
    """torch's namespace: `WORLD` is the default group or None; `NON_GROUP_MEMBER` is the only NonMember."""

    NON_GROUP_MEMBER = NonMember()

    @property
    def WORLD(self) -> ProcessGroup | None:
        return groups.world if groups.initialized else None


GroupMember = _GroupMember()
group = GroupMember


def member_of(group: Group, what: str) -> ProcessGroup | None:
    """Return the group for the operation `what`; on a rank outside the group, warn and return None."""
    if group is None:
        return groups.world
    if isinstance(group, ProcessGroup):
        return group
    if isinstance(group, NonMember):
        warnings.warn(
            f"{what} on rank {groups.world.rank}, which is not in the given group, does nothing", stacklevel=3
        )
        return None
    _refuse(group)


def group_rank(
    group: ProcessGroup, what: str, global_rank: int | None, rank: int | None, default: int | None = None
) -> int:
    """Return the group rank that two arguments of torch denote: `src` and `group_src`, or `dst` and `group_dst`.

    `what` is "src" or "dst". `default` is the global rank to take if neither argument is given; None: raise instead.
    """
    if rank is not None:
        if global_rank is not None:
            raise UsageError(f"{what}={global_rank} and group_{what}={rank} are both given; give one of them")
        return rank
    if global_rank is None:
        global_rank = default
    if global_rank is None:
        raise UsageError(f"{what} is missing; give {what} (a global rank) or group_{what} (a group rank)")
    return global_rank if group is groups.world else get_group_rank(group, global_rank)


def is_initialized() -> bool:
    """Return whether there is a default group: after `init_process_group`, before `destroy_process_group`."""
    return groups.initialized


def get_rank(group: Group = None) -> int:
    """Return this process's rank in the group (None: the default group); -1 outside the group."""
    return _asked(group).rank


def get_world_size(group: Group = None) -> int:
    """Return the number of ranks in the group (None: the default group); -1 outside the group."""
    return _asked(group).size


def get_backend(group: Group = None) -> Backend:
    """Return the backend of a group, as given when the group was made.

    If that was "auto", the result is the backend in use, such as "shm" on one node, or "tcp" if each rank has its own
    node. If the group was made with a backend for each device, the result is the backend for the CPU.

    Raises:
        UsageError: this process is not in the group.
    """
    choice = _choice(group)
    if choice.nccl_alone:
        return Backend(Backend.NCCL)
    asked = choice.by_device["cpu"]
    return Backend(entered(group).backend.name) if asked == Backend.AUTO else asked


def get_backend_config(group: Group = None) -> str:
    """Return the backends of a group by device, as given when the group was made: `cpu:auto,cuda:nccl`."""
    return str(_choice(group))


def get_group_rank(group: Group, global_rank: int) -> int:
    """Return the rank inside `group` of `global_rank`, a rank of the world.

    Raises:
        UsageError: that rank is not in the group.
    """
    found = entered(group)
    try:
        return found.ranks.index(global_rank)
    except ValueError:
        raise UsageError(
            f"global rank {global_rank} is not in the group {found.name!r} of {list(found.ranks)}"
        ) from None


def get_global_rank(group: Group, group_rank: int) -> int:
    """Return the rank in the world of `group_rank`, a rank inside `group`.

    Raises:
        UsageError: the group has no such rank.
    """
    found = entered(group)
    group_rank = whole("group_rank", group_rank)
    if not 0 <= group_rank < found.size:
        raise UsageError(
            f"group rank {group_rank} is not in the group {found.name!r}, which has 0..{found.size - 1}"
        )
    return found.ranks[group_rank]


def get_process_group_ranks(group: Group = None) -> list[int]:
    """Return the global ranks of a group, in the order of their group ranks.

    Raises:
        UsageError: this process is not in the group.
    """
    return list(entered(group).ranks)


def _asked(group: Group) -> ProcessGroup | NonMember:
    return group if isinstance(group, NonMember) else entered(group)


def entered(group: Group) -> ProcessGroup:
    """Return the group (None: the default group), or raise if this process is not in it or has destroyed it."""
    if group is None:
        return groups.world
    if not isinstance(group, ProcessGroup):
        _refuse(group)
    if group not in groups.backends and group not in groups.standalone:
        raise NotInitializedError(f"the group {group.name!r} was destroyed")
    return group


def of_job(group: Group, what: str) -> ProcessGroup:
    """Return a group of the job of `init_process_group`, for `what`, which makes a new group in that job.

    Raises:
        UnavailableError: `group_from_store` made the group.
        NotInitializedError, UsageError: as for `entered`.
    """
    found = entered(group)
    if found in groups.standalone:
        raise UnavailableError(
            f"{what}: group_from_store made the group {found.name!r}, and new groups are made in the store of "
            "init_process_group; make the new group by group_from_store, too"
        )
    return found


def _choice(group: Group) -> BackendChoice:
    found = entered(group)
    return groups.standalone[found].choice if found in groups.standalone else groups.backends[found]


def _refuse(group: Any) -> NoReturn:
    if isinstance(group, NonMember):
        raise UsageError("this process is not in the group; ask about it on a rank that is")
    raise UsageError(f"group is {group!r}; give a group made by new_group, or None for the default group")
