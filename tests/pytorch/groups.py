"""Groups: of some ranks, beside fastcoll's own, in children of fork, and what they refuse. Checks for three ranks."""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ErrorType

import fastcoll
from fastcoll.errors import AbortedError, CollectiveTimeoutError, UnavailableError, UsageError
from pytorch import pair
from pytorch.pair import data, equal, rank, size


def sums(group: Any, *ranks: int) -> None:
    """Check a group of these ranks by a sum."""
    x = data(torch.float32, 3)
    dist.all_reduce(x, group=group)
    equal(x, torch.stack([data(torch.float32, 3, of=r) for r in ranks]).sum(0))
    assert dist.get_process_group_ranks(group) == list(ranks)


def check_groups_of_some_ranks() -> None:
    dist.barrier(pair.OURS, timeout=pair.TIMEOUT)
    pair.OURS.monitored_barrier(pair.TIMEOUT)
    group = dist.new_group([0, 2])
    if rank() in (0, 2):
        sums(group, 0, 2)
        assert dist.get_rank(group) == rank() // 2
        dist.destroy_process_group(group)
    alone = dist.new_group([rank()])  # each rank makes its own group
    y, outs = data(torch.float32, 3), [torch.empty(3)]
    dist.all_reduce(y, group=alone)
    dist.all_gather(outs, y, group=alone)
    equal([y, *outs], [data(torch.float32, 3)] * 2)
    for _ in range(2):  # with the same name, because the first is destroyed by then
        # torch counts the calls on each rank and derives the name from that: so all ranks make one group.
        members = dist.new_group([1, 2] if rank() else [0], use_local_synchronization=True)
        if rank() > 0:
            said: list[Any] = [None, None]
            dist.all_gather_object(said, rank(), group=members)
            assert said == [1, 2]
        dist.destroy_process_group(members)


def check_groups_of_the_world_skip_the_join() -> None:
    """A group of the world's ranks needs no join, and under torchrun no meeting, which are several waits each."""
    with pytest.MonkeyPatch.context() as patch:
        for place in ("fastcoll.job.standalone.join", "fastcoll.torch.jobs.meet_anew"):
            patch.setattr(place, None)
        group = dist.new_group([0, 2], backend="fastcoll")
    if rank() != 1:
        sums(group, 0, 2)
        assert [member.rank for member in group.fastcoll.monitor.members] == [0, 2]


def check_split_groups() -> None:
    """On CPUs, torch.distributed.split_group also accepts Gloo's groups from 2.15 on."""
    whole = dist.new_group(backend="fastcoll")
    alone = whole.split_group([1], group_name="alone")
    if rank() == 1:
        x = data(torch.float32, 3)
        alone.allreduce(x).wait()
        equal(x, data(torch.float32, 3))
        assert alone.fastcoll.timeout == whole.fastcoll.timeout
        assert alone.group_name == "alone"
    else:
        assert alone is None
    if rank() != 1:  # ranked by their order in the list; rank 1 need not call
        reversed_ = whole.split_group([2, 0], group_name="reversed")
        assert [reversed_.rank(), reversed_.size()] == [{2: 0, 0: 1}[rank()], 2]
        x = data(torch.float32, 3)
        reversed_.broadcast(x, root=0).wait()
        equal(x, data(torch.float32, 3, of=2))
    for wrong, more in (([3], {}), ([0], {"opts": object()})):
        with pytest.raises(RuntimeError, match=r"ranks 0\.\.2|no options"):
            whole.split_group(wrong, **more)
    if torch.__version__ >= (2, 15):
        for backend in ("fastcoll", "gloo"):
            parent = dist.new_group(backend=backend)
            group = dist.split_group(parent, [[2, 0]], timeout=timedelta(seconds=50), group_desc="some")
            assert (group is dist.GroupMember.NON_GROUP_MEMBER) == (rank() == 1)
            if rank() != 1:
                assert [group.rank(), group.size()] == [{2: 0, 0: 1}[rank()], 2]
                sums(group, 2, 0)
                assert [group.group_name, type(group)] != [parent.group_name, type(pair.GLOO)]
                assert [dist.get_backend(group), group.group_desc] == [backend, "some"]
                assert group._get_backend(torch.device("cpu")).options._timeout == timedelta(seconds=50)
                dist.destroy_process_group(group)
    dist.barrier(pair.OURS)


