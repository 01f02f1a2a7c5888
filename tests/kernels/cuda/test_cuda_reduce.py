"""Every dtype and operation of the CUDA reducers against NumPy and the CPU's reducers, bit by bit."""

from __future__ import annotations

import itertools

import ml_dtypes
import numpy as np
import oracle
import pytest

from fastcoll.core.reduce_op import ReduceOp
from fastcoll.errors import ArrayError, UsageError

pytestmark = pytest.mark.gpu

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
PAIRS = [(op, dtype) for dtype in oracle.DTYPES for op in oracle.ops_for(dtype)]
SOME = [
    (ReduceOp.SUM, np.dtype("f4")),
    (ReduceOp.AVG, np.dtype("i1")),
    (ReduceOp.BXOR, np.dtype("?")),
    (ReduceOp.SUM, np.dtype("f2")),
    (ReduceOp.MAX, np.dtype("u8")),
    (ReduceOp.PRODUCT, np.dtype("c8")),
]


def inputs(n: int, count: int, dtype: np.dtype) -> list[np.ndarray]:
    return [oracle.values(rank, count, dtype) for rank in range(n)]


def full_range(n: int, count: int, dtype: np.dtype) -> list[np.ndarray]:
    """Return integers of all bits, so that sums and products wrap."""
    random = np.random.default_rng(8)
    return list(random.integers(0, 256, (n, count, dtype.itemsize), np.uint8).view(dtype)[..., 0])


def packs(dtype: np.dtype, number: int) -> int:
    """Return the number of elements in some accesses of 16 bytes."""
    return number * 16 // dtype.itemsize


@pytest.mark.parametrize(("op", "dtype"), PAIRS, ids=str)
def test_every_operation_and_dtype(cuda_reduce, op, dtype):
    sources = inputs(3, packs(dtype, 14) + 1, dtype)
    oracle.assert_same(cuda_reduce(op, sources), oracle.reduced(sources, op))


@pytest.mark.parametrize("dtype", oracle.INTEGERS, ids=str)
@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.PRODUCT, ReduceOp.AVG, ReduceOp.MIN], ids=str)
def test_integers_wrap(cuda_reduce, reduce, op, dtype):
    sources = full_range(3, packs(dtype, 2) + 1, dtype)
    assert cuda_reduce(op, sources).tobytes() == reduce(op, sources).tobytes()


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


@pytest.mark.parametrize("dtype", [np.dtype("i1"), np.dtype("f4"), BFLOAT16, np.dtype("c8")], ids=str)
def test_arrays_need_not_start_at_multiples_of_16_bytes(cuda_reduce, dtype):
    sources = inputs(2, packs(dtype, 14) + 1, dtype)
    want = oracle.reduced(sources, ReduceOp.SUM)
    size = dtype.itemsize
    for shifts in ([size] * 3, [16 - size] * 3, [size, 0, 0], [0, 0, 2 * size], [0, size, 0]):
        oracle.assert_same(cuda_reduce(ReduceOp.SUM, sources, shifts=shifts), want, shifts)
    few = [source[:1] for source in sources]
    oracle.assert_same(cuda_reduce(ReduceOp.SUM, few, shifts=[size] * 3), want[:1])


