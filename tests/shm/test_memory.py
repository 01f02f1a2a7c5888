"""Shared memory that groups use, and that they release all of it."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from shm.groups import holdings, mappings

import fastcoll as dist

BYTES_A_RANK = 4 << 20
WARM_UP = 30


@pytest.mark.ranks(1, 2, 3)
def test_a_real_group_maps_no_more(rank: int, world_size: int) -> None:
    before = mappings()
    group = dist.new_group()
    dist.barrier()
    assert len(mappings()) == len(before) + 1
    assert all(0 < nbytes <= world_size * BYTES_A_RANK for nbytes in mappings())
    dist.destroy_process_group(group)
    assert mappings() == before


def all_holdings() -> dict[str, int]:
    return holdings() | {"threads": threading.active_count()}


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
    before, resident = all_holdings(), resident_bytes()
    live(groups)
    dist.barrier()
    after = all_holdings()  # and collect garbage: a group is a cycle of objects, with tables of 30 KiB
    grown = resident_bytes() - resident
    end = time.monotonic() + 60
    while any(after[what] > before[what] for what in before) and time.monotonic() < end:
        after = all_holdings()  # a thread of the last group may not have ended
    # Fewer are fine: an idle thread of the pool of ranks may end in between.
    assert all(after[what] <= before[what] for what in before), f"{before} became {after}"
    # The tables of a segment would be 30 KiB a group. Rank 0 keeps the keys in its store: 0.8 KiB.
    assert grown < (1 << 20) + groups * (2 << 10), f"{grown} bytes"
