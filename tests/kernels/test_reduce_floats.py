"""Special values of floats: NaN, infinities, signed zeros, subnormals, and rounding of the 16-bit ones."""

from __future__ import annotations

import itertools

import ml_dtypes
import numpy as np
import pytest

from fastcoll.core.reduce_op import ReduceOp

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
FLOATS = [np.dtype("f"), np.dtype("d"), np.dtype("float16"), BFLOAT16]
pytestmark = pytest.mark.filterwarnings(
    "ignore:invalid value:RuntimeWarning", "ignore:overflow:RuntimeWarning"
)


def corners(dtype: np.dtype) -> np.ndarray:
    """Return all pairs of special values, as two rows, long enough for vector loops and their remainders."""
    info = ml_dtypes.finfo(dtype)
    values = [np.nan, -np.nan, np.inf, -np.inf, 0.0, -0.0, 1.0, -1.0]
    values += [float(info.tiny), float(info.smallest_subnormal), float(info.max), float(info.min)]
    pairs = np.array(list(itertools.product(values, values)), dtype)
    return np.ascontiguousarray(np.tile(pairs, (30, 1)).T)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", ["MIN", "MAX", "SUM", "PRODUCT"])
def test_specials_as_numpy(reduce, name, dtype):
    rows = corners(dtype)
    combine = {"MIN": np.minimum, "MAX": np.maximum, "SUM": np.add, "PRODUCT": np.multiply}[name]
    wide = rows if dtype == "d" else rows.astype("f")
    want = combine(wide[0], wide[1]).astype(dtype)
    got = reduce(getattr(ReduceOp, name), rows)
    np.testing.assert_array_equal(got.astype("d"), want.astype("d"))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", ["MIN", "MAX"])
def test_the_first_of_equal_zeros_wins_wherever_the_result_goes(reduce, name, dtype):
    rows = np.array([[0.0, -0.0] * 500, [-0.0, 0.0] * 500], dtype)
    for into in (None, 0, 1):
        result = reduce(getattr(ReduceOp, name), rows, into)
        np.testing.assert_array_equal(np.signbit(result), np.signbit(rows[0]), err_msg=f"into={into}")


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", ["MIN", "MAX", "SUM", "PRODUCT", "AVG"])
def test_every_destination_gets_the_same_bits(reduce, name, dtype):
    rows = corners(dtype)
    op = getattr(ReduceOp, name)
    for sources in (rows, np.vstack([rows, rows[:1, ::-1]])):
        results = [reduce(op, sources, into).tobytes() for into in (None, *range(len(sources)))]
        assert len(set(results)) == 1


@pytest.mark.parametrize("dtype", [np.dtype("float16"), BFLOAT16], ids=str)
def test_halves_are_rounded_once(reduce, dtype):
    tiny = float(ml_dtypes.finfo(dtype).eps) / 2  # alone it ties back to 1, and two of them make a step
    sources = np.array([[1.0] * 50, [tiny] * 50, [tiny] * 50], dtype)
    assert (reduce(ReduceOp.SUM, sources) == np.array(1 + 2 * tiny, dtype)).all()
    assert (reduce(ReduceOp.SUM, sources[:2]) == 1).all()
    three = np.array([[1 + 2 * tiny] * 50, [tiny] * 50], dtype)
    assert (reduce(ReduceOp.SUM, three) == np.array(1 + 4 * tiny, dtype)).all(), "a tie goes to even"
