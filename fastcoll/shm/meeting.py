"""The members of a new group meet: they map its segment, and agree on values that must be equal on all of them."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import operator
import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from typing import NamedTuple

from .. import config, failpoints
from ..errors import CollectiveTimeoutError, PeerDiedError, ResourceError
from ..rendezvous.assemble import GroupMeeting
from ..store import Store
from ..store.store import tries
from ..system.processes import Member, describe_gone, gone_among, neighbours_of
from . import slot_memory, tuning_table
from .autotune import allowed_algorithms
from .layout import ALGORITHMS, ATTACHED, LINE, ONE_SHOT_LIMIT, QUOTA, Layout, plan
from .reach import Reach
from .segment import DIRECTORY, MOUNT, Segment, allocates_later, free_bytes, new_name, shortage, sweep, unlink
from .tuning_cache import Conditions, Times, one_shot_limit

_MASK_WORDS = LINE // 8 - 1  # 960 CPUs
_LOOK_SECONDS = 0.05
_DOING = "making a group in shared memory"


class Met(NamedTuple):
    """Result of a meeting; equal on all members, except for the address at which the segment is mapped."""

    segment: Segment
    share: int  # cores of the members, divided by the job's ranks that may run on them; 0: fewer cores than ranks
    conditions: Conditions
    times: tuple[Times, float]  # earlier measurements under these conditions, see `tuning_table.matching`
    reach: int  # how all members can access one another's memory (reach.py)


def meet(
    store: Store, members: Sequence[Member], rank: int, timeout: float, crowd: Iterable[Member], relay: int
) -> Met:
    """Create the group's segment on rank 0, map it on all members, and agree on common values; collective.

    Args:
        crowd: the job's ranks, whether they are members of the group or not.
        relay: bytes of each rank's relay memory.
    """
    name = ""
    with GroupMeeting(store, members, rank, timeout, _DOING) as meeting:
        try:
            if rank == 0:
                sweep()
                layout = slot_memory.with_room(lambda: choose_layout(len(members), relay))
                name = new_name()
                published = tuning_table.to_publish(len(members), layout.slot)
                neighbours = neighbours_of(members, crowd, members[rank].world_size)
                segment = slot_memory.with_room(lambda: Segment.create(name, layout))
                segment.words[ONE_SHOT_LIMIT] = one_shot_limit(len(members))
                segment.words[ALGORITHMS] = allowed_algorithms()
                failpoints.reach("shm.meeting.after_create")
                announced = {"name": name, "times": published, "neighbours": neighbours, **asdict(layout)}
                meeting.publish("segment", json.dumps(announced).encode())
            else:
                announced = json.loads(meeting.receive("segment"))
                name, published, neighbours = map(announced.pop, ("name", "times", "neighbours"))
                try:
                    segment = Segment.attach(name, Layout(**announced))
                except ResourceError:
                    if name not in os.listdir(DIRECTORY):  # unlinked by a rank whose meeting failed
                        meeting.raise_published()
                    raise
                failpoints.reach("shm.meeting.after_attach")
            try:
                _publish_cores(segment, rank)
                reach = Reach(segment, members, rank)
                segment.publish_attached(rank)
                failpoints.reach("shm.meeting.after_proof")
                segment.prefault(rank)
                await_all(segment.missing, "attach", members, meeting, timeout)
                reach.probe()
                await_all(reach.unsure, "look at the others' memory", members, meeting, timeout)
                cores = _count_cores(segment)
            except BaseException:
                segment.close()
                raise
        except BaseException:
            # If rank 0 has died, its segment must be unlinked. This rank may not know the name.
            sweep(
                member
                for member in gone_among(members)
                if member.pid_namespace == members[rank].pid_namespace
            )
            raise
        finally:
            if name:
                unlink(name)
    share = cores // (len(members) + neighbours)
    conditions = Conditions(len(members), "own" if share else "shared", segment.layout.slot)
    return Met(segment, share, conditions, tuning_table.matching(published, conditions), reach.of_all())


def choose_layout(size: int, relay: int = 0) -> Layout:
    """Plan a layout that fits into half of the free memory in /dev/shm, since other programs need some too.

    Relay memory counts if all memory is allocated at once; else only the little of it that is used will be allocated.
    """
    wanted: int = config.get("FASTCOLL_SHM_BYTES_PER_RANK")
    try:
        free = free_bytes() // 2 // size - (0 if allocates_later() else relay)
    except FileNotFoundError as error:
        raise ResourceError(f"there is no {DIRECTORY}; {MOUNT}, or choose backend='tcp'") from error
    if wanted <= free:
        return plan(size, wanted, relay)
    try:
        return plan(size, free, relay)
    except ResourceError as error:
        raise ResourceError(shortage(size * (wanted + relay), "free what fills it")) from error


def await_all(
    late: Callable[[], list[int]], do: str, members: Sequence[Member], meeting: GroupMeeting, timeout: float
) -> None:
    """Wait until `late` returns no rank; meanwhile check for deaths and for failures of the meeting.

    A death raises an error only if some rank is still late at the next check, because the dead rank may have completed
    the step before it died.

    Args:
        late: returns the group ranks that have not completed the step.
        do: the step that the ranks must complete, as a verb for error messages.
    """
    next_look, dead = time.monotonic() + _LOOK_SECONDS, dict[Member, str | None]()
    # `late` takes 1 us for each member, so the pauses grow to a quarter of the time waited, and to 5 ms.
    for _ in tries(math.inf, 0.0002, 0.005, 1.25):
        missing = [members[r].rank for r in late()]
        if not missing:
            return
        if dead:
            raise PeerDiedError(f"{describe_gone(dead)} while {_DOING}", [m.rank for m in dead])
        if time.monotonic() < next_look:
            continue
        next_look = time.monotonic() + _LOOK_SECONDS
        meeting.look()
        dead = gone_among(members)
        if not meeting.left():
            who = f"rank {', '.join(map(str, missing))} did not {do} within {timeout:g} s"
            raise CollectiveTimeoutError(f"{_DOING}: {who}", missing)


def _publish_cores(segment: Segment, rank: int) -> None:
    """Publish the CPUs that this process may use, and the number that its cgroup allows."""
    mask = sum(1 << cpu for cpu in os.sched_getaffinity(0) if cpu < 64 * _MASK_WORDS)
    quota = 1 << 30  # no limit
    with contextlib.suppress(OSError, ValueError), open("/sys/fs/cgroup/cpu.max") as file:
        share, period = map(int, file.read().split())
        quota = max(1, share // period)
    segment.write(rank, ATTACHED + 8, mask.to_bytes(8 * _MASK_WORDS, "little"))
    segment.words[segment.word(rank, QUOTA)] = quota


def _count_cores(segment: Segment) -> int:
    """Count the CPUs that the members may use together; the result is the same on all of them."""
    ranks = range(segment.layout.size)
    masks = [int.from_bytes(segment.read(r, ATTACHED + 8, 8 * _MASK_WORDS), "little") for r in ranks]
    quotas = [int(segment.words[segment.word(r, QUOTA)]) for r in ranks]
    return min(functools.reduce(operator.or_, masks).bit_count(), *quotas)
