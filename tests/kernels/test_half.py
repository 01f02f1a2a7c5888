"""The 16-bit floats' conversions, by the processor and with integers, against NumPy and ml_dtypes."""

from __future__ import annotations

import functools

import llvmlite.binding
import ml_dtypes
import numpy as np
import pytest
from llvmlite import ir
from numba import njit, types
from numba.core import config
from numba.extending import intrinsic

from fastcoll.compiler import elements, processor
from fastcoll.compiler.elements import shaped

FLOAT16 = np.dtype("float16")
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
SINGLE = np.dtype(np.float32)
CONVERSIONS = [
    pytest.param(FLOAT16, elements.widen_float16, elements.round_float16, id="float16"),
    pytest.param(BFLOAT16, elements.widen_bfloat16, elements.round_bfloat16, id="bfloat16"),
    pytest.param(
        FLOAT16,
        elements.widen_float16_in_hardware,
        elements.round_float16_in_hardware,
        id="float16-hardware",
        marks=pytest.mark.skipif(not processor.converts_float16(), reason="this processor has no F16C"),
    ),
]


def in_every_way(test):
    """Run a test with each conversion, of one value at a time and of vectors."""
    widths = pytest.mark.parametrize("width", [1, 8, 32])
    return pytest.mark.long(widths(pytest.mark.parametrize(("dtype", "widen", "round_"), CONVERSIONS)(test)))


@functools.cache
def loop_of(convert, source: np.dtype, to: np.dtype, width: int):
    """Return a compiled loop that converts the elements of an array, `width` at a time."""
    lane = {np.dtype("u2"): ir.IntType(16), np.dtype("f4"): ir.FloatType()}[source]

    @intrinsic
    def some(typing_context, source, target):
        def emit(context, builder, signature, args):
            loaded = builder.load(builder.inttoptr(args[0], shaped(lane, width).as_pointer()), align=1)
            result = convert(builder, loaded)
            builder.store(result, builder.inttoptr(args[1], result.type.as_pointer()), align=1)
            return context.get_dummy_value()

        return types.void(types.int64, types.int64), emit

    step, step_out = width * source.itemsize, width * to.itemsize

    @njit(error_model="numpy")
    def every(source, target, times):
        for i in range(times):
            some(source + i * step, target + i * step_out)

    return every


def converted(values: np.ndarray, convert, to: np.dtype, width: int) -> np.ndarray:
    """Convert `values`, padded with the last one to complete vectors, `width` at a time."""
    values = np.pad(values, (0, -values.size % width), "edge")
    out = np.empty(values.size, to)
    loop_of(convert, values.dtype, to, width)(values.ctypes.data, out.ctypes.data, values.size // width)
    return out


def order_of(widen, width: int) -> np.ndarray:
    """Return the original lane of each lane of a widened vector."""
    wide = converted(np.arange(0x3C00, 0x3C00 + width, dtype="u2"), widen, SINGLE, width)
    return np.argsort(np.argsort(wide))


def widened(bits: np.ndarray, widen, width: int) -> np.ndarray:
    wide = converted(bits, widen, SINGLE, width).reshape(-1, width)
    return wide[:, np.argsort(order_of(widen, width))].ravel()[: bits.size]


def rounded(values: np.ndarray, round_, widen, width: int) -> np.ndarray:
    padded = np.pad(values, (0, -values.size % width), "edge").reshape(-1, width)
    shuffled = np.ascontiguousarray(padded[:, order_of(widen, width)]).ravel()
    return converted(shuffled, round_, np.dtype("u2"), width)[: values.size]


@in_every_way
def test_every_bit_pattern_survives_widening_and_rounding(dtype, widen, round_, width):
    bits = np.arange(65536, dtype=np.uint16)
    wide = widened(bits, widen, width)
    want = bits.view(dtype).astype(np.float32)
    nan = np.isnan(want)
    np.testing.assert_array_equal(wide[~nan].view(np.uint32), want[~nan].view(np.uint32))
    assert np.isnan(wide[nan]).all()
    back = rounded(wide, round_, widen, width)
    np.testing.assert_array_equal(back[~nan], bits[~nan])
    nans = np.array([0x7F800001, 0x7FC00000, 0x7FFFFFFF, 0xFF800001, 0xFFC00000, 0xFFFFFFFF], np.uint32)
    some = rounded(nans.view(np.float32), round_, widen, width)
    assert {*back[nan], *some} == {np.array(np.nan, dtype).view(np.uint16)[()]}, (
        "every NaN becomes the same one"
    )


@in_every_way
@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")
def test_rounding_around_every_tie(dtype, widen, round_, width):
    exact = np.arange(65536, dtype=np.uint16).view(dtype).astype(np.float32)
    exact = np.sort(exact[np.isfinite(exact)])
    ties = ((exact[:-1].astype("d") + exact[1:]) / 2).astype(np.float32)
    end = np.float32(ml_dtypes.finfo(dtype).max)
    around = [ties, np.nextafter(ties, np.float32(np.inf)), np.nextafter(ties, np.float32(-np.inf))]
    random = np.random.default_rng(3).integers(0, 2**32, 100_000, np.uint32).view(np.float32)
    values = np.concatenate([*around, random[~np.isnan(random)], np.array([end, -end, np.inf], np.float32)])
    np.testing.assert_array_equal(rounded(values, round_, widen, width), values.astype(dtype).view(np.uint16))


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
    monkeypatch.setattr(processor, "MACHINE", machine)
    monkeypatch.setattr(processor, "IS_X86", machine == "x86_64")
    monkeypatch.setattr(config, "CPU_NAME", name)
    monkeypatch.setattr(config, "CPU_FEATURES", features)
    monkeypatch.setattr(llvmlite.binding, "get_host_cpu_features", lambda: host)
    assert processor.converts_float16() is answer
