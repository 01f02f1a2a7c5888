"""Input validation of arrays: any CPU array becomes a C-contiguous ndarray over its memory.

An array that cannot be used is rejected by an error that names the cure. A strided or unaligned array is *packed*: the
call uses a contiguous copy, which `finish` copies back if the call writes. After validation every array is an exact
`numpy.ndarray`, C-contiguous, without objects, and writable if the call writes. Nothing is converted to another dtype.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from ..errors import ArrayError, FastcollError, UsageError
from . import columns, jax_arrays, tensors
from .imported import Array, FunctionalResult, ImportedArray, OnDeviceError, finish_all

__all__ = [
    "ImportedArray",
    "Array",
    "OnDeviceError",
    "FunctionalResult",
    "import_array",
    "import_list",
    "finish_all",
    "may_overlap",
    "room_like",
]

_DLPACK_HOST = (1, 3)  # kDLCPU, kDLCUDAHost (dlpack.h)
_NEVER_COPY: dict[str, Any] = {"copy": False} if np.lib.NumpyVersion(np.__version__) >= "2.1.0" else {}


# The import function of each library, by the module of the array's type. It returns None for other objects.
_LIBRARIES: dict[str, Callable[[Any, str, bool, bool], Array | ImportedArray | None]] = {
    "torch": tensors.import_array,
    "jax": jax_arrays.import_array,
    "jaxlib": jax_arrays.import_array,
    "pandas": columns.of_pandas,
    "polars": columns.of_polars,
    "pyarrow": columns.of_arrow,
}


def import_array(x: Any, *, writable: bool, what: str = "tensor", functional: bool = False) -> ImportedArray:
    """Import an array of NumPy, of a library in `_LIBRARIES`, or of another kind.

    Arrays of other kinds must support DLPack, the array interface or the buffer protocol.

    Args:
        x: the caller's array, with any number of dimensions, also 0; or a NumPy scalar, if the call only reads it.
        writable: the call writes into it.
        what: the argument's name, for messages.
        functional: the call may return a new array in place of an immutable one; `finish` then makes it.

    Raises:
        ArrayError: x is no array, has objects as elements, is not in host memory, or is read-only although the call
            writes into it.
    """
    try:
        array = x if type(x) is np.ndarray else _as_ndarray(x, what, writable, functional)
    except FastcollError:
        raise
    except (BufferError, RuntimeError, TypeError, ValueError) as error:  # of the object itself
        raise ArrayError(
            f"{what} is a {type(x).__name__} that NumPy cannot view: {error}; give a NumPy array"
        ) from error
    if isinstance(array, ImportedArray):
        return array
    if array.dtype.hasobject:
        raise ArrayError(
            f"{what} is a {_describe(array)}, whose elements are Python objects; "
            "give it a fixed-size dtype with .astype, or use the object collectives"
        )
    flags = array.flags
    if writable and not flags.writeable:
        raise ArrayError(
            f"{what} is a read-only {_describe(array)}, and the result goes there; give a writable copy of it"
        )
    if flags.c_contiguous and flags.aligned:
        return ImportedArray(array)
    if not writable:
        return ImportedArray(array.copy(order="C"))
    if may_overlap(array.shape, array.strides, array.itemsize):
        raise ArrayError(
            f"{what} is a {_describe(array)} with strides {array.strides}, so that elements may share memory, "
            "and the result goes there; give a copy of it"
        )
    return ImportedArray(array.copy(order="C"), owner=array)


def import_list(
    xs: Sequence[Any],
    n: int,
    *,
    writable: bool,
    what: str,
    import_array: Callable[..., ImportedArray] = import_array,
) -> list[ImportedArray]:
    """Import a list of exactly `n` arrays, one per rank, each with `import_array`.

    Error messages contain an item's index.
    """
    if not isinstance(xs, Sequence) or isinstance(xs, str | bytes | bytearray | memoryview):
        raise UsageError(f"{what} must be a list of {n} arrays, got {type(xs).__name__}")
    if len(xs) != n:
        raise UsageError(f"{what} must have {n} arrays, one a rank, got {len(xs)}")
    return [import_array(x, writable=writable, what=f"{what}[{index}]") for index, x in enumerate(xs)]


def room_like(x: Any, imported: Array, shape: Sequence[int]) -> FunctionalResult:
    """Allocate host memory for a result of this shape and of x's dtype.

    `finish` returns the result as a torch or JAX array if x is one, else as a NumPy array.

    Args:
        imported: the array that `import_array` made of x.
    """
    library = set(libraries(x))
    if "torch" in library:
        tensor = x.new_empty(tuple(shape))
        return FunctionalResult(import_array(tensor, writable=True).array, lambda _: tensor)
    array = np.empty(shape, imported.dtype)
    if library & {"jax", "jaxlib"}:
        return FunctionalResult(array, partial(jax_arrays.from_numpy, sharding=x.sharding, dtype=x.dtype))
    return FunctionalResult(array, lambda same: same)


def libraries(x: Any) -> list[str]:
    """Return the top-level packages of the classes of x, of its own class first."""
    return [kind.__module__.partition(".")[0] for kind in type(x).__mro__]


def _as_ndarray(x: Any, what: str, writable: bool, functional: bool) -> Array | ImportedArray:
    """Return an array of another type as an ndarray over its memory, or imported."""
    # The import of numpy.ma takes 50 ms; before it there are no masked arrays.
    if "numpy.ma" in sys.modules and isinstance(x, np.ma.MaskedArray):
        raise ArrayError(
            f"{what} is a masked array, whose mask would be ignored; give x.filled(value) or x.data"
        )
    if isinstance(x, np.ndarray):
        return x.view(np.ndarray)
    if isinstance(x, np.generic):
        if writable:
            raise ArrayError(
                f"{what} is a NumPy scalar ({x.dtype}), which cannot be written to; give an array, e.g. numpy.array(x)"
            )
        return np.asarray(x)
    library = next((name for name in libraries(x) if name in _LIBRARIES), None)
    if library and (known := _LIBRARIES[library](x, what, writable, functional)) is not None:
        return known
    if hasattr(x, "__cuda_array_interface__"):
        raise OnDeviceError(what, type(x).__name__)
    if hasattr(x, "__dlpack_device__"):
        kind, index = x.__dlpack_device__()
        if kind not in _DLPACK_HOST:
            raise OnDeviceError(what, f"DLPack device type {int(kind)}, number {index}")
    # The array interface comes before DLPack, because it always reports whether the memory may be written to.
    if hasattr(x, "__array_interface__"):
        return np.asarray(x)
    if hasattr(x, "__dlpack__"):
        return _from_dlpack(x, writable, what)
    try:
        view = memoryview(x)
    except TypeError:
        raise ArrayError(f"{what} must be an array, got {type(x).__name__}; {_cure(x)}") from None
    return np.asarray(view)


def _from_dlpack(x: Any, writable: bool, what: str) -> Array:
    try:
        array = np.from_dlpack(x, **_NEVER_COPY)
    except TypeError:  # before DLPack 1.0 the only argument is `stream`, and nothing is copied
        array = np.from_dlpack(x)
    if writable and not array.flags.writeable:
        raise ArrayError(
            f"{what} is a {type(x).__name__}, which is read-only through DLPack with NumPy {np.__version__}, and "
            "the result goes there; give a NumPy array (of DLPack before 1.0, or with NumPy before 2.1, all is "
            "read-only)"
        )
    return array


def _cure(x: Any) -> str:
    if x is None:
        return "every rank gives one"
    if isinstance(x, list | tuple | int | float | complex) or hasattr(x, "__array__"):
        return "make one with numpy.array(x), and keep it if the call writes into it"
    return "give a NumPy array, or use the object collectives"


def may_overlap(shape: Sequence[int], strides: Sequence[int], itemsize: int) -> bool:
    """Return whether two elements may share memory, from the shape and the strides in bytes.

    True if some stride is smaller than the extent of all dimensions with smaller strides.
    """
    extent = itemsize
    for stride, length in sorted(zip(map(abs, strides), shape, strict=True)):
        if length > 1:
            if stride < extent:
                return True
            extent += (length - 1) * stride
    return False


def _describe(x: Array) -> str:
    return f"{x.dtype} array of shape {x.shape}"
