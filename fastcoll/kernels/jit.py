"""The one place with Numba's flags: how a kernel, a helper and a C function are compiled.

No fastmath anywhere: the same inputs give the same bits. Kernels release the GIL, never raise, and divide as
NumPy does. What Python or C calls is kept on disk.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import numba
from numba.core.ccallback import CFunc

from .cache import KernelCache

_FLAGS = {"error_model": "numpy"}

inlined = numba.njit(**_FLAGS, forceinline=True, no_cfunc_wrapper=True)
"""A helper that becomes part of each kernel that calls it; cached with the kernel, never alone."""

spliced = numba.njit(**_FLAGS, inline="always")
"""A helper that is pasted into its caller before types are inferred, so that the result runs through LLVM once.

For loops that take other functions as arguments: as `inlined`, they took LLVM two to three times as long.
"""


def kernel(function: Callable[..., Any]) -> Any:
    """An entry point that Python calls with integers: runs without the GIL, compiled lazily, cached on disk."""
    compiled = numba.njit(**_FLAGS, nogil=True, no_cfunc_wrapper=True)(function)
    compiled._cache = KernelCache(function)
    return compiled


def c_function(function: Callable[..., Any], signature: Any, *, keep: bool = True) -> CFunc:
    """A C function of a fixed signature, compiled (or loaded) at once; its `address` is valid while it lives.

    Args:
        function: plain Python function; its globals may be kernels' helpers.
        signature: a Numba signature with a return type.
        keep: cache on disk; only for functions of a module, without closures.
    """
    compiled = CFunc(function, (signature.args, signature.return_type), locals={}, options=dict(_FLAGS))
    if keep:
        compiled._cache = KernelCache(function, f"-{zlib.crc32(str(signature).encode()):08x}")
    compiled.compile()
    return compiled
