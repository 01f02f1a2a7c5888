"""How a dtype's elements lie in memory and in vector registers.

| dtype in memory                | computed as             |
|--------------------------------|-------------------------|
| ints, floats                   | the same                |
| complex                        | two float lanes         |
| bool                           | a byte of 0 or 1        |
| float16, bfloat16 (a `Half`)   | float32, rounded once   |
| structured                     | has no lanes: custom.py |

An `Element` says it in LLVM's types. Loads and stores claim no alignment: an array may start anywhere, and x86 and Arm
vectors do not mind.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import models, register_model

from . import half
from .vectors import constant, shaped

_BYTE = ir.IntType(8)

_REGISTER = 64
"""Bytes of AVX-512's registers; LLVM makes two or four of one where the processor's are smaller."""


class Half(types.Type):
    """A 16-bit float in memory, "float16" or "bfloat16"; only ever computed with as float32."""

    def __init__(self, format: str) -> None:
        self.format = format
        super().__init__(name=f"Half({format})")


@register_model(Half)
class _HalfModel(models.PrimitiveModel):
    def __init__(self, data_model_manager, half_type):
        super().__init__(data_model_manager, half_type, ir.IntType(16))


def computed_as(element: types.Type) -> types.Type:
    """The type in which elements of a type in memory are combined."""
    return types.float32 if isinstance(element, Half) else element


def reducer_signature(element: types.Type) -> Any:
    """A reducer's signature; in C, a pointer and an int64 are passed alike."""
    return types.void(types.int64, types.CPointer(element), types.int64, types.int64, types.int64)


def _unchanged(builder: ir.IRBuilder, value: ir.Value) -> ir.Value:
    return value


@dataclass(frozen=True)
class Element:
    """What LLVM needs to know of a dtype."""

    stored: ir.Type
    """A lane in memory."""
    computed: ir.Type
    """A lane in a register."""
    size: int
    """Bytes of a lane in memory."""
    width: int
    """Lanes that are loaded, computed and stored together: as many as fill an AVX-512 register."""
    lanes: int = 1
    """Lanes of an element."""
    widen: Callable[[ir.IRBuilder, ir.Value], Any] = _unchanged
    """From memory to registers; it may change the order of lanes."""
    narrow: Callable[[ir.IRBuilder, ir.Value], Any] = _unchanged
    """From registers to memory; the inverse of `widen`, also in the lanes' order."""

    def load(self, builder: ir.IRBuilder, address: ir.Value, width: int) -> Any:
        """`width` lanes at an address."""
        pointer = builder.inttoptr(address, shaped(self.stored, width).as_pointer())
        return self.widen(builder, builder.load(pointer, align=1))

    def store(self, builder: ir.IRBuilder, value: ir.Value, address: ir.Value) -> None:
        """Write lanes to an address."""
        stored = self.narrow(builder, value)
        builder.store(stored, builder.inttoptr(address, stored.type.as_pointer()), align=1)


def element_of(element: types.Type) -> Element:
    """The lanes of a numeric type in memory."""
    if isinstance(element, Half):
        widen, narrow = half.CONVERSIONS[element.format]
        width = half.WIDTHS[element.format]
        return Element(ir.IntType(16), ir.FloatType(), 2, width, widen=widen, narrow=narrow)
    if isinstance(element, types.Boolean):
        return Element(_BYTE, _BYTE, 1, _REGISTER, widen=_truth)
    if isinstance(element, types.Integer):
        return _plain(ir.IntType(element.bitwidth), element.bitwidth // 8, 1)
    lanes = 2 if isinstance(element, types.Complex) else 1
    size = element.bitwidth // 8 // lanes
    return _plain(ir.FloatType() if size == 4 else ir.DoubleType(), size, lanes)


def _plain(lane: ir.Type, size: int, lanes: int) -> Element:
    return Element(lane, lane, size, _REGISTER // size, lanes)


def _truth(builder: ir.IRBuilder, value: ir.Value) -> Any:
    """1 for any byte but 0."""
    return builder.zext(builder.icmp_unsigned("!=", value, constant(0, value)), value.type)
