"""Reducers: C functions that reduce n arrays of one dtype by any operation.

    void reducer(int64 op, int64 dst, int64 srcs, int64 n, int64 count)

`srcs` is the address of n addresses, each of `count` elements. `dst` has room for `count` elements; it is one of the
sources, or overlaps none. The kernels of collectives are compiled once for all dtypes, and call a reducer by its
address. There is one reducer per dtype, compiled at its first use and kept on disk, and one per custom operation and
dtype.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np

from ..compiler.jit import Part, c_function
from ..compiler.undisturbed import undisturbed
from ..core.reduce_op import AVG, BAND, BOR, BXOR, LAND, LOR, LXOR, MAX, MIN, ReduceOp
from ..core.travel import TRAVEL_OF, Travel
from ..errors import ArrayError


class Reducer(NamedTuple):
    """A compiled reduction of one dtype.

    It has the C function's address, the function's argument `op`, and the bytes of an element.
    """

    address: int
    code: int
    itemsize: int


_reducers: dict[tuple[ReduceOp | int, np.dtype[Any]], Reducer] = {}


def reducer(op: ReduceOp, dtype: np.dtype[Any]) -> Reducer:
    """Return the reduction by `op` of arrays of `dtype`, compiled or loaded at the first call.

    A custom operation stays compiled, and its ReduceOp alive, until the process ends.

    Raises:
        ArrayError: the operation is not defined for this dtype.
        UsageError: Numba cannot compile a user's function.
    """
    custom = op if op.function is not None else None
    key = (custom or op.code, dtype)
    found = _reducers.get(key)
    if found is None:
        travel = TRAVEL_OF.get(dtype)
        if travel is None:
            refuse_undefined(op, dtype)
        if travel is not None:
            address = _compile_narrow(travel)
        elif custom is None:
            address = _compile(dtype.name)
        else:
            address = undisturbed(lambda: _import_custom().compile_custom(custom, dtype).address)
        found = _reducers[key] = Reducer(address, op.code, dtype.itemsize)
    return found


def _import_custom() -> Any:
    from . import custom

    return custom


def _import_fold() -> Any:
    from .fold import fold

    return fold


_fold = Part(_import_fold)


def _reduce(op, dst, srcs, n, count):
    _fold(op, dst, srcs, n, count)


@cache
def _compile(dtype: str) -> int:
    return c_function(_reduce, reducer_signature(dtype), f"reductions of {dtype}", f" --dtypes {dtype}")


def _import_narrow() -> Any:
    from . import narrow

    return narrow


_convert, _fold_blocks = Part(lambda: _import_narrow().convert), Part(lambda: _import_narrow().fold_blocks)


def _reduce_halves(op, dst, srcs, n, count):
    if op < 0:
        _convert(op, dst, srcs, n, count)
    else:
        _fold(op, dst, srcs, n, count)


def _reduce_blocks(op, dst, srcs, n, count):
    if op < 0:
        _convert(op, dst, srcs, n, count)
    else:
        _fold_blocks(op, dst, srcs, n, count)


@cache
def _compile_narrow(travel: Travel) -> int:
    function = _reduce_blocks if travel.elements > 1 else _reduce_halves
    return c_function(function, reducer_signature(travel.name), f"reductions of float32 as {travel.name}")


def reducer_signature(dtype: str) -> str:
    """Return the signature of the reducer of a dtype of numbers.

    In C, a pointer is passed in the same way as an int64.
    """
    element = f"Half({dtype!r})" if dtype in HALVES else dtype.replace("bool", "boolean")
    return f"void(int64, CPointer({element}), int64, int64, int64)"


_KINDS = "biufc"
HALVES = ("float16", "bfloat16")
_UNDEFINED = {
    "b": ((AVG,), "convert it first, say to float32"),
    "f": ((BAND, BOR, BXOR), "view it as integers with .view if bits are meant"),
    "c": (
        (MIN, MAX, BAND, BOR, BXOR, LAND, LOR, LXOR),
        "reduce abs(x), or x.real and x.imag, or use ReduceOp.custom",
    ),
}


def kind_of(dtype: np.dtype[Any]) -> str:
    """Return the kind of a dtype in NumPy's notation; halves are floats."""
    return "f" if dtype.name in HALVES else dtype.kind


def refuse_undefined(op: ReduceOp, dtype: np.dtype[Any]) -> None:
    """Raise ArrayError, with the cure, if the operation is not defined for this dtype."""
    if not dtype.isnative:
        raise ArrayError(
            f"a reduction needs the machine's byte order, got dtype {dtype}; use x.astype({dtype.newbyteorder('=')!r})"
        )
    if dtype.names is not None and op.function is not None:
        undisturbed(_import_custom).memory_type(dtype)
    elif not _is_number(dtype):
        raise ArrayError(f"{op!r} cannot reduce dtype {dtype}; {_cure(dtype)}")
    codes, cure = _UNDEFINED.get(kind_of(dtype), ((), ""))
    if op.code in codes:
        raise ArrayError(f"{op!r} is not defined for dtype {dtype}; {cure}")


def _is_number(dtype: np.dtype[Any]) -> bool:
    """Return whether reducers are compiled for elements of this dtype."""
    if dtype.name in HALVES:
        return True
    return (
        dtype.isbuiltin != 2 and dtype.kind in _KINDS and dtype.itemsize <= (16 if dtype.kind == "c" else 8)
    )


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
