"""A profile counts the calls of every backend, and times them."""

from __future__ import annotations

import numpy as np
import pytest

import fastcoll as dist


@pytest.mark.ranks(2, 3)
def test_a_profile_has_every_call_of_every_rank(rank, world_size):
    x, all_of_x = np.ones(1000, np.float32), np.ones(1000 * world_size, np.float32)
    with dist.profile() as profile:
        for _ in range(3):
            dist.all_reduce(x)
        dist.broadcast(x, 0)
        dist.all_gather_single(all_of_x, x, async_op=True).wait()
        if rank == 0:
            dist.send(x, 1)
        if rank == 1:
            dist.recv(x, 0)
        dist.barrier()
    found = profile.merged().as_dict()
    entries = {entry["operation"]: entry for entry in found["entries"] if entry["calls"]}
    ranks = range(world_size)
    for operation, calls in {"all_reduce": 3, "broadcast": 1, "wait for all_gather": 1, "barrier": 1}.items():
        assert entries[operation]["calls"] == dict.fromkeys(ranks, calls), operation
        assert all(entries[operation]["seconds"][each] > 0 for each in ranks), operation
    assert entries["all_reduce"]["nbytes"] == dict.fromkeys(ranks, 12_000)
    assert (entries["send"]["calls"], entries["recv"]["calls"]) == ({0: 1}, {1: 1})
    assert not found["missing"]
    assert [each["is_complete"] for each in found["ranks"]] == [True] * world_size
