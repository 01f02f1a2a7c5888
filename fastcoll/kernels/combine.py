"""What a predefined operation does to two elements, and the choice by operation code outside the loops."""

from __future__ import annotations

from ..reduce_op import BAND, BOR, BXOR, MAX, MIN, PRODUCT
from .jit import spliced


@spliced
def _add(a, b):
    return a + b


@spliced
def _multiply(a, b):
    return a * b


@spliced
def _smaller(a, b):
    """As `numpy.minimum`: the first of equals, and a NaN rather than a number."""
    return a if a <= b or a != a else b


@spliced
def _larger(a, b):
    """As `numpy.maximum`: the first of equals, and a NaN rather than a number."""
    return a if a >= b or a != a else b


@spliced
def _and(a, b):
    return a & b


@spliced
def _or(a, b):
    return a | b


@spliced
def _xor(a, b):
    return a ^ b


@spliced
def arithmetic(loop, op, x, y, count):
    """SUM (which is also AVG's and PREMUL_SUM's share here) and PRODUCT: for every dtype."""
    if op == PRODUCT:
        loop(_multiply, x, y, count)
    else:
        loop(_add, x, y, count)


@spliced
def ordered(loop, op, x, y, count):
    """`arithmetic`, MIN and MAX: for real dtypes."""
    if op == MIN:
        loop(_smaller, x, y, count)
    elif op == MAX:
        loop(_larger, x, y, count)
    else:
        arithmetic(loop, op, x, y, count)


@spliced
def bitwise(loop, op, x, y, count):
    """`ordered`, BAND, BOR and BXOR: for integers and bool."""
    if op == BAND:
        loop(_and, x, y, count)
    elif op == BOR:
        loop(_or, x, y, count)
    elif op == BXOR:
        loop(_xor, x, y, count)
    else:
        ordered(loop, op, x, y, count)
