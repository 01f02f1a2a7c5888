"""The one place with Numba's flags: how an entry, a kernel, a helper and a C function are compiled.

No fastmath anywhere: the same inputs give the same bits. Kernels release the GIL, never raise, and divide as
NumPy does. What Python or C calls is kept on disk.

Helpers and kernels are typed once, linked, and left to LLVM where they are used. By default Numba optimizes each by
itself, makes machine code and a Python wrapper of it, and does all that again for every literal that it is called
with: the entries took 22 s to compile with it, and take 9 s so (all of fastcoll.shm and one reducer, 2-core AMD EPYC,
Numba 0.68).
"""

from __future__ import annotations

import gc
import inspect
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numba
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.ccallback import CFunc
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import Compiler
from numba.core.registry import CPUDispatcher
from numba.extending import intrinsic

from .cache import KernelCache, Telling
from .pyobjects import index, pyobject


class _Codegen:
    """A library's code generator, to which a helper's environment is unknown: nothing runs there that needs it."""

    def __init__(self, codegen: Any) -> None:
        self._codegen = codegen

    def __getattr__(self, name: str) -> Any:
        return getattr(self._codegen, name)

    def set_env(self, env_name: str, env: Any) -> None:
        pass


class _Library(JITCodeLibrary):
    """Code to link into other libraries: neither optimized nor made machine code of by itself."""

    @property
    def codegen(self):
        return _Codegen(self._codegen)

    def _optimize_functions(self, ll_module):
        ll_module.data_layout = self._codegen._data_layout

    def _optimize_final_module(self):
        pass

    def _finalize_final_module(self):
        self._finalize_dynamic_globals()
        self._finalized = True

    def get_pointer_to_function(self, name):
        return 0


class _Compiler(Compiler):
    def __init__(self, typingctx, targetctx, library, *args):
        super().__init__(typingctx, targetctx, library or _Library(targetctx.codegen(), "linked"), *args)


class Linked(CPUDispatcher):
    """A function that compiled code calls, and Python cannot; compiled once for each tuple of types."""

    def __init__(self, function, flags):
        no_wrappers = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}
        options = {"nopython": True, "boundscheck": None, **no_wrappers}
        super().__init__(function, targetoptions=options | flags, pipeline_class=_Compiler)

    def get_call_template(self, args, kws):
        plain = types.unliteral
        return super().get_call_template(tuple(map(plain, args)), {k: plain(v) for k, v in kws.items()})

    def add_overload(self, cres):
        self.overloads[tuple(cres.signature.args)] = cres  # and nothing for Python to call

    def _compile_for_args(self, *args, **kws):
        raise TypeError(f"{self.py_func.__name__} is a part of compiled code; call it from an entry")


_FLAGS = {"error_model": "numpy"}
# No arrays, lists or strings are made in kernels. Code that may make some needs Numba's runtime, which is 0.3 s of
# imports away when all that is to be done is to load that code from the disk.
_WORDS_ONLY = {**_FLAGS, "_nrt": False}


def inlined(function: Callable[..., Any]) -> Any:
    """A helper that becomes part of each kernel that calls it; cached with the kernel, never alone."""
    return Linked(function, {**_WORDS_ONLY, "forceinline": True})


def kernel(function: Callable[..., Any]) -> Any:
    """A function for entries and other kernels to call, typed once for all of them."""
    return Linked(function, {**_WORDS_ONLY, "nogil": True})


def users_function(function: Callable[..., Any]) -> Any:
    """What a user wrote, to be part of a kernel; it may use all of Numba."""
    return numba.njit(**_FLAGS, forceinline=True, no_cfunc_wrapper=True)(function)


def instruction(returns: types.Type, *kinds: Any, by: Any = intrinsic) -> Callable[[Callable[..., Any]], Any]:
    """A helper whose LLVM instructions the decorated `emit(builder, *values)` adds.

    Args:
        kinds: the arguments' types, if they are not all int64.
        by: what makes it: Numba's `intrinsic`, or numba-cuda's.
    """

    def decorate(emit: Callable[..., Any]) -> Any:
        signature = inspect.signature(emit)
        made = returns(*(kinds or [types.int64] * (len(signature.parameters) - 1)))

        def define(typing_context, *args):
            def generate(context, builder, signature, values):
                value = emit(builder, *values)
                return context.get_dummy_value() if value is None else value

            return made, generate

        define.__signature__ = signature  # type: ignore[attr-defined]  # Numba folds a call's arguments by it
        return by(define)

    return decorate


def llvm_function(builder: ir.IRBuilder, name: str, returns: ir.Type, *kinds: ir.Type) -> Any:
    """One of LLVM's own functions."""
    return cgutils.get_or_insert_function(builder.module, ir.FunctionType(returns, kinds), name)


# ---- what Python calls -----------------------------------------------------------------------------------


class Entry:
    """What Python calls: a compiled function, made at its first call, kept on disk.

    Its parameters are a `PyObject` or an `Index` each (kernels/pyobjects.py), as annotated; it returns an integer.

    Attributes:
        call: the function. Numba's own C wrapper, without its dispatcher: a call with three arguments takes
            86 ns instead of 236 ns (2-core AMD EPYC, Numba 0.68, Python 3.11).
        name: the function's name.
    """

    def __init__(self, function: Callable[..., Any], locked: bool = False) -> None:
        self._locked = locked
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
        options = {**_WORDS_ONLY, "nogil": not self._locked, "no_cfunc_wrapper": True}
        compiled = numba.njit(**options)(self._function)
        room = self._function.__module__.split(".")[1]
        compiled._cache = KernelCache(self._function, f"{self.name} ({room})")
        with _no_collection(), compiled._cache:
            compiled.compile(signature)
        self.call = compiled.overloads[signature.args].entry_point

    def _first_call(self, *args: Any) -> int:
        self.compile()
        return self.call(*args)


def entry(function: Callable[..., Any]) -> Entry:
    """An entry that runs without the GIL."""
    return Entry(function)


def locked_entry(function: Callable[..., Any]) -> Entry:
    """An entry that has the GIL while it looks at objects; it must give it up for everything else (`release_gil`)."""
    return Entry(function, locked=True)


def c_function(function: Callable[..., Any], signature: Any, what: str, *, keep: bool = True) -> CFunc:
    """A C function of a fixed signature, compiled (or loaded) at once; its `address` is valid while it lives.

    Args:
        what: its name for people.
        keep: cache on disk; only for functions of a module, without closures.
    """
    flags = dict(_WORDS_ONLY if keep else _FLAGS)
    compiled = CFunc(function, (signature.args, signature.return_type), locals={}, options=flags)
    if keep:
        compiled._cache = KernelCache(function, what, f"-{zlib.crc32(str(signature).encode()):08x}")
    with _no_collection(), compiled._cache if keep else Telling(what):
        compiled.compile()
    return compiled


@contextmanager
def _no_collection() -> Iterator[None]:
    """Numba makes and keeps millions of objects, which the garbage collector would look at for 8 % of the time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
