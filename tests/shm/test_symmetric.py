"""Symmetric arrays: all_reduce against NumPy, views of peers, put, get, signal, wait, and errors."""

from __future__ import annotations

import errno
import gc
import os
import signal
import threading
import time
import weakref
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import oracle
import pytest
from net.meshes import until
from oracle import assert_same, reduced, values
from shm.groups import holdings, once_busy
from together import together

import fastcoll as dist
from fastcoll import ReduceOp, symmetric
from fastcoll.core.monitor import Wait
from fastcoll.shm import context_layout as words
from fastcoll.shm.segment import Segment

WORLDS = (1, 3, 5)
SMALLEST = 16 << 10  # bytes; all_reduce stages smaller arrays
LARGE = 1 << 20


def everyone(world_size, count, dtype, salt=0):
    return [values(rank, count, dtype, salt) for rank in range(world_size)]


def reduce_and_check(x, rank, world_size, op=ReduceOp.SUM, salt=0):
    """Compare all_reduce on x, a symmetric array or a slice of one, with the oracle and with an ordinary array."""
    inputs = everyone(world_size, x.size, x.dtype, salt)
    x[...] = inputs[rank].reshape(x.shape)
    ordinary = x.copy()
    dist.all_reduce(x, op)
    dist.all_reduce(ordinary, op)
    assert_same(x.reshape(-1), reduced(inputs, op), (x.dtype, op, x.size))
    np.testing.assert_array_equal(x.reshape(-1).view(np.uint8), ordinary.reshape(-1).view(np.uint8))


