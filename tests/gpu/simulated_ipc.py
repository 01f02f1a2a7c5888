"""Operations on shared GPU memory with a fake runtime and simulated kernels; run by test_ipc.py."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

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

from .collectives import *  # noqa: F403
from .collectives import F4, SUM, copies, inputs
from .fake_array import FakeArray
from .ipc_world import IpcRanks, world

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.fixture(scope="module", params=[2, 3, 4], ids=["n2", "n3", "n4"])
def ranks(request: pytest.FixtureRequest) -> Iterator[IpcRanks]:
    with world(request.param) as made:
        yield made


def assert_sums(ranks: IpcRanks, count: int) -> None:
    """All-reduce arrays of some elements, and check the result."""
    given = inputs(ranks, count)
    arrays = copies(given)
    ranks.run(lambda rank, group: group.all_reduce(ranks.array(rank, arrays[rank])))
    for x in arrays:
        oracle.assert_same(x, oracle.reduced(given, SUM), count)


@pytest.mark.parametrize("count", [0, 1, 255, 257, 900])
def test_sizes_around_a_slot_both_ways(ranks: IpcRanks, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for one_shot in (True, False):
        monkeypatch.setattr(schedules, "is_one_shot", lambda size, nbytes, one_shot=one_shot: one_shot)
        assert_sums(ranks, count)


def test_call_numbers_may_be_large(ranks: IpcRanks) -> None:
    """Start as after years of calls: words are compared, never reset."""
    for rank in range(ranks.size):
        ranks.carrier(rank).calls = (1 << 46) - 6
    for _ in range(4):
        assert_sums(ranks, 300)


def test_messages_go_through_the_host(ranks: IpcRanks) -> None:
    x, y = oracle.values(0, 50, F4), np.zeros(50, F4)

    def call(rank: int, group: Any) -> None:
        if rank == 0:
            group.send(ranks.array(0, x), 1, tag=3)
        elif rank == 1:
            assert group.recv(ranks.array(1, y), None, tag=3) == 0

    ranks.run(call)
    oracle.assert_same(y, x)


def test_elements_larger_than_a_slot_are_refused(ranks: IpcRanks) -> None:
    large = np.zeros(1, [("many", "f4", 1000)])
    with pytest.raises(ArrayError, match="an element has 4000 bytes"):
        ranks.groups[0].all_reduce(ranks.array(0, large), ReduceOp.custom(lambda a, b: a))


@pytest.mark.parametrize("backend", ["shm", "auto"])
def test_ranks_that_share_a_gpu_of_one_node_choose_it(backend: str) -> None:
    with world(2) as ranks:
        for group in ranks.groups:
            group.gpus.serve(lambda group: carrier_for(backend, group))
        for _ in range(3):
            assert_sums(ranks, 500)
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
            carrier.import_array(FakeArray(np.zeros(n, "u1")), writable=True, what="x")
            for n in (100, 9 << 20)
        )
        x, y = small.array, large.array
        for operation in [
            Operation("all_reduce", (y,), (y,), SUM),
            Operation("reduce", (y,), (y,), SUM),
            Operation("broadcast", (y,), (y,)),
            Operation("all_gather", (y, y), (y,)),
            Operation("reduce_scatter", (y,), (y, y), SUM),
            Operation("all_reduce_coalesced", (y,), (y,), SUM),
            Operation("all_gather_coalesced", (y, y), (y,)),
        ]:
            assert carrier.plan(operation) is operation
        assert isinstance(carrier.plan(Operation("all_reduce", (x,), (x,), SUM)), IpcCall)
        gathers = Operation("gather", (), (y,), root=1)
        assert isinstance(carrier.plan(gathers), IpcCall), "ranks do not know each other's sizes"
