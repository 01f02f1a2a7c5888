"""The layout of a dtype's elements in memory and in vector registers.

| dtype in memory                | computed as             |
|--------------------------------|-------------------------|
| ints, floats                   | the same                |
| complex                        | two float lanes         |
| bool                           | a byte of 0 or 1        |
| float16, bfloat16 (a `Half`)   | float32, rounded once   |
| structured                     | see kernels/custom.py   |

A *lane* is a number in a vector register. An `Element` describes the layout in LLVM's types. Loads and stores assume no
alignment: an array may start anywhere, and x86 and Arm vectors do not require it.

Halves are widened to float32 exactly and rounded back to nearest, ties to even. Every NaN is rounded to the same quiet
NaN, because otherwise the ranks' bits could differ: LLVM may swap an addition's operands in one loop and not in
another, and x86 returns the first NaN's sign and payload. If the processor converts float16 itself (F16C on x86, every
64-bit Arm), LLVM uses that; otherwise integer instructions do the same, after F. Giesen,
https://gist.github.com/rygorous/2156668. bfloat16 always uses integer instructions, because x86's vcvtneps2bf16 flushes
subnormals. A vector of bfloat16 is widened to its even lanes followed by its odd lanes, because the shift and the mask
that do this are cheaper than keeping the order. Rounding to bfloat16 restores the order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import models, register_model

from .processor import converts_float16

# ---- values of several lanes: an LLVM vector or, for one lane, a scalar ----------------------------------

WORD = ir.IntType(64)


def shaped(lane: ir.Type, width: int) -> ir.Type:
    """Return the type of `width` lanes."""
    return lane if width == 1 else ir.VectorType(lane, width)


def like(lane: ir.Type, value: ir.Value) -> ir.Type:
    """Return the type of a value with as many lanes as `value`, each of type `lane`."""
    return ir.VectorType(lane, value.type.count) if isinstance(value.type, ir.VectorType) else lane


def constant(number: int, value: ir.Value) -> ir.Constant:
    """Return a constant of the type of `value`, with `number` in every lane."""
    if isinstance(value.type, ir.VectorType):
        return ir.Constant(value.type, [number] * value.type.count)
    return ir.Constant(value.type, number)


def splat(builder: ir.IRBuilder, scalar: ir.Value, value: ir.Value) -> Any:
    """Return a value that has `scalar` in each of as many lanes as `value` has."""
    if not isinstance(value.type, ir.VectorType):
        return scalar
    undefined = ir.Constant(like(scalar.type, value), ir.Undefined)
    first = builder.insert_element(undefined, scalar, ir.Constant(ir.IntType(32), 0))
    return shuffled(builder, first, undefined, [0] * value.type.count)


def shuffled(builder: ir.IRBuilder, a: ir.Value, b: ir.Value, lanes: Iterable[int]) -> Any:
    """Return a vector of the given lanes of `a` and `b`; `b`'s are numbered after `a`'s."""
    chosen = list(lanes)
    return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(ir.IntType(32), len(chosen)), chosen))


# ---- halves as bits --------------------------------------------------------------------------------------

_U16, _U32, _FLOAT = ir.IntType(16), ir.IntType(32), ir.FloatType()


def _floats(builder: ir.IRBuilder, bits: ir.Value) -> Any:
    return builder.bitcast(bits, like(_FLOAT, bits))


def _bits(builder: ir.IRBuilder, value: ir.Value) -> Any:
    return builder.bitcast(value, like(_U32, value))


def widen_float16_in_hardware(builder: ir.IRBuilder, bits: ir.Value) -> Any:
    """Convert float16 bits to float32 with the processor's instruction."""
    return builder.fpext(builder.bitcast(bits, like(ir.HalfType(), bits)), like(_FLOAT, bits))


def round_float16_in_hardware(builder: ir.IRBuilder, value: ir.Value) -> Any:
    """Round a float32 to float16 bits with the processor's instruction."""
    rounded = builder.bitcast(builder.fptrunc(value, like(ir.HalfType(), value)), like(_U16, value))
    return _or_nan(builder, value, rounded, 0x7E00)


_REBIAS = (127 - 15) << 23
_SMALLEST_NORMAL = (127 - 14) << 23  # 2**-14 as float32 bits; below it float16 is subnormal
_OVERFLOW = (127 + 16) << 23  # 2**16: from here on float16 is infinity
_HALF = 126 << 23  # 0.5: adding it to a tiny float32 rounds the float32 at float16's last subnormal bit
_INFINITY = 0x7F800000


