"""Symmetric arrays: all_reduce against NumPy, views of peers, put, get, signal, wait, and errors."""

from __future__ import annotations

import errno
import gc
import os
import signal
import threading
import time
import weakref
from unittest.mock import Mock

import numpy as np
import oracle
import pytest
from oracle import assert_same, reduced, values
from together import together

import fastcoll as dist
from fastcoll import ReduceOp, symmetric
from fastcoll.kernels import waiting
from fastcoll.shm import context_layout as words
from fastcoll.shm.segment import Segment
from fastcoll.testing.worker import Footprint

WORLDS = (1, 2, 3, 5)
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
def test_all_reduce_of_odd_sizes(rank, world_size):
    memory = symmetric.empty(LARGE, np.uint8)
    for salt, nbytes in enumerate((1, 7, SMALLEST - 1, SMALLEST, SMALLEST + 1, 65 * 1009, LARGE - 1, LARGE)):
        for dtype in map(np.dtype, ("i1", "f2", "f4", "c16")):
            x = memory[: nbytes - nbytes % dtype.itemsize].view(dtype)
            reduce_and_check(x, rank, world_size, salt=salt)


@pytest.mark.ranks(2, 3, 5)
def test_only_the_slice_is_reduced(rank, world_size):
    x = symmetric.zeros((30, 1000), np.int32)
    for first, last in ((0, 30), (1, 12), (7, 29), (29, 30), (3, 3)):
        x[...] = -1 - rank
        reduce_and_check(x[first:last], rank, world_size)
        outside = np.delete(x, np.s_[first:last], axis=0)
        assert (outside == -1 - rank).all()


