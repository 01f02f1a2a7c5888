"""async_op, Work and await: order, progress, results, errors, and several operations and groups in flight."""

from __future__ import annotations

import asyncio
import inspect
import threading
from contextlib import suppress

import numpy as np
import pytest
import rows

import fastcoll as dist
from fastcoll import AbortedError, CollectiveTimeoutError, MismatchError, NotInitializedError

COUNT = 1 << 20  # many rounds, so that progress means more than handing over what fits into a slot


@pytest.mark.ranks(1, 2, 3, 4)
def test_several_operations_in_flight_run_in_order(rank, world_size):
    """Later calls are prepared while an earlier one runs."""
    sizes = (3, 300_000, 0, 70_000, 1, 4_000, 1_000_003, 17, 90_001)
    xs = [np.full(n, rank + 1.0 + n) for n in sizes]
    works = [dist.all_reduce(x, async_op=True) for x in xs]
    works.append(dist.broadcast(xs[3], 0, async_op=True))
    assert all(work.wait() for work in works)
    assert all(work.is_completed() and work.is_success() and work.exception() is None for work in works)
    total = world_size * (world_size + 1) / 2
    assert all((x == total + world_size * n).all() for n, x in zip(sizes, xs, strict=True))
    x = np.full(200_000, 1.0)
    work = dist.all_reduce(x, async_op=True)
    dist.all_reduce(x)  # queues behind it
    assert (x == world_size**2).all()
    assert work.is_completed()


@pytest.mark.ranks(2)
def test_every_operation_can_be_asynchronous(rank, world_size):
    def change(name, function):
        def call(*args, **more):
            is_one = "async_op" in inspect.signature(function).parameters and "async_op" not in more
            return function(*args, **more, async_op=True).wait() if is_one else function(*args, **more)

        return call

    rows.run(rank, world_size, 5, change)


@pytest.mark.ranks(2)
def test_an_error_ends_up_in_the_work(rank, world_size):
    work = dist.all_reduce(np.ones(3 + rank), async_op=True)
    with pytest.raises(MismatchError):
        work.wait()
    assert isinstance(work.exception(), MismatchError)
    assert work.is_completed()
    assert not work.is_success()
    dist.barrier()


@pytest.mark.ranks(2)
def test_a_wait_may_time_out_and_be_repeated(rank, world_size):
    x, large = np.ones(3), np.ones(1 << 20)  # many rounds, more than fits into a slot
    if rank == 0:
        work = dist.all_reduce(x, async_op=True)
        others = [dist.all_reduce(large, async_op=True) for _ in range(3)]
        with pytest.raises(CollectiveTimeoutError, match=r"0\.05 s"):
            work.wait(timeout=0.05)
        assert not any(each.is_completed() for each in (work, *others))
        dist.send(np.zeros(1), 1)  # now rank 1 may come
        assert all(each.wait() for each in (work, *others))
    else:
        dist.recv(np.zeros(1), 0)
        for each in (x, large, large, large):
            dist.all_reduce(each)
    assert (x == 2).all()
    assert (large == 8).all()


async def wrap(work):
    return await work


@pytest.mark.ranks(2)
def test_await(rank, world_size):
    async def main():
        xs = [np.full(5, rank + 1.0) for _ in range(3)]
        await asyncio.gather(*(wrap(dist.all_reduce(x, async_op=True)) for x in xs))
        return xs

    assert all((x == 3).all() for x in asyncio.run(main()))


@pytest.mark.ranks(2)
def test_callbacks_run_once_complete(rank, world_size):
    seen = []
    work = dist.all_reduce(np.ones(2), async_op=True)
    work.add_done_callback(seen.append)
    work.wait()
    work.add_done_callback(seen.append)
    dist.all_reduce(np.ones(2), async_op=True).wait()  # the progress thread is past the callback now
    assert seen == [work, work]


@pytest.mark.ranks(2)
def test_a_callback_may_raise_but_not_wait(rank, world_size, caplog):
    refused = []

    def careless(_):
        raise ValueError("in a callback")

    def waits(_):
        with pytest.raises(dist.UsageError, match="callback") as caught:
            dist.all_reduce(np.ones(2))
        refused.append(caught.value)

    attached = threading.Event()
    dist.group.WORLD.gate.queue.submit("holding what follows", attached.wait)
    first = dist.all_reduce(np.ones(500_000), async_op=True)
    second = dist.all_reduce(np.ones(3), async_op=True)
    first.add_done_callback(careless)
    first.add_done_callback(waits)
    attached.set()
    second.wait()
    dist.all_reduce(np.ones(3), async_op=True).wait()
    assert len(refused) == 1
    assert "in a callback" in caplog.text


@pytest.mark.ranks(2)
def test_a_work_completes_after_its_event_loop_is_closed(rank, world_size):
    async def give_up():
        if rank == 1:
            return
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(wrap(dist.all_reduce(np.ones(3), async_op=True)), 0.05)

    asyncio.run(give_up())
    if rank == 0:
        dist.send(np.zeros(1), 1)
    else:
        dist.recv(np.zeros(1), 0)
        dist.all_reduce(np.ones(3))
    dist.all_reduce(np.ones(3), async_op=True).wait()


