"""How entries, kernels, helpers and C functions are declared: decorators that import nothing.

What they make stands for the function until Numba meets it in code that it compiles, and asks for its `_numba_type_`:
then compiling.py has Numba make its own. What Python or C calls is kept on disk as machine code (cache.py), and loaded
without Numba (machine_code.py), whose import takes most of a second of some processors.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import cached_property
from typing import Any

from .. import config
from ..system.forks import at_fork
from .cache import KernelCache
from .machine_code import load, python_function


class Part:
    """A part of compiled code.

    Args:
        make: makes what Numba has for it, when Numba first meets it.
        py_func: the function that was written in Python, if one was.
    """

    def __init__(self, make: Callable[[], Any], py_func: Callable[..., Any] | None = None) -> None:
        self._make = make
        if py_func is not None:
            self.py_func, self.__name__, self.__doc__ = py_func, py_func.__name__, py_func.__doc__

    @cached_property
    def made(self) -> Any:
        """Numba's own, which lives as long as this."""
        return self._make()

    @cached_property
    def _numba_type_(self) -> Any:
        from . import compiling

        return compiling.type_of(self.made)

    def __call__(self, *args: Any) -> Any:
        raise TypeError(f"{self.__name__} is a part of compiled code; call it from an entry")


def inlined(function: Callable[..., Any]) -> Any:
    """A helper that becomes part of each kernel that calls it."""

    def make() -> Any:
        from . import compiling

        return compiling.linked(function, forceinline=True)

    return Part(make, function)


def kernel(function: Callable[..., Any]) -> Any:
    """A function for entries and other kernels to call, typed once for all of them."""

    def make() -> Any:
        from . import compiling

        return compiling.linked(function)

    return Part(make, function)


def instruction(returns: str, *kinds: str) -> Callable[[Callable[..., Any]], Any]:
    """A helper whose LLVM instructions the decorated `emit(builder, *values)` adds.

    Args:
        returns, kinds: Numba's names of its type and of the arguments', if they are not all int64.
    """

    def decorate(emit: Callable[..., Any]) -> Any:
        def make() -> Any:
            from . import compiling

            return compiling.instruction(emit, compiling.named(returns), *map(compiling.named, kinds))

        return Part(make, emit)

    return decorate


def external(name: str, signature: str) -> Any:
    """A function of libc, with Numba's names of types; an address and an int64 are passed alike."""

    def make() -> Any:
        from . import compiling

        return compiling.external(name, signature)

    return Part(make)


# ---- what Python and C call ------------------------------------------------------------------------------


def has_failpoints() -> bool:
    """Whether entries are compiled with failpoints (failing.py), as files of their own in the cache."""
    return bool(config.get("FASTCOLL_FAILPOINT"))


_compiling = threading.RLock()  # threads that need the same code make it once


def _after_fork() -> None:
    global _compiling
    _compiling = threading.RLock()  # who had it is not in this process


at_fork("compiling", _after_fork)


class Entry:
    """What Python calls: a compiled function, made at its first call, kept on disk.

    Its parameters are a `PyObject` or an `Index` each (kernels/pyobjects.py), as annotated; it returns an integer.

    Attributes:
        call: the function, a builtin of CPython's fastest convention.
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
        with _compiling:
            if self.call == self._first_call:
                self.call = python_function(
                    load(self.cache().code(self._compile)), self.name, self.__doc__ or ""
                )

    def cache(self) -> KernelCache:
        """Where its code is kept."""
        room = self._function.__module__.split(".")[1:2] or [self._function.__module__]
        variant = "with failpoints" if has_failpoints() else ""
        return KernelCache(self._function, f"{self.name} ({room[0]})", variant)

    def _compile(self) -> bytes:
        from . import compiling

        return compiling.entry(self._function, self._locked)

    def _first_call(self, *args: Any) -> int:
        self.compile()
        return self.call(*args)


def entry(function: Callable[..., Any]) -> Entry:
    """An entry that runs without the GIL."""
    return Entry(function)


def locked_entry(function: Callable[..., Any]) -> Entry:
    """An entry that has the GIL while it looks at objects; it must give it up for everything else (`release_gil`)."""
    return Entry(function, locked=True)


NJIT = " --njit"
"""The option of `python -m fastcoll.warmup` for what compiled callers call."""


def c_function(
    function: Callable[..., Any], signature: str, what: str, option: str = "", failing: bool = False
) -> int:
    """The address of a function for C, compiled or loaded at once; it stays valid until the process ends.

    Args:
        function: of a module, without a closure.
        signature: with Numba's names of types.
        what: its name for people.
        option: as of `KernelCache`.
        failing: it comes by failpoints.
    """
    variant = f"{signature} with failpoints" if failing and has_failpoints() else signature

    def compile() -> bytes:
        from . import compiling

        return compiling.c_function(function, signature)

    with _compiling:
        return load(KernelCache(function, what, variant, option).code(compile))
