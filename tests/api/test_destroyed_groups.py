"""What destroyed groups leave: no keys in the store, no memory, no descriptors, however many there were."""

from __future__ import annotations

import gc
import os
from contextlib import suppress

import numpy as np
import pytest

import fastcoll as dist
from fastcoll.api.world import current_job

_WARM = 20  # cycles until what is made once is there


def footprint() -> tuple[int, int, int]:
    """Keys of the job's store, open descriptors but those of peers' processes, resident bytes."""
    gc.collect()  # of groups, which are garbage in cycles
    keys, files = current_job().store.underlying_store.num_keys(), []
    for name in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # that of listing them
            files.append(os.readlink(f"/proc/self/fd/{name}"))
    with open("/proc/self/statm") as file:
        resident = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return keys, sum("pidfd" not in file for file in files), resident


def cycle(world_size: int, number: int) -> None:
    """Make and destroy groups in all ways: of all ranks, of some, by their members alone, and a split."""
    some = sorted({number % world_size, (number + 1) % world_size})
    made = [dist.new_group(), dist.new_group(some)]
    rank = dist.get_rank()
    if rank in some:
        made.append(dist.new_group(some, use_local_synchronization=True))
    made.append(dist.split_group(split_ranks=[[rank] for rank in range(world_size)]))
    dist.all_reduce(np.ones(3), group=made[0])
    for group in made:
        dist.destroy_process_group(group)


@pytest.mark.long
@pytest.mark.ranks(3, init=False, timeout=300)
@pytest.mark.parametrize("cycles", [60, pytest.param(1000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("way", ["tcp", pytest.param("file", marks=pytest.mark.long)])
def test_nothing_of_destroyed_groups_stays(rank, world_size, tmp_path, way, cycles):
    url = f"file://{tmp_path}/store" if way == "file" else None
    with dist.world("auto", url, rank=rank if url else -1, world_size=world_size if url else -1):
        for number in range(_WARM):
            cycle(world_size, number)
        dist.barrier()
        before = footprint()
        dist.barrier()
        for number in range(cycles):
            cycle(world_size, number)
        dist.barrier()
        keys, files, resident = footprint()
        assert keys <= before[0] + 20  # of groups that not all ranks had left at that moment
        assert files <= before[1]
        assert resident <= before[2] + (4 << 20)
        dist.barrier()


@pytest.mark.ranks(2, init=False)
def test_jobs_in_one_store_leave_it(rank, world_size, tmp_path):
    with dist.FileStore(tmp_path / "store", world_size) as store:
        for job in range(3):
            dist.init_process_group(store=store, rank=rank, world_size=world_size)
            dist.destroy_process_group(dist.new_group())
            dist.barrier()
            dist.destroy_process_group()
            store.barrier(f"barrier/left{job}", world_size)
            # One key counts, for each process, how often it has used the store.
            left = [key for key in store.list_keys() if "/use/" not in key and not key.startswith("barrier")]
            assert left == []
            store.barrier(f"barrier/seen{job}", world_size)
