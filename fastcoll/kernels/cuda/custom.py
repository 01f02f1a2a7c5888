"""Users' own reductions: their function as part of the same kernels, and a kernel of its own for structured dtypes."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from types import FunctionType
from typing import Any

import numpy as np
from numba import from_dtype, types

from .elements import Element
from .toolkit import SIMULATED, cuda, device


def combination_by(function: Callable[[Any, Any], Any], element: Element, kind: str) -> Any:
    """A function of two scalars for groups of lanes; what it returns is converted as by an assignment.

    It gets booleans for bool (`kind` "b"), complex numbers for complex ("c"), float32 for float16 and bfloat16.
    """
    scalar, part = device(_plain(function)), element.computed
    if kind == "b":
        combine = device(lambda a, b: (part(1 if scalar(a[0] != 0, b[0] != 0) else 0),))
    elif kind == "c":
        combine = _of_complex(scalar, types.complex64 if part == types.float32 else types.complex128)
    else:
        combine = device(lambda a, b: (part(scalar(a[0], b[0])),))
    if not SIMULATED:
        # Before it is nested: Numba tries twice at each level until it reports an error, for a minute in all.
        combine.compile_device((types.UniTuple(part, element.lanes),) * 2)
    return combine


def _of_complex(scalar: Any, whole: Any) -> Any:
    @device
    def combine(a, b):
        value = whole(scalar(whole(complex(a[0], a[1])), whole(complex(b[0], b[1]))))
        return value.real, value.imag

    return combine


def _plain(function: Callable[[Any, Any], Any]) -> Any:
    """The function as Python wrote it, also of one jitted for the CPU; a ufunc or builtin through a lambda."""
    python = getattr(function, "py_func", function)
    return python if isinstance(python, FunctionType) else lambda a, b: function(a, b)


def records_kernel(function: Callable[[Any, Any], Any], dtype: np.dtype[Any]) -> Any:
    """As fold.py's kernels, one record at a time.

    The function gets private copies, which it may write to. Their fields are aligned, also where those in memory are
    not, as numba-cuda compiles nothing else. (Numba's own simulator knows no alignment of local arrays.)
    """
    aligned = np.dtype([(name, field[0]) for name, field in (dtype.fields or {}).items()], align=True)
    record, size = from_dtype(aligned), dtype.itemsize
    combine = device(_plain(function))
    read, write, named = _moves(dtype, aligned)

    def reduce(dst, head, packs, count, srcs):
        taken = named(cuda.local.array(1, record) if SIMULATED else cuda.local.array(1, record, 16))
        new = named(cuda.local.array(1, record) if SIMULATED else cuda.local.array(1, record, 16))
        index = cuda.grid(1)
        while index < count:
            at = index * size
            read(taken, srcs[0] + at)
            for source in range(1, len(srcs)):
                read(new, srcs[source] + at)
                taken[0] = combine(taken[0], new[0])
            write(taken, dst + at)
            index += cuda.gridsize(1)

    return reduce


def _moves(dtype: np.dtype[Any], aligned: np.dtype[Any]) -> tuple[Any, Any, Any]:
    """Copies between an address and an array of one record, both ways, and the array with fields as attributes."""
    bytes_of = [
        (there[1] + i, here[1] + i)
        for there, here in zip((dtype.fields or {}).values(), (aligned.fields or {}).values(), strict=True)
        for i in range(there[0].itemsize)
    ]
    if not SIMULATED:
        return _copy(bytes_of, True), _copy(bytes_of, False), device(lambda array: array)

    def read(array, address):
        for there, here in bytes_of:
            ctypes.memmove(array.ctypes.data + here, int(address) + there, 1)

    def write(array, address):
        for there, here in bytes_of:
            ctypes.memmove(int(address) + there, array.ctypes.data + here, 1)

    return read, write, lambda array: array.view(np.recarray)


def _copy(bytes_of: list[tuple[int, int]], inwards: bool) -> Any:
    from llvmlite import ir
    from numba.cuda.extending import intrinsic

    byte, word = ir.IntType(8).as_pointer(), ir.IntType(64)

    @intrinsic
    def copy(typing_context, array, address):
        def emit(context, builder, signature, args):
            data = context.make_array(array)(context, builder, args[0]).data
            private, memory = builder.bitcast(data, byte), builder.inttoptr(args[1], byte)
            for offset, place in bytes_of:
                there = builder.gep(memory, [ir.Constant(word, offset)])
                here = builder.gep(private, [ir.Constant(word, place)])
                src, dst = (there, here) if inwards else (here, there)
                builder.store(builder.load(src), dst)
            return context.get_dummy_value()

        return types.void(array, types.int64), emit

    return copy