def check_monitored_barriers_have_gloos_texts() -> None:
    """Errors begin with Gloo's texts, which callers match on, and continue with fastcoll's own."""

    def fails(group: Any, match: str, limit: int = 100, everyone: bool = False) -> None:
        kind = RuntimeError if dist.get_backend(group) == "gloo" else CollectiveTimeoutError
        with pytest.raises(kind, match=match):
            group.monitored_barrier(timedelta(milliseconds=limit), wait_all_ranks=everyone)

    for everyone, culprits in ((False, "Rank 1"), (True, "Ranks 1, 2")):
        match = rf"\[Rank 0\]: {culprits} failed to pass monitoredBarrier in 100 ms"
        ours, gloo = (dist.new_group(backend=name, timeout=pair.TIMEOUT) for name in ("fastcoll", "gloo"))
        if rank() == 0:
            fails(ours, match, everyone=everyone)
            # The same failure again.
            with pytest.raises(CollectiveTimeoutError, match=r"^timed out: .* 0.1 s"):
                ours.monitored_barrier(timedelta(seconds=31))
            # Gloo looks at its clock before it waits for a rank, and is late where this process had no core.
            fails(gloo, f"{match}|Rank 0 timed out in monitoredBarrier after 100 ms", everyone=everyone)
    group, some = dist.new_group(backend="fastcoll"), dist.new_group([1, 2], backend="fastcoll")
    if rank() == 1:
        match = (
            "^Rank 1 successfully reached monitoredBarrier, but received errors while waiting for send/recv"
        )
        fails(group, rf"{match} from rank 0.* rank 0 \(pid.*within the timeout of 0.1 s")
        fails(some, r"\]: Rank 1 failed to pass monitored.*; .*rank 2 \(pid")
    late = dist.new_group(backend="fastcoll")
    if rank() == 0:
        fails(late, "Rank 0 timed out in monitoredBarrier after 0 ms", limit=0)
    dist.barrier(pair.OURS)


def check_fastcolls_own_world_beside_it() -> None:
    assert not fastcoll.is_initialized()
    fastcoll.init_process_group(
        store=fastcoll.FileStore(f"{sys.argv[1]}-store"), rank=rank(), world_size=size()
    )
    x = np.ones(3)
    fastcoll.all_reduce(x)
    dist.barrier(pair.OURS)
    fastcoll.destroy_process_group()
    dist.barrier(pair.OURS)
    assert x.tolist() == [3, 3, 3]


def check_children_of_fork_leave_the_group_alone() -> None:
    """Children of fork, such as a DataLoader's workers, do not disturb their parent's group."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            dist.all_reduce(torch.ones(1), group=pair.OURS)
        except RuntimeError as error:
            status = 0 if "forked" in str(error) else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    dist.barrier(pair.OURS)


def check_methods_that_torch_calls_on_a_backend() -> None:
    ours = pair.OURS._get_backend(torch.device("cpu"))
    assert ours.options.backend == "fastcoll"
    assert ours.options._timeout == pair.TIMEOUT
    for set_timeout in (ours.set_timeout, ours._set_default_timeout):
        set_timeout(timedelta(seconds=50))
        assert ours.options._timeout == timedelta(seconds=50)
        ours.set_timeout(pair.TIMEOUT)
    for name in ("coalescing", "shrinking", "reconfigure", "window", "time_estimate", "abort_hooks"):
        assert not getattr(ours, f"supports_{name}")
    for name in (
        "shrink split merge merge_remote_group reconfigure get_reconfigure_handle suspend resume "
        "memory_stats new_window allocate_tensor register_abort_hook register_completion_hook"
    ).split():
        with pytest.raises(UnavailableError, match=r".+: a group of fastcoll does not have it; .+"):
            getattr(ours, name)([0])
    group = dist.new_group(backend="fastcoll")
    assert group.get_error() == ErrorType.SUCCESS
    dist.barrier(group)
    group.abort()
    assert group.get_error() == ErrorType.COMM_ERROR
    with pytest.raises(AbortedError):
        dist.all_reduce(torch.ones(1), group=group)
    late = dist.new_group([0, 1], backend="fastcoll")
    if rank() == 0:
        pair.shorten(late, 0.1)
        with pytest.raises(CollectiveTimeoutError, match="timed out"):
            dist.barrier(late)
        assert late.get_error() == ErrorType.TIMEOUT
    dist.barrier(pair.OURS)


def check_what_is_refused() -> None:
    with pytest.raises(UsageError, match=r"[Ss]parse"):
        dist.broadcast(torch.eye(3).to_sparse(), 0, group=pair.OURS)
    with pytest.raises(UnavailableError, match=r"only CPU tensors.*new_group"):
        pair.OURS._get_backend(torch.device("cuda"))
    on_gpu = SimpleNamespace(__cuda_array_interface__={})
    both = dist.new_group(backend="cpu:fastcoll,cuda:nccl")
    dist.all_reduce(torch.ones(1), group=both)
    with pytest.raises(UnavailableError, match=r"only CPU tensors.*new_group"):
        both.allreduce([on_gpu])
    with pytest.raises(UsageError, match="2 items"):
        pair.OURS.allreduce([torch.ones(1), torch.ones(1)])
    with pytest.raises(UnavailableError, match="no options"):
        dist.new_group(backend="fastcoll", pg_options=object())
    assert dist.get_backend(pair.OURS) == "fastcoll" == pair.OURS.name()
    dist.barrier(pair.OURS)
