"""Asynchronous calls that begin on their callers' threads: results, order, and late peers."""

from __future__ import annotations

import signal
import threading
import time
from contextlib import contextmanager

import numpy as np
import oracle
import pytest

import fastcoll as dist
from fastcoll import AbortedError, MismatchError
from fastcoll.shm import context_layout as words
from fastcoll.shm import inline_start

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
@pytest.mark.parametrize("share", [1, 2])
@pytest.mark.parametrize("computes", [False, True])
def test_a_long_call_begins_on_the_progress_thread_unless_that_has_no_core(rank, world_size, share, computes):
    with group_of(share) as group:
        if not computes:
            group.backend.inline_start._longest = inline_start._LONGEST
        group.fast.all_reduce(np.ones(3))
        x = np.ones(200_000)
        group.fast.all_reduce(x, async_op=True).wait()
        assert (x == 2).all()
        threads = {thread.name for thread in threading.enumerate()}
        assert (f"fastcoll-{group.name}" in threads) == (share == 2 or not computes)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "how", ["wait", "poll", "call", "async call", "general call", "nothing", "event", "callback"]
)
def test_an_open_call_is_completed(how, rank, world_size):
    """Rank 1 makes its calls only after rank 0's call was left open."""
    x, y, strided = np.full(5, rank + 1.0), np.ones(3), np.ones((3, 2))[:, 0]
    dist.all_reduce(np.ones(3))
    dist.all_reduce(strided)
    if rank == 1:
        dist.recv(np.zeros(1), 0)
        dist.all_reduce(x)
        if how in ("call", "async call"):
            dist.all_reduce(y)
        elif how == "general call":
            dist.all_reduce(strided)
        return
    work = dist.all_reduce(x, async_op=True)
    assert not work.ended
    dist.send(np.zeros(1), 1)
    if how == "wait":
        assert work.wait()
    elif how == "poll":
        while not work.is_completed():
            pass
    elif how == "call":
        dist.all_reduce(y)
    elif how == "async call":
        assert dist.all_reduce(y, async_op=True).wait()
    elif how == "general call":
        dist.all_reduce(strided)
    elif how == "nothing":  # the watcher completes the call
        while not work.ended:
            time.sleep(1e-4)
    elif how == "event":
        assert work.wait(timeout=60)
    else:
        called = threading.Event()
        work.add_done_callback(lambda _: called.set())
        assert called.wait(60)
    assert work.ended
    assert work.is_success()
    assert (x == 3).all()
    (output,) = work.outputs
    assert np.shares_memory(output, x)


@pytest.mark.ranks(2)
def test_ctrl_c_in_a_wait_leaves_the_call_under_way(rank, world_size):
    x = np.full(5, rank + 1.0)
    dist.all_reduce(np.ones(3))
    if rank == 1:
        dist.recv(np.zeros(1), 0)
        dist.all_reduce(x)
        return
    work = dist.all_reduce(x, async_op=True)
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)

    def wait_until_interrupted():
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        work.wait()

    with pytest.raises(KeyboardInterrupt):
        wait_until_interrupted()
    signal.signal(signal.SIGALRM, before)
    assert not work.ended
    dist.send(np.zeros(1), 1)
    assert work.wait()
    assert (x == 3).all()
