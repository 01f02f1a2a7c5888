"""AVG's division of integers, which goes by reciprocals of floats, against Python's integers."""

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


@pytest.mark.parametrize("code", ["i1", "u1", "i2", "u2"])
def test_every_small_integer(code):
    dtype = np.dtype(code)
    info = np.iinfo(dtype)
    x = np.arange(info.min, info.max + 1).astype(dtype)
    divide, result = dividing(dtype), np.empty_like(x)
    for n in NUMBERS:
        divide(x, n, result)
        np.testing.assert_array_equal(result, truncated(x, n), err_msg=f"n={n}")


@pytest.mark.parametrize("code", ["i4", "u4"])
def test_integers_around_every_multiple(code):
    dtype = np.dtype(code)
    info = np.iinfo(dtype)
    random = np.random.default_rng(6).integers(info.min, info.max, 20_000, dtype, endpoint=True)
    divide = dividing(dtype)
    for n in NUMBERS:
        multiples = random.astype(np.int64) // n * n
        around = np.concatenate([multiples - 1, multiples, multiples + 1, [info.min, info.max]])
        x = np.concatenate([around[(around >= info.min) & (around <= info.max)].astype(dtype), random])
        result = np.empty_like(x)
        divide(x, n, result)
        np.testing.assert_array_equal(result, truncated(x, n), err_msg=f"n={n}")
