"""Dtypes that NumPy lacks, with and without ml_dtypes; bfloat16's arithmetic against ml_dtypes'."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import ml_dtypes
import numpy as np
import pytest

from fastcoll import ReduceOp
from fastcoll.arrays.dtypes import dtype_of, rounded, widened
from fastcoll.core import signature
from fastcoll.kernels.reduce import reducer

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> Iterator[np.dtype]:
    """bfloat16 without ml_dtypes."""
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    dtype_of.cache_clear()
    yield dtype_of("bfloat16", 2)
    dtype_of.cache_clear()


def test_without_them_a_dtype_is_opaque_and_one_of_its_own(own):
    names = ["bfloat16", "float8_e5m2", "float8_e4m3fn", "complex32", "bits8", "int4"]
    seen = [dtype_of(name, 2 if name == "bfloat16" else 1) for name in names]
    assert len({*seen, np.dtype("V1"), np.dtype("V2")}) == len(names) + 2
    assert all(dtype_of(name, dtype.itemsize) is dtype for name, dtype in zip(names, seen, strict=True))
    with pytest.raises((TypeError, ValueError)):  # it is never taken for integers
        np.ones(2, np.uint16).view(own).astype(np.float32)


def test_peers_and_kernels_take_bfloat16_with_and_without_them_for_the_same(own):
    assert signature.dtype_code(own) == signature.dtype_code(BFLOAT16)
    assert reducer(ReduceOp.SUM, own)[1] == reducer(ReduceOp.SUM, BFLOAT16)[1]


def test_derived_arrays_keep_bfloat16(own):
    x = np.zeros((2, 6), own)
    for made in (x[:, ::2].copy(order="C"), x.reshape(-1), np.empty(3, own), x.T):
        assert made.dtype is own
        assert made.dtype.name == "bfloat16"


def test_widening_and_rounding_are_those_of_ml_dtypes(own):
    every = np.arange(1 << 16, dtype=np.uint16)
    wide = widened(every.view(own))
    np.testing.assert_array_equal(wide, every.view(BFLOAT16).astype(np.float32))
    half = np.float16([1.5, 65504, np.inf])  # by NumPy
    assert (rounded(widened(half), half.dtype) == half).all()
    with np.errstate(over="ignore", invalid="ignore"):
        halfway = np.concatenate([wide, wide * np.float32(1 + 2**-8), wide * np.float32(1 + 2**-9), wide / 3])
        expected = halfway.astype(BFLOAT16)
    for dtype in (own, BFLOAT16):
        got = rounded(halfway, dtype)
        assert got.dtype == dtype
        number = ~np.isnan(halfway)
        assert (got.view(np.uint16) == expected.view(np.uint16))[number].all()
        assert np.isnan(widened(got)[~number]).all()
