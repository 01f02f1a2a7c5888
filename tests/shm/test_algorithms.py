"""Every algorithm of autotune.py that goes through the slots gives the same results."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import numpy as np
import oracle
import pytest
import rows

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


def prefer(group, algorithm):
    """Make the next calls use an algorithm, if they can; on all ranks between the same two calls."""
    start = at.CHOOSING + autotune.ROWS
    found = group.backend.context.words[start : at.MEMO].reshape(-1, autotune.ROW_WORDS)
    found[:] = 1 << 40
    found[:, autotune.CALLS], found[:, autotune.BEST], found[:, autotune.TIMES + algorithm] = 4, algorithm, 1


def inputs(world_size, count, dtype=np.float32):
    return [oracle.values(rank, count, np.dtype(dtype)) for rank in range(world_size)]


@pytest.mark.ranks(1, 2, 4)
@pytest.mark.parametrize("algorithm", [autotune.CLOSE, autotune.PAST, autotune.AHEAD])
def test_every_collective(rank, world_size, algorithm):
    with staged() as group:
        prefer(group, algorithm)
        rows.run(rank, world_size, LARGE, lambda name, function: partial(function, group=group))
        assert group.backend.context[at.CHOOSING + autotune.LAST_ALGORITHM] == algorithm


@pytest.mark.long
@pytest.mark.ranks(2)
def test_the_largest_moves(rank, world_size):
    every = oracle.values(0, autotune.LARGE // 4 + 1009, np.dtype("f4"))
    assert autotune.staged_algorithms.py_func(every.nbytes, SLOT, True) == sum(1 << k for k in ALGORITHMS)
    with staged() as group:
        for algorithm in ALGORITHMS:
            prefer(group, algorithm)
            x = every + algorithm if rank == 1 else np.zeros_like(every)
            group.fast.broadcast(x, 1)
            oracle.assert_same(x, every + algorithm)
            outs = [np.zeros_like(every) for _ in range(2)]
            group.fast.all_gather(outs, every + rank)
            oracle.assert_same(outs[1 - rank], every + (1 - rank))
            assert group.backend.context[at.CHOOSING + autotune.ALGORITHM] == algorithm


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.AVG, ReduceOp.PRODUCT])
def test_reductions_have_the_same_bits(rank, world_size, op):
    xs, results = inputs(world_size, LARGE), set()
    with staged() as group:
        for algorithm in ALGORITHMS:
            prefer(group, algorithm)
            x = xs[rank].copy()
            group.fast.all_reduce(x, op)
            results.add(x.tobytes())
    assert len(results) == 1


@pytest.mark.long
@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("dtype", ["i1", "f2", "c16", oracle.RECORD, np.dtype((np.void, 4104))])
def test_elements_of_other_sizes(rank, world_size, dtype):
    dtype = np.dtype(dtype)
    with staged() as group:
        for algorithm in ALGORITHMS:
            prefer(group, algorithm)
            if dtype.kind == "V" and dtype.fields is None:
                x = np.zeros(400, dtype)
                x[:] = bytes([algorithm + 1]) * dtype.itemsize if rank == 0 else b"\xff" * dtype.itemsize
                group.fast.broadcast(x, 0)
                assert (x.view(np.uint8) == algorithm + 1).all()
                continue
            xs = inputs(world_size, 100_003, dtype)
            x = xs[rank].copy()
            group.fast.broadcast(x, 1)
            oracle.assert_same(x, xs[1])
            if dtype.kind != "V":
                x = xs[rank].copy()
                group.fast.all_reduce(x)
                oracle.assert_same(x, oracle.reduced(xs, ReduceOp.SUM))


@pytest.mark.ranks(2, 3)
def test_one_shot_and_two_shot(rank, world_size):
    xs = inputs(world_size, LARGE)
    total = oracle.reduced(xs, ReduceOp.SUM)
    with staged() as group:
        for limit in (0, 1 << 40):
            group.fast.barrier()
            group.backend.context.go_one_shot(limit)
            for algorithm in ALGORITHMS:
                prefer(group, algorithm)
                x = xs[rank].copy()
                group.fast.all_reduce(x)
                oracle.assert_same(x, total)


@pytest.mark.ranks(2, 3)
def test_blocks_of_nothing_and_large_ones_in_one_call(rank, world_size):
    sizes = [[(0, LARGE, 5)[(2 * src + dst) % 3] for dst in range(world_size)] for src in range(world_size)]
    data = [[oracle.values(10 * s + d, sizes[s][d], np.dtype("f4")) for d in range(world_size)]
            for s in range(world_size)]  # fmt: skip
    with staged() as group:
        for algorithm in ALGORITHMS:
            prefer(group, algorithm)
            outs = [np.zeros_like(data[src][rank]) for src in range(world_size)]
            group.fast.all_to_all(outs, data[rank])
            for src, got in enumerate(outs):
                oracle.assert_same(got, data[src][rank])
