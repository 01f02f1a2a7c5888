"""The one place with Numba's flags: how an entry, a kernel, a helper and a C function are compiled.

No fastmath anywhere: the same inputs give the same bits. Kernels release the GIL, never raise, and divide as
NumPy does. What Python or C calls is kept on disk.
"""

from __future__ import annotations

import inspect
import zlib
from collections.abc import Callable
from typing import Any

import numba
from numba import types
from numba.core.ccallback import CFunc

from .cache import KernelCache
from .pyobjects import index, pyobject

_FLAGS = {"error_model": "numpy"}

inlined = numba.njit(**_FLAGS, forceinline=True, no_cfunc_wrapper=True)
"""A helper that becomes part of each kernel that calls it; cached with the kernel, never alone."""

spliced = numba.njit(**_FLAGS, inline="always")
"""A helper that is pasted into its caller before types are inferred, so that the result runs through LLVM once.

For loops that take other functions as arguments: as `inlined`, they took LLVM two to three times as long.
"""


def kernel(function: Callable[..., Any]) -> Any:
    """A function for entries and other kernels to call, compiled once for all of them."""
    return numba.njit(**_FLAGS, nogil=True, no_cfunc_wrapper=True)(function)


class Entry:
    """What Python calls: a compiled function that runs without the GIL, made at its first call, kept on disk.

    Its parameters are a `PyObject` or an `Index` each (kernels/pyobjects.py), as annotated; it returns an integer.

    Attributes:
        call: the function. Numba's own C wrapper, without its dispatcher: a call with three arguments takes
            86 ns instead of 236 ns (2-core AMD EPYC, Numba 0.68, Python 3.11).
        name: the function's name.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.name = function.__name__
        self.call: Callable[..., int] = self._first_call
        self.__doc__ = function.__doc__
        self._function = function

    def compile(self) -> None:
        """Compile the function, or load it from the disk, unless that has been done."""
        if self.call != self._first_call:
            return
        kinds = {"PyObject": pyobject, "Index": index}
        parameters = inspect.signature(self._function).parameters.values()
        signature = types.int64(*[kinds[parameter.annotation] for parameter in parameters])
        compiled = kernel(self._function)
        compiled._cache = KernelCache(self._function)
        compiled.compile(signature)
        self.call = compiled.overloads[signature.args].entry_point

    def _first_call(self, *args: Any) -> int:
        self.compile()
        return self.call(*args)


entry = Entry


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
