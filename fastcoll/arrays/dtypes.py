"""NumPy dtypes for elements for which NumPy has none: bfloat16, float8, complex32, ...

For bfloat16 and float8 the dtypes of the package ml_dtypes are used, if that is installed. All other elements of this
kind are opaque records of the same size. Records can be moved, and their dtypes compared; bfloat16 can also be reduced,
because kernels recognise it by name.
"""

from __future__ import annotations

from contextlib import suppress
from functools import lru_cache
from typing import Any

import numpy as np

from ..errors import UnavailableError, UsageError

NUMPY = (
    "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64 complex64 complex128"
).split()
_ALIASES = {"half": "float16", "float": "float32", "double": "float64", "char": "int8", "uint": "uint32"}


class bfloat(np.void):  # type: ignore[misc]  # final for type checkers only
    """The type of a bfloat16 element if ml_dtypes is not installed.

    NumPy appends the number of bits to this name, so the dtype is called bfloat16.
    """


@lru_cache(maxsize=256)
def dtype_of(name: str, itemsize: int) -> np.dtype[Any]:
    """Return the dtype with a name of NumPy, ml_dtypes or torch.

    There is one object for each name, because kernels identify dtypes by their address.
    """
    if name in NUMPY:
        return np.dtype(name)
    if name.startswith(("bfloat16", "float8")):
        with suppress(ImportError, AttributeError):
            import ml_dtypes

            known: np.dtype[Any] = np.dtype(getattr(ml_dtypes, name))
            return known
    # A record of one field, because NumPy treats plain void dtypes of one size as equal.
    record = np.dtype([(name, f"V{itemsize}")])
    return np.dtype((bfloat, record)) if name == "bfloat16" else record


def parse_dtype(text: str) -> np.dtype[Any]:
    """Return the numeric dtype that `text` names.

    Valid names are NumPy's, half, float, double, char, uint and, if ml_dtypes is installed, bfloat16.
    """
    name = _ALIASES.get(text.lower(), text.lower())
    kind: Any = name
    if name == "bfloat16":
        try:
            from ml_dtypes import bfloat16 as kind
        except ImportError as error:
            raise UnavailableError(
                "dtype bfloat16 needs the package ml_dtypes; pip install ml_dtypes"
            ) from error
    known = "give e.g. float32, float64, int32, bfloat16"
    try:
        dtype: np.dtype[Any] = np.dtype(kind)
    except TypeError as error:
        raise UsageError(f"there is no dtype {text!r}; {known}") from error
    if dtype.kind not in "biufc" and kind is name:
        raise UsageError(f"dtype {text!r} holds no numbers; {known}")
    return dtype


def is_structured(dtype: np.dtype[Any]) -> bool:
    """Whether a dtype is a record of the user's; bfloat16 without ml_dtypes is a record, too, but a number."""
    return dtype.names is not None and dtype.name != "bfloat16"


def number(value: Any, dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """Return an array of one element with this value, rounded to a number of `dtype`."""
    if dtype.name == "bfloat16":
        return rounded(np.full(1, value, np.float32), dtype)
    return np.full(1, value, dtype)


def widened(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    if x.dtype.name != "bfloat16":
        return x.astype(np.float32)
    # NumPy 1 would make int64 of a 0-d array and an int.
    bits = x.view(np.uint16).astype(np.uint32) << np.uint32(16)
    return bits.view(np.float32)


def rounded(x: np.ndarray[Any, Any], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """Round float32 to float16 or bfloat16, to nearest, ties to even.

    If the result is bfloat16, every NaN becomes the positive quiet NaN.
    """
    if dtype.name != "bfloat16":
        return x.astype(dtype)
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    nearest = (bits + (0x7FFF + (bits >> 16 & 1))) >> 16
    return np.where(np.isnan(x), 0x7FC0, nearest).astype(np.uint16).view(dtype).reshape(x.shape)
