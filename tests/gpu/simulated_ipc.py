"""Operations on shared GPU memory with a fake runtime and simulated kernels; run by test_ipc.py."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import oracle
import pytest

from fastcoll import ReduceOp
from fastcoll.core.operation import Operation
from fastcoll.errors import ArrayError
from fastcoll.gpu.carriers import carrier_for
from fastcoll.gpu.ipc import schedules
from fastcoll.gpu.ipc.backend import IpcCall, IpcCarrier
from fastcoll.gpu.streams import StreamCarrier

from .ipc_world import Ranks, gpu, world

F4 = np.dtype("f4")
PAIRS = [(op, dtype) for dtype in oracle.DTYPES for op in oracle.ops_for(dtype)]

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.fixture(scope="module", params=[2, 3, 4], ids=["n2", "n3", "n4"])
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    with world(request.param) as made:
        yield made


# ---- every operation against the oracle ------------------------------------------------------------------


def test_all_reduce_of_every_operation_and_dtype(ranks: Ranks) -> None:
    pairs = PAIRS if ranks.size == 3 else PAIRS[:: len(PAIRS) // 10]
    inputs = [[oracle.values(rank, 21, dtype) for rank in range(ranks.size)] for _, dtype in pairs]
    arrays = [[x.copy() for x in xs] for xs in inputs]

    def call(group: Any) -> None:
        for (op, _), xs in zip(pairs, arrays, strict=True):
            group.all_reduce(gpu(xs[group.rank]), op)

    ranks.run(call)
    for (op, _), before, after in zip(pairs, inputs, arrays, strict=True):
        for x in after:
            oracle.assert_same(x, oracle.reduced(before, op), op)


@pytest.mark.parametrize("count", [0, 1, 255, 257, 900])
def test_sizes_around_a_slot_both_ways(ranks: Ranks, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for one_shot in (True, False):
        monkeypatch.setattr(schedules, "is_one_shot", lambda size, nbytes, one_shot=one_shot: one_shot)
        inputs = ranks.each(lambda rank: oracle.values(rank, count, F4))
        arrays = [x.copy() for x in inputs]
        ranks.run(lambda group, arrays=arrays: group.all_reduce(gpu(arrays[group.rank])))
        for x in arrays:
            oracle.assert_same(x, oracle.reduced(inputs, ReduceOp.SUM), (count, one_shot))


def test_reductions_to_one_and_along_the_ranks(ranks: Ranks) -> None:
    inputs = ranks.each(lambda rank: oracle.values(rank, 300, F4))
    reduced, scanned, before = ([x.copy() for x in inputs] for _ in range(3))
    blocks = ranks.each(lambda rank: oracle.values(rank, ranks.size * 100, F4))
    outputs = ranks.each(lambda rank: np.zeros(100, F4))

    def call(group: Any) -> None:
        group.reduce(gpu(reduced[group.rank]), 1, ReduceOp.MAX)
        group.scan(gpu(scanned[group.rank]))
        group.exscan(gpu(before[group.rank]))
        group.reduce_scatter_single(gpu(outputs[group.rank]), gpu(blocks[group.rank]))

    ranks.run(call)
    for rank in range(ranks.size):
        want = oracle.reduced(inputs, ReduceOp.MAX) if rank == 1 else inputs[rank]
        oracle.assert_same(reduced[rank], want, "reduce")
        oracle.assert_same(scanned[rank], oracle.reduced(inputs[: rank + 1], ReduceOp.SUM), "scan")
        want = oracle.reduced(inputs[:rank], ReduceOp.SUM) if rank else inputs[0]
        oracle.assert_same(before[rank], want, "exscan")
        mine = [block[100 * rank : 100 * (rank + 1)] for block in blocks]
        oracle.assert_same(outputs[rank], oracle.reduced(mine, ReduceOp.SUM), "reduce_scatter")


def test_moves_of_different_sizes(ranks: Ranks) -> None:
    n, i2 = ranks.size, np.dtype("i2")
    sizes = [600 * rank for rank in range(n)]
    blocks = [oracle.values(rank, size, i2) for rank, size in enumerate(sizes)]
    contributions = ranks.each(lambda rank: oracle.values(rank, 700, i2))
    want = contributions[n - 1].copy()
    alls = [[np.zeros_like(block) for block in blocks] for _ in range(n)]
    gathered, scattered = [np.zeros_like(b) for b in blocks], [np.zeros_like(b) for b in blocks]
    given = [[oracle.values(r, 100 * (r + p), i2, p) for p in range(n)] for r in range(n)]
    taken = [[np.zeros(100 * (r + p), i2) for p in range(n)] for r in range(n)]

    def call(group: Any) -> None:
        rank = group.rank
        group.broadcast(gpu(contributions[rank]), n - 1)
        group.all_gather([gpu(x) for x in alls[rank]], gpu(blocks[rank]))
        group.gather(gpu(blocks[rank]), [gpu(x) for x in gathered] if rank == 1 else None, 1)
        group.scatter(gpu(scattered[rank]), [gpu(x) for x in blocks] if rank == 1 else None, 1)
        group.all_to_all([gpu(x) for x in taken[rank]], [gpu(x) for x in given[rank]])

    ranks.run(call)
    for rank in range(n):
        oracle.assert_same(contributions[rank], want)
        oracle.assert_same(scattered[rank], blocks[rank])
        for peer in range(n):
            oracle.assert_same(alls[rank][peer], blocks[peer])
            oracle.assert_same(gathered[peer], blocks[peer])
            oracle.assert_same(taken[rank][peer], given[peer][rank])


def test_several_arrays_at_once_factors_and_overlaps(ranks: Ranks) -> None:
    n = ranks.size
    inputs = ranks.each(lambda rank: oracle.values(rank, 90, F4))
    xs, scaled = ([x.copy() for x in inputs] for _ in range(2))
    lists = [[[np.zeros(30, F4), np.zeros(60, F4)] for _ in range(n)] for _ in range(n)]
    shifted = ranks.each(lambda rank: np.concatenate([oracle.values(rank, 10, F4), np.zeros(10 * n, F4)]))
    halves = ranks.each(lambda rank: oracle.values(rank, 40, np.dtype(ml_dtypes.bfloat16)))
    half = [x.copy() for x in halves]

    def call(group: Any) -> None:
        rank = group.rank
        group.all_reduce_coalesced([gpu(xs[rank][:30]), gpu(xs[rank][30:])], ReduceOp.MIN)
        group.all_reduce(gpu(scaled[rank]), ReduceOp.PREMUL_SUM(0.5))
        group.all_reduce_coalesced([gpu(half[rank])], ReduceOp.PREMUL_SUM(2))
        outs = [[gpu(parts[k]) for parts in lists[rank]] for k in range(2)]
        group.all_gather_coalesced(outs, [gpu(inputs[rank][:30]), gpu(inputs[rank][30:])])
        x = shifted[rank]
        group.all_gather_single(gpu(x[5 : 5 + 10 * n]), gpu(x[:10]))

    ranks.run(call)
    for rank in range(n):
        oracle.assert_same(xs[rank], oracle.reduced(inputs, ReduceOp.MIN))
        want = oracle.reduced([x * F4.type(0.5) for x in inputs], ReduceOp.SUM)
        oracle.assert_same(scaled[rank], want)
        oracle.assert_same(half[rank], oracle.reduced([x + x for x in halves], ReduceOp.SUM))
        for peer in range(n):
            assert (np.concatenate(lists[rank][peer]) == inputs[peer]).all()
            got = shifted[rank][5 + 10 * peer : 15 + 10 * peer]
            oracle.assert_same(got, oracle.values(peer, 10, F4))


def test_strided_arrays_empty_ones_and_works(ranks: Ranks) -> None:
    wide = ranks.each(lambda rank: oracle.values(rank, 60, F4).reshape(6, 10))
    inputs = [x.copy() for x in wide]
    works = ranks.run(lambda group: group.all_reduce(gpu(wide[group.rank][:, ::2]), async_op=True))
    for work, x in zip(works, wide, strict=True):
        assert work.wait(timeout=60)
        assert work.is_success()
        oracle.assert_same(x[:, ::2].copy(), oracle.reduced([y[:, ::2] for y in inputs], ReduceOp.SUM))
    for x, before in zip(wide, inputs, strict=True):
        assert (x[:, 1::2] == before[:, 1::2]).all()
    ranks.run(lambda group: group.broadcast(gpu(np.zeros((0, 3), F4)), 0))


def test_call_numbers_may_be_large(ranks: Ranks) -> None:
    """Start as after years of calls: words are compared, never reset."""
    for rank in range(ranks.size):
        ranks.carrier(rank).calls = (1 << 46) - 6
    inputs = ranks.each(lambda rank: oracle.values(rank, 300, F4))
    for _ in range(4):
        arrays = [x.copy() for x in inputs]
        ranks.run(lambda group, arrays=arrays: group.all_reduce(gpu(arrays[group.rank])))
        for x in arrays:
            oracle.assert_same(x, oracle.reduced(inputs, ReduceOp.SUM))


def test_a_users_function_in_rank_order(ranks: Ranks) -> None:
    first = ReduceOp.custom(lambda a, b: a if a else b, "first")
    inputs = ranks.each(lambda rank: oracle.values(rank, 40, F4) * (np.arange(40) % ranks.size <= rank))
    inputs = [x.astype(F4) for x in inputs]
    arrays = [x.copy() for x in inputs]
    ranks.run(lambda group: group.all_reduce(gpu(arrays[group.rank]), first))
    want = np.array([next((v for v in column if v), 0) for column in zip(*inputs, strict=True)], F4)
    for x in arrays:
        assert (x == want).all()


def test_messages_go_through_the_host(ranks: Ranks) -> None:
    x, y = oracle.values(0, 50, F4), np.zeros(50, F4)

    def call(group: Any) -> None:
        if group.rank == 0:
            group.send(gpu(x), 1, tag=3)
        elif group.rank == 1:
            assert group.recv(gpu(y), None, tag=3) == 0

    ranks.run(call)
    oracle.assert_same(y, x)


def test_elements_larger_than_a_slot_are_refused(ranks: Ranks) -> None:
    large = np.zeros(1, [("many", "f4", 1000)])
    op = ReduceOp.custom(lambda a, b: a)
    with pytest.raises(ArrayError, match="an element has 4000 bytes"):
        ranks.groups[0].all_reduce(gpu(large), op)


@pytest.mark.parametrize("backend", ["shm", "auto"])
def test_ranks_that_share_a_gpu_of_one_node_choose_it(backend: str) -> None:
    with world(2) as ranks:
        for group in ranks.groups:
            group.gpus.serve(lambda group: carrier_for(backend, group))
        arrays = [np.ones(500, F4), np.ones(500, F4)]
        for want in (2, 4, 8):
            ranks.run(lambda group: group.all_reduce(gpu(arrays[group.rank])))
            assert (arrays[0] == want).all()
        for group in ranks.groups:
            assert isinstance(group.devices().chosen, IpcCarrier)


class Fallback(StreamCarrier):
    """Records the calls that are handed to it."""

    messages: Any = None

    def plan(self, operation: Operation, timeout: float | None = None) -> Any:
        return operation


Fallback.__abstractmethods__ = frozenset()  # type: ignore[attr-defined]


def test_large_calls_are_handed_to_nccl() -> None:
    with world(2) as ranks:
        group = ranks.groups[0]
        carrier = IpcCarrier(group, Fallback(group))
        small, large = (
            carrier.import_array(gpu(np.zeros(n, "u1")), writable=True, what="x") for n in (100, 9 << 20)
        )
        x, y = small.array, large.array
        op = ReduceOp.SUM
        for operation in [
            Operation("all_reduce", (y,), (y,), op),
            Operation("reduce", (y,), (y,), op),
            Operation("broadcast", (y,), (y,)),
            Operation("all_gather", (y, y), (y,)),
            Operation("reduce_scatter", (y,), (y, y), op),
            Operation("all_reduce_coalesced", (y,), (y,), op),
            Operation("all_gather_coalesced", (y, y), (y,)),
        ]:
            assert carrier.plan(operation) is operation
        assert isinstance(carrier.plan(Operation("all_reduce", (x,), (x,), op)), IpcCall)
        gathers = Operation("gather", (), (y,), root=1)
        assert isinstance(carrier.plan(gathers), IpcCall), "ranks do not know each other's sizes"
