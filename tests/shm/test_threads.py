"""Several threads of a process on one group: calls run one at a time, in order, and independently."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
from together import together

import fastcoll as dist
from fastcoll import MismatchError


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("count", [3, 50_000, 300_000])
def test_threads_that_call_at_once(rank, world_size, count):
    """All threads make the same call, so the ranks agree in every order of threads."""
    wrong = []

    def work(strided):
        for _ in range(15):
            x = np.full(2 * count, rank + 1.0)[:: 2 if strided else 1][:count]
            dist.all_reduce(x)
            if not (x == world_size * (world_size + 1) / 2).all():
                wrong.append(x)

    assert together(*[lambda k=k: work(k == 2) for k in range(3)]) == [None] * 3
    assert not wrong


@pytest.mark.ranks(2)
def test_a_mismatch_is_reported_before_the_next_threads_call_begins(rank, world_size, tmp_path):
    """Ranks exchange sizes for the report; a queued call must not run in between."""
    group = dist.GroupMember.WORLD
    dist.all_reduce(np.ones(5))
    for turn in range(15):
        dist.barrier()
        x, works, begun = np.full(5, rank + 1.0), [], tmp_path / str(turn)
        outs = [np.zeros(3), np.zeros(3 + rank)]
        if rank == 0:

            def submit(x=x, works=works, begun=begun):
                while not group.gate.is_busy():
                    time.sleep(1e-3)
                begun.touch()
                works.append(group.fast.all_reduce(x, async_op=True))

            thread = threading.Thread(target=submit)
            thread.start()
        else:
            while not begun.exists():
                time.sleep(1e-3)
            time.sleep(0.01)  # for the other thread of rank 0 to queue its call, if it can
        with pytest.raises(MismatchError, match=r"rank \d sends (24|32) bytes to rank \d"):
            dist.all_gather(outs, np.zeros(3 + rank))
        if rank == 0:
            thread.join()
            assert works[0].wait(60)
        else:
            dist.all_reduce(x)
        assert (x == 3).all()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("size", [2, 200_000])
@pytest.mark.parametrize("strided", [False, True])
def test_an_abort_ends_the_call_of_another_thread(rank, world_size, size, strided):
    group = dist.new_group()
    group.fast.all_reduce(np.ones(size))

    def abort():
        while not group.gate.is_busy():
            time.sleep(1e-3)
        group.abort("tested")

    if rank == 0:
        thread = threading.Thread(target=abort)
        thread.start()
        for _ in range(2):
            with pytest.raises(dist.AbortedError, match="tested"):
                group.fast.all_reduce(np.ones(size)[:: 2 if strided else 1])
        thread.join()
    dist.barrier()
    group.close()


@pytest.mark.ranks(2)
def test_closing_ends_the_calls_of_other_threads(rank, world_size):
    """A collective, a receive and a queued operation each end with an error."""
    group = dist.new_group()
    group.fast.all_reduce(np.ones(2))
    if rank == 0:

        def close():
            while not group.gate.is_busy():
                time.sleep(1e-3)
            group.close()

        *errors, _ = together(
            lambda: group.fast.all_reduce(np.ones(2)),
            lambda: group.fast.all_reduce(np.ones(4)[::2]),
            lambda: group.fast.recv(np.ones(2), 1),
            lambda: group.fast.all_reduce(np.ones(2), async_op=True).wait(),
            close,
        )
        assert {type(error) for error in errors} <= {dist.AbortedError, dist.NotInitializedError}
    dist.barrier()
    group.close()


@pytest.mark.ranks(2, 3)
def test_a_mismatch_of_sizes_has_the_number_of_its_call(rank, world_size):
    """The error must not have the number of the exchange of sizes that ranks make for the report."""
    group = dist.new_group()
    outs = [np.zeros(2 + r + (rank == r == 0)) for r in range(world_size)]
    group.fast.barrier()
    with pytest.raises(MismatchError, match="call 2 of"):
        group.fast.all_to_all(
            [np.zeros(2 + (rank == 0)) for _ in outs], [np.zeros(2 + (rank == 0)) for _ in outs]
        )
    dist.barrier()
    group.close()
