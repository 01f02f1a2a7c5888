"""Staging: results, order of streams, segments, errors; ranks are threads on TCP that share a fake GPU."""

from __future__ import annotations

import os
import signal
import threading

import numpy as np
import pytest
from net.groups import everybody

import fastcoll
from fastcoll import ANY_TAG, ReduceOp, Status
from fastcoll.errors import (
    AbortedError,
    ArrayError,
    CollectiveTimeoutError,
    FastcollError,
    GroupError,
    MismatchError,
    NotInitializedError,
    PeerDiedError,
)
from fastcoll.gpu import staged as staged_module
from fastcoll.gpu import staging
from fastcoll.gpu.staged import StagedCarrier

from .fake_array import FakeArray
from .thread_ranks import served

PAIR = np.dtype([("value", "f4"), ("index", "i8")])


def staged(n):
    """Groups of n ranks that accept arrays on GPUs."""
    return served(n, StagedCarrier)


def run(made, call):
    """Run a call on all ranks, and return their results, none of which is an error."""
    results = everybody(made, call)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


@pytest.fixture
def small_segments(monkeypatch):
    """Use segments of 96 bytes, so that small arrays have many."""
    monkeypatch.setattr(staged_module, "SEGMENT", 96)


# ---- results -----------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("gpu", "small_segments")
@pytest.mark.parametrize("dtype", ["i1", "f4", "c16"])
@pytest.mark.parametrize("nbytes", [80, 96, 112, 192, 384, 2000])
def test_segments_give_the_result_of_the_complete_array(dtype, nbytes):
    count, n = nbytes // np.dtype(dtype).itemsize, 3
    inputs = [(np.arange(count) * (r + 1) % 9).astype(dtype) for r in range(n)]
    want = np.sum(inputs, axis=0, dtype=dtype)
    with staged(n) as made:
        for call, wants in (
            (lambda g, x: g.all_reduce(x), [want] * n),
            (lambda g, x: g.reduce(x, 1), [inputs[0], want, inputs[2]]),
            (lambda g, x: g.broadcast(x, 2), [inputs[2]] * n),
        ):
            xs = [x.copy() for x in inputs]
            run(made, lambda g, call=call, xs=xs: call(g, FakeArray(xs[g.rank])))
            assert all((x == want).all() for x, want in zip(xs, wants, strict=True))


@pytest.mark.usefixtures("gpu", "small_segments")
def test_coalesced_arrays_are_cut_anywhere():
    shapes = [(3,), (0,), (50,), (), (7, 5), (1,)]
    with staged(2) as made:
        xs = [[np.full(shape, 10.0 * k + g.rank) for k, shape in enumerate(shapes)] for g in made]
        run(made, lambda g: g.all_reduce_coalesced([FakeArray(x) for x in xs[g.rank]]))
        assert all((x == 20.0 * k + 1).all() for mine in xs for k, x in enumerate(mine))
        outs = [[[np.zeros(shape) for _ in range(2)] for shape in shapes] for _ in made]
        run(made, lambda g: g.all_gather_coalesced(
            [[FakeArray(out) for out in pair] for pair in outs[g.rank]],
            [FakeArray(np.full(shape, 10.0 * k + g.rank)) for k, shape in enumerate(shapes)],
        ))  # fmt: skip
        assert all(
            (out == 10.0 * k + r).all()
            for mine in outs
            for k, pair in enumerate(mine)
            for r, out in enumerate(pair)
        )


