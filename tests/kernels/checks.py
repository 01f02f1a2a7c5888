"""What reducers of the CPU and of a GPU have in common: checks of `reduce(op, sources, into)` for the tests of both."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import reduce as fold
from typing import Any

import ml_dtypes
import numba
import numpy as np

from fastcoll.core.reduce_op import ReduceOp

Array = np.ndarray[Any, Any]
Reduce = Callable[..., Array]

PAIR = np.dtype([("value", "f8"), ("index", "i8")])
PACKED = np.dtype([("index", "i4"), ("flag", "u1"), ("value", "f4")])
RECORDS = {"pair": PAIR, "packed": PACKED, "aligned": np.dtype(PACKED, align=True)}
DTYPES = ["?", "i1", "u8", "f4", "c8", "f2", ml_dtypes.bfloat16]


def first_nonzero(a: Any, b: Any) -> Any:
    """Associative but not commutative."""
    return a if a else b


def larger(a: Any, b: Any) -> Any:
    """The pair with the larger value; of equal values, the one with the smaller index."""
    if a.value > b.value or (a.value == b.value and a.index < b.index):
        return a
    return b


def writes_into_its_argument(a: Any, b: Any) -> Any:
    a.index = a.index + b.index
    return a


def not_compilable(a: Any, b: Any) -> Any:
    return a.no_such_attribute + b


FIRST, LARGER = ReduceOp.custom(first_nonzero), ReduceOp.custom(larger)
NOT_COMPILABLE = [
    not_compilable,
    lambda a: a,
    lambda a, b: None,
    lambda a, b: (a, b),
    lambda a, b: a + 1j * b,
]


def check_rank_order(reduce: Reduce, dtype: Any, count: int) -> None:
    """The sources are combined in rank order, into any destination."""
    random = np.random.default_rng(2)
    for n in (1, 2, 5):
        sources = ((random.random((n, count)) < 0.3) * random.integers(1, 100, (n, count))).astype(dtype)
        want = fold(lambda a, b: np.where(a.astype(bool), a, b), sources)
        for into in (None, 0, n - 1):
            assert reduce(FIRST, sources, into).tobytes() == want.tobytes()


def check_argmax(reduce: Reduce, dtype: np.dtype[Any], count: int) -> None:
    random = np.random.default_rng(4)
    for n in (1, 2, 3, 5):
        sources = np.zeros((n, count), dtype)
        sources["value"] = random.integers(0, 3, sources.shape)
        sources["index"] = random.permutation(sources.size).reshape(sources.shape)
        key = [[(-x["value"], x["index"], rank) for rank, x in enumerate(column)] for column in sources.T]
        want = sources[[min(column)[2] for column in key], np.arange(count)]
        for into in (None, 0, n - 1):
            got = reduce(LARGER, sources, into)
            assert (got["value"] == want["value"]).all()
            assert (got["index"] == want["index"]).all()


def corners(dtype: np.dtype[Any]) -> Array:
    """Return all pairs of special values, as two rows."""
    info = ml_dtypes.finfo(dtype)
    values = [np.nan, -np.nan, np.inf, -np.inf, 0.0, -0.0, 1.0, -1.0]
    values += [float(info.tiny), float(info.smallest_subnormal), float(info.max), float(info.min)]
    return np.array(list(itertools.product(values, values)), dtype).T.copy()


def a_record_function_may_write_into_its_arguments(reduce: Reduce) -> None:
    for n in (2, 3):
        sources = np.zeros((n, 40), PAIR)
        sources["index"] = np.arange(n * 40).reshape(n, 40)
        for into in (None, 0, 1):  # `reduce` checks that no source changes
            got = reduce(ReduceOp.custom(writes_into_its_argument), sources, into)
            assert (got["index"] == sources["index"].sum(axis=0)).all()


def halves_are_computed_in_float32(reduce: Reduce) -> None:
    op = ReduceOp.custom(lambda a, b: a * 4096 + b * 4096 - a * 4095 - b * 4095, "sum")
    assert reduce(op, np.array([[30000], [20000]], np.float16)) == np.float16(50000)


def halves_are_rounded_once(reduce: Reduce) -> None:
    for dtype in (np.float16, ml_dtypes.bfloat16):
        tiny = float(ml_dtypes.finfo(dtype).eps) / 2  # alone it ties back to 1, and two of them make a step
        sources = np.array([[1.0] * 50, [tiny] * 50, [tiny] * 50], dtype)
        assert (reduce(ReduceOp.SUM, sources) == np.array(1 + 2 * tiny, dtype)).all()
        assert (reduce(ReduceOp.SUM, sources[:2]) == 1).all()
        odd = np.array([[1 + 2 * tiny] * 50, [tiny] * 50], dtype)
        assert (reduce(ReduceOp.SUM, odd) == np.array(1 + 4 * tiny, dtype)).all(), "a tie goes to even"


def functions_may_be_jitted_ufuncs_and_builtins(reduce: Reduce) -> None:
    scale = 2.0
    for function, want in (
        (numba.njit(lambda a, b: a + b), [7, 17]),
        (np.hypot, [5, 13]),
        (max, [4, 12]),
        (lambda a, b: scale * a + b, [10, 22]),
    ):
        assert reduce(ReduceOp.custom(function), np.array([[3.0, 5.0], [4.0, 12.0]])).tolist() == want


def any_byte_but_zero_is_true(reduce: Reduce) -> None:
    sources = np.array([[0, 1, 2, 255], [0, 0, 4, 1]], np.uint8).view(bool)
    assert reduce(ReduceOp.BXOR, sources).view(np.uint8).tolist() == [0, 1, 0, 0]


def an_average_of_integers_is_truncated_towards_zero(reduce: Reduce) -> None:
    for code, given, want in (
        ("i1", [-3, 3, -4, 127], [-1, 1, -2, 63]),
        ("i8", [2**63 - 1, -(2**63)], [2**62 - 1, -(2**62)]),
        ("u8", [2**64 - 1], [2**63 - 1]),
    ):
        assert reduce(ReduceOp.AVG, np.array([given, [0] * len(given)], code)).tolist() == want


ALWAYS = [
    a_record_function_may_write_into_its_arguments, halves_are_computed_in_float32, halves_are_rounded_once,
    functions_may_be_jitted_ufuncs_and_builtins, any_byte_but_zero_is_true,
    an_average_of_integers_is_truncated_towards_zero,
]  # fmt: skip
