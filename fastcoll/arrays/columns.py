"""Import of columns of pandas, Arrow and polars, which are read in place.

A column is rejected if its elements have no fixed size, or if an element is missing. Arrays of Arrow and polars are
immutable. A column of pandas is writable only if pandas makes the result of `to_numpy` writable, which pandas 3 never
does.
"""

from __future__ import annotations

import re
import sys
from typing import Any

import numpy as np

from ..errors import ArrayError
from .imported import Array

_PANDAS_CURES = (  # by a part of the dtype's name
    ("category", "give x.cat.codes, and send the categories once"),
    ("Sparse", "give x.sparse.to_dense()"),
    ("datetime64", "give x.dt.tz_convert(None)"),
    ("str", "use the object collectives"),
    ("object", "use the object collectives, or give x.astype of a fixed-size dtype"),
)


def of_pandas(x: Any, what: str, writable: bool, functional: bool) -> Array | None:
    """Import a Series, an Index or another of pandas' arrays; return None for other objects."""
    pandas = sys.modules["pandas"]
    if isinstance(x, pandas.DataFrame):
        raise ArrayError(f"{what} is a pandas DataFrame; give its columns one by one, or x.to_numpy()")
    if not isinstance(x, pandas.Series | pandas.Index | pandas.api.extensions.ExtensionArray):
        return None
    array = _elements_of_pandas(pandas, x, what)
    if writable and not array.flags.writeable:
        raise ArrayError(
            f"{what} is a pandas {type(x).__name__}, which may not be written to through NumPy, and the result goes "
            "there; give array = x.to_numpy(copy=True), and assign that to the column afterwards"
        )
    return array


def _elements_of_pandas(pandas: Any, x: Any, what: str) -> Array:
    dtype = x.dtype.numpy_dtype if isinstance(x, pandas.arrays.NumpyExtensionArray) else x.dtype
    if isinstance(dtype, np.dtype) and not dtype.hasobject:
        return np.asarray(x.to_numpy())
    name = f"{what} is a pandas {type(x).__name__} of {dtype}"
    arrow, nullable = isinstance(dtype, pandas.ArrowDtype), getattr(dtype, "numpy_dtype", None)
    if not (arrow or isinstance(nullable, np.dtype)) or str(dtype).startswith("str"):
        cure = next(
            (cure for part, cure in _PANDAS_CURES if part in str(dtype)), "give x.to_numpy(dtype=...)"
        )
        if not isinstance(x, pandas.Series):  # the others have these methods themselves
            cure = re.sub(r"x\.(cat|sparse|dt)\.", "x.", cure)
        raise ArrayError(f"{name}, which NumPy has no dtype for; {cure}")
    if x.isna().any():
        raise ArrayError(f"{name} with missing values; give x.fillna(value) or x.dropna()")
    if arrow:
        column = getattr(x, "array", x).__arrow_array__()
        return _elements_of_arrow(column, what, "x.astype('uint8')", "x.to_numpy()")
    array = np.asarray(x.to_numpy(dtype=nullable)).view()
    array.flags.writeable = False
    return array


def of_arrow(x: Any, what: str, writable: bool, functional: bool) -> Array | None:
    """Import an Array, a ChunkedArray of at most one chunk, or a Tensor.

    Returns None for other objects, such as a buffer.
    """
    arrow = sys.modules["pyarrow"]
    if isinstance(x, arrow.Table | arrow.RecordBatch):
        raise ArrayError(f"{what} is an Arrow {type(x).__name__}; give its columns one by one")
    if isinstance(x, arrow.Tensor):
        return np.asarray(memoryview(x))
    if not isinstance(x, arrow.Array | arrow.ChunkedArray):
        return None
    if writable:
        raise _immutable(what, f"an Arrow {type(x).__name__}", "pyarrow.array(output)")
    return _elements_of_arrow(x, what, "x.cast(pyarrow.uint8())", "x.combine_chunks()")


def _elements_of_arrow(x: Any, what: str, unpacked: str, joined: str) -> Array:
    """Return the elements of an Arrow array.

    Args:
        unpacked, joined: the cures if the elements are packed into bits, or are in several chunks.
    """
    arrow = sys.modules["pyarrow"]
    name = f"{what} is an Arrow {type(x).__name__} of {x.type}"
    if x.null_count:
        raise ArrayError(f"{name} with nulls; give x.fill_null(value) or x.drop_null()")
    if isinstance(x, arrow.ChunkedArray):
        if x.num_chunks > 1:
            raise ArrayError(f"{name} in {x.num_chunks} chunks; give {joined}")
        x = x.chunk(0) if x.num_chunks else arrow.array([], x.type)
    if arrow.types.is_boolean(x.type):
        raise ArrayError(f"{name}, packed into bits; give {unpacked}")
    try:
        array: Array = x.to_numpy(zero_copy_only=True)
    except (arrow.ArrowInvalid, arrow.ArrowNotImplementedError) as error:
        cure = "give x.cast to a number, the parts that it is made of (x.indices, x.flatten())"
        raise _unseen(name, cure) from error
    return array


def of_polars(x: Any, what: str, writable: bool, functional: bool) -> Array | None:
    """Import a Series; return None for other objects."""
    polars = sys.modules["polars"]
    if isinstance(x, polars.DataFrame | polars.LazyFrame):
        raise ArrayError(f"{what} is a polars {type(x).__name__}; give its columns one by one")
    if not isinstance(x, polars.Series):
        return None
    if writable:
        raise _immutable(what, "a polars Series", "polars.Series(output)")
    name = f"{what} is a polars Series of {x.dtype}"
    if x.null_count():
        raise ArrayError(f"{name} with nulls; give x.fill_null(value) or x.drop_nulls()")
    if x.n_chunks() > 1:
        raise ArrayError(f"{name} in {x.n_chunks()} chunks; give x.rechunk()")
    try:
        array: Array = x.to_numpy(allow_copy=False)
    except RuntimeError as error:
        raise _unseen(name, "give x.cast to a number (Booleans: polars.UInt8)") from error
    return array


def _immutable(what: str, name: str, back: str) -> ArrayError:
    return ArrayError(
        f"{what} is {name}, which is immutable, and the result goes there; give a NumPy array as the output, and "
        f"make {back} of it afterwards"
    )


def _unseen(name: str, cure: str) -> ArrayError:
    return ArrayError(f"{name}, whose elements NumPy cannot view; {cure}, or use the object collectives")
