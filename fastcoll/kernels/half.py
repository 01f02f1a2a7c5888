"""float16 and bfloat16 as bits: widened to float32 exactly, rounded back to nearest-even.

Every NaN is rounded to the one quiet NaN: LLVM may swap an addition's operands in one loop and not in another,
and x86 hands on the first NaN's sign and payload, so that the ranks' bits would differ.

Each function adds LLVM instructions to `builder` and returns the result's value. Where the processor converts
float16 itself (F16C on x86, every 64-bit Arm), LLVM does it; elsewhere the same is done with integers, after
F. Giesen, https://gist.github.com/rygorous/2156668. Both vectorise. bfloat16 always goes by integers, as
x86's vcvtneps2bf16 flushes subnormals.
"""

from __future__ import annotations

import platform
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir
from numba.core import config

_U16, _U32, _FLOAT = ir.IntType(16), ir.IntType(32), ir.FloatType()


def converts_in_hardware() -> bool:
    """Whether code that Numba makes here may use the processor's float16 conversions."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return platform.machine() in ("aarch64", "arm64")
    if config.CPU_FEATURES is not None:
        return "+f16c" in config.CPU_FEATURES.split(",")
    if config.CPU_NAME not in (None, "host"):
        return False
    return bool(llvm.get_host_cpu_features().get("f16c", False))


def widen_float16_in_hardware(builder: ir.IRBuilder, bits: ir.Value) -> Any:
    """float16 bits as a float32, by the processor."""
    return builder.fpext(builder.bitcast(bits, ir.HalfType()), _FLOAT)


def round_float16_in_hardware(builder: ir.IRBuilder, value: ir.Value) -> Any:
    """A float32 rounded to float16 bits, by the processor."""
    return _or_nan(builder, value, builder.bitcast(builder.fptrunc(value, ir.HalfType()), _U16), 0x7E00)


def _u32(value: int) -> ir.Constant:
    return ir.Constant(_U32, value)


_REBIAS = _u32((127 - 15) << 23)
_SMALLEST_NORMAL = _u32((127 - 14) << 23)  # 2**-14 as float32 bits; below it float16 is subnormal
_OVERFLOW = _u32((127 + 16) << 23)  # 2**16: from here on it is infinity
_HALF = _u32(126 << 23)  # 0.5: added to a tiny float32 it rounds at float16's last subnormal bit
_INFINITY = _u32(0x7F800000)


def widen_float16(builder: ir.IRBuilder, bits: ir.Value) -> Any:
    """float16 bits as a float32, by integers; NaNs become quiet."""
    wide = builder.zext(bits, _U32)
    sign = builder.shl(builder.and_(wide, _u32(0x8000)), _u32(16))
    body = builder.shl(builder.and_(wide, _u32(0x7FFF)), _u32(13))
    normal = builder.add(body, _REBIAS)
    subnormal = builder.bitcast(
        builder.fsub(
            builder.bitcast(builder.add(body, _SMALLEST_NORMAL), _FLOAT),
            builder.bitcast(_SMALLEST_NORMAL, _FLOAT),
        ),
        _U32,
    )
    special = builder.or_(body, _INFINITY)
    nan = builder.or_(special, _u32(0x400000))
    result = builder.select(builder.icmp_unsigned("<", body, _u32(0x400 << 13)), subnormal, normal)
    result = builder.select(builder.icmp_unsigned(">=", body, _u32(0x7C00 << 13)), special, result)
    result = builder.select(builder.icmp_unsigned(">", body, _u32(0x7C00 << 13)), nan, result)
    return builder.bitcast(builder.or_(result, sign), _FLOAT)


def round_float16(builder: ir.IRBuilder, value: ir.Value) -> Any:
    """A float32 rounded to float16 bits, by integers."""
    bits = builder.bitcast(value, _U32)
    sign = builder.and_(bits, _u32(0x80000000))
    body = builder.xor(bits, sign)
    shifted = builder.fadd(builder.bitcast(body, _FLOAT), builder.bitcast(_HALF, _FLOAT))
    subnormal = builder.sub(builder.bitcast(shifted, _U32), _HALF)
    normal = builder.lshr(builder.sub(_rounding_up(builder, body, 13), _REBIAS), _u32(13))
    result = builder.select(builder.icmp_unsigned("<", body, _SMALLEST_NORMAL), subnormal, normal)
    result = builder.select(builder.icmp_unsigned(">=", body, _OVERFLOW), _u32(0x7C00), result)
    result = builder.or_(result, builder.lshr(sign, _u32(16)))
    return _or_nan(builder, value, builder.trunc(result, _U16), 0x7E00)


def widen_bfloat16(builder: ir.IRBuilder, bits: ir.Value) -> Any:
    """bfloat16 bits as a float32."""
    return builder.bitcast(builder.shl(builder.zext(bits, _U32), _u32(16)), _FLOAT)


def round_bfloat16(builder: ir.IRBuilder, value: ir.Value) -> Any:
    """A float32 rounded to bfloat16 bits."""
    bits = builder.bitcast(value, _U32)
    result = builder.trunc(builder.lshr(_rounding_up(builder, bits, 16), _u32(16)), _U16)
    return _or_nan(builder, value, result, 0x7FC0)


def _or_nan(builder: ir.IRBuilder, value: ir.Value, rounded: ir.Value, nan: int) -> Any:
    """`rounded`, or the bits `nan` where `value` is not a number."""
    return builder.select(builder.fcmp_unordered("uno", value, value), ir.Constant(_U16, nan), rounded)


def _rounding_up(builder: ir.IRBuilder, bits: ir.Value, dropped: int) -> Any:
    """`bits` plus what makes dropping the low bits round to nearest, ties to even."""
    odd = builder.and_(builder.lshr(bits, _u32(dropped)), _u32(1))
    return builder.add(bits, builder.add(odd, _u32((1 << (dropped - 1)) - 1)))


if converts_in_hardware():
    CONVERSIONS = {
        "float16": (widen_float16_in_hardware, round_float16_in_hardware),
        "bfloat16": (widen_bfloat16, round_bfloat16),
    }
else:
    CONVERSIONS = {"float16": (widen_float16, round_float16), "bfloat16": (widen_bfloat16, round_bfloat16)}
