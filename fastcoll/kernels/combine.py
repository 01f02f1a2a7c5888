"""What the predefined operations do to two values of lanes, and what AVG does to a sum.

Every function adds LLVM instructions to a `builder` and returns the result's value. No fastmath: each lane is rounded
as IEEE 754 says, and nothing is contracted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from llvmlite import ir
from numba import types

from ..core.reduce_op import BAND, BOR, BXOR, MAX, MIN, PRODUCT, SUM
from .elements import Half, like, shuffled, splat

Combine = Callable[[ir.IRBuilder, ir.Value, ir.Value], Any]
Divide = Callable[..., Any]


def operations_of(element: types.Type) -> Mapping[int, Combine]:
    """The operations of a type, by code; AVG is SUM with a division after it."""
    if isinstance(element, types.Boolean):
        return _BOOL
    if isinstance(element, types.Integer):
        return _SIGNED if element.signed else _UNSIGNED
    return _COMPLEX if isinstance(element, types.Complex) else _FLOAT


def division_of(element: types.Type) -> Divide | None:
    """How AVG divides values of a type by an int64; None where there is no AVG."""
    if isinstance(element, types.Boolean):
        return None
    if isinstance(element, types.Float | types.Complex | Half):
        return _divide_floats
    if element.bitwidth == 64:
        return _divide_words(element.signed)
    wide = ir.FloatType() if element.bitwidth <= 16 else ir.DoubleType()
    return _by_reciprocal(wide, element.signed)


def _first_float_if(relation: str) -> Combine:
    """As `numpy.minimum` and `maximum`: the first of equals, and a NaN rather than a number."""

    def choose(builder: ir.IRBuilder, a: ir.Value, b: ir.Value) -> Any:
        wins = builder.or_(builder.fcmp_ordered(relation, a, b), builder.fcmp_unordered("uno", a, a))
        return builder.select(wins, a, b)

    return choose


def _first_if(relation: str, signed: bool) -> Combine:
    def choose(builder: ir.IRBuilder, a: ir.Value, b: ir.Value) -> Any:
        compare = builder.icmp_signed if signed else builder.icmp_unsigned
        return builder.select(compare(relation, a, b), a, b)

    return choose


def _multiply_complex(builder: ir.IRBuilder, a: ir.Value, b: ir.Value) -> Any:
    """(a.re b.re - a.im b.im, a.re b.im + a.im b.re) in each pair of lanes."""
    lanes = range(a.type.count)
    real = shuffled(builder, a, a, [i & ~1 for i in lanes])
    imaginary = shuffled(builder, a, a, [i | 1 for i in lanes])
    straight = builder.fmul(real, b)
    crossed = builder.fmul(imaginary, shuffled(builder, b, b, [i ^ 1 for i in lanes]))
    difference, total = builder.fsub(straight, crossed), builder.fadd(straight, crossed)
    return shuffled(builder, difference, total, [i + a.type.count if i & 1 else i for i in lanes])


def _divide_floats(builder: ir.IRBuilder, value: ir.Value, n: ir.Value) -> Any:
    lane = value.type.element if isinstance(value.type, ir.VectorType) else value.type
    return builder.fdiv(value, splat(builder, builder.sitofp(n, lane), value))


def _divide_words(signed: bool) -> Divide:
    divide = ir.IRBuilder.sdiv if signed else ir.IRBuilder.udiv
    return lambda builder, value, n: divide(builder, value, splat(builder, n, value))


def _by_reciprocal(wide: ir.Type, signed: bool) -> Divide:
    """Small integers divided, truncated towards zero; processors have no vector instruction for it.

    The product with a reciprocal that is too large by a relative 2**-22 (2**-50 in float64) is exact after
    truncation: it never falls short of a whole quotient, and a quotient that is not whole lies 1/n or more
    before the next integer, which |value| * 2**-21 / n for 16 bits (2**-49 for 32) does not reach.
    """
    excess = 1 + 2.0 ** (-22 if isinstance(wide, ir.FloatType) else -50)
    widen = ir.IRBuilder.sitofp if signed else ir.IRBuilder.uitofp
    truncate = ir.IRBuilder.fptosi if signed else ir.IRBuilder.fptoui

    def divide(builder: ir.IRBuilder, value: ir.Value, n: ir.Value) -> Any:
        reciprocal = builder.fdiv(ir.Constant(wide, excess), builder.sitofp(n, wide))
        number = widen(builder, value, like(wide, value))
        return truncate(builder, builder.fmul(number, splat(builder, reciprocal, value)), value.type)

    return divide


_B = ir.IRBuilder
_INTEGER: dict[int, Combine] = {SUM: _B.add, PRODUCT: _B.mul, BAND: _B.and_, BOR: _B.or_, BXOR: _B.xor}
_SIGNED = _INTEGER | {MIN: _first_if("<=", True), MAX: _first_if(">=", True)}
_UNSIGNED = _INTEGER | {MIN: _first_if("<=", False), MAX: _first_if(">=", False)}
_FLOAT: dict[int, Combine] = {
    SUM: _B.fadd,
    PRODUCT: _B.fmul,
    MIN: _first_float_if("<="),
    MAX: _first_float_if(">="),
}
_COMPLEX: dict[int, Combine] = {SUM: _B.fadd, PRODUCT: _multiply_complex}
_BOOL: dict[int, Combine] = {
    **dict.fromkeys((SUM, MAX, BOR), _B.or_),
    **dict.fromkeys((PRODUCT, MIN, BAND), _B.and_),
    BXOR: _B.xor,
}