@pytest.mark.parametrize("dtype", [np.dtype("c8"), np.dtype("c16")], ids=str)
def test_complex_arrays_need_be_aligned_to_their_parts_only(cuda_reduce, dtype):
    sources = inputs(2, 9, dtype)
    shifts = [dtype.itemsize // 2] * 3
    oracle.assert_same(
        cuda_reduce(ReduceOp.SUM, sources, shifts=shifts), oracle.reduced(sources, ReduceOp.SUM)
    )


@pytest.mark.parametrize("op", [ReduceOp.PRODUCT, ReduceOp.AVG, ReduceOp.SUM], ids=str)
@pytest.mark.parametrize("dtype", [np.dtype("c8"), np.dtype("c16")], ids=str)
def test_complex_bits_are_the_cpus(cuda_reduce, reduce, op, dtype):
    sources = inputs(3, 41, dtype)
    assert cuda_reduce(op, sources).tobytes() == reduce(op, sources).tobytes()


def corners(dtype: np.dtype) -> list[np.ndarray]:
    """Return all pairs of special values, as two rows."""
    info = ml_dtypes.finfo(dtype)
    values = [np.nan, -np.nan, np.inf, -np.inf, 0.0, -0.0, 1.0, -1.0]
    values += [float(info.tiny), float(info.smallest_subnormal), float(info.max), float(info.min)]
    return list(np.array(list(itertools.product(values, values)), dtype).T.copy())


@pytest.mark.parametrize("op", [*oracle.ORDER, *oracle.ARITHMETIC, ReduceOp.AVG], ids=str)
@pytest.mark.parametrize("dtype", oracle.HALVES, ids=str)
def test_halves_have_the_cpus_bits_also_for_nan(cuda_reduce, reduce, op, dtype):
    sources = corners(dtype)
    assert cuda_reduce(op, sources).tobytes() == reduce(op, sources).tobytes()


@pytest.mark.parametrize("op", oracle.ORDER, ids=str)
@pytest.mark.parametrize("dtype", oracle.FLOATS, ids=str)
def test_the_order_of_nan_and_signed_zeros_is_the_cpus(cuda_reduce, reduce, op, dtype):
    sources = corners(dtype)
    assert cuda_reduce(op, sources).tobytes() == reduce(op, sources).tobytes()


@pytest.mark.parametrize("dtype", oracle.FLOATS, ids=str)
def test_arithmetic_propagates_nan_and_keeps_subnormals(cuda_reduce, reduce, dtype):
    sources = corners(dtype)
    for op in (ReduceOp.SUM, ReduceOp.PRODUCT, ReduceOp.AVG):
        np.testing.assert_array_equal(cuda_reduce(op, sources), reduce(op, sources), str(op))


@pytest.mark.parametrize("dtype", oracle.HALVES, ids=str)
def test_halves_are_rounded_once(cuda_reduce, dtype):
    tiny = float(ml_dtypes.finfo(dtype).eps) / 2  # alone it ties back to 1, and two of them make a step
    sources = list(np.array([[1.0] * 20, [tiny] * 20, [tiny] * 20], dtype))
    assert (cuda_reduce(ReduceOp.SUM, sources) == np.array(1 + 2 * tiny, dtype)).all()
    assert (cuda_reduce(ReduceOp.SUM, sources[:2]) == 1).all()
    assert (cuda_reduce(ReduceOp.SUM, [sources[0] + sources[1] * 2, sources[1]]) == 1 + 4 * tiny).all()


@pytest.mark.parametrize("dtype", oracle.HALVES, ids=str)
def test_rounding_around_every_tie_of_a_binade(cuda_reduce, reduce, dtype):
    """x + y with y near half a step of x: all roundings of bfloat16, one in 8 of float16."""
    x = np.arange(0x3F80 if dtype == BFLOAT16 else 0x3C00, 0x4000, 1 if dtype == BFLOAT16 else 8)
    x = x.astype(np.uint16).view(dtype)
    eps = float(ml_dtypes.finfo(dtype).eps)
    for y in (eps / 2, eps / 2 * (1 + eps), eps / 2 * (1 - eps)):
        sources = [x, np.full_like(x, y)]
        assert cuda_reduce(ReduceOp.SUM, sources).tobytes() == reduce(ReduceOp.SUM, sources).tobytes()


@pytest.mark.parametrize("name", ["bool", "int8", "uint64", "float16", "float32"])
@pytest.mark.parametrize("op", oracle.LOGICAL, ids=repr)
def test_truth_values(cuda_reduce, op, name):
    sources = [oracle.truths(rank, 37, np.dtype(name)) for rank in range(3)]
    oracle.assert_same(cuda_reduce(op, sources), oracle.reduced(sources, op))


def test_any_byte_but_zero_is_true(cuda_reduce):
    sources = list(np.array([[0, 1, 2, 255], [0, 0, 4, 1]], np.uint8).view(bool))
    assert cuda_reduce(ReduceOp.BXOR, sources).view(np.uint8).tolist() == [0, 1, 0, 0]


def test_premultiplied_sum_adds_scaled_arrays(cuda_reduce):
    sources = inputs(2, 9, np.dtype("f4"))
    oracle.assert_same(cuda_reduce(ReduceOp.PREMUL_SUM(7.0), sources), oracle.reduced(sources, ReduceOp.SUM))


def test_an_average_of_integers_is_truncated_towards_zero(cuda_reduce):
    sources = list(np.array([[-3, 3, -4, 127], [0, 0, 0, 0]], np.int8))
    assert cuda_reduce(ReduceOp.AVG, sources).tolist() == [-1, 1, -2, 63]
    big = list(np.array([[2**63 - 1, -(2**63)], [0, 0]], np.int64))
    assert cuda_reduce(ReduceOp.AVG, big).tolist() == [2**62 - 1, -(2**62)]
    wide = list(np.array([[2**64 - 1], [0]], np.uint64))
    assert cuda_reduce(ReduceOp.AVG, wide).tolist() == [2**63 - 1]


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
