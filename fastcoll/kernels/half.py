"""float16 and bfloat16 as bits: widened to float32 exactly, rounded back to nearest-even.

Every NaN is rounded to the one quiet NaN: LLVM may swap an addition's operands in one loop and not in another,
and x86 hands on the first NaN's sign and payload, so that the ranks' bits would differ.

Each function adds LLVM instructions to `builder` and returns the result's value, a number or a vector of them.
Where the processor converts float16 itself (F16C on x86, every 64-bit Arm), LLVM does it; elsewhere the same is done
with integers, after F. Giesen, https://gist.github.com/rygorous/2156668. bfloat16 always goes by integers, as x86's
vcvtneps2bf16 flushes subnormals; a vector of them is widened to its even lanes followed by its odd ones, as a shift
and a mask are cheaper than keeping the order, and rounding undoes it.
"""

from __future__ import annotations

import platform
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir
from numba.core import config

from .vectors import constant, like, shuffled

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


def _floats(builder: ir.IRBuilder, bits: ir.Value) -> Any:
    return builder.bitcast(bits, like(_FLOAT, bits))


def _bits(builder: ir.IRBuilder, value: ir.Value) -> Any:
    return builder.bitcast(value, like(_U32, value))


def widen_float16_in_hardware(builder: ir.IRBuilder, bits: ir.Value) -> Any:
    """float16 bits as a float32, by the processor."""
    return builder.fpext(builder.bitcast(bits, like(ir.HalfType(), bits)), like(_FLOAT, bits))


def round_float16_in_hardware(builder: ir.IRBuilder, value: ir.Value) -> Any:
    """A float32 rounded to float16 bits, by the processor."""
    rounded = builder.bitcast(builder.fptrunc(value, like(ir.HalfType(), value)), like(_U16, value))
    return _or_nan(builder, value, rounded, 0x7E00)


_REBIAS = (127 - 15) << 23
_SMALLEST_NORMAL = (127 - 14) << 23  # 2**-14 as float32 bits; below it float16 is subnormal
_OVERFLOW = (127 + 16) << 23  # 2**16: from here on it is infinity
_HALF = 126 << 23  # 0.5: added to a tiny float32 it rounds at float16's last subnormal bit
_INFINITY = 0x7F800000


def widen_float16(builder: ir.IRBuilder, bits: ir.Value) -> Any:
    """float16 bits as a float32, by integers; NaNs become quiet."""
    wide = builder.zext(bits, like(_U32, bits))

    def u32(number: int) -> ir.Constant:
        return constant(number, wide)

    sign = builder.shl(builder.and_(wide, u32(0x8000)), u32(16))
    body = builder.shl(builder.and_(wide, u32(0x7FFF)), u32(13))
    normal = builder.add(body, u32(_REBIAS))
    shifted = _floats(builder, builder.add(body, u32(_SMALLEST_NORMAL)))
    subnormal = _bits(builder, builder.fsub(shifted, _floats(builder, u32(_SMALLEST_NORMAL))))
    special = builder.or_(body, u32(_INFINITY))
    nan = builder.or_(special, u32(0x400000))
    result = builder.select(builder.icmp_unsigned("<", body, u32(0x400 << 13)), subnormal, normal)
    result = builder.select(builder.icmp_unsigned(">=", body, u32(0x7C00 << 13)), special, result)
    result = builder.select(builder.icmp_unsigned(">", body, u32(0x7C00 << 13)), nan, result)
    return _floats(builder, builder.or_(result, sign))


def round_float16(builder: ir.IRBuilder, value: ir.Value) -> Any:
    """A float32 rounded to float16 bits, by integers."""
    bits = _bits(builder, value)

    def u32(number: int) -> ir.Constant:
        return constant(number, bits)

    sign = builder.and_(bits, u32(0x80000000))
    body = builder.xor(bits, sign)
    shifted = builder.fadd(_floats(builder, body), _floats(builder, u32(_HALF)))
    subnormal = builder.sub(_bits(builder, shifted), u32(_HALF))
    normal = builder.lshr(builder.sub(_rounding_up(builder, body, 13), u32(_REBIAS)), u32(13))
    result = builder.select(builder.icmp_unsigned("<", body, u32(_SMALLEST_NORMAL)), subnormal, normal)
    result = builder.select(builder.icmp_unsigned(">=", body, u32(_OVERFLOW)), u32(0x7C00), result)
    result = builder.or_(result, builder.lshr(sign, u32(16)))
    return _or_nan(builder, value, builder.trunc(result, like(_U16, value)), 0x7E00)


def widen_bfloat16(builder: ir.IRBuilder, bits: ir.Value) -> Any:
    """bfloat16 bits as a float32."""
    if not isinstance(bits.type, ir.VectorType):
        return builder.bitcast(builder.shl(builder.zext(bits, _U32), ir.Constant(_U32, 16)), _FLOAT)
    pairs = builder.bitcast(bits, ir.VectorType(_U32, bits.type.count // 2))
    even = builder.shl(pairs, constant(16, pairs))
    odd = builder.and_(pairs, constant(0xFFFF0000, pairs))
    return _floats(builder, shuffled(builder, even, odd, range(bits.type.count)))


def round_bfloat16(builder: ir.IRBuilder, value: ir.Value) -> Any:
    """A float32 rounded to bfloat16 bits."""
    bits = _bits(builder, value)
    bits = _or_nan(builder, value, _rounding_up(builder, bits, 16), 0x7FC00000)
    if not isinstance(bits.type, ir.VectorType):
        return builder.trunc(builder.lshr(bits, constant(16, bits)), _U16)
    middle, end = bits.type.count // 2, bits.type.count
    even = shuffled(builder, bits, bits, range(middle))
    odd = shuffled(builder, bits, bits, range(middle, end))
    low = builder.lshr(even, constant(16, even))
    pairs = builder.or_(low, builder.and_(odd, constant(0xFFFF0000, odd)))
    return builder.bitcast(pairs, ir.VectorType(_U16, end))


def _or_nan(builder: ir.IRBuilder, value: ir.Value, rounded: ir.Value, nan: int) -> Any:
    """`rounded`, or the bits `nan` where `value` is not a number."""
    return builder.select(builder.fcmp_unordered("uno", value, value), constant(nan, rounded), rounded)


def _rounding_up(builder: ir.IRBuilder, bits: ir.Value, dropped: int) -> Any:
    """`bits` plus what makes dropping the low bits round to nearest, ties to even."""
    odd = builder.and_(builder.lshr(bits, constant(dropped, bits)), constant(1, bits))
    return builder.add(bits, builder.add(odd, constant((1 << (dropped - 1)) - 1, bits)))


if converts_in_hardware():
    CONVERSIONS = {
        "float16": (widen_float16_in_hardware, round_float16_in_hardware),
        "bfloat16": (widen_bfloat16, round_bfloat16),
    }
else:
    CONVERSIONS = {"float16": (widen_float16, round_float16), "bfloat16": (widen_bfloat16, round_bfloat16)}

WIDTHS = {"float16": 16, "bfloat16": 32}
"""Numbers that are best converted together: as float32 a register of AVX-512, or the two of the even and odd lanes."""
