"""Errors are raised in Python and name the rank at fault. Checks for two ranks."""

from __future__ import annotations

import os
import signal
from datetime import timedelta
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from fastcoll.errors import AbortedError, CollectiveTimeoutError, MismatchError, NotInitializedError
from pytorch import pair
from pytorch.pair import rank
from pytorch.training import Net, ddp


def check_calls_that_differ() -> None:
    x = torch.zeros(3 + rank())
    for asynchronous in (False, True):
        with pytest.raises(MismatchError, match=r"rank 0 .*3 elements.*rank 1 .*4 elements"):
            dist.all_reduce(x, group=pair.OURS, async_op=asynchronous).wait()
    with pytest.raises(RuntimeError, match=r"rank 0 .*3 elements.*rank 1 .*4 elements"):
        dist.all_reduce(x, group=pair.OURS, async_op=True).get_future().wait()
    dist.barrier(pair.OURS)  # still usable


def check_calls_that_differ_under_ddp() -> None:
    group = dist.new_group(backend="fastcoll")
    model = ddp(nn.Linear(4, 4), group)
    loss = model(torch.ones(2, 4)).sum()
    call = loss.backward if rank() == 0 else partial(dist.all_reduce, torch.zeros(9), group=group)
    with pytest.raises(RuntimeError, match=r"rank 1 .*9 elements"):
        call()


def check_ranks_that_are_late() -> None:
    group = dist.new_group(backend="fastcoll")
    x = torch.ones(1)
    if rank() == 0:
        pair.shorten(group, 0.3)
        for _ in range(2):  # the group stays failed
            with pytest.raises(CollectiveTimeoutError, match=r"timed out.*rank 1"):
                dist.all_reduce(torch.ones(2), group=group)
        late = dist.barrier(pair.OURS, async_op=True)
        with pytest.raises(CollectiveTimeoutError, match=r"timed out.*not complete after 0\.01 s"):
            late.wait(timedelta(milliseconds=10))
        options = dist.AllreduceOptions()
        options.asyncOp, options.timeout = False, timedelta(milliseconds=10)
        with pytest.raises(CollectiveTimeoutError, match=r"timed out.*not complete after 0\.01 s"):
            pair.OURS.allreduce([x], options)
    else:
        dist.barrier(pair.GLOO)
        late = dist.barrier(pair.OURS, async_op=True)
        dist.all_reduce(x, group=pair.OURS)
    if rank() == 0:
        dist.barrier(pair.GLOO)
    late.wait()  # the operations continued
    dist.barrier(pair.OURS)
    assert x.tolist() == [2.0]


def check_a_tensor_without_other_references() -> None:
    """A tensor's memory is not reused while its operation runs."""
    if rank() == 1:
        dist.barrier(pair.GLOO)
    x = torch.full((300_000,), rank() + 1.0)
    memory = StorageWeakRef(x.untyped_storage())
    dist.all_reduce(x, group=pair.OURS, async_op=True)
    del x
    kept = rank() == 1 or not memory.expired()
    if rank() == 0:
        dist.barrier(pair.GLOO)
    dist.barrier(pair.OURS)
    assert kept


def check_collectives_that_are_not_waited_for() -> None:
    """A rank completes its part of such collectives before it leaves."""
    group = dist.new_group(backend="fastcoll")
    xs = [torch.ones(100_000) for _ in range(20)]
    if rank() == 1:
        dist.barrier(pair.GLOO)
    works = [dist.all_reduce(x, group=group, async_op=True) for x in xs]
    if rank() == 0:
        dist.barrier(pair.GLOO)
    else:
        for work in works:
            work.wait()
    dist.destroy_process_group(group)
    assert all(x.eq(2).all() for x in xs)


def check_groups_that_are_left_with_an_error() -> None:
    """The other ranks get an error at once, because the started operations are not completed.

    The tensor has several rounds. Of a smaller one, a rank could publish all its data before it leaves; with them the
    other ranks would complete their call.
    """
    group = dist.new_group(backend="fastcoll")
    x = torch.ones(4_000_000)
    if rank() == 0:
        pending = dist.all_reduce(x, group=group, async_op=True)
        try:
            raise ValueError("tested")
        except ValueError:
            dist.destroy_process_group(group)
        with pytest.raises(AbortedError, match=r"left: ValueError: tested|was destroyed"):
            pending.wait()
        dist.barrier(pair.GLOO)
    else:
        dist.barrier(pair.GLOO)
        with pytest.raises(AbortedError, match=r"rank 0 .*left: ValueError: tested"):
            dist.all_reduce(x, group=group)
        dist.destroy_process_group(group)


def check_groups_that_are_left() -> None:
    group = dist.new_group(backend="fastcoll")
    pending = dist.all_reduce(torch.ones(1), group=group, async_op=True) if rank() == 0 else None
    dist.barrier(pair.GLOO)
    dist.destroy_process_group(group)
    if pending is not None:
        with pytest.raises(AbortedError, match=r"rank 1 .*left"):
            pending.wait()
    with pytest.raises((AbortedError, NotInitializedError), match=r"destroyed|left"):
        group.allreduce([torch.ones(1)])


def check_a_rank_that_dies_under_ddp() -> None:
    """Rank 1 dies, so this is the last check."""
    model = ddp(Net(), pair.OURS)
    model(torch.ones(4, 8)).sum().backward()
    loss = model(torch.ones(4, 8)).sum()
    if rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(RuntimeError, match=r"rank 1 .*died"):
        loss.backward()