def widen_float16(builder: ir.IRBuilder, bits: ir.Value) -> Any:
    """Convert float16 bits to float32 with integer instructions; NaNs become quiet."""
    wide = builder.zext(bits, like(_U32, bits))
    u32 = partial(constant, value=wide)
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
    """Round a float32 to float16 bits with integer instructions."""
    bits = _bits(builder, value)
    u32 = partial(constant, value=bits)
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
    """Convert bfloat16 bits to float32."""
    if not isinstance(bits.type, ir.VectorType):
        return builder.bitcast(builder.shl(builder.zext(bits, _U32), ir.Constant(_U32, 16)), _FLOAT)
    pairs = builder.bitcast(bits, ir.VectorType(_U32, bits.type.count // 2))
    even = builder.shl(pairs, constant(16, pairs))
    odd = builder.and_(pairs, constant(0xFFFF0000, pairs))
    return _floats(builder, shuffled(builder, even, odd, range(bits.type.count)))


def round_bfloat16(builder: ir.IRBuilder, value: ir.Value) -> Any:
    """Round a float32 to bfloat16 bits."""
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
    """Return `rounded`, or the bits `nan` where `value` is not a number."""
    return builder.select(builder.fcmp_unordered("uno", value, value), constant(nan, rounded), rounded)


def _rounding_up(builder: ir.IRBuilder, bits: ir.Value, dropped: int) -> Any:
    """Add a number to `bits` so that dropping the low bits rounds to nearest, ties to even."""
    odd = builder.and_(builder.lshr(bits, constant(dropped, bits)), constant(1, bits))
    return builder.add(bits, builder.add(odd, constant((1 << (dropped - 1)) - 1, bits)))


CONVERSIONS = {"float16": (widen_float16, round_float16), "bfloat16": (widen_bfloat16, round_bfloat16)}
if converts_float16():
    CONVERSIONS["float16"] = widen_float16_in_hardware, round_float16_in_hardware

WIDTHS = {"float16": 16, "bfloat16": 32}
"""The number of lanes that are best converted together.

As float32, 16 lanes fill a register of AVX-512; 32 lanes of bfloat16 fill two, one with the even and one with the odd
lanes.
"""


# ---- elements --------------------------------------------------------------------------------------------

_BYTE = ir.IntType(8)
_REGISTER = 64
"""Bytes of AVX-512's registers; LLVM splits a value of this size if the processor's registers are smaller."""


class Half(types.Type):
    """A 16-bit float in memory, "float16" or "bfloat16"; computed only as float32."""

    def __init__(self, format: str) -> None:
        self.format = format
        super().__init__(name=f"Half({format})")


@register_model(Half)
class _HalfModel(models.PrimitiveModel):
    def __init__(self, manager, half_type):
        super().__init__(manager, half_type, ir.IntType(16))


def computed_as(element: types.Type) -> types.Type:
    """Return the type in which elements of type `element` are combined."""
    return types.float32 if isinstance(element, Half) else element


def unchanged(builder: ir.IRBuilder, value: ir.Value) -> ir.Value:
    return value


@dataclass(frozen=True)
class Element:
    """The facts about a dtype that LLVM code needs.

    `widen` converts lanes from memory to registers, and may change their order; `narrow` reverses both.
    """

    stored: ir.Type  # a lane in memory
    computed: ir.Type  # a lane in a register
    size: int  # bytes of a lane in memory
    width: int  # lanes that are loaded, computed and stored together: as many as fill an AVX-512 register
    lanes: int = 1  # lanes of an element
    widen: Callable[[ir.IRBuilder, ir.Value], Any] = unchanged
    narrow: Callable[[ir.IRBuilder, ir.Value], Any] = unchanged

    def load(self, builder: ir.IRBuilder, address: ir.Value, width: int) -> Any:
        """Load `width` lanes from an address."""
        pointer = builder.inttoptr(address, shaped(self.stored, width).as_pointer())
        return self.widen(builder, builder.load(pointer, align=1))

    def store(self, builder: ir.IRBuilder, value: ir.Value, address: ir.Value) -> None:
        """Store lanes to an address."""
        stored = self.narrow(builder, value)
        builder.store(stored, builder.inttoptr(address, stored.type.as_pointer()), align=1)


def element_of(element: types.Type) -> Element:
    """Return the `Element` of a numeric type."""
    if isinstance(element, Half):
        return Element(_U16, _FLOAT, 2, WIDTHS[element.format], 1, *CONVERSIONS[element.format])
    if isinstance(element, types.Boolean):
        return Element(_BYTE, _BYTE, 1, _REGISTER, widen=_truth)
    lanes = 2 if isinstance(element, types.Complex) else 1
    size = element.bitwidth // 8 // lanes
    lane = ir.FloatType() if size == 4 else ir.DoubleType()
    if isinstance(element, types.Integer):
        lane = ir.IntType(element.bitwidth)
    return Element(lane, lane, size, _REGISTER // size, lanes)


def _truth(builder: ir.IRBuilder, value: ir.Value) -> Any:
    """Return 1 for any byte except 0."""
    return builder.zext(builder.icmp_unsigned("!=", value, constant(0, value)), value.type)
