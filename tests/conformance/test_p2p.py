"""Messages between real ranks, as far as the functions add to what the groups do."""

from __future__ import annotations

import numpy as np
import pytest

import fastcoll as dist


@pytest.mark.ranks(1, 2, 3)
def test_a_ring_in_one_batch(rank: int, world_size: int) -> None:
    """Every rank sends before it receives, to itself in a world of one."""
    right, left = (rank + 1) % world_size, (rank - 1) % world_size
    sent, received = np.full(5, rank), np.full(5, -1)
    ops = [dist.P2POp(dist.isend, sent, right, tag=4), dist.P2POp(dist.irecv, received, left, tag=4)]
    works = dist.batch_isend_irecv(ops)
    for work in works:
        assert work.wait(30)
    assert received.tolist() == [left] * 5
    assert works[1].result() == left


@pytest.mark.ranks(1, 2)
def test_a_batch_with_a_wrong_operation_posts_none(rank: int, world_size: int) -> None:
    """What an earlier operation had posted would take the message of the next batch."""
    right, left = (rank + 1) % world_size, (rank - 1) % world_size
    sent, received, lost = np.full(2, float(rank)), np.zeros(2), np.zeros(2)
    receive = dist.P2POp(dist.irecv, lost, left)
    for wrong in (
        dist.P2POp(dist.isend, [1.0, 2.0], right),
        dist.P2POp(dist.isend, sent, world_size),
        dist.P2POp(dist.isend, sent, right, tag=-1),
    ):
        with pytest.raises(dist.UsageError):
            dist.batch_isend_irecv([receive, wrong])
    ops = [dist.P2POp(dist.irecv, received, left), dist.P2POp(dist.isend, sent, right)]
    for work in dist.batch_isend_irecv(ops):
        assert work.wait(30)
    assert received.tolist() == [left] * 2
    assert not lost.any()


@pytest.mark.ranks(4)
def test_senders_are_global_ranks(rank: int) -> None:
    group = dist.new_group([1, 3])
    x = np.full(2, float(rank))
    if rank == 3:
        dist.send(x, dst=1, group=group)
        dist.send(x, group=group, group_dst=0, tag=1)
    elif rank == 1:
        assert dist.recv(x, group=group) == 3
        work = dist.irecv(x, src=3, group=group, tag=1)
        assert work is not None
        assert work.result() == 3
        assert x.tolist() == [3.0, 3.0]
    else:
        with pytest.warns(UserWarning, match=r"recv on rank \d, which is not in the given group"):
            assert dist.recv(x, group=group) == -1


@pytest.mark.ranks(2, timeout=30)
@pytest.mark.parametrize("backend", ["shm", "tcp"])
def test_a_timeout_that_is_set_later_counts_for_messages(rank: int, world_size: int, backend: str) -> None:
    try:
        group = dist.new_group(backend=backend)
    except dist.UnavailableError:  # the ranks are on several hosts
        group = dist.new_group()
    dist.barrier(group)
    group.timeout = 0.3
    if rank == 0:
        with pytest.raises(dist.CollectiveTimeoutError, match=r"0\.3 s"):
            dist.recv(np.zeros(2), 1, group=group)
    dist.barrier()
    group.close()
