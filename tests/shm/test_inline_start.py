"""Asynchronous calls that begin on their callers' threads: results, order, and late peers."""

from __future__ import annotations

import threading
from contextlib import contextmanager

import numpy as np
import oracle
import pytest

import fastcoll as dist
from fastcoll import AbortedError, MismatchError
from fastcoll.shm import context_layout as words

COUNTS = (1, 5000, 1_000_001)  # in the call line; one slot; several rounds of all slots


@contextmanager
def group_of(share=1):
    """A group of all ranks; `share`: cores for each rank, so that progress threads may have none."""
    group = dist.new_group()
    group.backend.inline_start._share = share
    group.backend.begin_at_once()
    try:
        yield group
    finally:
        group.close()


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("share", [0, 1])
def test_results_are_right_and_in_order(rank, world_size, count, share):
    xs = [oracle.values(r, count, np.dtype("f4")) for r in range(world_size)]
    total = oracle.reduced(xs, dist.ReduceOp.SUM)
    with group_of(share) as group:
        x, part, scattered = xs[rank].copy(), xs[rank].copy(), np.zeros_like(xs[0])
        gathered = np.zeros(count * world_size, np.float32)
        works = [
            group.fast.all_reduce(x, async_op=True),
            group.fast.broadcast(part, 0, async_op=True),
            group.fast.all_gather_single(gathered, xs[rank], async_op=True),
            group.fast.reduce_scatter_single(scattered, np.concatenate(xs), async_op=True),
            group.fast.all_reduce(x, dist.ReduceOp.MAX, async_op=True),
        ]
        group.fast.barrier()
        assert all(work.is_success() for work in works)
        oracle.assert_same(x, total)
        oracle.assert_same(part, xs[0])
        oracle.assert_same(gathered, np.concatenate(xs))
        oracle.assert_same(scattered, oracle.reduced([xs[rank]] * world_size, dist.ReduceOp.SUM))


@pytest.mark.ranks(2)
def test_the_last_rank_to_arrive_has_finished_when_the_call_returns(rank, world_size):
    with group_of() as group:
        group.fast.all_reduce(np.ones(3))  # now the memo has its spec
        if rank == 0:
            work = group.fast.all_reduce(np.ones(3), async_op=True)
            dist.send(np.zeros(1), 1)
        else:
            dist.recv(np.zeros(1), 0)
            work = group.fast.all_reduce(np.ones(3), async_op=True)
            assert work.is_completed()
        assert work.wait()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("share", [0, 1])
def test_a_late_peer_does_not_block_the_caller(rank, world_size, share):
    """Rank 1 makes its call after rank 0's call has returned."""
    x = np.full(3_000_001, rank + 1.0)
    with group_of(share) as group:
        group.fast.all_reduce(np.ones(3))
        if rank == 1:
            dist.recv(np.zeros(1), 0)
        work = group.fast.all_reduce(x, async_op=True)
        if rank == 0:
            assert not work.is_completed()
            assert threading.get_ident() != group.backend.context[words.BUSY]
            dist.send(np.zeros(1), 1)
        assert work.wait(60)
        assert (x == 3).all()


@pytest.mark.ranks(2)
def test_the_work_raises_a_mismatch_and_the_group_stays_usable(rank, world_size):
    with group_of() as group:
        group.fast.all_reduce(np.ones(3))
        work = group.fast.all_reduce(np.ones(3 + rank), async_op=True)
        with pytest.raises(MismatchError, match="elements"):
            work.wait()
        x = np.ones(4)
        group.fast.all_reduce(x)
        assert (x == 2).all()


@pytest.mark.ranks(2)
def test_closing_ends_a_call_that_was_handed_over(rank, world_size):
    with group_of() as group:
        group.fast.all_reduce(np.ones(3))
        if rank == 0:
            work = group.fast.all_reduce(np.ones(3), async_op=True)
            group.close()
            with pytest.raises(AbortedError):
                work.wait()
            dist.send(np.zeros(1), 1)
        else:
            dist.recv(np.zeros(1), 0)


@pytest.mark.ranks(2)
def test_there_is_no_inline_start_if_progress_threads_have_cores(rank, world_size):
    with group_of(share=2) as group:
        assert group.backend.inline_start._ahead == 0
