"""The fastcoll groups behind torch's process groups: made over torch's store, apart from fastcoll's own world.

Each is a job of its own, which its members join by their group ranks. What is never destroyed is left at exit, while
Python still runs, and disowned in children of fork (a DataLoader's workers).
"""

from __future__ import annotations

import functools
import logging
import os
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, NoReturn

import torch.distributed as dist

from .. import config
from ..api.backends import load, parse_backend
from ..api.leaving import ExitHook, leave
from ..core.group import ProcessGroup
from ..core.members import Member, forget, speak_as
from ..core.processes import this_process
from ..errors import AbortedError, GroupError, StoreTimeoutError, UnavailableError, UsageError
from ..rendezvous import HashStore, PrefixStore
from ..rendezvous.join import join
from ..rendezvous.views import TorchStore
from .completion import completions
from .meeting import meet_anew

_log = logging.getLogger("fastcoll")
_SETTLE_SECONDS = 5.0

_made: dict[ProcessGroup, Sequence[Member]] = {}


def make_group(
    store: Any, name: str, rank: int, size: int, timeout: float, global_ranks: Sequence[int], world_size: int
) -> ProcessGroup:
    """Meet the other members; collective.

    Args:
        store: torch's store for this group, shared by all members.
        name: torch's name of the group, for error messages.
        rank, size: this process's group rank, and the number of members.
        timeout: seconds, for this and for every call on the group.
        global_ranks: of the members, in the order of their group ranks; empty: the same numbers.
        world_size: ranks of the whole job.

    Raises:
        PeerDiedError, StoreTimeoutError: a member died or did not come in time.
        ResourceError: no shared memory or no port.
    """
    config.check()
    _watch_ends()
    choice = parse_backend(None)
    make = load(choice)
    deadline = time.monotonic() + timeout
    ranks = global_ranks or range(size)
    speak_as(ranks[rank])
    if ranks[rank] == 0:
        config.warn_of_unknown()
    # A group of one needs no meeting; each rank may make its own under the same name.
    try:
        job = _job_store(store, rank, size, timeout) if size > 1 else HashStore()
        members = join(job, rank, size, str(choice), max(deadline - time.monotonic(), 0.001))
    except (UsageError, StoreTimeoutError) as error:
        if not global_ranks:
            raise
        raise type(error)(
            f"{error}; if the members alone have called new_group, and not every rank of the world, give "
            "use_local_synchronization=True"
        ) from error
    with ExitStack() as undo:
        undo.callback(forget, members)
        known = [replace(m, rank=r, world_size=world_size) for m, r in zip(members, ranks, strict=True)]
        group = make(PrefixStore("group", job), name, known, rank, timeout)
        group.serve_gpus(refuse_gpus)
        group.begin_at_once()  # what runs beside collectives of CPU tensors computes on the CPU
        undo.pop_all()
    _made[group] = known
    return group


def refuse_gpus(group: ProcessGroup) -> NoReturn:
    """What a group says to tensors on GPUs."""
    raise UnavailableError(
        f"the group {group.name!r} serves CPU tensors alone, also if cpu:fastcoll,cuda:nccl was asked for: a process "
        "group written in Python replaces the other backends of its group; make a group for CUDA tensors with "
        "torch.distributed.new_group(backend='nccl')"
    )


def leave_group(group: ProcessGroup) -> None:
    """Leave a group and let go of what it holds, as leaving.py does. Leaving twice is fine.

    What was lost is logged: an exception would leave torch with a group half destroyed.
    """
    if (lost := _leave([group], sys.exc_info()[1])) is not None:
        _log.error("%s", lost)


def _leave(groups: Sequence[ProcessGroup], error: BaseException | None) -> GroupError | None:
    members = [member for group in groups for member in _made.pop(group, ())]
    try:
        return leave(groups, error)
    finally:
        forget(members)


def _job_store(store: Any, rank: int, size: int, timeout: float) -> PrefixStore:
    """The part of torch's store that belongs to this group alone: torch uses the same keys again."""
    ours = PrefixStore("fastcoll", TorchStore(store))
    if dist.is_torchelastic_launched():
        return PrefixStore(meet_anew(ours, rank, size, timeout), ours)
    # Each process counts for itself, after each destroy_process_group; two that claim one rank then meet and are told.
    me = this_process()
    use = ours.add(f"use/{rank}/{me.boot_id}/{me.pid}/{me.start_time}", 1) - 1
    return PrefixStore(str(use), ours)


@functools.cache
def _watch_ends() -> None:
    """Once a process."""
    ExitHook(_leave_all).set()
    os.register_at_fork(after_in_child=_disown_all)


def _leave_all(error: BaseException | None) -> GroupError | None:
    if _made:
        _log.info("torch.distributed.destroy_process_group was not called; leaving at exit")
    try:
        return _leave(list(_made), error)
    finally:
        # A thread that Python's end finds inside torch's C++ would take the process down.
        completions.settle(_SETTLE_SECONDS)


def _disown_all() -> None:
    completions.start_anew()
    for group in _made:
        group.disown(
            AbortedError(
                f"the process group belongs to process {os.getppid()}, from which process {os.getpid()} was forked; "
                "call init_process_group in the new process, or start it by spawn"
            )
        )
    _made.clear()
