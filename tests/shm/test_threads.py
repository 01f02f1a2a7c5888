"""Several threads of a process on one group: calls run one at a time, in order, and independently."""

from __future__ import annotations

import time

import numpy as np
import pytest
from shm.groups import once_busy
from together import together

import fastcoll as dist
from fastcoll import AbortedError, MismatchError
from fastcoll.shm import rings


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("count", [3, 50_000, 300_000])
def test_threads_that_call_at_once(rank, world_size, count):
    """All threads make the same call, so the ranks agree in every order of threads."""

    def work(strided):
        for _ in range(15):
            x = np.full(2 * count, rank + 1.0)[:: 2 if strided else 1][:count]
            dist.all_reduce(x)
            assert (x == world_size * (world_size + 1) / 2).all()

    assert together(*[lambda k=k: work(k == 2) for k in range(3)]) == [None] * 3


@pytest.mark.ranks(2)
def test_a_mismatch_is_reported_before_the_next_threads_call_begins(rank, world_size, tmp_path):
    """Ranks exchange sizes for the report; a call that is queued meanwhile must not run in between."""
    group = dist.GroupMember.WORLD

    def mismatch():
        with pytest.raises(MismatchError, match=r"rank \d sends (24|32) bytes to rank \d"):
            dist.all_gather([np.zeros(3), np.zeros(3 + rank)], np.zeros(3 + rank))

    dist.all_reduce(np.ones(5))
    for turn in range(15):
        dist.barrier()
        x, queued = np.full(5, rank + 1.0), tmp_path / str(turn)

        def queue(x=x, queued=queued):
            work = group.fast.all_reduce(x, async_op=True)
            queued.touch()
            return work

        if rank == 0:
            error, work = together(mismatch, once_busy(group, queue))
            assert error is None
            assert work.wait(60)
        else:
            while not queued.exists():
                time.sleep(1e-3)
            mismatch()
            dist.all_reduce(x)
        assert (x == 3).all()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("size", [2, 200_000])
@pytest.mark.parametrize("strided", [False, True])
def test_an_abort_ends_the_call_of_another_thread(rank, world_size, size, strided):
    group = dist.new_group()
    group.fast.all_reduce(np.ones(size))

    def call():
        for _ in range(2):
            with pytest.raises(AbortedError, match="tested"):
                group.fast.all_reduce(np.ones(size)[:: 2 if strided else 1])

    if rank == 0:
        assert together(call, once_busy(group, lambda: group.abort("tested"))) == [None, None]
    dist.barrier()
    group.close()


@pytest.mark.ranks(2)
def test_closing_ends_the_calls_of_other_threads(rank, world_size):
    """A collective, a receive and a queued operation each end with an error."""
    group = dist.new_group()
    group.fast.all_reduce(np.ones(2))
    if rank == 0:
        *errors, _ = together(
            lambda: group.fast.all_reduce(np.ones(2)),
            lambda: group.fast.all_reduce(np.ones(4)[::2]),
            lambda: group.fast.recv(np.ones(2), 1),
            lambda: group.fast.all_reduce(np.ones(2), async_op=True).wait(),
            once_busy(group, group.close),
        )
        assert {type(error) for error in errors} <= {AbortedError, dist.NotInitializedError}
    dist.barrier()
    group.close()


@pytest.mark.ranks(1)
def test_memory_that_a_message_uses_stays_mapped_when_the_group_is_closed(rank, world_size, monkeypatch):
    """The thread of a message does not leave its compiled code, for example because it was stopped in there."""
    monkeypatch.setattr("fastcoll.p2p.progress._CLOSE_SECONDS", 0.0)
    group = dist.new_group()
    busy, segment = group.backend.pipe.table[rings.BUSY :][:1], group.backend._segment
    busy[0] = 1  # no thread's number
    group.close()
    assert segment.nonce
    busy[0] = 0
    segment.close()


@pytest.mark.ranks(2, 3)
def test_a_mismatch_of_sizes_has_the_number_of_its_call(rank, world_size):
    """The error must not have the number of the exchange of sizes that ranks make for the report."""
    group = dist.new_group()
    group.fast.barrier()
    with pytest.raises(MismatchError, match="call 2 of"):
        group.fast.all_to_all(*([np.zeros(2 + (rank == 0)) for _ in range(world_size)] for _ in range(2)))
    dist.barrier()
    group.close()