@pytest.mark.ranks(2, 3, 5)
def test_all_reduce_that_returns_to_python_after_every_piece(rank, world_size):
    budget = dist.group.WORLD.backend.context.words[words.BACKOFF + waiting.BUDGET :][:1]
    usual, budget[0] = budget[0], 0
    for salt, nbytes in enumerate((SMALLEST, LARGE + 4, 3 * LARGE)):
        reduce_and_check(symmetric.empty(nbytes // 4, np.float32), rank, world_size, salt=salt)
    budget[0] = usual


@pytest.mark.ranks(2, 3, init=False)
@pytest.mark.parametrize("slow", [0, 1])
def test_no_rank_returns_before_the_slowest_slice_is_stored(rank, world_size, slow):
    dist.init_process_group()
    group = dist.group.WORLD
    x = symmetric.zeros(LARGE // 4, np.float32)
    if rank == slow:
        group.backend.context.words[words.BACKOFF + waiting.BUDGET] = 0
        group.monitor.decide = lambda needed, doing: time.sleep(0.05)
    x[...] = rank + 1
    dist.all_reduce(x)
    assert (x == world_size * (world_size + 1) / 2).all()
    dist.destroy_process_group()


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
    work = dist.all_reduce(x, async_op=True)
    assert work.wait()
    total = world_size * (world_size + 1) / 2
    assert (x == total).all()
    dist.all_reduce(x, ReduceOp.AVG)
    assert (x == total).all()
    dist.all_reduce(x, ReduceOp.PREMUL_SUM(0.5))
    assert (x == total * world_size / 2).all()
    x[...] = rank + 1
    dist.all_reduce(x, ReduceOp.custom(lambda a, b: a, "first"))
    assert (x == 1).all()
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
            assert type(x) is np.ndarray
            assert x.dtype == np.dtype(dtype)
            assert x.shape == np.zeros(shape).shape
            assert x.flags.c_contiguous
            assert x.flags.aligned
            assert x.flags.writeable
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


@pytest.mark.ranks(1, 2)
def test_put_of_overlapping_arrays(rank, world_size):
    x = symmetric.empty(1000, np.int32)
    x[...] = np.arange(1000)
    dist.barrier()
    if rank == 0:
        symmetric.put(x[1:], symmetric.peer(x, world_size - 1)[:-1], world_size - 1)
    dist.barrier()
    want = np.r_[0, np.arange(999)] if rank == world_size - 1 else np.arange(1000)
    np.testing.assert_array_equal(x, want)


@pytest.mark.ranks(2, 3)
def test_signals_are_counted_for_each_channel(rank, world_size):
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
    for turn in range(200):  # ping-pong: the data of a put is visible after the wait
        if rank == 0:
            symmetric.put(x, np.array([turn, -turn]), 1)
            symmetric.signal(x, 1)
            symmetric.wait(x, 1)
        elif rank == 1:
            symmetric.wait(x, 0)
            assert x.tolist() == [turn, -turn]
            symmetric.signal(x, 0)


@pytest.mark.ranks(2)
def test_two_threads_wait_on_channels_of_their_own(rank, world_size):
    x, other = symmetric.zeros(1), 1 - rank

    def one_after_the_other():
        symmetric.signal(x, other, 0)
        symmetric.wait(x, other, 0)
        symmetric.signal(x, other, 1)

    assert together(lambda: symmetric.wait(x, other, 1), one_after_the_other) == [None, None]
    dist.barrier()


@pytest.mark.ranks(2)
def test_an_ordinary_array_on_one_rank_is_a_mismatch(rank, world_size):
    x = symmetric.zeros(10_000)
    with pytest.raises(dist.MismatchError, match=r"rank 1 called all_reduce\(.*, in symmetric memory\)"):
        dist.all_reduce(x if rank else x.copy())
    reduce_and_check(x, rank, world_size)


@pytest.mark.ranks(2, 3)
def test_different_slices_are_a_mismatch(rank, world_size):
    x, y = symmetric.zeros(10_000), symmetric.zeros(10_000)
    last = rank == world_size - 1
    with pytest.raises(
        dist.MismatchError, match=f"rank {world_size - 1} passed the slice at byte 8 of symmetric array 0"
    ):
        dist.all_reduce(x[1:9001] if last else x[:9000])
    with pytest.raises(dist.MismatchError, match="byte 0 of symmetric array 1; pass the same slice"):
        dist.all_reduce(y if last else x)
    with pytest.raises(dist.MismatchError, match="all_reduce"):
        dist.all_reduce(x[:9000] if last else x)
    assert not x.any()
    assert not y.any()
    reduce_and_check(x, rank, world_size)


@pytest.mark.ranks(2, 3)
def test_different_shapes_are_a_mismatch(rank, world_size):
    for shapes, dtypes in (([1, 2], ["float64"] * 2), ([4, 4], ["float32", "int32"])):
        said = "; ".join(rf"rank {k}: shape \({shapes[k]},\) of {dtypes[k]}" for k in range(2))
        with pytest.raises(dist.MismatchError, match=said):
            symmetric.empty(shapes[min(rank, 1)], dtypes[min(rank, 1)])
    with pytest.raises(dist.MismatchError, match=r"symmetric\.empty"):
        _ = symmetric.empty(3) if rank else dist.barrier()
    reduce_and_check(symmetric.zeros(10_000), rank, world_size)


@pytest.mark.ranks(2)
def test_an_array_that_does_not_fit_is_an_error_on_all_ranks(rank, world_size):
    with pytest.raises(
        dist.ResourceError, match=r"rank 0 cannot .* KiB free, \d+ KiB are needed; .*smaller arrays"
    ):
        symmetric.empty(1 << 44, np.int8)
    reduce_and_check(symmetric.zeros(10_000), rank, world_size)


@pytest.mark.ranks(2, 3)
def test_a_rank_without_descriptors_is_an_error_on_all(rank, world_size, monkeypatch):
    before = footprint()
    refused = "rank 1 cannot make a symmetric array of .*Too many open"
    with monkeypatch.context() as patch:
        if rank == 1:
            error = OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            patch.setattr(Segment, "attach", Mock(side_effect=error))
        with pytest.raises(dist.ResourceError, match=refused):
            symmetric.empty(5)
    dist.barrier()
    assert footprint() == before
    reduce_and_check(symmetric.zeros(10_000), rank, world_size)


@pytest.mark.ranks(1)
def test_wrong_arguments(rank, world_size):
    x = symmetric.zeros((3, 2))
    for shape in (-1, (2, -1), "ab", 1.5, None):
        with pytest.raises(dist.UsageError):
            symmetric.empty(shape)
    for dtype in (object, "nonsense", "V0", np.dtype(("f4", (2,)))):
        with pytest.raises(dist.ArrayError):
            symmetric.empty(3, dtype)
    for ranks in ({}, {"rank": 0, "group_rank": 0}, {"rank": 1}, {"group_rank": -1}, {"rank": "0"}):
        with pytest.raises(dist.UsageError):
            symmetric.peer(x, **ranks)
    for ordinary in (x.copy(), [1.0], None):
        with pytest.raises(dist.UsageError, match=r"symmetric\.empty"):
            symmetric.peer(ordinary, 0)
        assert not symmetric.is_symmetric(ordinary)
    for value in (1.0, np.zeros(3), np.zeros((3, 2), np.float32)):
        with pytest.raises(dist.ArrayError):
            symmetric.put(x, value, 0)
    frozen = np.zeros((3, 2))
    frozen.flags.writeable = False
    with pytest.raises(dist.ArrayError, match="read-only"):
        symmetric.get(x, 0, frozen)
    for channel in (-1, 16, None):
        with pytest.raises(dist.UsageError, match="channel"):
            symmetric.signal(x, 0, channel)
    with pytest.raises(dist.UsageError, match="timeout"):
        symmetric.wait(x, 0, timeout=0)


@pytest.mark.ranks(2, init=False)
def test_arrays_outlive_their_group(rank, world_size):
    dist.init_process_group()
    x = symmetric.zeros(5)
    symmetric.put(x, np.full(5, rank + 1.0), 1 - rank)
    dist.barrier()
    dist.destroy_process_group()
    assert (x == 2 - rank).all()
    assert (symmetric.peer(x, 1 - rank) == rank + 1).all()
    for call in (
        lambda: symmetric.put(x, x.copy(), 0),
        lambda: symmetric.signal(x, 0),
        lambda: symmetric.wait(x, 0),
    ):
        with pytest.raises(dist.NotInitializedError):
            call()


@pytest.mark.ranks(2, init=False)
def test_a_wait_without_a_signal_ends_with_its_timeout(rank, world_size):
    dist.init_process_group()
    x = symmetric.zeros(5)
    if rank == 0:
        with pytest.raises(
            dist.CollectiveTimeoutError,
            match=r"symmetric\.wait on channel 3.*rank 1 .* within the timeout of 0\.2 s",
        ):
            symmetric.wait(x, 1, channel=3, timeout=0.2)
    with pytest.raises(
        dist.CollectiveTimeoutError if rank == 0 else dist.AbortedError, match=r"within the timeout of 0\.2 s"
    ):
        dist.barrier()
    dist.destroy_process_group()


@pytest.mark.ranks(2, init=False)
@pytest.mark.parametrize("aborts", [True, False])
def test_abort_and_destroy_end_a_wait(rank, world_size, aborts):
    dist.init_process_group()
    x = symmetric.zeros(5)

    def end():
        while not dist.group.WORLD.gate.is_busy():
            time.sleep(1e-3)
        dist.barrier()  # both wait now
        if aborts:
            dist.group.WORLD.abort("enough")
        dist.destroy_process_group()

    error, _ = together(lambda: symmetric.wait(x, 1 - rank), end)
    assert type(error) is dist.AbortedError


def footprint():
    """Number of this process's descriptors and mappings of shared memory, and the names with its pid."""
    gc.collect()
    with open("/proc/self/maps") as maps:
        mapped = sum("/dev/shm" in line for line in maps)
    links = [fd for fd in Footprint.now().files.values() if fd.startswith("/dev/shm/fastcoll")]
    return len(links), mapped, {name for name in os.listdir("/dev/shm") if f"-{os.getpid()}-" in name}


@pytest.mark.ranks(2)
def test_hundreds_of_allocations_leave_nothing(rank, world_size):
    symmetric.zeros(3)
    before = footprint()
    kept = [symmetric.zeros(20_000, np.float32) for _ in range(40)]  # more than the table has rows at first
    for turn in range(300):
        x = symmetric.empty(5000, np.float32)
        x[...] = turn
        if turn % 30 == 0:
            dist.all_reduce(x)
            assert (x == 2 * turn).all()
            reduce_and_check(kept[turn // 30 * 3], rank, world_size, salt=turn)
    fds, mapped, names = footprint()
    assert (fds, mapped, names) == (before[0] + 41, before[1] + 41, before[2])
    del kept, x
    assert footprint() == before


@pytest.mark.ranks(2)
def test_memory_stays_mapped_while_an_array_uses_it(rank, world_size):
    x = symmetric.zeros(100_000)
    memory = weakref.ref(x.base.base)
    tail = symmetric.peer(x[90_000:], 1 - rank)
    address = x.ctypes.data
    del x
    gc.collect()
    assert memory() is not None
    tail[...] = 5
    dist.barrier()
    del tail
    gc.collect()
    assert memory() is None
    # A new array at a freed address is an ordinary array.
    fresh = [np.full(100_000, float(rank)) for _ in range(8)]
    for y in fresh:
        dist.all_reduce(y)
        assert (y == 1).all(), (address, y.ctypes.data)


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

    def interrupt():
        while not dist.group.WORLD.gate.is_busy():
            time.sleep(1e-3)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    interrupter = threading.Thread(target=interrupt)
    interrupter.start()
    with pytest.raises(KeyboardInterrupt):
        symmetric.wait(x, 0)
    interrupter.join()
    symmetric.signal(x, 0)
    symmetric.wait(x, 0)
    dist.barrier()


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
    with pytest.raises(dist.GroupError) as caught:
        symmetric.zeros(3, group=group)
    if rank == 0:
        assert isinstance(caught.value, dist.CollectiveTimeoutError)
        assert caught.value.ranks == (1,)
    else:
        assert "rank 0" in str(caught.value)
        assert "failed the group: " in str(caught.value)
    dist.barrier()
