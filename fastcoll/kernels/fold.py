"""The loops of a reduction, for any dtype and any combining function; sources are folded strictly in order.

`dst` may be one of the sources. A loop that writes through one pointer what it reads through two others fails
LLVM's run-time alias check when they are equal, and then runs element by element: so every loop here has two
pointers, and the general case collects a block in a scratch in the L1 cache before any of it is written. Every
way gives the same bits, but for the sign and payload of a wide float's NaN, which LLVM leaves to the processor.
"""

from __future__ import annotations

from ..reduce_op import AVG
from .elements import (
    SCRATCH,
    as_integer,
    divide,
    itemsize_of,
    load,
    narrow,
    pointer_like,
    scratch_like,
    store,
)
from .jit import spliced
from .pointers import load_word


@spliced
def into_first(combine, x, y, count):
    """x[i] = combine(x[i], y[i])"""
    for i in range(count):
        a = load(x, i)
        store(x, i, narrow(combine(a, load(y, i)), a))


@spliced
def into_second(combine, x, y, count):
    """y[i] = combine(x[i], y[i])"""
    for i in range(count):
        a = load(x, i)
        store(y, i, narrow(combine(a, load(y, i)), a))


@spliced
def average(op, x, n, count):
    """x[i] /= n, where the operation is AVG."""
    if op == AVG:
        for i in range(count):
            store(x, i, divide(load(x, i), n))


@spliced
def leave(op, x, n, count):
    """For dtypes without AVG."""


@spliced
def _transfer(dst, src, count):
    """dst[i] = src[i], between the type in memory and the type that is computed with."""
    for i in range(count):
        store(dst, i, load(src, i))


@spliced
def fold(apply, finish, op, dst, srcs, n, count):
    """Reduce `n` arrays of `count` elements, whose addresses are at `srcs`, into the array at the pointer `dst`.

    Args:
        apply: `apply(loop, op, x, y, count)` runs `into_first` or `into_second` with the function for `op`.
        finish: `finish(op, x, n, count)` turns a fold into the result, in place.
    """
    first = load_word(srcs, 0)
    if n == 2 and op != AVG and first == as_integer(dst):
        apply(into_first, op, dst, pointer_like(dst, load_word(srcs, 1)), count)
    elif n == 2 and op != AVG and load_word(srcs, 1) == as_integer(dst):
        apply(into_second, op, pointer_like(dst, first), dst, count)
    else:
        scratch = scratch_like(dst)
        for start in range(0, count, SCRATCH):
            length = min(SCRATCH, count - start)
            skip = start * itemsize_of(dst)
            _transfer(scratch, pointer_like(dst, first + skip), length)
            for rank in range(1, n):
                apply(into_first, op, scratch, pointer_like(dst, load_word(srcs, rank) + skip), length)
            finish(op, scratch, n, length)
            _transfer(pointer_like(dst, as_integer(dst) + skip), scratch, length)
