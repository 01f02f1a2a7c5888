"""Users' reductions on a GPU: every kind of dtype, records, and any callable, against the CPU's reducers."""

from __future__ import annotations

import ml_dtypes
import numba
import numpy as np
import pytest

from fastcoll.core.reduce_op import ReduceOp

pytestmark = pytest.mark.gpu

PAIR = np.dtype([("value", "f8"), ("index", "i8")])
PACKED = np.dtype([("index", "i4"), ("flag", "u1"), ("value", "f4")])
ALIGNED = np.dtype(PACKED.descr, align=True)


def first_nonzero(a, b):
    """Associative but not commutative."""
    return a if a else b


def larger(a, b):
    """The pair with the larger value; of equal values, the one with the smaller index."""
    if a.value > b.value or (a.value == b.value and a.index < b.index):
        return a
    return b


def writes_into_its_argument(a, b):
    a.index = a.index + b.index
    return a


FIRST = ReduceOp.custom(first_nonzero)
LARGER = ReduceOp.custom(larger)


@pytest.mark.parametrize("dtype", ["?", "i1", "u8", "f4", "c8", "c16", "f2", ml_dtypes.bfloat16], ids=str)
def test_any_dtype_in_rank_order_into_any_destination(cuda_reduce, reduce, dtype):
    random = np.random.default_rng(2)
    for n in (1, 2, 5):
        sources = ((random.random((n, 75)) < 0.3) * random.integers(1, 100, (n, 75))).astype(dtype)
        want = reduce(FIRST, sources).tobytes()
        for into in (None, n - 1):
            assert cuda_reduce(FIRST, list(sources), into).tobytes() == want


@pytest.mark.parametrize("dtype", [PAIR, PACKED, ALIGNED], ids=["pair", "packed", "aligned"])
def test_records_for_argmax(cuda_reduce, dtype):
    random = np.random.default_rng(4)
    for n in (1, 2, 5):
        sources = np.zeros((n, 30), dtype)
        sources["value"] = random.integers(0, 3, sources.shape)
        sources["index"] = random.permutation(sources.size).reshape(sources.shape)
        key = [[(-x["value"], x["index"], rank) for rank, x in enumerate(column)] for column in sources.T]
        want = sources[[min(column)[2] for column in key], np.arange(30)]
        for into in (None, 0, n - 1):
            got = cuda_reduce(LARGER, list(sources), into)
            assert (got["value"] == want["value"]).all()
            assert (got["index"] == want["index"]).all()


def test_records_without_fields_have_nothing_to_reduce(device):
    from fastcoll.kernels.cuda.reducers import cuda_reducer

    cuda_reducer(ReduceOp.custom(lambda a, b: a), np.dtype([])).launch(
        0, [0, 0], 3
    )  # address 0 would be a fault


def test_a_record_function_may_write_into_its_arguments(cuda_reduce):
    sources = np.zeros((3, 30), PAIR)
    sources["index"] = np.arange(90).reshape(3, 30)
    for into in (None, 0):  # `cuda_reduce` checks that no other source changes
        got = cuda_reduce(ReduceOp.custom(writes_into_its_argument), list(sources), into)
        assert (got["index"] == sources["index"].sum(axis=0)).all()


def test_halves_are_computed_in_float32(cuda_reduce):
    op = ReduceOp.custom(lambda a, b: a * 4096 + b * 4096 - a * 4095 - b * 4095, "sum")
    sources = list(np.array([[30000], [20000]], np.float16))
    assert cuda_reduce(op, sources) == np.float16(50000)


def test_jitted_functions_ufuncs_and_builtins(cuda_reduce):
    sources = list(np.array([[3.0, 5.0], [4.0, 12.0]]))
    scale = 2.0
    assert cuda_reduce(ReduceOp.custom(numba.njit(lambda a, b: a + b)), sources).tolist() == [7, 17]
    assert cuda_reduce(ReduceOp.custom(np.hypot), sources).tolist() == [5, 13]
    assert cuda_reduce(ReduceOp.custom(max), sources).tolist() == [4, 12]
    assert cuda_reduce(ReduceOp.custom(lambda a, b: scale * a + b), sources).tolist() == [10, 22]
