"""AVG's division of integers by reciprocals of floats, against Python's integers."""

from __future__ import annotations

import numpy as np
import pytest
from numba import from_dtype, njit, types
from numba.extending import intrinsic

from fastcoll.kernels.fold import division_of

NUMBERS = [*range(1, 70), 127, 128, 129, 255, 256, 257, 1000, 32767, 32768, 32769, 65535, 65536, 2**20, 2**31]


def dividing(dtype: np.dtype):
    kind = from_dtype(dtype)
    divide = division_of(kind)

    @intrinsic
    def quotient(typing_context, x, n):
        return kind(kind, types.int64), lambda context, builder, signature, args: divide(builder, *args)

    @njit(error_model="numpy")
    def every(x, n, out):
        for i in range(x.size):
            out[i] = quotient(x[i], n)

    return every


def truncated(x: np.ndarray, n: int) -> np.ndarray:
    wide = x.astype(np.int64)
    return (np.sign(wide) * (np.abs(wide) // n)).astype(x.dtype)


def numbers_of(dtype: np.dtype, n: int) -> np.ndarray:
    """Return every number of a dtype of at most two bytes; of others, those near multiples of n and the limits."""
    info = np.iinfo(dtype)
    if dtype.itemsize <= 2:
        return np.arange(info.min, info.max + 1).astype(dtype)
    random = np.random.default_rng(6).integers(info.min, info.max, 20_000, np.int64, endpoint=True)
    around = [random // n * n + shift for shift in (-1, 0, 1)]
    found = np.concatenate([*around, random, [info.min, info.max]])
    return found[(found >= info.min) & (found <= info.max)].astype(dtype)


@pytest.mark.parametrize("code", ["i1", "u1", "i2", "u2", "i4", "u4"])
def test_quotients_of_integers(code):
    divide = dividing(np.dtype(code))
    for n in NUMBERS:
        x = numbers_of(np.dtype(code), n)
        result = np.empty_like(x)
        divide(x, n, result)
        np.testing.assert_array_equal(result, truncated(x, n), err_msg=f"n={n}")
