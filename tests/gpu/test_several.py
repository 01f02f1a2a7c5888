"""Several arrays per rank: on the host, and on one and two fake GPUs with Numba's simulator.

Cases on GPUs are called "simulated"; test_conformance.py runs them, with the simulator. Ranks are threads.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial

import numba
import numpy as np
import oracle
import pytest
from net.groups import everybody

import fastcoll
from fastcoll import ReduceOp
from fastcoll.core.backend import StreamCall
from fastcoll.core.group import ProcessGroup
from fastcoll.errors import ArrayError, MismatchError, UsageError
from fastcoll.gpu import several
from fastcoll.gpu.staged import StagedCarrier

from .fake_array import FakeArray
from .fake_runtime import FakeRuntime
from .thread_ranks import served

SIMULATED = pytest.mark.skipif(
    not numba.config.ENABLE_CUDASIM, reason="needs Numba's simulator (NUMBA_ENABLE_CUDASIM=1)"
)


class Place:
    """Puts arrays on the host, or on GPUs in turn."""

    def __init__(self, fake: FakeRuntime | None, gpus: int, carrier: type[StagedCarrier] = StagedCarrier):
        self.fake, self.gpus, self.carrier = fake, gpus, carrier

    def put(self, x, gpu=0):
        if self.fake is None:
            return x
        if x.size:
            self.fake.place(x if x.base is None else x.base, gpu % self.gpus)
        return FakeArray(x)

    def put_all(self, xs):
        """Put arrays on the GPUs in turn."""
        return [self.put(x, k) for k, x in enumerate(xs)]

    def groups(self, n: int) -> contextlib.AbstractContextManager[list[ProcessGroup]]:
        return served(n, self.carrier)

    def everybody(self, made, call: Callable):
        results = everybody(made, call)
        for result in results:
            if isinstance(result, BaseException):
                raise result
        if self.fake is not None:
            self.fake.settle()


KEPT: list[object] = []


class Queueing(StagedCarrier):
    """Queues calls on a stream, runs them behind earlier ones, and unpacks on the stream, as streams.py does."""

    def plan(self, operation, timeout=None):
        return Queued(super().plan(operation, timeout), self)


class Queued(StreamCall):
    def __init__(self, call, carrier):
        self.call, self.carrier = call, carrier

    def start(self, name, owners):
        gate = self.carrier.group.gate
        gate.submit(name, partial(gate.run_exclusively, self.call)).wait()
        KEPT.append(owners)  # until the stream has finished
        stream = self.carrier.staging.stream(0, "up")
        for owner in owners:
            owner.unpack(stream)
        work = fastcoll.Work(name)
        work.complete()
        return work

    def __call__(self):
        raise AssertionError("started by the group")


@pytest.fixture(
    params=["host", *(pytest.param(f"simulated-{kind}", marks=SIMULATED) for kind in ("1", "2", "queueing"))]
)
def place(request) -> Iterator[Place]:
    """The kind of memory of the arrays."""
    if request.param == "host":
        yield Place(None, 1)
        return
    fake = FakeRuntime(devices=2)
    with fake.installed():
        queueing = request.param.endswith("queueing")
        yield Place(fake, 1 if request.param.endswith("1") else 2, Queueing if queueing else StagedCarrier)
        KEPT.clear()
        fake.await_nothing_left()


def inputs(n, many, count, dtype):
    return [[oracle.values(10 * r + j, count, np.dtype(dtype)) for j in range(many)] for r in range(n)]


def flat(lists):
    return [x for mine in lists for x in mine]


def run(place, call):
    """Make a call on two ranks: `call(group, rank)`."""
    with place.groups(2) as made:
        place.everybody(made, lambda g: call(g, g.rank))


@pytest.mark.parametrize(
    ("op", "dtype"),
    [("SUM", "f4"), ("AVG", "f4"), ("AVG", "i4"), ("MAX", "i4"), ("PREMUL_SUM", "f4"), ("custom", "f4")],
)
def test_all_reduce(place, op, dtype):
    given = inputs(2, 3, 5, dtype)
    if op == "PREMUL_SUM":
        how, want = ReduceOp.PREMUL_SUM(2.0), sum(flat(given)) * 2
    elif op == "custom":
        how, want = ReduceOp.custom(lambda a, b: a), given[0][0].copy()
    else:
        how, want = getattr(ReduceOp, op), oracle.reduced(flat(given), getattr(ReduceOp, op))
    run(place, lambda g, r: several.all_reduce(g, place.put_all(given[r]), how, False))
    for x in flat(given):
        np.testing.assert_allclose(x, want, rtol=1e-5)


def test_reduce_writes_one_array_only(place):
    given = inputs(2, 2, 9, "f8")
    before = [x.copy() for x in flat(given)]
    for mine in given:
        mine[0].flags.writeable = False
    run(place, lambda g, r: several.reduce(g, place.put_all(given[r]), 1, ReduceOp.SUM, 1, False))
    *others, result = flat(given)
    np.testing.assert_allclose(result, oracle.reduced(before, ReduceOp.SUM))
    assert all((x == old).all() for x, old in zip(others, before, strict=False))


def test_broadcast(place):
    given = inputs(2, 3, 9, "i2")
    want = given[1][2].copy()
    given[1][2].flags.writeable = False
    run(place, lambda g, r: several.broadcast(g, place.put_all(given[r]), 1, 2, False))
    assert all((x == want).all() for x in flat(given))


def test_all_gather(place):
    given = inputs(2, 2, 5, "c8")
    outs = [[[np.zeros(5, "c8") for _ in range(4)] for _ in range(2)] for _ in range(2)]

    def call(g, r):
        lists = [[place.put(out, k) for out in outputs] for k, outputs in enumerate(outs[r])]
        several.all_gather(g, lists, place.put_all(given[r]), False)

    run(place, call)
    for outputs in flat(outs):
        assert all((out == x).all() for out, x in zip(outputs, flat(given), strict=True))


def test_strided_arrays_and_asynchronous_calls(place):
    rooms = [np.arange(24.0).reshape(2, 12) + g for g in range(2)]
    want = sum(room[k, ::3] for room in rooms for k in range(2))
    gaps = [room[:, 1::3].copy() for room in rooms]

    def call(g, r):
        work = several.all_reduce(g, [place.put(rooms[r][k, ::3]) for k in range(2)], ReduceOp.SUM, True)
        if place.fake is None or place.carrier is StagedCarrier:
            work.join()

    run(place, call)
    for room, gap in zip(rooms, gaps, strict=True):
        assert (room[:, ::3] == want).all()
        assert (room[:, 1::3] == gap).all()


def test_streams_of_all_arrays_are_followed_and_wait(place):
    if place.fake is None:
        pytest.skip("no streams")
    fake, xs = place.fake, [np.zeros(4), np.zeros(4)]
    fake.place(xs[1], 1)
    streams = [fake.new_stream(0), fake.new_stream(1)]
    arrays, seen = [FakeArray(x, s) for x, s in zip(xs, streams, strict=True)], []

    def queue(run):
        for device, (x, stream) in enumerate(zip(xs, streams, strict=True)):
            with fake.on(device):
                fake.queue("kernel", stream, lambda x=x, device=device: run(x, device))

    with place.groups(1) as (group,):
        queue(lambda x, device: x.fill(device + 1))
        several.all_reduce(group, arrays, ReduceOp.SUM, False)
        queue(lambda x, device: seen.append(x.tolist()))
        for stream in streams:
            fake.end_stream(stream)
    assert seen == [[3.0] * 4] * 2


def test_the_stream_of_an_input_that_is_only_read_waits_for_the_read(place, monkeypatch):
    if place.fake is None:
        pytest.skip("no streams")
    fake, xs, orders = place.fake, [np.zeros(4), np.ones(4)], []
    fake.place(xs[1], 1)
    streams = [fake.new_stream(0), fake.new_stream(1)]
    order = fake.order
    monkeypatch.setattr(fake, "order", lambda stream, event: (orders.append(stream), order(stream, event)))
    with place.groups(1) as (group,):
        arrays = [FakeArray(x, s) for x, s in zip(xs, streams, strict=True)]
        several.reduce(group, arrays, 0, ReduceOp.SUM, 0, False)
        assert streams[1] in orders
        fake.settle()
        for stream in streams:
            fake.end_stream(stream)
    assert xs[0].tolist() == [1.0] * 4


def test_wrong_calls(place):
    put = place.put
    with place.groups(2) as made:

        def check_refused(call, arguments, kind, message):
            for error in everybody(made, lambda g: call(g, *arguments, False)):
                assert isinstance(error, kind)
                assert message in str(error)

        x, y = np.ones(3), np.ones(3)
        total, both, wide = ReduceOp.SUM, [put(x), put(y)], np.ones(5)
        overlapping = [put(wide[:3]), put(x), put(wide[2:])]
        for call, arguments, message in (
            (several.all_reduce, ([], total), "one at least"),
            (several.all_reduce, (put(x), total), "must be a list"),
            (several.all_reduce, ([put(x), put(np.ones(4))], total), "same dtype and number"),
            (several.reduce, (both, 0, total, 2), "dst_tensor is 2"),
            (several.broadcast, (both, 2, 0), "ranks 0..1"),
            (several.broadcast, (overlapping, 0, 0), "tensor_list[0] and tensor_list[2] share"),
            (several.all_reduce, (overlapping, total), "tensor_list[0] and tensor_list[2] share"),
            (several.all_gather, ([[put(x)]], both), "1 lists for 2"),
            (several.all_gather, ([[put(x)] * 3] * 2, both), "must have 4 arrays"),
        ):
            check_refused(call, arguments, UsageError, message)
        if place.fake is not None:
            check_refused(several.all_reduce, ([put(x), y], total), ArrayError, "both be on GPUs")
        xs = [[np.full(3 + r, 1.0) for _ in range(2)] for r in range(2)]
        results = everybody(made, lambda g: several.all_reduce(g, [*map(put, xs[g.rank])], total, False))
        assert [type(result) for result in results] == [MismatchError] * 2
        assert all((x == 1).all() for mine in xs for x in mine)


@pytest.mark.ranks(2)
def test_the_public_functions(rank, world_size):
    xs = [np.full(3, 10.0 * rank), np.full(3, 10.0 * rank + 1)]
    fastcoll.all_reduce_multigpu(xs)
    assert all((x == 22).all() for x in xs)
    fastcoll.all_reduce_multigpu(xs[:1], ReduceOp.AVG)
    assert (xs[0] == 22).all()
    fastcoll.reduce_multigpu(xs, 1, dst_tensor=1)
    assert (xs[1] == (88 if rank == 1 else 22)).all()
    xs[1][:] = rank
    fastcoll.broadcast_multigpu([*xs, xs[0]], src=1, src_tensor=1)
    assert all((x == 1).all() for x in xs)
    outs = [[np.zeros(3) for _ in range(4)] for _ in range(2)]
    work = fastcoll.all_gather_multigpu(
        outs, [np.full(3, 2.0 * rank), np.full(3, 2.0 * rank + 1)], async_op=True
    )
    work.wait()
    assert all([out[0] for out in mine] == [0, 1, 2, 3] for mine in outs)


@pytest.mark.ranks(2)
def test_wrong_arguments_are_refused_on_all_ranks(rank, world_size):
    pair = fastcoll.new_group([0, 1], sort_ranks=False)
    xs = [np.ones(3), np.ones(3 + rank)]  # rank 1's differ in size
    for name, call in (
        ("all_reduce", lambda: fastcoll.all_reduce_multigpu(xs)),
        (
            "reduce",
            lambda: fastcoll.reduce_multigpu(
                xs[:1], 5 * rank, group=fastcoll.new_group([1, 0], sort_ranks=False)
            ),
        ),
        ("broadcast", lambda: fastcoll.broadcast_multigpu(xs[:1], 0, group=pair, src_tensor=rank)),
        ("all_gather", lambda: fastcoll.all_gather_multigpu([[np.ones(3) for _ in range(2 + rank)]], xs[:1])),
    ):
        error, text = (UsageError, None) if rank else (MismatchError, f"rank 1's {name}_multigpu was refused")
        with pytest.raises(error, match=text):
            call()
