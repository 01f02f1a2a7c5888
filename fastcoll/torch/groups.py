"""The fastcoll groups behind torch's process groups: made over torch's store, apart from fastcoll's own world.

Each is a job of its own, which its members join by their group ranks. What is never destroyed is left at exit, while
Python still runs, and disowned in children of fork (a DataLoader's workers).
"""

from __future__ import annotations

import atexit
import functools
import logging
import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, NoReturn

from .. import config
from ..backends import load, parse_backend
from ..errors import AbortedError, UnavailableError
from ..group import ProcessGroup
from ..members import Member, forget
from ..processes import this_process
from ..rendezvous import PrefixStore
from ..rendezvous.join import join
from .completion import completions
from .store import TorchStore

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
    job = PrefixStore(f"fastcoll/{_use(store, rank)}", TorchStore(store))
    members = join(job, rank, size, str(choice), timeout)
    with ExitStack() as undo:
        undo.callback(forget, members)
        ranks = global_ranks or range(size)
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
        f"the group {group.name!r} serves CPU tensors alone, also if cpu:fastcoll,cuda:nccl was asked for: in torch up "
        "to 2.13 a backend written in Python replaces the others of its group; make a group for CUDA tensors with "
        "torch.distributed.new_group(backend='nccl')"
    )


def leave_group(group: ProcessGroup) -> None:
    """Leave a group and let go of what it holds. Leaving twice is fine."""
    members = _made.pop(group, ())
    try:
        group.close()
    finally:
        forget(members)


def _use(store: Any, rank: int) -> int:
    """How often this process has made a group over these keys: after destroy_process_group torch uses them again."""
    me = this_process()
    return int(store.add(f"fastcoll/use/{rank}/{me.boot_id}/{me.pid}/{me.start_time}", 1)) - 1


@functools.cache
def _watch_ends() -> None:
    """Once a process."""
    atexit.register(_leave_all)
    os.register_at_fork(after_in_child=_disown_all)


def _leave_all() -> None:
    if _made:
        _log.info("torch.distributed.destroy_process_group was not called; leaving at exit")
    for group in reversed(list(_made)):
        leave_group(group)
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
