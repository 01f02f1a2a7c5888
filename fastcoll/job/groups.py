"""The groups that this process is in, and the questions that can be asked about them.

`groups.world` is the default group. Before `init_process_group` a stand-in takes its place whose every
use raises, so that the calls on the default group need no test of their own.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn, cast

from ..core.group import ProcessGroup
from ..core.operands import whole
from ..errors import AbortedError, NotInitializedError, UsageError
from ..system.forks import at_fork
from ..system.processes import Member
from .backends import Backend, BackendChoice


class NonMember:
    """What `new_group` returns on a rank outside the group; calls on it warn and do nothing."""

    rank = -1
    size = -1

    def __repr__(self) -> str:
        return "GroupMember.NON_GROUP_MEMBER"


Group = ProcessGroup | NonMember | None
"""A `group` argument: a group of `new_group`, or None for the default one."""


class _NoWorld:
    """The default group while there is none."""

    def __getattr__(self, name: str) -> NoReturn:
        raise NotInitializedError("there is no default process group; call init_process_group first")

    def __hash__(self) -> int:
        self.__getattr__("__hash__")


_NO_WORLD = cast(ProcessGroup, _NoWorld())


class Standalone(NamedTuple):
    """Of a group without a world: what was asked for it, its members, and what clears its part of a store."""

    choice: BackendChoice
    members: Sequence[Member]
    retire: Callable[[], None]


class Groups:
    """The registry: the default group or its stand-in, and every group, oldest first, with what was asked for it.

    `standalone` are groups without a world (standalone.py). `inherited` is the error of every use of the world and its
    groups, when all of this came through fork from another process.
    """

    def __init__(self) -> None:
        self.standalone: dict[ProcessGroup, Standalone] = {}
        self.clear()

    @property
    def initialized(self) -> bool:
        """Whether there is a default group."""
        return self.world is not _NO_WORLD

    def clear(self) -> None:
        """Forget every group of the world, without closing it."""
        self.world = _NO_WORLD
        self.backends: dict[ProcessGroup, BackendChoice] = {}
        self.inherited: AbortedError | None = None

    def add(self, group: ProcessGroup, choice: BackendChoice) -> None:
        """Enter a group; the first one is the default group."""
        self.backends[group] = choice
        if not self.initialized:
            self.world = group

    def disown(self) -> None:
        """Make every group unusable in a child of fork, without a word to the peers."""
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
    """`GroupMember.WORLD` is the default group (None before there is one); see also NonMember."""

    NON_GROUP_MEMBER = NonMember()

    @property
    def WORLD(self) -> ProcessGroup | None:
        return groups.world if groups.initialized else None


GroupMember = _GroupMember()
group = GroupMember


def member_of(group: Group, what: str) -> ProcessGroup | None:
    """The group that an operation named `what` is for; None, with a warning, outside the group."""
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
    """The group rank meant by torch's pair of arguments `src`, `group_src` (or `dst`, `group_dst`; `what` says which).

    `default` is the global rank when neither is given; None: one must be given.
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
    """Whether `init_process_group` was called, and not undone by `destroy_process_group`."""
    return groups.initialized


def get_rank(group: Group = None) -> int:
    """This process's rank in the group (None: the default group); -1 outside the group."""
    return _asked(group).rank


def get_world_size(group: Group = None) -> int:
    """The number of ranks in the group (None: the default group); -1 outside the group."""
    return _asked(group).size


def get_backend(group: Group = None) -> Backend:
    """The backend of a group: the name that was asked for, "auto" replaced by "shm" on one node and by "tcp"
    where each rank has a node of its own. Of backends by device, the CPU's.

    Raises:
        UsageError: this process is not in the group.
    """
    choice = _choice(group)
    if choice.nccl_alone:
        return Backend(Backend.NCCL)
    asked = choice.by_device["cpu"]
    return Backend(entered(group).backend.name) if asked == Backend.AUTO else asked


def get_backend_config(group: Group = None) -> str:
    """The backends of a group as asked for, device by device: `cpu:auto,cuda:nccl`."""
    return str(_choice(group))


def get_group_rank(group: Group, global_rank: int) -> int:
    """The rank inside `group` of `global_rank`, a rank of the world.

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
    """The rank in the world of `group_rank`, a rank inside `group`.

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
    """The global ranks of a group, in the order of their group ranks.

    Raises:
        UsageError: this process is not in the group.
    """
    return list(entered(group).ranks)


def _asked(group: Group) -> ProcessGroup | NonMember:
    return group if isinstance(group, NonMember) else entered(group)


def entered(group: Group) -> ProcessGroup:
    """A group that this process is in."""
    if group is None:
        return groups.world
    if not isinstance(group, ProcessGroup):
        _refuse(group)
    if group not in groups.backends and group not in groups.standalone:
        raise NotInitializedError(f"the group {group.name!r} was destroyed")
    return group


def _choice(group: Group) -> BackendChoice:
    found = entered(group)
    return groups.standalone[found].choice if found in groups.standalone else groups.backends[found]


def _refuse(group: Any) -> NoReturn:
    if isinstance(group, NonMember):
        raise UsageError("this process is not in the group; ask about it on a rank that is")
    raise UsageError(f"group is {group!r}; give a group made by new_group, or None for the default group")
