"""Many groups at once: overlapping, used in different orders, made and destroyed again and again."""

from __future__ import annotations

import gc
import os
import re
import time
from collections import Counter
from contextlib import suppress

import numpy as np
import pytest

import fastcoll as dist
from fastcoll.shm import arena


def total(ranks):
    return sum(r + 1 for r in ranks)


@pytest.mark.ranks(4)
def test_overlapping_groups_used_in_different_orders(rank, world_size):
    groups = [([0, 1], dist.new_group([0, 1])), ([1, 2, 3], dist.new_group([1, 2, 3]))]
    groups += [([0, 2], dist.new_group([0, 2])), ([0, 1, 2, 3], dist.new_group())]
    mine = [(ranks, group) for ranks, group in groups if rank in ranks]
    works = []
    for ranks, group in mine if rank % 2 else reversed(mine):
        x = np.full(5, rank + 1.0)
        works.append((ranks, x, dist.all_reduce(x, group=group, async_op=True)))
    for ranks, x, work in works:
        work.wait()
        assert (x == total(ranks)).all()


@pytest.mark.ranks(3)
def test_roots_are_global_ranks_or_group_ranks(rank, world_size):
    group = dist.new_group([1, 2])
    if rank == 0:
        assert group is dist.GroupMember.NON_GROUP_MEMBER
        return
    x = np.full(2, float(rank))
    dist.broadcast(x, 2, group=group)
    assert (x == 2).all()
    x[:] = rank
    dist.broadcast(x, group_src=0, group=group)
    assert (x == 1).all()
    assert dist.get_group_rank(group, 2) == 1
    assert dist.get_global_rank(group, 0) == 1
    if rank == 1:
        dist.send(np.array([7.0]), 2, group=group)
    else:
        assert dist.recv(x[:1], group=group) == 1
        assert x[0] == 7


@pytest.mark.long
@pytest.mark.ranks(2)
def test_groups_leave_nothing_behind(rank, world_size):
    def footprint():
        """Kinds of open files, and threads; without pidfds, which are opened when a peer is first waited for long."""
        files = []
        for fd in os.listdir("/proc/self/fd"):
            with suppress(FileNotFoundError):  # that of listing them
                files.append(re.sub(r"[0-9a-f]{4,}|[0-9]+", "N", os.readlink(f"/proc/self/fd/{fd}")))
        return Counter(file for file in files if "pidfd" not in file), len(os.listdir("/proc/self/task"))

    def segments():
        """Segments of groups that are mapped, and blocks of the record, which go with the group's last object."""
        gc.collect()
        # An earlier test may have made the arena, which stays until the process ends.
        own_arena = os.readlink(f"/proc/self/fd/{arena.descriptor()}") if arena.exists() else "none"
        with open("/proc/self/maps") as maps:
            lines = [line for line in maps if "fastcoll-" in line and own_arena not in line]
        return Counter("record" if "fastcoll-record" in line else "segment" for line in lines)

    def once():
        group = dist.new_group()
        dist.all_reduce(np.ones(3), group=group)
        dist.destroy_process_group(group)

    mapped = segments()
    once()
    before = footprint()
    for _ in range(20):
        once()
    end = time.monotonic() + 10
    while (left := footprint())[1] > before[1] and time.monotonic() < end:
        time.sleep(0.01)  # the system's part of a thread ends a moment after Python's
    files, threads = left
    assert files <= before[0]  # of the store's connections one may have gone
    assert threads <= before[1]
    assert segments() == mapped
    assert mapped["segment"] <= 1  # the default group's, where it has one


@pytest.mark.long
@pytest.mark.ranks(3, 4, 5, timeout=60)
def test_monitored_barrier_names_all_who_are_missing(rank, world_size, tmp_path):
    group = dist.new_group()
    dist.barrier(group)
    missing = {1, world_size - 1}
    given_up = [tmp_path / str(other) for other in range(world_size) if other not in missing]
    if rank in missing:
        end = time.monotonic() + 30
        while not all(path.exists() for path in given_up):
            assert time.monotonic() < end
            time.sleep(0.01)
    else:
        with pytest.raises((dist.CollectiveTimeoutError, dist.AbortedError)) as caught:
            # Where several wait, each of them must have come when another one's time is up.
            dist.monitored_barrier(group, timeout=0.5 if world_size == 3 else 2.0)
        (tmp_path / str(rank)).touch()
        assert set(caught.value.ranks) == missing
        assert all(f"rank {other} (pid" in str(caught.value) for other in missing), caught.value
        assert "monitored_barrier(), call" in str(caught.value), caught.value
    dist.barrier()
