"""Arrays on GPUs over MPI, run inside MPI jobs by rank.py: host memory stands in for GPU memory (gpu/fake_*.py).

The MPI libraries differ from CUDA-aware ones only in what they declare, and accept the same addresses.
"""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from gpu.fake_array import FakeArray
from gpu.fake_runtime import FakeRuntime
from interrupts import interrupted

import fastcoll as dist
from fastcoll import ReduceOp
from fastcoll.gpu import cuda_aware_mpi, staged
from fastcoll.kernels.reduce import reducer
from fastcoll.net.mpi import backend, execution
from fastcoll.net.mpi import library as mpi_library

from .cases import SIZES, all_moves, usable

pytestmark = pytest.mark.ranks(*SIZES)
BYTES = 3, 1009, 50_000


@pytest.fixture
def gpu():
    """A fake GPU, on which queued work runs only when a thread waits for it."""
    with FakeRuntime().installed() as fake:
        yield fake
        assert fake.left() == []


def make_aware(monkeypatch, answer):
    """Let the libraries of new groups declare whether they are CUDA-aware."""
    monkeypatch.setattr(backend, "load", lambda: mpi_library.load()._replace(cuda_aware=answer))


@pytest.fixture
def group(gpu, monkeypatch):
    """A group whose MPI library accepts arrays on GPUs."""
    make_aware(monkeypatch, True)
    group = dist.new_group(timeout=90)
    yield group
    dist.destroy_process_group(group)
    usable()


class HostKernel:
    """Stands in for a CudaReducer: the CPU's reducer, queued like a kernel."""

    def __init__(self, fake, op, dtype):
        self.fake, self.how, self.itemsize = fake, reducer(op, dtype), dtype.itemsize
        self.call = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 5)(self.how.address)

    def launch(self, target, sources, count, stream):
        def run():
            addresses = np.array(sources, np.int64)
            self.call(self.how.code, target, addresses.ctypes.data, len(sources), count)

        self.fake.queue("kernel", stream, run)


@pytest.fixture
def kernels(gpu, monkeypatch):
    """Let the GPU reduce."""

    def made(memory, op, dtype, blocks):
        return HostKernel(gpu, op, dtype)

    monkeypatch.setattr(cuda_aware_mpi.DeviceMemory, "reducer", made)


def through_host(fake):
    """The number of copies between the GPU and the host so far."""
    return [what for what, _ in fake.queued if what in ("to_host", "to_device")]


@pytest.mark.parametrize("count", BYTES)
@pytest.mark.usefixtures("kernels")
def test_arrays_are_passed_to_mpi_without_staging(rank, world_size, count, gpu, group, monkeypatch):
    monkeypatch.setattr(execution, "LARGEST", 40_000)
    all_moves(rank, world_size, count, group, on=FakeArray)
    x = np.repeat(np.arange(world_size) + 10 * rank, count)
    dist.all_to_all_single(FakeArray(x), FakeArray(x), group=group)
    assert (x == np.repeat(10 * np.arange(world_size) + rank, count)).all()
    lists = [np.zeros((world_size, n), int) for n in (2, count)]
    outs = [[FakeArray(row) for row in rows] for rows in lists]
    dist.all_gather_coalesced(outs, [FakeArray(np.full(n, rank)) for n in (2, count)], group=group)
    assert all((row == r).all() for rows in lists for r, row in enumerate(rows))
    work = dist.broadcast(FakeArray(x), 1, group=group, async_op=True)
    work.wait()
    assert (x == np.repeat(10 * np.arange(world_size) + 1, count)).all()
    assert through_host(gpu) == []


