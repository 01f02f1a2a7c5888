"""A user's own elementwise function f(a, b), compiled into the same loops as the predefined operations."""

from __future__ import annotations

import types as python_types
from collections.abc import Callable
from typing import Any

import numpy as np
from numba import types
from numba.core.ccallback import CFunc
from numba.extending import is_jitted

from ..errors import UsageError
from ..reduce_op import ReduceOp
from .elements import reducer_signature
from .fold import fold, leave
from .jit import c_function, inlined, spliced


def compile_custom(op: ReduceOp, element: types.Type, dtype: np.dtype[Any]) -> CFunc:
    """Compile a reducer for a custom operation; its code is not kept on disk.

    The function gets scalars of the dtype (float32 for float16 and bfloat16), or private records it may write
    to. What it returns is converted as by an assignment. It must not raise.

    Raises:
        UsageError: Numba cannot compile the function for this dtype.
    """
    assert op.function is not None
    function = _jitted(op.function)

    @spliced
    def apply(loop, op, x, y, count):
        loop(function, x, y, count)

    def reduce(op, dst, srcs, n, count):
        fold(apply, leave, op, dst, srcs, n, count)

    try:
        return c_function(reduce, reducer_signature(element), keep=False)
    except Exception as error:  # Numba lets errors of many kinds through
        raise UsageError(
            f"{op!r}: Numba cannot compile the function {op.name!r} for elements of dtype {dtype}; "
            f"it must take two of them and return one. Numba says: {error}"
        ) from error


def _jitted(function: Callable[[Any, Any], Any]) -> Any:
    """The function as Numba can call it; a ufunc or builtin is called through a lambda."""
    if is_jitted(function):
        return function
    if isinstance(function, python_types.FunctionType):
        return inlined(function)
    return inlined(lambda a, b: function(a, b))
