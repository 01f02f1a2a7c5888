"""The fastcoll groups behind torch's process groups, made over torch's store, without a world of fastcoll.

Each group is a job of its own (job/standalone.py), which its members join by their group ranks.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
import sys
import time
from collections.abc import Sequence
from typing import Any, NoReturn
from weakref import WeakKeyDictionary

import torch.distributed as dist

from .. import config
from ..core.group import ProcessGroup
from ..errors import GroupError, StoreTimeoutError, UnavailableError, UsageError
from ..job import standalone
from ..job.leaving import ExitHook
from ..store import HashStore, PrefixStore, Store
from ..store.store import listed, tries
from ..store.views import TorchStore
from ..store.waiting import LateWarning, fetch_for
from ..system.forks import at_fork
from ..system.processes import Member, this_process
from .work import completions

_log = logging.getLogger("fastcoll")
_SETTLE_SECONDS = 5.0
# For each group, the name of the start of the ranks in which it was made (`meet_anew`); empty without torchrun.
_starts: WeakKeyDictionary[ProcessGroup, str] = WeakKeyDictionary()


def make_group(
    store: Any,
    name: str,
    rank: int,
    size: int,
    timeout: float,
    global_ranks: Sequence[int],
    world_size: int,
    parent: ProcessGroup | None = None,
) -> ProcessGroup:
    """Make a group with the other members, who meet in torch's `store`; collective.

    Args:
        rank, size: this process's group rank, and the number of members.
        timeout: seconds for this call and for every call on the group.
        global_ranks: the members' global ranks, in the order of group ranks; empty: global and group ranks are
            the same.
        world_size: the number of ranks of the job.
        parent: a group that contains all members, so that they need not exchange addresses again; or None.
    """
    config.check()
    _exit_hook.set_once()
    began = time.monotonic()
    members: list[Member] = []
    if parent is not None and size > 1:
        by_rank = {member.rank: member for member in parent.monitor.members}
        members = [by_rank[rank] for rank in global_ranks]
    try:
        prefixed, start = _prefixed_store(store, rank, size, timeout, global_ranks, parent)
        group = standalone.make(
            prefixed,
            name,
            rank,
            size,
            timeout,
            ranks=global_ranks,
            world_size=world_size,
            began=began,
            members=members,
        )
    except (UsageError, StoreTimeoutError) as error:
        if not global_ranks:
            raise
        raise type(error)(
            f"{error}; if the members alone have called new_group, and not every rank of the world, give "
            "use_local_synchronization=True"
        ) from error
    _starts[group] = start
    group.gpus.serve(refuse_gpus)
    group.backend.begin_at_once()  # torch's programs compute during asynchronous calls, on all cores
    return group


def refuse_gpus(group: ProcessGroup) -> NoReturn:
    """Refuse tensors on GPUs."""
    raise UnavailableError(
        f"the group {group.name!r} serves only CPU tensors, even if cpu:fastcoll,cuda:nccl was requested: a process "
        "group written in Python replaces the other backends of its group; make a group for CUDA tensors with "
        "torch.distributed.new_group(backend='nccl')"
    )


def refuse_options(pg_options: Any) -> None:
    if pg_options is not None:
        raise UnavailableError(f"pg_options is {pg_options!r}, but this backend has no options; leave it out")


def leave_group(group: ProcessGroup) -> None:
    """Leave a group; a second call does nothing.

    An error of an operation that was not waited for is logged, not raised: an exception would leave torch's group half
    destroyed.
    """
    if (lost := standalone.leave_groups([group], sys.exc_info()[1])) is not None:
        _log.error("%s", lost)


def _prefixed_store(
    store: Any, rank: int, size: int, timeout: float, global_ranks: Sequence[int], parent: ProcessGroup | None
) -> tuple[Store, str]:
    """Return torch's store with a prefix that is new for each group, and the start's name (`meet_anew`).

    torch itself uses the same keys again after destroy_process_group.
    """
    if size == 1:
        return HashStore(), ""
    prefixed, start = PrefixStore("fastcoll", TorchStore(store)), ""
    if parent is not None:
        # Members of `parent` skip the join, which would detect a second group of the same name. So the keys contain
        # the group's ranks.
        prefixed = PrefixStore(hashlib.sha256(repr(list(global_ranks)).encode()).hexdigest()[:16], prefixed)
        start = _starts[parent]
    if dist.is_torchelastic_launched():
        start = start or meet_anew(prefixed, rank, size, timeout)
        prefixed = PrefixStore(start, prefixed)
    # Each process has its own counter of groups. So if two processes claim the same rank, both use the same keys, meet,
    # and get an error.
    me = this_process()
    use = prefixed.add(f"use/{rank}/{me.boot_id}/{me.pid}/{me.start_time}", 1) - 1
    return PrefixStore(str(use), prefixed), start


def meet_anew(store: Store, rank: int, size: int, timeout: float) -> str:
    """Return a name that all ranks of this start share and that no earlier start had; collective.

    torchrun restarts all ranks after a failure or a change of members, and its store keeps the keys of earlier starts.
    No environment variable that torchrun sets is both new in each start and the same on all ranks, because the agents
    of several nodes count restarts separately. So for each start rank 0 makes a *meeting*: it publishes a new name, and
    waits until all other ranks have joined under this name. A group with a parent uses the parent's name and needs no
    meeting.

        meeting             the name of the latest meeting; rank 0 sets it
        <name>/here/<rank>  a counter: the process that raises it to 1 joins the meeting as this rank
        <name>/met          set when all ranks have joined

    Raises:
        StoreTimeoutError: not all ranks joined within `timeout` seconds; on rank 0 the error names those that did not.
        StoreError: the store is gone.
    """
    late, doing = LateWarning(), f"joining as rank {rank} of {size}"
    if rank == 0:
        name = f"{size}/{secrets.token_hex(8)}"
        store.set("meeting", name)
        keys = {rank: f"{name}/here/{rank}" for rank in range(1, size)}

        def absent() -> str:
            return f"rank(s) {listed([rank for rank, key in keys.items() if not store.check([key])])}"

        fetch_for(store, list(keys.values()), (), timeout, doing, missing=absent)
        store.set(f"{name}/met", b"")
        return name

    def missing() -> str:
        return "others, which rank 0 knows," if mine else "rank 0"

    # Join the latest meeting, and join a later one if it appears before this one is complete.
    seen = mine = ""
    for _ in tries(timeout, 0.0002, growth=1.25):
        if mine and store.check([f"{mine}/met"]):
            return mine
        latest = (store.peek(["meeting"])[0] or b"").decode()
        if latest != seen:
            seen = latest
            # A meeting of another size, or one that this rank has joined before, belongs to an earlier start.
            is_new = latest.startswith(f"{size}/") and store.add(f"{latest}/here/{rank}", 1) == 1
            mine = latest if is_new else ""
        late.look(doing, missing)
    raise StoreTimeoutError(f"{doing}: {missing()} did not come within {timeout:.3g} s")


def _leave_at_exit(error: BaseException | None) -> GroupError | None:
    try:
        return standalone.leave_all(error)
    finally:
        # A thread that is inside torch's C++ when Python ends would crash the process.
        completions.settle(_SETTLE_SECONDS)


_exit_hook = ExitHook(_leave_at_exit)
at_fork("torch's threads", completions.start_anew)
