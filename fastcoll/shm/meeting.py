"""How the members of a group meet in a segment: announce, create, attach, unlink.

Rank 0 announces the segment's name before it creates it, so that any survivor can unlink it when
somebody dies meanwhile. Everybody unlinks at the end: the first does it, for the others it is gone.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence

import numpy as np

from .. import config
from ..core.members import Member, gone_among
from ..core.operands import Array
from ..errors import CollectiveTimeoutError, PeerDiedError, ResourceError
from ..rendezvous import Store
from ..rendezvous.assemble import GroupMeeting
from . import segment as shared
from .lanes import lanes_for
from .layout import ATTACHED, LINE, ONE_SHOT_LIMIT, QUOTA, Layout, plan
from .segment import Segment
from .thresholds import one_shot_limit

_MASK_WORDS = LINE // 8 - 1  # 960 CPUs
_DOING = "making a group in shared memory"


def meet(
    store: Store, members: Sequence[Member], rank: int, timeout: float, neighbours: int
) -> tuple[Segment, int, int]:
    """The group's segment, mapped by all members, the number of cores that they share, and how many lanes it has.

    Args:
        neighbours: ranks of the job on this node, members or not.
    """
    name = ""
    with GroupMeeting(store, members, rank, timeout, _DOING) as meeting:
        try:
            if rank == 0:
                shared.sweep()
                layout = _choose(len(members))
                name = shared.new_name()
                meeting.say("segment", json.dumps({"name": name, **vars(layout)}).encode())
                segment = Segment.create(name, layout)
                segment.words[ONE_SHOT_LIMIT] = one_shot_limit(len(members))
                meeting.say("created")
            else:
                announced = json.loads(meeting.hear("segment"))
                name = announced.pop("name")
                meeting.hear("created")
                segment = Segment.attach(name, Layout(**announced))
            try:
                segment.words[_mask(segment, rank)] = _my_cores()
                quota = segment.word(rank, QUOTA)
                segment.words[quota : quota + 2] = _quota(), config.get("FASTCOLL_LANES")
                segment.say_attached(rank)
                segment.prefault(rank)
                segment.await_attached(_Look(meeting, members, timeout))
                cores = _count_cores(segment)
                lanes = _agree_on_lanes(segment, cores, neighbours)
            except BaseException:
                segment.close()
                raise
        finally:
            if name:
                shared.unlink(name)
    return segment, cores, lanes


def _choose(size: int) -> Layout:
    """Sizes that fit into half of what /dev/shm has left, since others need some as well."""
    wanted: int = config.get("FASTCOLL_SHM_BYTES_PER_RANK")
    free = shared.free_bytes() // 2 // size
    if wanted <= free:
        return plan(size, wanted)
    try:
        return plan(size, free)
    except ResourceError as error:
        raise ResourceError(shared.shortage(size * wanted, "free what fills it")) from error


class _Look:
    """What to do between two looks at who has attached: nap, and from time to time look for trouble."""

    def __init__(self, meeting: GroupMeeting, members: Sequence[Member], timeout: float) -> None:
        self._meeting, self._members = meeting, members
        self._timeout = timeout
        self._next = time.monotonic() + 0.05

    def __call__(self, missing: list[int]) -> None:
        time.sleep(0.0002)
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + 0.05
        names = ", ".join(str(self._members[r].rank) for r in missing)
        self._meeting.look()
        if dead := gone_among(self._members):
            raise PeerDiedError(f"{', '.join(map(str, dead))} died while {_DOING}", [m.rank for m in dead])
        if not self._meeting.left():
            ranks = [self._members[r].rank for r in missing]
            raise CollectiveTimeoutError(
                f"{_DOING}: rank {names} did not attach within {self._timeout:g} s", ranks
            )


def _mask(segment: Segment, rank: int) -> slice:
    start = segment.word(rank, ATTACHED) + 1
    return slice(start, start + _MASK_WORDS)


def _my_cores() -> list[int]:
    """The CPUs that this process may use, as words of 63 bits."""
    words = [0] * _MASK_WORDS
    for cpu in os.sched_getaffinity(0):
        if cpu < 63 * _MASK_WORDS:
            words[cpu // 63] |= 1 << cpu % 63
    return words


def _count_cores(segment: Segment) -> int:
    """How many CPUs the members may use together; the same number on all of them."""
    masks = [segment.words[_mask(segment, rank)] for rank in range(segment.layout.size)]
    cpus = sum(int(word).bit_count() for word in np.bitwise_or.reduce(masks))
    quotas = [int(segment.words[segment.word(rank, QUOTA)]) for rank in range(segment.layout.size)]
    return min(cpus, *quotas)


def _agree_on_lanes(segment: Segment, cores: int, neighbours: int) -> int:
    """What FASTCOLL_LANES and the cores of all members allow; the same number on all of them."""
    ranks = range(segment.layout.size)
    masks = [_number(segment.words[_mask(segment, rank)]) for rank in ranks]
    wanted = [int(segment.words[segment.word(rank, QUOTA) + 1]) for rank in ranks]
    return lanes_for(segment.layout, masks, wanted, cores // max(neighbours, segment.layout.size))


def _number(words: Array) -> int:
    return sum(int(word) << 63 * k for k, word in enumerate(words))


def _quota() -> int:
    """Cores that the cgroup's CPU quota allows, at least 1; a large number without a quota."""
    try:
        with open("/sys/fs/cgroup/cpu.max") as file:
            quota, period = file.read().split()
        return max(1, int(quota) // int(period))
    except (OSError, ValueError):
        return 1 << 30