@pytest.mark.usefixtures("gpu", "small_segments")
@pytest.mark.parametrize("count", [5, 100])
def test_premul_sum_scales_reduced_inputs_only(count):
    with staged(2) as made:
        op = [ReduceOp.PREMUL_SUM(2.0), ReduceOp.PREMUL_SUM(3.0)]
        xs = [np.full(count, g.rank + 1.0) for g in made]
        run(made, lambda g: g.all_reduce(FakeArray(xs[g.rank]), op[g.rank]))
        assert all((x == 8).all() for x in xs)
        xs = [np.full(count, g.rank + 1.0) for g in made]
        run(made, lambda g: g.reduce(FakeArray(xs[g.rank]), 1, op[g.rank]))
        run(made, lambda g: g.exscan(FakeArray(xs[g.rank]), op[g.rank]))
        assert [x[-1] for x in xs] == [1, 2]
        outs = [np.zeros(2 * count) for _ in made]
        run(made, lambda g: g.reduce_scatter_single(
            FakeArray(outs[g.rank][:count]), FakeArray(np.full(2 * count, g.rank + 1.0)), op[g.rank]
        ))  # fmt: skip
        assert all((out[:count] == 8).all() and (out[count:] == 0).all() for out in outs)
        with pytest.raises(ArrayError, match="PREMUL_SUM takes float and complex"):
            made[0].all_reduce(FakeArray(np.ones(3, "i4")), op[0])


@pytest.mark.usefixtures("gpu")
def test_arrays_of_a_call_may_overlap_anywhere():
    with staged(2) as made:
        rooms = [np.arange(6) + 10 * g.rank for g in made]

        def shift(g):
            x = rooms[g.rank]
            g.all_to_all_single(FakeArray(x[1:5]), FakeArray(x[:4]))

        run(made, shift)
        assert [x.tolist() for x in rooms] == [[0, 0, 1, 10, 11, 5], [10, 2, 3, 12, 13, 15]]


@pytest.mark.usefixtures("gpu", "small_segments")
def test_a_users_operation_on_records():
    best = ReduceOp.custom(lambda a, b: b if b.value > a.value else a)
    with staged(2) as made:
        xs = [np.array([(k % 2 ^ g.rank, g.rank) for k in range(30)], PAIR) for g in made]
        run(made, lambda g: g.all_reduce(FakeArray(xs[g.rank]), best))
        assert xs[0]["index"].tolist() == xs[1]["index"].tolist() == [1, 0] * 15


@pytest.mark.usefixtures("gpu")
def test_a_shorter_message_leaves_the_rest_of_the_array():
    with staged(2) as made:
        got, found = [np.full(5, -1.0), np.full(5, -1.0)], [Status(), Status()]

        def talk(g):
            if g.rank == 0:
                return [g.send(FakeArray(np.full(n, 4.0)), 1, tag=n) for n in (3, 0)]
            first = g.recv(FakeArray(got[0]), None, ANY_TAG, found[0])
            return [first, g.irecv(FakeArray(got[1]), 0, 0, found[1]).result()]

        assert run(made, talk) == [[None, None], [0, 0]]
        assert [(status.tag, status.count) for status in found] == [(3, 3), (0, 0)]
        assert got[0].tolist() == [4.0] * 3 + [-1.0] * 2
        assert got[1].tolist() == [-1.0] * 5


# ---- order -------------------------------------------------------------------------------------------------


def test_earlier_work_on_the_arrays_streams_comes_first(gpu):
    with staged(2) as made:
        xs = [np.zeros(4) for _ in made]
        streams = [gpu.new_stream(0) for _ in made]

        def late(g):
            gpu.queue("kernel", streams[g.rank], lambda: xs[g.rank].fill(g.rank + 1))
            return g.all_reduce(FakeArray(xs[g.rank], stream=streams[g.rank]), async_op=g.rank == 0)

        work, _ = run(made, late)
        work.wait(60)
        assert all((x == 3).all() for x in xs)
        given, taken = np.zeros(4), np.zeros(4)
        gpu.queue("kernel", streams[0], lambda: given.fill(7))
        # An earlier write to the output must not come after the result.
        gpu.queue("kernel", streams[1], lambda: taken.fill(1))
        with staged(1) as (one,):
            one.all_gather([FakeArray(taken, stream=streams[1])], FakeArray(given, stream=streams[0]))
        gpu.settle()
        assert (taken == 7).all()
        got = np.zeros(4)
        gpu.queue("kernel", streams[0], lambda: xs[0].fill(5))
        made[0].isend(FakeArray(xs[0], stream=streams[0]), 1)
        # The receive must not overwrite data that the stream still reads.
        seen = []
        gpu.queue("kernel", streams[1], lambda: seen.append(got[0]))
        made[1].recv(FakeArray(got, stream=streams[1]), 0)
        assert (got == 5).all()
        assert seen == [0]
        for stream in streams:
            gpu.end_stream(stream)


