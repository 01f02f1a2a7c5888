"""Several groups at once: overlapping, used in different orders, with their own ranks, and with missing ranks."""

from __future__ import annotations

import time

import numpy as np
import pytest

import fastcoll as dist


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


@pytest.mark.long
@pytest.mark.ranks(3, 4, 5)
def test_monitored_barrier_names_all_missing_ranks(rank, world_size, tmp_path):
    group = dist.new_group()
    dist.barrier(group)
    missing = {1, world_size - 1}
    given_up = [tmp_path / str(other) for other in range(world_size) if other not in missing]
    if rank in missing:
        while not all(path.exists() for path in given_up):
            time.sleep(0.01)
    else:
        with pytest.raises((dist.CollectiveTimeoutError, dist.AbortedError)) as caught:
            # If several ranks wait, each must have called before another one's timeout.
            dist.monitored_barrier(group, timeout=0.5 if world_size == 3 else 2.0)
        (tmp_path / str(rank)).touch()
        assert set(caught.value.ranks) == missing
        assert all(f"rank {other} (pid" in str(caught.value) for other in missing), caught.value
        assert "monitored_barrier(), call" in str(caught.value), caught.value
    dist.barrier()
