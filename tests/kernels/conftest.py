"""Calling a compiled reducer from Python, as protocols call it from compiled code."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from fastcoll.core import reduce_op
from fastcoll.kernels.reduce import reducer

_C_REDUCER = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 5)


def _reduce(op: reduce_op.ReduceOp, sources: Sequence[np.ndarray], into: int | None = None) -> np.ndarray:
    """Reduce copies of `sources` into a new array, or into copy number `into`."""
    found = reducer(op, sources[0].dtype)
    assert found.itemsize == sources[0].itemsize
    arrays = [source.copy() for source in sources]
    result = np.full_like(arrays[0], 1) if into is None else arrays[into]
    table = np.array([x.ctypes.data for x in arrays], np.int64)
    _C_REDUCER(found.address)(found.code, result.ctypes.data, table.ctypes.data, len(arrays), result.size)
    for index, (array, source) in enumerate(zip(arrays, sources, strict=True)):
        assert index == into or array.tobytes() == source.tobytes(), f"source {index} was written to"
    return result


@pytest.fixture(scope="session")
def reduce() -> Callable[..., np.ndarray]:
    return _reduce