def test_copies_overlap_the_cpus_work(gpu, small_segments):
    with staged(1) as (group,):
        order = []
        plan = group.backend.plan

        def noted(operation, timeout=None):
            call = plan(operation, timeout)
            if operation.kind != "all_reduce":
                return call
            order.extend(what for what, _ in gpu.queued if what.startswith("to_"))
            gpu.queued.clear()
            order.append("cpu")
            return call

        group.backend.plan = noted
        group.all_reduce(FakeArray(np.zeros(48)))
        order.extend(what for what, _ in gpu.queued if what.startswith("to_"))
        assert order == [
            "to_host", "to_host", "cpu", "to_device", "to_host", "cpu", "to_device", "to_host", "cpu", "to_device",
            "cpu", "to_device",
        ]  # fmt: skip


def test_calls_of_cuda_are_made_for_the_arrays_gpu(two_gpus, monkeypatch):
    """Also in other threads, where GPU 0 would be current, and get a context."""
    current = set()

    def noted(call):
        return lambda *args: current.add(two_gpus.current()) or call(*args)

    for name in "pinned to_host to_device wait_stream new_stream record is_past end_event".split():
        monkeypatch.setattr(two_gpus, name, noted(getattr(two_gpus, name)))
    with staged(2) as made:
        xs = [np.ones(4), np.ones(4)]
        for x in xs:
            two_gpus.place(x, 1)
        for work in everybody(made, lambda g: g.all_reduce(FakeArray(xs[g.rank]), async_op=True)):
            work.wait(60)
        xs[0][:] = 3
        receive = made[1].irecv(FakeArray(xs[1]))
        made[0].send(FakeArray(xs[0]), 1)
        receive.wait(60)
        assert xs[1].tolist() == [3.0] * 4
    assert current == {1}


# ---- errors ------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("gpu", "small_segments")
def test_segmented_calls_that_differ_move_nothing():
    with staged(3) as made:
        for call in (
            lambda g, x: g.all_reduce(x[: 100 - (g.rank == 1)]),
            lambda g, x: g.broadcast(x, g.rank % 2),
            lambda g, x: g.reduce(x, 0, (ReduceOp.SUM, ReduceOp.MAX)[g.rank == 2]),
            lambda g, x: g.all_reduce(x) if g.rank else g.broadcast(x, 0),
            lambda g, x: g.all_reduce(x[:5]) if g.rank else g.all_reduce(x),
            lambda g, x: g.all_reduce_coalesced([x[:40], x[40:]] if g.rank else [x[:50], x[50:]]),
        ):
            xs = [np.full(100, g.rank) for g in made]
            results = everybody(made, lambda g, xs=xs, call=call: call(g, OnGpu(xs[g.rank])))
            assert [type(result) for result in results] == [MismatchError] * 3, results
            assert all((x == r).all() for r, x in enumerate(xs))
        x = [np.full(100, g.rank) for g in made]
        run(made, lambda g: g.all_reduce(FakeArray(x[g.rank])))
        assert all((each == 3).all() for each in x)


class OnGpu(FakeArray):
    """A FakeArray with slices."""

    def __getitem__(self, part: slice) -> FakeArray:
        return FakeArray(self.host[part])


@pytest.mark.usefixtures("gpu")
def test_arrays_that_cannot_be_used_are_refused():
    with staged(1) as (group,):
        x = np.ones((4, 4))
        with pytest.raises(ArrayError, match="put all arrays of a call in one place"):
            group.all_gather_single(x, FakeArray(x))
        with pytest.raises(ArrayError, match="BAND"):
            group.all_reduce(FakeArray(x), ReduceOp.BAND, async_op=True)
        with pytest.raises(ArrayError, match="travel='int8' needs an array of float32 in host memory"):
            group.all_reduce_narrow(FakeArray(x.astype("f4")), ReduceOp.SUM, False, "int8", None)
        group.broadcast(FakeArray(x, read_only=True), 0)  # the root's array is only read