@pytest.mark.ranks(*WORLDS)
def test_all_reduce(rank, world_size):
    for dtype in oracle.DTYPES:
        x = symmetric.empty(LARGE // 16 // dtype.itemsize + 7, dtype)
        for op in oracle.ops_for(dtype):
            reduce_and_check(x, rank, world_size, op)


@pytest.mark.ranks(*WORLDS)
def test_all_reduce_of_slices_of_odd_sizes(rank, world_size):
    """Nothing beside the slice changes."""
    memory = symmetric.empty(2 * LARGE, np.uint8)
    for salt, nbytes in enumerate((1, 7, SMALLEST - 1, SMALLEST, SMALLEST + 1, 65 * 1009, LARGE - 1, LARGE)):
        for first in (0, 48, LARGE):
            for dtype in map(np.dtype, ("i1", "f2", "f4", "c16")):
                end = first + nbytes - nbytes % dtype.itemsize
                memory[...] = 200 + rank
                reduce_and_check(memory[first:end].view(dtype), rank, world_size, salt=salt)
                assert (memory[:first] == 200 + rank).all()
                assert (memory[end:] == 200 + rank).all()


@pytest.fixture
def returns_early():
    """All entries of this rank return to Python as often as they can; counts the returns after a piece."""
    budget = dist.group.WORLD.backend.context.words[words.FULL_WAIT + 2 :][:1]  # nanoseconds
    usual, budget[0] = budget[0], 0
    with patch.object(Wait, "worked") as worked:
        yield worked
    budget[0] = usual


@pytest.mark.ranks(2, 3)
def test_all_reduce_that_returns_to_python_after_every_piece(rank, world_size, returns_early):
    for salt, nbytes in enumerate((SMALLEST, LARGE + 4, 3 * LARGE)):
        reduce_and_check(symmetric.empty(nbytes // 4, np.float32), rank, world_size, salt=salt)
    assert returns_early.call_count > 3


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("slow", [0, 1])
def test_no_rank_returns_before_the_slowest_slice_is_stored(rank, world_size, slow, returns_early, tmp_path):
    """The slow rank goes on after its first piece only when its peers wait for it, or have returned too early."""
    context, x = dist.group.WORLD.backend.context, symmetric.zeros(LARGE, np.float32)

    def look(needed, doing):
        if context[words.WROTE] == 2:  # it waits at the end of the call
            (tmp_path / str(rank)).touch()

    def await_peers():
        while len(list(tmp_path.iterdir())) < world_size - 1:
            time.sleep(1e-3)

    returns_early.side_effect = await_peers if rank == slow else None
    x[...] = rank + 1
    with patch.object(dist.group.WORLD.monitor, "decide", look):
        dist.all_reduce(x)
    if rank != slow:
        (tmp_path / str(rank)).touch()
    assert (x == world_size * (world_size + 1) / 2).all()
    assert returns_early.called


@pytest.mark.ranks(2, 3, 4)
def test_between_other_collectives(rank, world_size):
    x, y = symmetric.empty(40_000, np.float32), symmetric.empty((200, 200), np.float32)
    plain = np.empty(40_000, np.float32)
    for turn in range(30):
        reduce_and_check((x, plain, y)[turn % 3], rank, world_size, salt=turn)
        y[...] = rank
        dist.broadcast(y, turn % world_size)
        assert (y == turn % world_size).all()
        reduce_and_check((x[turn:], x[:1000], plain[:5])[turn % 3], rank, world_size, salt=turn)
        parts = [np.empty(40_000, np.float32) for _ in range(world_size)]
        x[...] = rank
        dist.all_gather(parts, x)
        assert [part[turn] for part in parts] == list(range(world_size))
        dist.barrier()


@pytest.mark.ranks(2, 3)
def test_asynchronous_averaged_scaled_custom_and_strided(rank, world_size):
    x = symmetric.empty(90_000, np.float32)
    x[...] = rank + 1
    assert dist.all_reduce(x, async_op=True).wait()
    total = world_size * (world_size + 1) / 2
    assert (x == total).all()
    first = ReduceOp.custom(lambda a, b: a, "first")
    for op, want in ((ReduceOp.AVG, total), (ReduceOp.PREMUL_SUM(0.5), total * world_size / 2), (first, 1)):
        if op is first:
            x[...] = rank + 1
        dist.all_reduce(x, op)
        assert (x == want).all()
    dist.all_reduce(x[::2])
    assert (x[::2] == world_size).all()
    assert (x[1::2] == 1).all()


@pytest.mark.ranks(3)
def test_in_a_group_of_some_ranks(rank, world_size):
    some = dist.new_group([0, 2])
    if rank == 1:
        for make in (symmetric.empty, symmetric.zeros):
            with pytest.warns(UserWarning, match=rf"symmetric\.{make.__name__} on rank 1") as warned:
                assert make(3, group=some) is None
            assert warned[0].filename == __file__
        return
    x = symmetric.zeros(10_000, group=some)
    x[...] = rank
    dist.all_reduce(x, group=some)
    assert (x == 2).all()
    dist.barrier(some)  # no rank may write into an array that its owner is still checking
    symmetric.put(x[5:7], np.full(2, 10.0 + rank), 2 - rank)
    dist.barrier(some)
    assert x[6] == 12 - rank
    assert symmetric.peer(x, group_rank=(2 - rank) // 2)[5] == 10 + rank
    with pytest.raises(dist.UsageError, match=r"ranks \[0, 2\]"):
        symmetric.peer(x, 1)


@pytest.mark.ranks(1, 3)
def test_shapes_and_dtypes(rank, world_size):
    for shape in (3, (3,), [2, 5], (), (0, 4), np.int64(6)):
        for dtype in (np.float32, "f2", np.int8, oracle.RECORD, ">f4", "U5"):
            x = symmetric.zeros(shape, dtype)
            assert (type(x), x.dtype, x.shape) == (np.ndarray, np.dtype(dtype), np.zeros(shape).shape)
            assert x.flags.carray, "contiguous, aligned and writeable"
            assert not x.view(np.uint8).any() if x.shape and x.dtype.isbuiltin else True
            x[...] = np.zeros(1, dtype)
            dist.barrier()
            assert symmetric.peer(x, 0).shape == x.shape
    assert symmetric.empty(1).dtype == np.float64


@pytest.mark.ranks(1, 2, 5)
def test_peers_see_what_is_written(rank, world_size):
    x = symmetric.zeros((4, 6), np.int64)
    x[...] = rank
    dist.barrier()
    for other in range(world_size):
        theirs = symmetric.peer(x, other)
        assert symmetric.is_symmetric(theirs)
        assert (theirs == other).all()
        assert (symmetric.peer(theirs, rank) == rank).all()
    dist.barrier()
    after = (rank + 1) % world_size
    for view in (x[1], x[:, 2], x[3:1:-1, ::2], x[2:3, 3:5].T):
        symmetric.peer(view, after)[...] = 100 + rank
        dist.barrier()
        assert (view == 100 + (rank - 1) % world_size).all()
        assert view.base is not None
        dist.barrier()


@pytest.mark.ranks(1, 2, 3)
def test_put_and_get(rank, world_size):
    x = symmetric.zeros((50, 40), np.float32)
    before, after = (rank - 1) % world_size, (rank + 1) % world_size
    mine = np.random.default_rng(rank).random((50, 40), np.float32)
    theirs = np.random.default_rng(before).random((50, 40), np.float32)
    symmetric.put(x, mine, after)
    symmetric.signal(x, after)
    symmetric.wait(x, before)
    np.testing.assert_array_equal(x, theirs)
    np.testing.assert_array_equal(symmetric.get(x, after), mine)
    part = x[3:9, 4:7]  # strided
    out = np.zeros((7, 6), np.float32)[1:].T[:3].T
    assert symmetric.get(part, after, out) is out
    np.testing.assert_array_equal(out, mine[3:9, 4:7])
    dist.barrier()
    symmetric.put(part, mine[:6, :3], group_rank=after)
    dist.barrier()
    np.testing.assert_array_equal(part, theirs[:6, :3])
    dist.barrier()
    if rank == 0:
        assert symmetric.get(x, after, x) is x
        np.testing.assert_array_equal(x[20:], mine[20:])
    dist.barrier()
    line, last = symmetric.empty(1000, np.int32), world_size - 1
    line[...] = np.arange(1000)
    dist.barrier()
    if rank == 0:  # arrays that overlap, if it is this rank's own
        symmetric.put(line[1:], symmetric.peer(line, last)[:-1], last)
    dist.barrier()
    np.testing.assert_array_equal(line, np.r_[0, np.arange(999)] if rank == last else np.arange(1000))


@pytest.mark.ranks(2, 3)
def test_signals_are_counted_for_each_channel_and_two_threads_may_wait(rank, world_size):
    x = symmetric.zeros(2, np.int64)
    after, before = (rank + 1) % world_size, (rank - 1) % world_size
    for _ in range(3):
        symmetric.signal(x, after, channel=2)
    symmetric.signal(x, after, channel=15)
    symmetric.signal(x, rank)
    symmetric.wait(x, rank)
    for _ in range(3):
        symmetric.wait(x, before, channel=2)
    symmetric.wait(x[1:], group_rank=before, channel=15)

    def one_after_the_other():
        symmetric.signal(x, after, 0)
        symmetric.wait(x, before, 0)
        symmetric.signal(x, after, 1)

    assert together(lambda: symmetric.wait(x, before, 1), one_after_the_other) == [None, None]
    for turn in range(200):  # ping-pong: the data of a put is visible after the wait
        if rank == 0:
            symmetric.put(x, np.array([turn, -turn]), 1)
            symmetric.signal(x, 1)
            symmetric.wait(x, 1)
        elif rank == 1:
            symmetric.wait(x, 0)
            assert x.tolist() == [turn, -turn]
            symmetric.signal(x, 0)


@pytest.mark.ranks(2, 3)
def test_differences_between_ranks_are_mismatches_and_change_nothing(rank, world_size):
    x, y = symmetric.zeros(10_000), symmetric.zeros(10_000)
    last, end = rank == world_size - 1, world_size - 1
    shapes, types = (
        r"rank 0: shape \(1,\) of float64; rank 1: shape \(2,\)",
        r"rank 0: .* float32; rank 1: .* int32",
    )
    for call, match in (
        (
            lambda: dist.all_reduce(x if last else x.copy()),
            rf"rank {end} called .*\(.*, in symmetric memory\)",
        ),
        (
            lambda: dist.all_reduce(x[1:9001] if last else x[:9000]),
            f"rank {end} .* at byte 8 of symmetric array 0",
        ),
        (lambda: dist.all_reduce(y if last else x), "byte 0 of symmetric array 1; pass the same slice"),
        (lambda: dist.all_reduce(x[:9000] if last else x), "all_reduce"),
        (lambda: symmetric.empty(1 + min(rank, 1)), shapes),
        (lambda: symmetric.empty(4, "int32" if rank else "float32"), types),
        (lambda: symmetric.empty(3) if rank else dist.barrier(), r"symmetric\.empty"),
    ):
        with pytest.raises(dist.MismatchError, match=match):
            call()
    refused = r"rank 0 cannot .* KiB free, \d+ KiB are needed; .*smaller arrays"
    with pytest.raises(dist.ResourceError, match=refused):
        symmetric.empty(1 << 44, np.int8)
    assert not x.any()
    assert not y.any()
    reduce_and_check(x, rank, world_size)


@pytest.mark.ranks(2, 3)
def test_a_rank_without_descriptors_is_an_error_on_all(rank, world_size):
    before = holdings("/dev/shm/fastcoll")
    error = OSError(errno.EMFILE, os.strerror(errno.EMFILE)) if rank == 1 else None
    refused = r"rank 1 cannot make a symmetric array of .*Too many open"
    attach = patch.object(Segment, "attach", side_effect=error, wraps=Segment.attach)
    with attach, pytest.raises(dist.ResourceError, match=refused):
        symmetric.empty(5)
    dist.barrier()
    assert holdings("/dev/shm/fastcoll") == before
    reduce_and_check(symmetric.zeros(10_000), rank, world_size)


@pytest.mark.ranks(1)
def test_wrong_arguments(rank, world_size):
    x = symmetric.zeros((3, 2))
    frozen = np.zeros((3, 2))
    frozen.flags.writeable = False
    ranks = {}, {"rank": 0, "group_rank": 0}, {"rank": 1}, {"group_rank": -1}, {"rank": "0"}
    dtypes = object, "nonsense", "V0", np.dtype(("f4", (2,)))
    for call, wrong, error, match in (
        (symmetric.empty, (-1, (2, -1), "ab", 1.5, None), dist.UsageError, None),
        (lambda dtype: symmetric.empty(3, dtype), dtypes, dist.ArrayError, None),
        (lambda ranks: symmetric.peer(x, **ranks), ranks, dist.UsageError, None),
        (
            lambda other: symmetric.peer(other, 0),
            (x.copy(), [1.0], None),
            dist.UsageError,
            r"symmetric\.empty",
        ),
        (
            lambda value: symmetric.put(x, value, 0),
            (1.0, np.zeros(3), frozen.astype("f4")),
            dist.ArrayError,
            None,
        ),
        (lambda out: symmetric.get(x, 0, out), (frozen,), dist.ArrayError, "read-only"),
        (lambda channel: symmetric.signal(x, 0, channel), (-1, 16, None), dist.UsageError, "channel"),
        (lambda timeout: symmetric.wait(x, 0, timeout=timeout), (0,), dist.UsageError, "timeout"),
    ):
        for value in wrong:
            with pytest.raises(error, match=match):
                pytest.fail(f"{value!r} was taken: {call(value)}")
    assert not any(map(symmetric.is_symmetric, (x.copy(), [1.0], None)))


@pytest.mark.ranks(2, init=False)
def test_arrays_outlive_their_group(rank, world_size):
    dist.init_process_group()
    x = symmetric.zeros(5)
    symmetric.put(x, np.full(5, rank + 1.0), 1 - rank)
    dist.barrier()
    dist.destroy_process_group()
    assert (x == 2 - rank).all()
    assert (symmetric.peer(x, 1 - rank) == rank + 1).all()
    for call, *arguments in ((symmetric.put, x.copy(), 0), (symmetric.signal, 0), (symmetric.wait, 0)):
        with pytest.raises(dist.NotInitializedError):
            call(x, *arguments)


@pytest.mark.ranks(2, init=False)
def test_a_wait_without_a_signal_ends_with_its_timeout(rank, world_size):
    dist.init_process_group()
    x = symmetric.zeros(5)
    late = r"symmetric\.wait on channel 3.*rank 1 .* within the timeout of 0\.2 s"
    if rank == 0:
        with pytest.raises(dist.CollectiveTimeoutError, match=late):
            symmetric.wait(x, 1, channel=3, timeout=0.2)
    with pytest.raises(
        dist.AbortedError if rank else dist.CollectiveTimeoutError, match=r"the timeout of 0\.2 s"
    ):
        dist.barrier()
    dist.destroy_process_group()


@pytest.mark.ranks(2, init=False)
@pytest.mark.parametrize("aborts", [True, False])
def test_abort_and_destroy_end_a_wait(rank, world_size, aborts):
    dist.init_process_group()
    x = symmetric.zeros(5)

    def end():
        dist.barrier()  # both wait now
        if aborts:
            dist.group.WORLD.abort("enough")
        dist.destroy_process_group()

    error, _ = together(lambda: symmetric.wait(x, 1 - rank), once_busy(dist.group.WORLD, end))
    assert type(error) is dist.AbortedError


@pytest.mark.ranks(2)
def test_hundreds_of_allocations_leave_nothing(rank, world_size):
    symmetric.zeros(3)
    before = holdings("/dev/shm/fastcoll")
    kept = [symmetric.zeros(20_000, np.float32) for _ in range(40)]  # more than the table has rows at first
    for turn in range(300):
        x = symmetric.empty(5000, np.float32)
        x[...] = turn
        if turn % 30 == 0:
            dist.all_reduce(x)
            assert (x == 2 * turn).all()
            reduce_and_check(kept[turn // 30 * 3], rank, world_size, salt=turn)
    assert holdings("/dev/shm/fastcoll") == before | {
        what: before[what] + 41 for what in ("descriptors", "mappings")
    }
    del kept, x
    assert holdings("/dev/shm/fastcoll") == before


@pytest.mark.ranks(2)
def test_memory_stays_mapped_while_an_array_uses_it(rank, world_size):
    x = symmetric.zeros(100_000)
    memory = weakref.ref(x.base.base)
    tail = symmetric.peer(x[90_000:], 1 - rank)
    del x
    gc.collect()
    assert memory() is not None
    tail[...] = 5
    dist.barrier()
    del tail
    gc.collect()
    assert memory() is None
    # A new array at a freed address is an ordinary array.
    for y in [np.full(100_000, float(rank)) for _ in range(8)]:
        dist.all_reduce(y)
        assert (y == 1).all()


@pytest.mark.ranks(1, backend="tcp")
def test_the_error_of_other_backends_names_the_cure(rank, world_size):
    with pytest.raises(dist.UnavailableError, match=r"runs on tcp.*new_group"):
        symmetric.empty(3)


def test_without_a_group():
    with pytest.raises(dist.NotInitializedError):
        symmetric.empty(3)


@pytest.mark.ranks(1)
def test_ctrl_c_ends_a_wait_and_the_group_stays_usable(rank, world_size):
    x = symmetric.zeros(3)

    interrupt = partial(signal.pthread_kill, threading.main_thread().ident, signal.SIGINT)
    interrupter = threading.Thread(target=once_busy(dist.group.WORLD, interrupt))
    interrupter.start()
    with pytest.raises(KeyboardInterrupt):
        symmetric.wait(x, 0)
    interrupter.join()
    symmetric.signal(x, 0)
    symmetric.wait(x, 0)
    dist.barrier()


@pytest.mark.ranks(1)
@pytest.mark.parametrize("comes", [True, False])
def test_a_wait_for_a_signal_leaves_the_record_when_it_ends(rank, world_size, monkeypatch, comes):
    group, slots = dist.new_group(), set()
    x = symmetric.zeros(3, group=group)
    record = SimpleNamespace(
        waits=lambda slot, *_, **__: slots.add(slot), waits_no_more=slots.discard, is_in_call=False
    )

    def act():
        until(lambda: slots)
        if comes:
            symmetric.signal(x, 0)
        else:
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    actor = threading.Thread(target=act)
    with monkeypatch.context() as patch:
        patch.setattr(group.monitor, "record", record)
        actor.start()
        with nullcontext() if comes else pytest.raises(KeyboardInterrupt):
            symmetric.wait(x, 0)
        actor.join()
    assert not slots
    group.close()


@pytest.mark.ranks(2)
def test_a_rank_that_attaches_after_the_others_have_given_up_gets_their_error(rank, world_size, monkeypatch):
    group, attach = dist.new_group(), Segment.attach

    def late(name, layout):
        while os.path.exists(f"/dev/shm/{name}"):
            time.sleep(0.01)
        return attach(name, layout)

    monkeypatch.setattr(Segment, "attach", late)
    if rank == 0:
        group.timeout = 0.5
    with pytest.raises(dist.GroupError, match=r"rank 0 .*failed the group: " if rank else None) as caught:
        symmetric.zeros(3, group=group)
    if rank == 0:
        assert isinstance(caught.value, dist.CollectiveTimeoutError)
        assert caught.value.ranks == (1,)
    dist.barrier()
