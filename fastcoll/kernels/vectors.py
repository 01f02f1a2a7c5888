"""Values of several lanes in LLVM: an LLVM vector or, for one lane, a scalar. What is here takes both."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from llvmlite import ir

WORD = ir.IntType(64)


def shaped(lane: ir.Type, width: int) -> ir.Type:
    """The type of `width` lanes."""
    return lane if width == 1 else ir.VectorType(lane, width)


def like(lane: ir.Type, value: ir.Value) -> ir.Type:
    """The type of as many lanes as `value` has."""
    return ir.VectorType(lane, value.type.count) if isinstance(value.type, ir.VectorType) else lane


def constant(number: int, value: ir.Value) -> ir.Constant:
    """An integer in every lane of a type like `value`'s."""
    if isinstance(value.type, ir.VectorType):
        return ir.Constant(value.type, [number] * value.type.count)
    return ir.Constant(value.type, number)


def splat(builder: ir.IRBuilder, scalar: ir.Value, value: ir.Value) -> Any:
    """A scalar in as many lanes as `value` has."""
    if not isinstance(value.type, ir.VectorType):
        return scalar
    undefined = ir.Constant(like(scalar.type, value), ir.Undefined)
    first = builder.insert_element(undefined, scalar, ir.Constant(ir.IntType(32), 0))
    return shuffled(builder, first, undefined, [0] * value.type.count)


def shuffled(builder: ir.IRBuilder, a: ir.Value, b: ir.Value, lanes: Iterable[int]) -> Any:
    """The named lanes of two vectors, `b`'s counted on from `a`'s."""
    chosen = list(lanes)
    return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(ir.IntType(32), len(chosen)), chosen))