@pytest.fixture
def stuck(prompt_gpu):
    """An array whose stream does not get to its end before the test's."""
    gone, stream = threading.Event(), prompt_gpu.new_stream(0)
    prompt_gpu.queue("kernel", stream, gone.wait)
    yield FakeArray(np.ones(3), stream=stream)
    gone.set()
    prompt_gpu.end_stream(stream)


def test_an_array_that_never_gets_ready_ends_by_the_timeout(stuck):
    with staged(2) as made:
        made[0].timeout = 0.1  # the other rank waits for this one
        first, other = everybody(made, lambda g: g.all_reduce(FakeArray(np.ones(3)) if g.rank else stuck))
        assert isinstance(first, CollectiveTimeoutError)
        assert "arrays' streams" in str(first)
        assert isinstance(other, GroupError)


def test_an_abort_ends_the_waiting_for_a_stream(stuck):
    with staged(1) as (group,):
        work = group.all_reduce(stuck, async_op=True)
        group.abort("enough")
        with pytest.raises(AbortedError, match="enough"):
            work.wait(60)


@pytest.mark.parametrize("count", [3, 100])
@pytest.mark.parametrize("method", ["to_host", "to_device", "wait_stream"])
def test_an_error_of_cuda_ends_the_call_on_all_ranks(gpu, small_segments, monkeypatch, count, method):
    """The rank leaves its peers in the middle of a call; they must get an error."""
    with staged(2) as made:
        real, broken = getattr(gpu, method), []

        def fail(*args):
            if threading.current_thread() in broken:
                raise FastcollError("CUDA: copying failed: too bad")
            real(*args)

        monkeypatch.setattr(gpu, method, fail)

        def reduce(g):
            if g.rank == 1:
                broken.append(threading.current_thread())
            try:
                g.all_reduce(FakeArray(np.ones(count)))
                g.barrier()
            finally:
                broken.clear()

        results = everybody(made, reduce)
        assert isinstance(results[0], GroupError)
        assert "too bad" in str(results[1])
        with pytest.raises(AbortedError, match="too bad"):
            made[1].barrier()


@pytest.mark.usefixtures("gpu", "small_segments")
@pytest.mark.parametrize("count", [3, 100])
def test_a_peer_that_leaves_ends_the_call(count):
    with staged(2) as made:
        results = everybody(made, lambda g: g.close() if g.rank else g.all_reduce(FakeArray(np.ones(count))))
        assert isinstance(results[0], GroupError)
        with pytest.raises(GroupError):
            made[0].broadcast(FakeArray(np.ones(count)), 0)


@pytest.mark.long
@pytest.mark.usefixtures("gpu")
@pytest.mark.ranks(2, fresh=True, may_die=[1], timeout=120)
def test_a_killed_peer_leaves_nothing_on_the_gpu(rank):
    x = FakeArray(np.ones(3_000_000, "f4"))
    fastcoll.all_reduce(x)
    assert (x.host == 2).all()
    fastcoll.barrier()  # rank 0 has its result, too
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(PeerDiedError):
        fastcoll.all_reduce(x)
    fastcoll.destroy_process_group()


@pytest.mark.usefixtures("gpu")
def test_after_close_nothing_can_be_started():
    with staged(1) as (group,):
        x = FakeArray(np.ones(3))
        work = group.irecv(x)
        group.close()
        assert isinstance(work.exception(), AbortedError)
        with pytest.raises(NotInitializedError):
            group.all_reduce(x)
        with pytest.raises(NotInitializedError):
            group.isend(x, 0)


# ---- pinned memory -----------------------------------------------------------------------------------------


def test_pinned_memory_is_used_again_and_bounded(gpu, monkeypatch):
    monkeypatch.setattr(staging, "KEPT", 16 << 10)
    with staged(1) as (group,):
        for count in (10, 500, 11, 501):
            group.all_reduce(FakeArray(np.ones(count)))
        pool = group.devices().staging.pool
        assert pool.kept == 4096
        for count in (1000, 2000, 100_000, 700):
            group.scan(FakeArray(np.ones(count, "u1")))
        assert pool.kept <= 16 << 10
        assert sum(gpu._pinned.values()) == pool.kept
