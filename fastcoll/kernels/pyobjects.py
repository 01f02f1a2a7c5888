"""Python objects as arguments of entries (compiled functions for Python): addresses and fields.

An array is read through CPython's PyArrayObject and a tuple through PyTupleObject, both stable since the first release
of NumPy and of Python 3 (numpy/core/include/numpy/ndarraytypes.h, cpython/tupleobject.h). A self-test at import
compares the fields with Python's attributes. Passing an object like this costs nothing; `x.ctypes.data` costs 795 ns
(2-core AMD EPYC, Python 3.11).

Another thread may assign an array's `shape`, `dtype` or `strides` during a call. For a moment the array then has the
new dtype and the old shape, or its shape is in freed memory. So the fields that determine its size (DESCR, FLAGS, NDIM,
SHAPE) are read with the GIL (`locked_entry`, jit.py), or from a view that no other thread has (`pinned`,
shm/context.py). These assignments change neither the first address nor the number of bytes. So the values stay right
after the GIL is released, and DATA may be read at any time. The caller's frame holds references to the objects, so they
stay alive, and an array's `resize`, which would move the data, raises an error.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Any

import numpy as np

from ..compiler import llvm
from ..compiler.jit import instruction
from ..errors import UnavailableError

# Offsets of the fields, in bytes.
_HEAD = object.__basicsize__
TYPE = _HEAD - 8
DATA = _HEAD
NDIM = _HEAD + 8  # 32 bits
SHAPE = _HEAD + 16  # pointer to words
DESCR = _HEAD + 40
FLAGS = _HEAD + 48  # 32 bits
LENGTH = _HEAD
ITEMS = tuple.__basicsize__

CONTIGUOUS, ALIGNED, WRITEABLE = 0x001, 0x100, 0x400  # NPY_ARRAY_...

PyObject = Any
"""Annotation of an entry's parameter that takes any Python object."""
Index = int
"""Annotation of an entry's parameter that takes an integer."""


@instruction("int64", "PyObject")
def object_at(builder, value):
    """Return the address of a PyObject argument."""
    return builder.ptrtoint(value, llvm.WORD)


@instruction("int64", "Index")
def integer(builder, value):
    """Return an Index argument as an integer."""
    return value


@instruction("int64")
def release_gil(builder):
    """Release the GIL; no object may be accessed before `take_gil`, which gets the result."""
    return builder.call(llvm.function(builder, "PyEval_SaveThread", llvm.WORD), [])


@instruction("int64")
def take_gil(builder, thread, result):
    """Acquire the GIL and return `result`, which was computed without it.

    For example `take_gil(release_gil(), work(...))`.
    """
    builder.call(llvm.function(builder, "PyEval_RestoreThread", llvm.VOID, llvm.WORD), [thread])
    return result


@instruction("void")
def add_reference(builder, address):
    """Add a reference to the object at an address."""
    builder.call(llvm.function(builder, "Py_IncRef", llvm.VOID, llvm.WORD), [address])


@instruction("void")
def drop_reference(builder, address):
    """Drop a reference to the object at an address, which may delete the object and run Python code."""
    builder.call(llvm.function(builder, "Py_DecRef", llvm.VOID, llvm.WORD), [address])


def _layout_is_known() -> bool:
    """Return whether the fields of arrays and tuples are at the offsets in this file."""
    word = ctypes.c_int64.from_address
    half = ctypes.c_uint32.from_address
    arrays: list[np.ndarray[Any, Any]] = [
        np.zeros(3, np.float32), np.zeros((2, 3))[1:], np.zeros((4, 5), np.int16)[:, ::2], np.array(1, np.uint8),
        np.zeros(0),
    ]  # fmt: skip
    arrays[0].flags.writeable = False
    for x in arrays:
        shape = [word(word(id(x) + SHAPE).value + 8 * k).value for k in range(x.ndim)]
        found = [word(id(x) + field).value for field in (TYPE, DESCR, DATA)]
        found += [half(id(x) + NDIM).value, half(id(x) + FLAGS).value, *shape]
        if found != [id(type(x)), id(x.dtype), x.ctypes.data, x.ndim, x.flags.num, *x.shape]:
            return False
    items = (arrays[0], None)
    fields = [word(id(items) + offset).value for offset in (LENGTH, ITEMS, ITEMS + 8)]
    return fields == [2, id(arrays[0]), id(None)]


if not _layout_is_known():
    raise UnavailableError(
        f"this build of NumPy {np.__version__} on {sys.implementation.name} {sys.version.split()[0]} does not lay "
        "arrays and tuples out in memory as fastcoll's kernels expect; use CPython with NumPy from PyPI or conda-forge"
    )