@pytest.mark.parametrize("segment", [execution.SEGMENT, 4000])
@pytest.mark.usefixtures("kernels")
def test_reductions_have_the_bits_of_the_host(rank, world_size, segment, gpu, group, monkeypatch):
    monkeypatch.setattr(execution, "SEGMENT", segment)
    monkeypatch.setattr(execution, "GATHERED", 1000)
    rng = np.random.default_rng(rank)
    root = world_size - 1
    for op, dtype in {
        ReduceOp.SUM: "f4",
        ReduceOp.AVG: "f2",
        ReduceOp.PRODUCT: "c16",
        ReduceOp.MAX: "i8",
    }.items():
        for count in (0, 3, 2003):
            x = (10 * rng.standard_normal(count)).astype(dtype)
            blocks = [(10 * rng.standard_normal(count + r)).astype(dtype) for r in range(world_size)]
            results = []
            for on in (lambda x: x, FakeArray):
                y, z, out, parts = x.copy(), x.copy(), np.zeros_like(blocks[rank]), [x.copy(), x[:2].copy()]
                dist.all_reduce(on(y), op, group=group)
                dist.reduce(on(z), root, op, group=group)
                dist.reduce_scatter(on(out), [on(block) for block in blocks], op, group=group)
                dist.all_reduce_coalesced([on(part) for part in parts], op, group=group)
                results.append([y, z, out, *parts])
            for host, device in zip(*results, strict=True):
                assert host.tobytes() == device.tobytes()
    assert through_host(gpu) == []


def test_where_one_rank_has_no_kernels_all_reduce_on_the_host(
    rank, world_size, group, monkeypatch, kernels, gpu
):
    made = cuda_aware_mpi.DeviceMemory.reducer
    lacks = rank == 1
    monkeypatch.setattr(cuda_aware_mpi.DeviceMemory, "reducer", lambda *args: None if lacks else made(*args))
    for factor, op in ((1, ReduceOp.SUM), (2, ReduceOp.PREMUL_SUM(2.0))):
        x = np.full(1009, float(rank))
        dist.all_reduce(FakeArray(x), op, group=group)
        assert (x == factor * sum(range(world_size))).all()
    assert "kernel" not in [what for what, _ in gpu.queued]


@pytest.mark.usefixtures("kernels")
def test_reductions_without_kernels_are_staged(rank, world_size, group, monkeypatch):
    largest = ReduceOp.custom(lambda a, b: a if abs(a) > abs(b) else b, "largest")
    x = np.full(5, -float(rank))
    dist.all_reduce(FakeArray(x), largest, group=group)
    assert (x == 1 - world_size).all()
    y = np.full(5, rank + 1)
    dist.scan(FakeArray(y), group=group)
    assert (y == sum(range(rank + 2))).all()
    y[:] = rank + 1
    dist.exscan(FakeArray(y), group=group)
    assert (y == (sum(range(rank + 1)) or 1)).all()
    monkeypatch.setattr(cuda_aware_mpi, "MOST_SOURCES", 1)
    dist.all_reduce(FakeArray(y[:1]), ReduceOp.MIN, group=group)
    assert y[0] == 1


@pytest.mark.usefixtures("kernels")
def test_calls_wait_for_the_arrays_streams(rank, world_size, gpu, group):
    stream = gpu.new_stream(0)
    x = np.full(1009, -1)
    gpu.queue("kernel", stream, lambda: x.fill(rank))
    dist.broadcast(FakeArray(x, stream), 1, group=group)
    assert (x == 1).all()
    gpu.queue("kernel", stream, lambda: x.fill(rank + 5))
    dist.all_reduce(FakeArray(x, stream), ReduceOp.MAX, group=group)
    assert (x == world_size + 4).all()
    peer = rank ^ 1
    y, seen = np.full(1009, -1), []
    gpu.queue("kernel", stream, lambda: x.fill(rank))
    gpu.queue("kernel", stream, lambda: seen.append(y.max()))
    received = dist.irecv(FakeArray(y, stream), peer, group=group)
    dist.send(FakeArray(x, stream), peer, group=group)
    assert received.wait() is not False
    assert (y == peer).all()
    assert seen == [-1]  # its stream has finished reading
    gpu.end_stream(stream)


def test_messages_of_all_lengths_between_gpus_and_hosts(rank, world_size, gpu, group):
    peer = rank ^ 1
    for count in (0, 122, 123, 124, 100_003):
        for give, take in [(FakeArray, FakeArray), (FakeArray, np.asarray), (np.asarray, FakeArray)]:
            gpu.queued.clear()
            x, y = np.arange(count) + rank, np.zeros(count, int)
            if rank < peer:
                dist.send(give(x), peer, group=group)
                assert dist.recv(take(y), None if world_size == 2 else peer, group=group) == peer
            else:
                assert dist.recv(take(y), peer, group=group) == peer
                dist.send(give(x), peer, group=group)
            assert (y == np.arange(count) + peer).all()
            assert count <= 123 or through_host(gpu) == []


