"""Shared memory that groups use, and that they release all of it."""

from __future__ import annotations

import gc
import os
import threading
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

import fastcoll as dist
from fastcoll.shm import arena

BYTES_A_RANK = 4 << 20
WARM_UP = 30


def segments() -> list[int]:
    """Sizes of groups' mappings in this process, without the arena, which an earlier test may have created."""
    found = []
    own_arena = os.readlink(f"/proc/self/fd/{arena.descriptor()}") if arena.exists() else "none"
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "/dev/shm/fastcoll-" in line and own_arena not in line:
            start, end = (int(part, 16) for part in line.split()[0].split("-"))
            found.append(end - start)
    return found


@pytest.mark.ranks(1, 2, 3)
def test_a_real_group_maps_no_more(rank: int, world_size: int) -> None:
    before = segments()
    group = dist.new_group()
    dist.barrier()
    assert len(segments()) == len(before) + 1
    assert all(0 < nbytes <= world_size * BYTES_A_RANK for nbytes in segments())
    dist.destroy_process_group(group)
    assert segments() == before


def descriptors() -> list[str]:
    """Open descriptors, without pidfds, which are opened in the first long wait for a peer."""
    found = []
    for fd in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the one that lists them
            found.append(os.readlink(f"/proc/self/fd/{fd}"))
    return [file for file in found if "pidfd" not in file]


def holdings() -> dict[str, int]:
    """System resources that this process holds."""
    gc.collect()
    return {
        "descriptors": len(descriptors()),
        "threads": threading.active_count(),
        "segments": len(segments()),
        "names": len([name for name in os.listdir("/dev/shm") if f"-{os.getpid()}-" in name]),
    }


def resident_bytes() -> int:
    """Bytes of this process's own memory, without pages of files, which the kernel may evict."""
    _, resident, shared, *_ = map(int, Path("/proc/self/statm").read_text().split())
    return (resident - shared) * os.sysconf("SC_PAGE_SIZE")


def live(groups: int) -> None:
    """Make, use and destroy groups."""
    x = np.ones(50_000, np.float32)
    for _ in range(groups):
        group = dist.new_group()
        dist.all_reduce(x, group=group)
        dist.all_reduce(x, group=group, async_op=True).wait()
        dist.destroy_process_group(group)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "groups", [pytest.param(60, marks=pytest.mark.long), pytest.param(1000, marks=pytest.mark.slow)]
)
def test_groups_made_and_destroyed_leave_nothing(rank: int, world_size: int, groups: int) -> None:
    live(WARM_UP)
    before, resident = holdings(), resident_bytes()
    live(groups)
    dist.barrier()
    after = holdings()  # and collect garbage: a group is a cycle of objects, with tables of 30 KiB
    grown = resident_bytes() - resident
    end = time.monotonic() + 60
    while any(after[what] > before[what] for what in before) and time.monotonic() < end:
        after = holdings()  # a thread of the last group may not have ended
    # Fewer are fine: an idle thread of the pool of ranks may end in between.
    assert all(after[what] <= before[what] for what in before), f"{before} became {after}"
    # The tables of a segment would be 30 KiB a group. Rank 0 keeps the keys in its store: 0.8 KiB.
    assert grown < (1 << 20) + groups * (2 << 10), f"{grown} bytes"