@pytest.mark.ranks(2)
def test_operations_under_way_are_completed_before_a_group_is_destroyed(rank, world_size):
    """Rank 0 is leaving before rank 1 begins; no thread waits for any of the six operations."""
    group, other = dist.new_group(), 1 - rank
    x, y, here = (np.full(300_000, rank + 1.0) for _ in range(3))
    got, mine = np.zeros_like(x), np.zeros_like(x)
    if rank == 1:
        dist.recv(np.zeros(1), 0)
    dist.all_reduce(x, group=group, async_op=True)
    dist.isend(y, other, group=group)
    dist.irecv(got, None if rank else other, group=group)
    dist.isend(here, rank, group=group, tag=1)
    dist.irecv(mine, rank, group=group, tag=1)
    dist.broadcast(y[:3], 0, group=group, async_op=True)
    if rank == 0:
        dist.send(np.zeros(1), 1)
    dist.destroy_process_group(group)
    assert (x == 3).all()
    assert (got[3:] == other + 1).all()
    assert (mine == rank + 1).all()
    assert (y[:3] == 1).all()


@pytest.mark.ranks(2)
def test_operations_that_no_rank_can_complete_are_named_when_a_group_is_destroyed(
    rank, world_size, monkeypatch
):
    """A receive without a sender ends as soon as all ranks are leaving; the group is destroyed nevertheless."""
    monkeypatch.setattr("fastcoll.job.leaving._RECEIVE_SECONDS", 600)
    lost, ours = dist.new_group(), dist.new_group()
    dist.irecv(np.zeros(3), 1 - rank, group=lost, tag=5)
    dist.irecv(np.zeros(3), group=lost, tag=6)
    dist.irecv(np.zeros(3), rank, group=lost, tag=7)
    checked = dist.irecv(np.zeros(3), 1 - rank, group=lost, tag=8)
    dist.barrier()  # what a rank receives from one that is leaving fails at once, and the group with it
    with pytest.raises(AbortedError) as caught:
        dist.destroy_process_group(lost)
    for what in (f"rank {1 - rank} ", "tag 5", "recv from any rank, tag 6", f"rank {rank} ", "tag 7"):
        assert what in str(caught.value)
    with pytest.raises(AbortedError):
        checked.wait()
    with pytest.raises(NotInitializedError):
        dist.destroy_process_group(lost)
    # Operations that have failed before are lost too, unless a thread has checked them.
    asked, unasked = (dist.all_reduce(np.ones(3 + rank), group=ours, async_op=True) for _ in range(2))
    completed = threading.Event()
    unasked.add_done_callback(lambda work: completed.set())
    assert completed.wait(60)
    assert not asked.is_success()
    with pytest.raises(AbortedError, match="all_reduce") as caught:
        dist.destroy_process_group(ours)
    assert str(caught.value).count("all_reduce of the group") == 1
    dist.barrier()


@pytest.mark.ranks(2)
def test_a_rank_that_leaves_by_an_exception_waits_for_nothing(rank, world_size):
    group = dist.new_group()
    if rank == 0:
        work = dist.all_reduce(np.ones(3), group=group, async_op=True)
        try:
            raise ValueError("tested")
        except ValueError:
            dist.destroy_process_group(group)
        with pytest.raises(AbortedError, match=r"left: ValueError: tested|was destroyed"):
            work.wait()
        dist.barrier()
    else:
        dist.barrier()
        works = [dist.all_reduce(np.ones(3), group=group, async_op=True) for _ in range(2)]
        with suppress(AbortedError):  # rank 0's part in it may be done
            works[0].wait()
        with pytest.raises(AbortedError, match=r"rank 0 .*left: ValueError: tested"):
            works[1].wait()
        dist.destroy_process_group(group)


@pytest.mark.ranks(2, 3)
def test_operations_complete_while_no_rank_waits_for_them(rank, world_size):
    """Every rank does other work, without a call of the group, until its own operations are complete."""
    xs = [np.full(COUNT, rank + 1.0, np.float32) for _ in range(4)]
    done = threading.Event()
    for x in xs[:-1]:
        dist.all_reduce(x, async_op=True)
    dist.all_reduce(xs[-1], async_op=True).add_done_callback(lambda work: done.set())
    assert done.wait(60)
    assert all((x == world_size * (world_size + 1) / 2).all() for x in xs)


@pytest.mark.ranks(2)
def test_operations_progress_while_python_computes(rank, world_size):
    """The caller never releases the interpreter, and the kernels do not need it."""
    work = dist.all_reduce(np.ones(COUNT, np.float32), async_op=True)
    turns = 0
    while not work.is_completed():
        turns += 1
    assert work.wait()


@pytest.mark.long
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
        assert (x == sum(r + 1 for r in ranks)).all()
