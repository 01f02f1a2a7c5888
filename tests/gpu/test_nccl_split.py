"""Groups whose communicator is split from their parent's: ncclCommSplit on a fake NCCL; ranks are threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from messages.worlds import until
from net.groups import groups

from fastcoll.core.group import ProcessGroup
from fastcoll.errors import AbortedError, ArrayError, PeerDiedError
from fastcoll.gpu.stream_work import Watcher

from .fake_array import FakeArray
from .nccl_world import NcclRanks, world

EVEN = [0, 2]


def array(ranks: NcclRanks, rank: int) -> FakeArray:
    """Return an array with the rank plus 1."""
    return ranks.array(rank, np.full(3, rank + 1, np.float32))


@contextmanager
def met(size: int) -> Iterator[NcclRanks]:
    """A world whose ranks have a communicator, and whose first call is outstanding."""

    def does(rank: int, group: ProcessGroup) -> None:
        assert not group.gpus.splits()
        group.all_reduce(array(ranks, rank), async_op=True)
        assert group.gpus.splits()

    with world(size) as ranks:
        assert ranks.attempt(does) == [None] * size
        yield ranks


def split(ranks: NcclRanks, members: Sequence[int], then: Callable[[int, ProcessGroup], Any]) -> list[Any]:
    """Make a group of `members` on all ranks, run `then` with it once all members have it, and close it."""
    made = threading.Barrier(len(members))

    def does(rank: int, parent: ProcessGroup) -> Any:
        child = children[members.index(rank)] if rank in members else None
        parent.gpus.split(child)
        if child is None:
            return None
        made.wait(60)
        try:
            return then(rank, child)
        finally:
            child.close()

    with groups(len(members), timeout=60.0) as children:
        return ranks.run(does)


def test_a_group_by_split_has_its_ranks_and_needs_no_other_communicator() -> None:
    def sums(rank: int, group: ProcessGroup) -> list[float]:
        x = array(ranks, rank)
        group.all_reduce(x, async_op=True).wait()
        group.broadcast(x, 1)
        ranks.gpu.settle()
        return list(x.host)

    with met(4) as ranks:
        assert split(ranks, EVEN, sums) == [[4, 4, 4], None, [4, 4, 4], None]  # 1 + 3
        assert split(ranks, [1, 2, 3], sums)[1:] == [[9, 9, 9]] * 3  # 2 + 3 + 4
        meant = ["ncclCommInitRankConfig", "ncclCommSplit", "ncclCommDestroy"]
        assert [ranks.nccl.calls.count(name) for name in meant] == [4, 8, 5]


def test_a_split_waits_for_outstanding_work(monkeypatch: pytest.MonkeyPatch) -> None:
    gate, drain = threading.Event(), Watcher.drain

    def opened(watcher: Watcher) -> None:
        gate.set()
        drain(watcher)

    def does(rank: int, group: ProcessGroup) -> None:
        stream = ranks.gpu.new_stream(rank)
        ranks.gpu.queue("hold", stream, lambda: [gate.wait(60)][:0])
        group.all_reduce(ranks.array(rank, np.ones(3, "f4"), stream), async_op=True)
        try:
            group.gpus.split(None)
        finally:
            gate.set()
        ranks.gpu.end_stream(stream)

    with met(2) as ranks, monkeypatch.context() as patch:
        patch.setattr(Watcher, "drain", opened)
        ranks.run(does)


def test_a_failure_in_a_split_group_stays_there() -> None:
    called = threading.Barrier(2)

    def abort(rank: int, group: ProcessGroup) -> None:
        group.all_reduce(array(ranks, rank))
        called.wait(60)
        group.abort("enough")
        with pytest.raises(AbortedError, match="enough"):
            group.all_reduce(array(ranks, rank))

    with met(3) as ranks:
        split(ranks, EVEN, abort)
        ranks.run(lambda rank, group: group.all_reduce(array(ranks, rank)))


def test_a_split_group_monitors_its_own_peers_only() -> None:
    def then(rank: int, group: ProcessGroup) -> None:
        ranks.groups[rank].abort("enough")
        if rank:  # rank 0 meanwhile checks whether all have reached the end
            until(lambda: any(comm.finalized for comm in ranks.nccl.comms))

    with met(2) as ranks:
        split(ranks, [0, 1], then)
    assert [ranks.nccl.calls.count(f"ncclComm{end}") for end in ("Destroy", "Abort")] == [2, 2]


def test_a_group_by_split_is_on_the_gpu_of_its_parent() -> None:
    def other(rank: int, group: ProcessGroup) -> None:
        with pytest.raises(ArrayError, match=f"works on GPU {rank}.* and this array is on GPU {2 - rank}"):
            group.all_reduce(array(ranks, 2 - rank))

    with met(3) as ranks:
        split(ranks, EVEN, other)


def test_a_rank_that_dies_before_it_splits_is_named_by_the_others() -> None:
    def does(rank: int, group: ProcessGroup) -> None:
        if rank == 1:
            ranks.died.append(1)
            return
        with pytest.raises(PeerDiedError, match="rank 1 died; splitting a communicator"):
            group.gpus.split(group)
        assert group.failure is not None

    with met(3) as ranks:
        ranks.run(does)


def test_a_split_that_nccl_refuses_fails_the_parent() -> None:
    def does(rank: int, group: ProcessGroup) -> None:
        with pytest.raises(AbortedError, match="splitting a communicator failed with status 5"):
            group.gpus.split(None)

    with met(2) as ranks:
        ranks.nccl.statuses["ncclCommSplit"] = 5
        ranks.run(does)