def test_messages_without_a_receive(rank, world_size, gpu, group):
    """They, and messages of a rank to itself, wait in host memory."""
    x = np.arange(1009) + rank
    if rank == 0:
        works = [dist.isend(FakeArray(x), 1, group=group, tag=tag) for tag in (3, 4)]
        for work in works:
            work.wait()
    elif rank == 1:
        first, second = np.zeros((2, 1009), int)
        dist.recv(FakeArray(second), 0, group=group, tag=4)
        dist.recv(FakeArray(first), group=group, tag=3)
        assert (first == np.arange(1009)).all()
        assert (second == first).all()
        assert through_host(gpu) == ["to_device"]
    y = np.zeros_like(x)
    dist.send(FakeArray(x), rank, group=group)
    dist.recv(FakeArray(y[::-1][::-1]), rank, group=group)
    assert (y == x).all()


def test_threads_that_carry_messages_have_the_arrays_gpu(rank, world_size, monkeypatch):
    """MPI libraries use the current GPU of the calling thread."""
    make_aware(monkeypatch, True)
    x, y, used, peer = np.full(1009, rank), np.zeros(1009, int), set(), rank ^ 1
    with FakeRuntime(devices=2).installed() as fake:
        group = dist.new_group(timeout=90)
        requests = group.backend.pipe._requests
        poll = requests.poll
        monkeypatch.setattr(requests, "poll", lambda mode: used.add(fake.current()) or poll(mode))
        for array in (x, y):
            fake.place(array, 1)
        works = [dist.irecv(FakeArray(y), peer, group=group), dist.isend(FakeArray(x), peer, group=group)]
        for work in works:
            work.wait()
        assert (y == peer).all()
        assert used == {1}
        dist.destroy_process_group(group)


@pytest.mark.parametrize("count", [1, 30_000])
@pytest.mark.usefixtures("kernels")
def test_ranks_must_agree_where_the_arrays_are(rank, world_size, count, group):
    x = np.zeros(count)
    for call in (dist.all_reduce, lambda x, group: dist.broadcast(x, 0, group=group)):
        with pytest.raises(dist.MismatchError, match=r"arrays of \[1\] are on GPUs"):
            call(FakeArray(x) if rank == 1 else x, group=group)
    with pytest.raises(dist.MismatchError, match=r"SUM.*MAX"):
        dist.all_reduce(FakeArray(x), ReduceOp.MAX if rank == 1 else ReduceOp.SUM, group=group)
    usable(group)
    dist.all_reduce(FakeArray(x), group=group)


def test_one_library_that_is_not_cuda_aware_makes_all_stage(rank, world_size, gpu, monkeypatch):
    """In rows, in one transfer, and in segments."""
    make_aware(monkeypatch, rank != 1)
    monkeypatch.setattr(staged, "SEGMENT", 100_000)
    group = dist.new_group()
    for count in (3, 10_000, 50_000):
        x = np.full(count, float(rank))
        dist.all_reduce(FakeArray(x), group=group)
        assert (x == sum(range(world_size))).all()
        all_moves(rank, world_size, count, group, on=FakeArray)
        if rank == 0:
            dist.send(FakeArray(x), 1, group=group)
        elif rank == 1:
            x[:] = -1
            dist.recv(FakeArray(x), 0, group=group)
            assert (x == sum(range(world_size))).all()
    assert type(group.devices()) is staged.StagedCarrier
    dist.destroy_process_group(group)


@pytest.mark.parametrize("call", ["broadcast", "recv"])
def test_a_missing_rank_is_named(rank, world_size, call, group):
    group.timeout = 0.3  # only now, as to meet may take longer
    x = FakeArray(np.ones(50_000))
    if rank != 1:
        with pytest.raises(dist.GroupError, match=r"rank 1 \("):
            dist.broadcast(x, 0, group=group) if call == "broadcast" else dist.recv(x, 1, group=group)
    dist.barrier()


def test_ctrl_c_ends_a_call_on_all_ranks(rank, world_size, group):
    x = FakeArray(np.ones(5000))
    if rank == 0:
        with pytest.raises(KeyboardInterrupt), interrupted(group):
            dist.broadcast(x, 0, group=group)
    else:
        with pytest.raises(dist.AbortedError, match="KeyboardInterrupt"):
            dist.recv(x, 0, group=group)
    dist.barrier()
