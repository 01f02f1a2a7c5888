"""Reducers: C functions that fold n arrays of one dtype element by element, by any of the operations.

    void reducer(int64 op, int64 dst, int64 srcs, int64 n, int64 count)

`srcs` is the address of n addresses, each of `count` elements; so many are at `dst`, which is one of the
sources or apart from all of them. Protocols are compiled once, know no dtype, and call this by its address.
There is one function a dtype, compiled at its first use and kept on disk, and one a custom operation and dtype.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import from_dtype, types
from numba.core.ccallback import CFunc
from numba.core.errors import NumbaError

from ..core.reduce_op import AVG, BAND, BOR, BXOR, MAX, MIN, ReduceOp
from ..errors import ArrayError
from .custom import compile_custom
from .elements import Half, reducer_signature
from .fold import fold
from .jit import c_function


class Reducer(NamedTuple):
    """A compiled reduction of one dtype: the C function's address, its first argument, and bytes of an element."""

    address: int
    code: int
    itemsize: int


_reducers: dict[tuple[ReduceOp | int, np.dtype[Any]], Reducer] = {}
_compiled: dict[tuple[ReduceOp | None, np.dtype[Any]], CFunc] = {}  # keeps the code alive


def reducer(op: ReduceOp, dtype: np.dtype[Any]) -> Reducer:
    """The compiled reduction by `op` of arrays of `dtype`; compiled or loaded at the first call.

    A custom operation stays compiled, and its ReduceOp alive, until the process ends.

    Raises:
        ArrayError: there is no such operation for this dtype.
        UsageError: Numba cannot compile a custom operation's function for this dtype.
    """
    custom = op if op.function is not None else None
    key = (custom or op.code, dtype)
    found = _reducers.get(key)
    if found is None:
        element = memory_type(op, dtype)
        refuse_undefined(op, dtype)
        found = _reducers[key] = Reducer(_compile(custom, element, dtype).address, op.code, dtype.itemsize)
    return found


def _compile(custom: ReduceOp | None, element: types.Type, dtype: np.dtype[Any]) -> CFunc:
    compiled = _compiled.get((custom, dtype))
    if compiled is None:
        if custom is None:
            compiled = c_function(_reduce, reducer_signature(element), f"reductions of {dtype}")
        else:
            compiled = compile_custom(custom, element, dtype)
        _compiled[custom, dtype] = compiled
    return compiled


def _reduce(op, dst, srcs, n, count):
    fold(op, dst, srcs, n, count)


_KINDS = "biufc"
HALVES = ("float16", "bfloat16")
_UNDEFINED = {
    "b": ((AVG,), "convert it with .astype first, say to float32"),
    "f": ((BAND, BOR, BXOR), "view it as integers with .view if bits are meant"),
    "c": ((MIN, MAX, BAND, BOR, BXOR), "reduce abs(x), or x.real and x.imag, or use ReduceOp.custom"),
}


def kind_of(dtype: np.dtype[Any]) -> str:
    """The kind of a dtype as NumPy names it, halves among the floats."""
    return "f" if dtype.name in HALVES else dtype.kind


def refuse_undefined(op: ReduceOp, dtype: np.dtype[Any]) -> None:
    """Raise ArrayError, with the cure, where an operation means nothing for a dtype."""
    codes, cure = _UNDEFINED.get(kind_of(dtype), ((), ""))
    if op.code in codes:
        raise ArrayError(f"{op!r} is not defined for dtype {dtype}; {cure}")


def memory_type(op: ReduceOp, dtype: np.dtype[Any]) -> types.Type:
    """Numba's type of an element in memory."""
    if not dtype.isnative:
        raise ArrayError(
            f"{op!r} needs the machine's byte order, got dtype {dtype}; use x.astype({dtype.newbyteorder('=')!r})"
        )
    if dtype.name in HALVES:
        return Half(dtype.name)
    if dtype.isbuiltin != 2 and dtype.kind in _KINDS and dtype.itemsize <= (16 if dtype.kind == "c" else 8):
        return from_dtype(dtype)
    if dtype.names is None or op.function is None:
        raise ArrayError(f"{op!r} cannot reduce dtype {dtype}; {_cure(dtype)}")
    try:
        return from_dtype(dtype)
    except (NotImplementedError, TypeError, NumbaError) as error:
        raise ArrayError(
            f"Numba has no type for dtype {dtype} ({error}); reduce its fields one by one"
        ) from error


def _cure(dtype: np.dtype[Any]) -> str:
    if dtype.names is not None:
        return "reduce its fields one by one, or use ReduceOp.custom with a function of two records"
    if dtype.kind in "mM":
        return "reduce x.view(numpy.int64), where NaT is the smallest integer"
    if dtype.kind in "fc" and dtype.isbuiltin != 2:  # 2: float8 of ml_dtypes
        return "use .astype to float64 or complex128, the widest that are compiled"
    if dtype.kind == "O":
        return "give it a numeric dtype with .astype, or use the object collectives"
    return "use an integer, float or complex dtype, bool, float16 or bfloat16"
