"""A rank that has done its part of a call may leave or die: the others, who work on, still complete it."""

from __future__ import annotations

import os
import time

import numpy as np
import pytest

import fastcoll as dist
from fastcoll import ReduceOp


def dawdle(a, b):
    for _ in range(400):
        a = a + b / (a + 1)
    return a


def reduce_on_rank_0(group, rank, op):
    """Rank 1 comes late, and is done long before rank 0, which has several looks at its peers meanwhile."""
    x = np.ones(8 * 32_768)
    if rank == 1:
        time.sleep(0.2)
    group.reduce(x, 0, op)
    return x


@pytest.mark.ranks(2, timeout=40)
def test_a_rank_may_leave_when_its_part_is_done(rank, world_size):
    op = ReduceOp.custom(dawdle)
    dist.reduce(np.ones(8), 0, op)
    group = dist.new_group()
    group.barrier()
    x = reduce_on_rank_0(group, rank, op)
    group.close()
    assert np.isfinite(x).all()
    assert (x == 1).all() == (rank == 1)
    dist.barrier()


@pytest.mark.ranks(2, timeout=40, fresh=True, may_die=(1,))
def test_a_rank_may_die_when_its_part_is_done(rank, world_size):
    op = ReduceOp.custom(dawdle)
    dist.reduce(np.ones(8), 0, op)
    dist.barrier()
    x = reduce_on_rank_0(dist.GroupMember.WORLD, rank, op)
    if rank == 1:
        os._exit(0)
    assert not (x == 1).any()
