"""The 16-bit floats' conversions, by the processor and by integers, against NumPy and ml_dtypes."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from numba import types
from numba.extending import intrinsic

from fastcoll.kernels import half
from fastcoll.kernels.jit import inlined

FLOAT16 = np.dtype("float16")
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
CONVERSIONS = [
    pytest.param(FLOAT16, half.widen_float16, half.round_float16, id="float16"),
    pytest.param(BFLOAT16, half.widen_bfloat16, half.round_bfloat16, id="bfloat16"),
    pytest.param(
        FLOAT16,
        half.widen_float16_in_hardware,
        half.round_float16_in_hardware,
        id="float16-hardware",
        marks=pytest.mark.skipif(not half.converts_in_hardware(), reason="this processor has no F16C"),
    ),
]


def widened(bits: np.ndarray, widen) -> np.ndarray:
    @intrinsic
    def one(typing_context, x):
        return types.float32(types.uint16), lambda context, builder, signature, args: widen(builder, args[0])

    @inlined
    def every(x, out):
        for i in range(x.size):
            out[i] = one(x[i])

    out = np.empty(bits.size, np.float32)
    every(bits, out)
    return out


def rounded(values: np.ndarray, round_) -> np.ndarray:
    @intrinsic
    def one(typing_context, x):
        return types.uint16(types.float32), lambda context, builder, signature, args: round_(builder, args[0])

    @inlined
    def every(x, out):
        for i in range(x.size):
            out[i] = one(x[i])

    out = np.empty(values.size, np.uint16)
    every(values, out)
    return out


@pytest.mark.parametrize(("dtype", "widen", "round_"), CONVERSIONS)
def test_every_bit_pattern_is_widened_and_comes_back(dtype, widen, round_):
    bits = np.arange(65536, dtype=np.uint16)
    wide = widened(bits, widen)
    want = bits.view(dtype).astype(np.float32)
    nan = np.isnan(want)
    np.testing.assert_array_equal(wide[~nan].view(np.uint32), want[~nan].view(np.uint32))
    assert np.isnan(wide[nan]).all()
    back = rounded(wide, round_)
    np.testing.assert_array_equal(back[~nan], bits[~nan])
    assert np.isnan(back[nan].view(dtype).astype(np.float32)).all()


@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")
@pytest.mark.parametrize(("dtype", "widen", "round_"), CONVERSIONS)
def test_rounding_around_every_tie(dtype, widen, round_):
    exact = np.arange(65536, dtype=np.uint16).view(dtype).astype(np.float32)
    exact = np.sort(exact[np.isfinite(exact)])
    ties = ((exact[:-1].astype("d") + exact[1:]) / 2).astype(np.float32)
    end = np.float32(ml_dtypes.finfo(dtype).max)
    around = [ties, np.nextafter(ties, np.float32(np.inf)), np.nextafter(ties, np.float32(-np.inf))]
    random = np.random.default_rng(3).integers(0, 2**32, 100_000, np.uint32).view(np.float32)
    values = np.concatenate([*around, random[~np.isnan(random)], np.array([end, -end, np.inf], np.float32)])
    np.testing.assert_array_equal(rounded(values, round_), values.astype(dtype).view(np.uint16))


@pytest.mark.parametrize(("dtype", "widen", "round_"), CONVERSIONS)
def test_every_nan_becomes_the_same_nan(dtype, widen, round_):
    bits = np.array([0x7F800001, 0x7FC00000, 0x7FFFFFFF, 0xFF800001, 0xFFC00000, 0xFFFFFFFF], np.uint32)
    result = rounded(bits.view(np.float32), round_)
    assert np.isnan(result.view(dtype).astype(np.float32)).all()
    assert set(result) == {np.array(np.nan, dtype).view(np.uint16)[()]}


@pytest.mark.parametrize(
    ("machine", "name", "features", "host", "answer"),
    [
        ("x86_64", None, None, {"f16c": True}, True),
        ("x86_64", None, None, {"f16c": False}, False),
        ("x86_64", None, "+avx,+f16c", {}, True),
        ("x86_64", None, "+avx", {"f16c": True}, False),
        ("x86_64", "generic", None, {"f16c": True}, False),
        ("aarch64", None, None, {}, True),
        ("riscv64", None, None, {}, False),
    ],
)
def test_hardware_is_used_where_compiled_code_may(monkeypatch, machine, name, features, host, answer):
    monkeypatch.setattr(half.platform, "machine", lambda: machine)
    monkeypatch.setattr(half.config, "CPU_NAME", name)
    monkeypatch.setattr(half.config, "CPU_FEATURES", features)
    monkeypatch.setattr(half.llvm, "get_host_cpu_features", lambda: host)
    assert half.converts_in_hardware() is answer
