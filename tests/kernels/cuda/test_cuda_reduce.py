"""Every dtype and operation of the CUDA reducers against NumPy and the CPU's reducers, bit by bit."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import oracle
import pytest
from kernels import checks
from oracle import ARITHMETIC, COMPLEX, FLOATS, HALVES, INTEGERS, LOGICAL, ORDER

from fastcoll.arrays.dtypes import bfloat
from fastcoll.core.reduce_op import ReduceOp
from fastcoll.errors import ArrayError, UsageError

pytestmark = pytest.mark.gpu

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
PAIRS = [(op, dtype) for dtype in oracle.DTYPES for op in oracle.ops_for(dtype)]
PAIRS += [(op, np.dtype(name)) for name in ("bool", "int8", "uint64", "float16", "float32") for op in LOGICAL]
SOME = [
    (ReduceOp.SUM, np.dtype("f4")),
    (ReduceOp.AVG, np.dtype("i1")),
    (ReduceOp.BXOR, np.dtype("?")),
    (ReduceOp.SUM, np.dtype("f2")),
    (ReduceOp.MAX, np.dtype("u8")),
    (ReduceOp.PRODUCT, np.dtype("c8")),
]
AS_ON_THE_CPU = [
    *[(op, dtype) for dtype in INTEGERS for op in (*ARITHMETIC, ReduceOp.AVG, ReduceOp.MIN)],
    *[(op, dtype) for dtype in COMPLEX for op in (*ARITHMETIC, ReduceOp.AVG)],
    *[(op, dtype) for dtype in HALVES for op in (*ORDER, *ARITHMETIC, ReduceOp.AVG)],
    *[(op, dtype) for dtype in FLOATS for op in ORDER],
]


def inputs(n: int, count: int, dtype: np.dtype) -> list[np.ndarray]:
    return [oracle.values(rank, count, dtype) for rank in range(n)]


def packs(dtype: np.dtype, number: int) -> int:
    """Return the number of elements in some accesses of 16 bytes."""
    return number * 16 // dtype.itemsize


@pytest.mark.parametrize(("op", "dtype"), PAIRS, ids=repr)
def test_every_operation_and_dtype(cuda_reduce, op, dtype):
    some = oracle.truths if op in LOGICAL else oracle.values
    sources = [some(rank, packs(dtype, 14) + 1, dtype) for rank in range(3)]
    oracle.assert_same(cuda_reduce(op, sources), oracle.reduced(sources, op))


@pytest.mark.parametrize(("op", "dtype"), AS_ON_THE_CPU, ids=str)
def test_the_bits_are_the_cpus(cuda_reduce, reduce, op, dtype):
    """Integers of all bits wrap; floats are special values, such as NaN, signed zeros and subnormals."""
    if dtype in COMPLEX:
        sources = inputs(3, 41, dtype)
    elif dtype in INTEGERS:
        shape = 3, packs(dtype, 2) + 1, dtype.itemsize
        sources = np.random.default_rng(8).integers(0, 256, shape, np.uint8).view(dtype)[..., 0]
    else:
        sources = checks.corners(dtype)
    assert cuda_reduce(op, sources).tobytes() == reduce(op, sources).tobytes()


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_arithmetic_propagates_nan_and_keeps_subnormals(cuda_reduce, reduce, dtype):
    sources = checks.corners(dtype)
    for op in (*ARITHMETIC, ReduceOp.AVG):
        np.testing.assert_array_equal(cuda_reduce(op, sources), reduce(op, sources), str(op))


@pytest.mark.parametrize("n", [1, 2, 3, 5, 8])
@pytest.mark.parametrize(("op", "dtype"), SOME, ids=str)
def test_counts_and_numbers_of_sources(cuda_reduce, op, dtype, n):
    for count in (0, 1, packs(dtype, 1), packs(dtype, 30) + packs(dtype, 1) - 1):
        sources = inputs(n, count, dtype)
        oracle.assert_same(cuda_reduce(op, sources), oracle.reduced(sources, op), (n, count))


def test_a_copy_goes_four_packs_at_a_time_and_more_than_once(cuda_reduce):
    sources = inputs(1, packs(np.dtype("f8"), 110), np.dtype("f8"))
    oracle.assert_same(cuda_reduce(ReduceOp.SUM, sources), sources[0])


@pytest.mark.parametrize(("op", "dtype"), SOME, ids=str)
@pytest.mark.parametrize("into", [0, 1, 2])
def test_the_result_may_go_into_any_source(cuda_reduce, op, dtype, into):
    sources = inputs(3, packs(dtype, 14) + 1, dtype)
    oracle.assert_same(cuda_reduce(op, sources, into), oracle.reduced(sources, op))


@pytest.mark.parametrize("dtype", [np.dtype("i1"), np.dtype("f4"), BFLOAT16, *COMPLEX], ids=str)
def test_arrays_need_not_start_at_multiples_of_16_bytes(cuda_reduce, dtype):
    """Complex arrays need be aligned to their parts only."""
    sources = inputs(2, packs(dtype, 14) + 1, dtype)
    size = dtype.itemsize // (1 + (dtype in COMPLEX))
    for shifts in ([size] * 3, [16 - size] * 3, [size, 0, 0], [0, 0, 2 * size], [0, size, 0]):
        for count in (1, sources[0].size):
            few = [source[:count] for source in sources]
            want = oracle.reduced(few, ReduceOp.SUM)
            oracle.assert_same(cuda_reduce(ReduceOp.SUM, few, shifts=shifts), want, (shifts, count))


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_rounding_around_every_tie_of_a_binade(cuda_reduce, reduce, dtype):
    """x + y with y near half a step of x: all roundings of bfloat16, one in 8 of float16."""
    x = np.arange(0x3F80 if dtype == BFLOAT16 else 0x3C00, 0x4000, 1 if dtype == BFLOAT16 else 8)
    x = x.astype(np.uint16).view(dtype)
    eps = float(ml_dtypes.finfo(dtype).eps)
    for y in (eps / 2, eps / 2 * (1 + eps), eps / 2 * (1 - eps)):
        sources = [x, np.full_like(x, y)]
        assert cuda_reduce(ReduceOp.SUM, sources).tobytes() == reduce(ReduceOp.SUM, sources).tobytes()


def test_bfloat16_without_ml_dtypes_is_a_number(cuda_reduce):
    record = np.dtype((bfloat, np.dtype([("bfloat16", "V2")])))
    sources = inputs(3, packs(BFLOAT16, 5) + 1, BFLOAT16)
    for op in (ReduceOp.SUM, ReduceOp.MAX, ReduceOp.PREMUL_SUM(0.5)):
        got = cuda_reduce(op, [x.view(record) for x in sources])
        assert got.tobytes() == cuda_reduce(op, sources).tobytes()


def test_premultiplied_sum_adds_scaled_arrays(cuda_reduce):
    sources = inputs(2, 9, np.dtype("f4"))
    oracle.assert_same(cuda_reduce(ReduceOp.PREMUL_SUM(7.0), sources), oracle.reduced(sources, ReduceOp.SUM))


def test_an_operation_and_dtype_have_one_reducer(device):
    from fastcoll.kernels.cuda.reducers import cuda_reducer

    reducer = cuda_reducer(ReduceOp.SUM, np.dtype("f4"))
    assert cuda_reducer(ReduceOp.SUM, np.dtype("float32")) is reducer


@pytest.mark.parametrize(
    ("srcs", "error", "match"),
    [
        ([], UsageError, "1 to 64 arrays, got 0"),
        ([1 << 20] * 65, UsageError, "1 to 64 arrays, got 65"),
        ([(1 << 20) + 2], ArrayError, "aligned to 4 bytes, got addresses 0x100000, 0x100002"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_runs(device, srcs, error, match):
    from fastcoll.kernels.cuda.reducers import cuda_reducer

    with pytest.raises(error, match=match):
        cuda_reducer(ReduceOp.SUM, np.dtype("f4")).launch(1 << 20, srcs, 4)


@pytest.mark.parametrize(
    ("op", "dtype", "match"),
    [
        (ReduceOp.AVG, "?", "AVG is not defined for dtype bool"),
        (ReduceOp.MIN, "c8", "MIN is not defined for dtype complex64"),
        (ReduceOp.BAND, "f4", "BAND is not defined"),
        (ReduceOp.SUM, ">f4", "byte order"),
        (ReduceOp.SUM, [("a", "f4")], "ReduceOp.custom"),
        (ReduceOp.SUM, "g", "float64"),
    ],
)
def test_undefined_pairs_are_refused_as_on_the_cpu(device, op, dtype, match):
    from fastcoll.kernels.cuda.reducers import cuda_reducer

    with pytest.raises(ArrayError, match=match):
        cuda_reducer(op, np.dtype(dtype))
