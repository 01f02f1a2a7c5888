"""Asynchronous operations progress while their callers do other work; no test here measures time."""

from __future__ import annotations

import threading

import numpy as np
import pytest

import fastcoll as dist

COUNT = 1 << 20  # many rounds, so that progress means more than handing over what fits into a slot


@pytest.mark.ranks(2, 3)
def test_operations_complete_while_no_rank_waits_for_them(rank, world_size):
    """Every rank does other work, without a call of the group, until its own operations are complete."""
    xs = [np.full(COUNT, rank + 1.0, np.float32) for _ in range(4)]
    done = threading.Event()
    for x in xs[:-1]:
        dist.all_reduce(x, async_op=True)
    dist.all_reduce(xs[-1], async_op=True).add_done_callback(lambda work: done.set())
    assert done.wait(30)
    assert all((x == world_size * (world_size + 1) / 2).all() for x in xs)


@pytest.mark.ranks(2)
def test_operations_progress_while_python_computes(rank, world_size):
    """The caller never releases the interpreter, and the kernels do not need it."""
    work = dist.all_reduce(np.ones(COUNT, np.float32), async_op=True)
    turns = 0
    while not work.is_completed():
        turns += 1
    assert work.wait()
