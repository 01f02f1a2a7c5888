"""Every algorithm of autotune.py that goes through the slots gives the same results."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import numpy as np
import oracle
import pytest
import rows
from shm.groups import algorithm_of, rows_of

import fastcoll as dist
from fastcoll import ReduceOp
from fastcoll.shm import autotune, layout
from fastcoll.shm import context_layout as at

LARGE = 300_001  # float32 of a call of several rounds
SLOT = layout.plan(2, 4 << 20).slot
ALGORITHMS = range(autotune.DIRECT)


@contextmanager
def staged() -> Iterator[dist.ProcessGroup]:
    """A group of all ranks whose calls all go through the slots."""
    group = dist.new_group()
    group.backend.context.words[at.DIRECT_FROM] = autotune.NEVER
    try:
        yield group
    finally:
        group.close()


def each(group, algorithms=ALGORITHMS):
    """Make the next calls use each algorithm, if they can; on all ranks between the same two calls."""
    for algorithm in algorithms:
        found = rows_of(group)
        found[:] = 1 << 40
        found[:, autotune.CALLS], found[:, autotune.BEST], found[:, autotune.TIMES + algorithm] = (
            4,
            algorithm,
            1,
        )
        yield algorithm


def inputs(world_size, count, dtype="f4"):
    return [oracle.values(rank, count, np.dtype(dtype)) for rank in range(world_size)]


@pytest.mark.ranks(1, 2, 4)
def test_every_collective(rank, world_size):
    with staged() as group:
        for algorithm in each(group, [autotune.CLOSE, autotune.PAST, autotune.AHEAD]):
            rows.run(rank, world_size, LARGE, lambda name, function: partial(function, group=group))
            assert group.backend.context[at.CHOOSING + autotune.LAST_ALGORITHM] == algorithm


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("count", [LARGE, 20_000], ids=["several slots", "part of a slot"])
def test_ranks_may_use_different_algorithms(rank, world_size, count):
    """As they do if they have other times, because the arrays of some calls were in shared pages on one rank only."""
    both = [autotune.CLOSE, autotune.PAST]
    with staged() as group:
        for algorithm in each(group, both if rank == 1 else both[::-1]):
            rows.run(rank, world_size, count, lambda name, function: partial(function, group=group))
            assert group.backend.context[at.CHOOSING + autotune.LAST_ALGORITHM] == algorithm


@pytest.mark.long
@pytest.mark.ranks(2)
def test_the_largest_moves(rank, world_size):
    every = oracle.values(0, autotune.LARGE // 4 + 1009, np.dtype("f4"))
    assert autotune.staged_algorithms.py_func(every.nbytes, SLOT, True) == sum(1 << k for k in ALGORITHMS)
    with staged() as group:
        for algorithm in each(group):
            x = every + algorithm if rank == 1 else np.zeros_like(every)
            group.fast.broadcast(x, 1)
            oracle.assert_same(x, every + algorithm)
            outs = [np.zeros_like(every) for _ in range(2)]
            group.fast.all_gather(outs, every + rank)
            oracle.assert_same(outs[1 - rank], every + (1 - rank))
            assert algorithm_of(group) == algorithm


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("limit", [0, 1 << 40], ids=["two-shot", "one-shot"])
def test_reductions_have_the_same_bits(rank, world_size, limit):
    """They are NumPy's, in rank order."""
    xs = inputs(world_size, LARGE)
    with staged() as group:
        group.fast.barrier()
        group.backend.context.go_one_shot(limit)
        for op in (ReduceOp.SUM, ReduceOp.AVG, ReduceOp.PRODUCT):
            for _ in each(group):
                x = xs[rank].copy()
                group.fast.all_reduce(x, op)
                oracle.assert_same(x, oracle.reduced(xs, op))


@pytest.mark.long
@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("dtype", ["i1", "f2", "c16", oracle.RECORD, "V4104"])
def test_elements_of_other_sizes(rank, world_size, dtype):
    dtype = np.dtype(dtype)
    xs = inputs(world_size, 100_003 if dtype.itemsize < 100 else 400, dtype)
    with staged() as group:
        for _ in each(group):
            x = xs[rank].copy()
            group.fast.broadcast(x, 1)
            oracle.assert_same(x, xs[1])
            if dtype.kind != "V":
                x = xs[rank].copy()
                group.fast.all_reduce(x)
                oracle.assert_same(x, oracle.reduced(xs, ReduceOp.SUM))


@pytest.mark.ranks(2, 3)
def test_blocks_of_nothing_and_large_ones_in_one_call(rank, world_size):
    ranks = range(world_size)
    data = [[oracle.values(s, (0, LARGE, 5)[(2 * s + d) % 3], np.dtype("f4")) for d in ranks] for s in ranks]
    with staged() as group:
        for _ in each(group):
            outs = [np.zeros_like(data[src][rank]) for src in ranks]
            group.fast.all_to_all(outs, data[rank])
            for src, got in enumerate(outs):
                oracle.assert_same(got, data[src][rank])
