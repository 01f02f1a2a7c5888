"""Every dtype, operation, count, number of sources and aliasing against NumPy, bit by bit; special values of floats."""

from __future__ import annotations

import ctypes
import functools

import ml_dtypes
import numpy as np
import oracle
import pytest
from kernels import checks
from oracle import ARITHMETIC, BITS, COMPLEX, DTYPES, FLOATS, HALVES, LOGICAL, ORDER, ops_for

from fastcoll.core.reduce_op import ReduceOp
from fastcoll.errors import ArrayError
from fastcoll.kernels.reduce import reducer

COUNTS = (0, 1, 2, 3, 5, 7, 31, 1000, 4097, 70001)
NUMBERS = (1, 2, 3, 5, 8)
OPS = [*ARITHMETIC, ReduceOp.AVG, *ORDER, *BITS]
PAIRS = [(op, dtype) for dtype in DTYPES for op in OPS if op in ops_for(dtype)]
REFUSED = [(op, dtype) for dtype in DTYPES for op in OPS if op not in ops_for(dtype)]
REFUSED += [(op, dtype) for dtype in COMPLEX for op in LOGICAL]


def some(dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
    """Return random elements of a dtype: all integers, and floats whose products of eight stay finite."""
    random = np.random.default_rng(5)
    if dtype.kind == "b":
        return random.random(shape) < 0.5
    if dtype.kind in "iu":
        return random.integers(0, 256, (*shape, dtype.itemsize), np.uint8).view(dtype)[..., 0]
    x = random.normal(size=shape)
    return (x + 1j * random.normal(size=shape) if dtype.kind == "c" else x).astype(dtype)


def multiply_complex(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Multiply without NumPy's fused multiply-add, which rounds differently."""
    product = np.empty_like(a)
    product.real = a.real * b.real - a.imag * b.imag
    product.imag = a.real * b.imag + a.imag * b.real
    return product


def expected(op: ReduceOp, sources: np.ndarray) -> np.ndarray:
    if sources.dtype.kind != "c" or op == ReduceOp.SUM:
        return oracle.reduced(sources, op)
    if op == ReduceOp.PRODUCT:
        return functools.reduce(multiply_complex, sources)
    parts = oracle.reduced(sources, ReduceOp.SUM).view(sources.real.dtype)
    return (parts / parts.dtype.type(len(sources))).view(sources.dtype)


def assert_same_bits(got: np.ndarray, want: np.ndarray, what: str = "") -> None:
    bits = np.dtype((np.void, want.itemsize))
    np.testing.assert_array_equal(got.view(bits), want.view(bits), err_msg=what)


@pytest.mark.parametrize(("op", "dtype"), PAIRS, ids=str)
def test_every_count_number_and_aliasing(reduce, op, dtype):
    data = some(dtype, (max(NUMBERS), max(COUNTS)))
    for n in NUMBERS:
        for count in COUNTS:
            sources = data[:n, -count:] if count else data[:n, :0]
            want = expected(op, sources)
            for into in (None, *sorted({0, n // 2, n - 1})):
                assert_same_bits(reduce(op, sources, into), want, f"n={n} count={count} into={into}")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_arrays_may_start_anywhere(reduce, dtype):
    rows = some(dtype, (3, 1001))
    room = np.zeros(3 * rows[0].nbytes + 1, np.uint8)[1:]
    room[:] = rows.reshape(-1).view(np.uint8)
    shifted = room.view(dtype).reshape(rows.shape)
    assert not shifted.flags.aligned or dtype.itemsize == 1
    addresses = shifted.ctypes.data + rows[0].nbytes * np.arange(3)
    found = reducer(ReduceOp.SUM, dtype)
    call = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 5)(found.address)
    call(found.code, int(addresses[2]), addresses.ctypes.data, 2, rows.shape[1])
    assert_same_bits(shifted[2].copy(), expected(ReduceOp.SUM, rows[:2]))


@pytest.mark.parametrize("dtype", [dtype for dtype in DTYPES if dtype not in COMPLEX], ids=str)
@pytest.mark.parametrize("op", LOGICAL, ids=repr)
def test_truth_values(reduce, op, dtype):
    for n in NUMBERS:
        for count in (1, 5, 1000):
            sources = np.array([oracle.truths(rank, count, dtype) for rank in range(n)])
            assert_same_bits(reduce(op, sources), oracle.reduced(sources, op), f"n={n} count={count}")


@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")
@pytest.mark.parametrize("dtype", [*FLOATS, *HALVES], ids=str)
@pytest.mark.parametrize("op", [*ORDER, *ARITHMETIC, ReduceOp.AVG], ids=str)
def test_special_values_are_as_numpys_and_have_the_same_bits_in_every_destination(reduce, op, dtype):
    rows = np.tile(checks.corners(dtype), 30)  # long enough for vector loops and their remainders
    for sources in (rows, np.vstack([rows, rows[:1, ::-1]])):
        first, *others = [reduce(op, sources, into) for into in (None, *range(len(sources)))]
        np.testing.assert_array_equal(first.astype("d"), oracle.reduced(sources, op).astype("d"))
        assert {other.tobytes() for other in others} == {first.tobytes()}


@pytest.mark.parametrize("dtype", [*FLOATS, *HALVES], ids=str)
@pytest.mark.parametrize("op", ORDER, ids=str)
def test_the_first_of_equal_zeros_wins_wherever_the_result_goes(reduce, op, dtype):
    rows = np.array([[0.0, -0.0] * 500, [-0.0, 0.0] * 500], dtype)
    for into in (None, 0, 1):
        np.testing.assert_array_equal(np.signbit(reduce(op, rows, into)), np.signbit(rows[0]))


@pytest.mark.parametrize("check", checks.ALWAYS)
def test_always(reduce, check):
    check(reduce)


@pytest.mark.parametrize(("op", "dtype"), REFUSED, ids=str)
def test_undefined_pairs_are_refused(op, dtype):
    with pytest.raises(ArrayError, match=f"{op.name} is not defined for dtype {dtype}; ."):
        reducer(op, dtype)


OTHERS = [
    (">f4", "astype"), ("M8[s]", "view"), ("m8[ms]", "view"), ("O", "object collectives"), ("U3", "float"),
    ("V5", "float"), ([("a", "f4"), ("b", "i4")], "ReduceOp.custom"), (ml_dtypes.float8_e4m3fn, "bfloat16"),
    (ml_dtypes.float8_e5m2, "bfloat16"),  # its kind is "f"
    (ml_dtypes.int4, "integer"), *[(code, "float64") for code in "gG" if np.dtype("g").itemsize > 8],
]  # fmt: skip


@pytest.mark.parametrize(("dtype", "cure"), OTHERS, ids=str)
def test_other_dtypes_are_refused_with_the_cure(dtype, cure):
    with pytest.raises(ArrayError, match=cure):
        reducer(ReduceOp.SUM, np.dtype(dtype))
