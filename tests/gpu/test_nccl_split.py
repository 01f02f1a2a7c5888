"""Groups whose communicator is split from their parent's: ncclCommSplit on a fake NCCL; ranks are threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from messages.worlds import until

from fastcoll.errors import AbortedError, ArrayError, PeerDiedError
from fastcoll.gpu.stream_work import Watcher

from .nccl_world import Meeting, Ranks, ThreadGroup, world

EVEN = [0, 2]


def ones(ranks: Ranks, rank: int) -> np.ndarray:
    host = np.ones(3, np.float32)
    return host * (rank + 1)


def meet(ranks: Ranks) -> None:
    """Make the first call, which gives the world a communicator, and leave it outstanding."""

    def does(rank: int, group: ThreadGroup) -> None:
        assert not group.gpus.splits()
        group.all_reduce(ranks.array(rank, ones(ranks, rank)), async_op=True)
        assert group.gpus.splits()

    assert ranks.attempt(does) == [None] * ranks.size


def split(ranks: Ranks, members: Sequence[int], then: Callable[[int, ThreadGroup], Any]) -> list[Any]:
    """Make a group of `members` on all ranks and run `then` with it; close it at the end."""
    meeting = Meeting(len(members))

    def does(rank: int, parent: ThreadGroup) -> Any:
        child = ThreadGroup(meeting, members.index(rank), parent.timeout) if rank in members else None
        parent.gpus.split(child)
        if child is None:
            return None
        try:
            return then(rank, child)
        finally:
            child.close()

    return ranks.run(does)


def test_a_group_by_split_has_its_ranks_and_needs_no_other_communicator() -> None:
    def sums(rank: int, group: ThreadGroup) -> list[float]:
        host = ones(ranks, rank)
        group.all_reduce(ranks.array(rank, host), async_op=True).wait()
        group.broadcast(ranks.array(rank, host), 1)
        ranks.gpu.settle()
        return list(host)

    with world(4) as ranks:
        meet(ranks)
        assert split(ranks, EVEN, sums) == [[4, 4, 4], None, [4, 4, 4], None]  # 1 + 3
        assert split(ranks, [1, 2, 3], sums)[1:] == [[9, 9, 9]] * 3  # 2 + 3 + 4
        meant = ["ncclCommInitRankConfig", "ncclCommSplit", "ncclCommDestroy"]
        assert [ranks.nccl.calls.count(name) for name in meant] == [4, 8, 5]


def test_a_split_waits_for_outstanding_work(monkeypatch: pytest.MonkeyPatch) -> None:
    gate, drain = threading.Event(), Watcher.drain

    def opened(watcher: Watcher) -> None:
        gate.set()
        drain(watcher)

    def does(rank: int, group: ThreadGroup) -> None:
        stream = ranks.gpu.new_stream(rank)
        ranks.gpu.queue("hold", stream, lambda: [gate.wait(60)][:0])
        group.all_reduce(ranks.array(rank, ones(ranks, rank), stream), async_op=True)
        try:
            group.gpus.split(None)
        finally:
            gate.set()
        ranks.gpu.end_stream(stream)

    with world(2) as ranks:
        meet(ranks)
        with monkeypatch.context() as patch:
            patch.setattr(Watcher, "drain", opened)
            ranks.run(does)


def test_a_failure_in_a_split_group_stays_there() -> None:
    def abort(rank: int, group: ThreadGroup) -> None:
        group.all_reduce(ranks.array(rank, ones(ranks, rank)))
        group.abort("enough")
        with pytest.raises(AbortedError, match="enough"):
            group.all_reduce(ranks.array(rank, ones(ranks, rank)))

    with world(3) as ranks:
        meet(ranks)
        split(ranks, EVEN, abort)
        ranks.run(lambda rank, group: group.all_reduce(ranks.array(rank, ones(ranks, rank))))


def test_a_split_group_monitors_its_own_peers_only() -> None:
    def then(rank: int, group: ThreadGroup) -> None:
        ranks.groups[rank].abort("enough")
        if rank:  # rank 0 meanwhile checks whether all have reached the end
            until(lambda: any(comm.finalized for comm in ranks.nccl.comms))

    with world(2) as ranks:
        meet(ranks)
        split(ranks, [0, 1], then)
        assert [ranks.nccl.calls.count(f"ncclComm{end}") for end in ("Destroy", "Abort")] == [2, 2]


def test_a_group_by_split_is_on_the_gpu_of_its_parent() -> None:
    def other(rank: int, group: ThreadGroup) -> None:
        with pytest.raises(ArrayError, match=f"works on GPU {rank}.* and this array is on GPU {2 - rank}"):
            group.all_reduce(ranks.array(2 - rank, ones(ranks, rank)))

    with world(3) as ranks:
        meet(ranks)
        split(ranks, EVEN, other)


def test_a_rank_that_dies_before_it_splits_is_named_by_the_others() -> None:
    def does(rank: int, group: ThreadGroup) -> None:
        if rank == 1:
            ranks.meeting.died.append(1)
            return
        with pytest.raises(PeerDiedError, match="rank 1 died; splitting a communicator"):
            group.gpus.split(group)
        assert group.failure is not None

    with world(3) as ranks:
        meet(ranks)
        ranks.run(does)


def test_a_split_that_nccl_refuses_fails_the_parent() -> None:
    def does(rank: int, group: ThreadGroup) -> None:
        with pytest.raises(AbortedError, match="splitting a communicator failed with status 5"):
            group.gpus.split(None)

    with world(2) as ranks:
        meet(ranks)
        ranks.nccl.statuses["ncclCommSplit"] = 5
        ranks.run(does)
