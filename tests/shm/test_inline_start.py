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
from fastcoll.core.work import Work
from fastcoll.shm import context_layout as words
from fastcoll.shm import inline_start

COUNTS = (1, 5000, 1_000_001)  # in the call line; one slot; several rounds of all slots


@contextmanager
def group_of(share=1):
    """A group of all ranks that has made a call; `share`: cores for each rank, so progress threads may have none."""
    group = dist.new_group()
    group.backend.inline_start._share = share
    group.backend.begin_at_once()
    group.fast.all_reduce(np.ones(3))  # now the memo has its spec
    try:
        yield group
    finally:
        group.close()


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("share", [0, 1])
def test_results_are_right_and_in_order(rank, world_size, count, share):
    xs = [oracle.values(r, count, np.dtype("f4")) for r in range(world_size)]
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
        oracle.assert_same(x, oracle.reduced(xs, dist.ReduceOp.SUM))
        oracle.assert_same(part, xs[0])
        oracle.assert_same(gathered, np.concatenate(xs))
        oracle.assert_same(scattered, oracle.reduced([xs[rank]] * world_size, dist.ReduceOp.SUM))


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("count", "share"), [(3, 1), (3_000_001, 0), (3_000_001, 1)])
def test_a_late_peer_does_not_block_the_caller_and_completes_a_short_call_at_once(
    rank, world_size, count, share
):
    """Rank 1 makes its call after rank 0's call has returned."""
    x = np.full(count, rank + 1.0)
    with group_of(share) as group:
        if rank == 1:
            dist.recv(np.zeros(1), 0)
        work = group.fast.all_reduce(x, async_op=True)
        if rank == 0:
            assert not work.is_completed()
            assert threading.get_ident() != group.backend.context[words.BUSY]
            dist.send(np.zeros(1), 1)
        assert rank == 0 or count > 3 or work.ended
        assert work.wait(60)
        assert (x == 3).all()


@pytest.mark.ranks(2)
def test_the_work_raises_a_mismatch_and_the_group_stays_usable(rank, world_size):
    with group_of() as group:
        work = group.fast.all_reduce(np.ones(3 + rank), async_op=True)
        with pytest.raises(MismatchError, match="elements"):
            work.wait()
        x = np.ones(4)
        group.fast.all_reduce(x)
        assert (x == 2).all()


@pytest.mark.ranks(2)
def test_closing_ends_a_call_that_was_handed_over(rank, world_size):
    with group_of() as group:
        if rank == 1:
            dist.recv(np.zeros(1), 0)
            return
        work = group.fast.all_reduce(np.ones(3), async_op=True)
        group.close()
        with pytest.raises(AbortedError):
            work.wait()
        dist.send(np.zeros(1), 1)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("share", [1, 2])
@pytest.mark.parametrize("computes", [False, True])
def test_a_long_call_begins_on_the_progress_thread_unless_that_has_no_core(rank, world_size, share, computes):
    with group_of(share) as group:
        if not computes:
            group.backend.inline_start._longest = inline_start._LONGEST
        x = np.ones(200_000)
        group.fast.all_reduce(x, async_op=True).wait()
        assert (x == 2).all()
        threads = {thread.name for thread in threading.enumerate()}
        assert (f"fastcoll-{group.name}" in threads) == (share == 2 or not computes)


def poll(work, y):
    while not work.is_completed():
        pass


def leave_it_to_the_watcher(work, y):
    while not work.ended:
        time.sleep(1e-4)


def let_it_call_back(work, y):
    called = threading.Event()
    work.add_done_callback(lambda _: called.set())
    assert called.wait(60)


WAYS = {
    "wait": lambda work, y: work.wait(),
    "event": lambda work, y: work.wait(timeout=60),
    "poll": poll,
    "nothing": leave_it_to_the_watcher,
    "callback": let_it_call_back,
    "call": lambda work, y: dist.all_reduce(y),
    "async call": lambda work, y: dist.all_reduce(y, async_op=True).wait(),
    "general call": lambda work, y: dist.all_reduce(y),
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("how", WAYS)
def test_an_open_call_is_completed(how, rank, world_size):
    """Rank 1 makes its calls only after rank 0's call was left open."""
    x, y = np.full(5, rank + 1.0), np.ones((3, 2))[:, 0] if how == "general call" else np.ones(3)
    dist.all_reduce(np.ones(3))
    dist.all_reduce(y)
    if rank == 1:
        dist.recv(np.zeros(1), 0)
        dist.all_reduce(x)
        if how.endswith("call"):
            dist.all_reduce(y)
        return
    work = dist.all_reduce(x, async_op=True)
    assert not work.ended
    dist.send(np.zeros(1), 1)
    WAYS[how](work, y)
    assert (x == 3).all()
    if how.endswith(
        "call"
    ):  # the watcher may have completed the call, and needs the GIL to complete its Work
        leave_it_to_the_watcher(work, y)
    assert work.ended
    assert work.is_success()
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

    def interrupt_a_wait(_, frame):
        while frame is not None:
            if frame.f_code is Work.wait.__code__:
                raise KeyboardInterrupt
            frame = frame.f_back

    before = signal.signal(signal.SIGALRM, interrupt_a_wait)
    signal.setitimer(signal.ITIMER_REAL, 0.05, 0.05)
    with pytest.raises(KeyboardInterrupt):
        work.wait()
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)
    assert not work.ended
    dist.send(np.zeros(1), 1)
    assert work.wait()
    assert (x == 3).all()
