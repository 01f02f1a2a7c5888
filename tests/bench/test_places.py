"""Arrays of the benchmark on another device: all operations make, fill and check them through the place."""

from __future__ import annotations

from functools import partial
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

import fastcoll as dist
from fastcoll.bench.cases import SHAPES, Case
from fastcoll.bench.measuring import Schedule, measure
from fastcoll.bench.rank import Cuda, Host, prepare
from fastcoll.errors import UnavailableError
from fastcoll.gpu import runtime


class Marked(np.ndarray):  # type: ignore[type-arg]
    """An array of the place; its type is not NumPy's, as with CuPy."""


class Elsewhere(Host):
    def __init__(self) -> None:
        self.made: list[Any] = []
        self.checked = 0

    def zeros(self, count: int, dtype: np.dtype[Any]) -> Any:
        self.made.append(super().zeros(count, dtype).view(Marked))
        return self.made[-1]

    def fill(self, x: Any, tile: Any, start: int = 0) -> None:
        assert isinstance(x, Marked)
        super().fill(x, tile, start)

    def count_wrong(self, x: Any, tile: Any, start: int = 0) -> int:
        assert isinstance(x, Marked)
        self.checked += 1
        return super().count_wrong(x, tile, start)


@pytest.mark.ranks(2)
def test_every_operation_works_on_arrays_of_its_place(rank: int, world_size: int) -> None:
    for operation, shape in SHAPES.items():
        if not shape.moves or operation == "update_symmetric_all_reduce":
            continue
        place = Elsewhere()
        redop = "sum" if shape.reduces else "none"
        case = Case(operation, np.dtype(np.float32), redop, 0 if shape.rooted else -1, 20_000, world_size)
        trial = prepare(case, rank, place)
        trial.reset()
        trial.call()
        assert trial.wrong() == 0, operation
        assert place.made, operation
        if not (operation == "gather" and rank):
            assert place.checked, operation
        if not shape.rooted:  # a rank's result may be its input
            trial.reset()
            assert trial.wrong() > 0, operation
        dist.barrier()


def test_each_batch_waits_for_queued_work() -> None:
    seen: list[str] = []
    measure(lambda: seen.append("call"), Schedule(2, 3), lambda: seen.append("settle"))
    assert seen == ["call", "call", "call", "settle"] * 2


def test_arrays_on_a_gpu_are_filled_and_checked_from_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    def on_gpu(count: int, dtype: Any) -> Mock:
        host = np.zeros(count, dtype)
        set_all = partial(np.copyto, host)
        return Mock(host=host, shape=host.shape, dtype=host.dtype, get=host.copy, set=set_all)

    cupy = Mock(zeros=on_gpu)
    cupy.cuda.runtime.getDeviceCount.return_value = 2
    monkeypatch.setattr(runtime, "cupy", lambda: cupy)
    place = Cuda(local_rank=3)
    cupy.cuda.Device.assert_called_once_with(1)
    x, tile = place.zeros(5, np.dtype(np.int32)), np.arange(1, 16382, dtype=np.int32)
    assert place.count_wrong(x, tile) == 5
    place.fill(x, tile, 2)
    assert x.host.tolist() == [3, 4, 5, 6, 7]
    assert place.count_wrong(x, tile, 2) == 0
    place.settle()
    cupy.cuda.get_current_stream().synchronize.assert_called_once_with()


def test_a_missing_gpu_is_an_error_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise UnavailableError("arrays on GPUs need CuPy")

    monkeypatch.setattr(runtime, "cupy", missing)
    with pytest.raises(UnavailableError, match="CuPy"):
        Cuda(0)
