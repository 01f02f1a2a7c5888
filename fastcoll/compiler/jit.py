"""Decorators that declare entries, kernels, helpers and C functions without importing Numba.

Python calls an *entry*; entries call *kernels*; a *helper* becomes part of each of its callers. A decorator returns a
placeholder (`Part`). When Numba compiles code that uses the placeholder, it reads the placeholder's `_numba_type_`, and
compiling.py makes Numba's own object. Functions that Python or C calls are kept on disk as machine code (cache.py) and
loaded without Numba (machine_code.py), because the import of Numba takes almost a second on some processors.
"""

from __future__ import annotations

import atexit
import sys
import threading
from collections.abc import Callable
from functools import cached_property
from typing import Any

from .. import config
from ..system.forks import at_fork
from .cache import KernelCache
from .machine_code import python_function


@atexit.register
def _forget_modules() -> None:
    """Call `forget_modules` at exit if this process has compiled.

    Hooks run newest first. The hook that leaves a job may compile; it is registered after this hook, so it runs first.
    """
    if (compiling := sys.modules.get(f"{__package__}.compiling")) is not None:
        compiling.forget_modules()


class Part:
    """A kernel, helper or external function, as a placeholder for Numba's object.

    Args:
        make: makes Numba's object; called when Numba first needs it.
        py_func: the Python function, if there is one.
    """

    def __init__(self, make: Callable[[], Any], py_func: Callable[..., Any] | None = None) -> None:
        self._make = make
        if py_func is not None:
            self.py_func, self.__name__, self.__doc__ = py_func, py_func.__name__, py_func.__doc__

    @cached_property
    def made(self) -> Any:
        """Numba's object, which lives as long as the placeholder."""
        return self._make()

    @cached_property
    def _numba_type_(self) -> Any:
        from . import compiling

        return compiling.type_of(self.made)

    def __call__(self, *args: Any) -> Any:
        raise TypeError(f"{self.__name__} is a part of compiled code; call it from an entry")


def inlined(function: Callable[..., Any]) -> Any:
    """Declare a helper that becomes part of each kernel that calls it."""

    def make() -> Any:
        from . import compiling

        return compiling.linked(function, forceinline=True)

    return Part(make, function)


def kernel(function: Callable[..., Any]) -> Any:
    """Declare a function for entries and other kernels, typed once for all of them."""

    def make() -> Any:
        from . import compiling

        return compiling.linked(function)

    return Part(make, function)


def instruction(returns: str, *kinds: str) -> Callable[[Callable[..., Any]], Any]:
    """Declare a helper that consists of LLVM instructions; the decorated `emit(builder, *values)` adds them.

    Args:
        returns: Numba's name of the result type.
        kinds: Numba's names of the argument types, if these are not all int64.
    """

    def decorate(emit: Callable[..., Any]) -> Any:
        def make() -> Any:
            from . import compiling

            return compiling.instruction(emit, compiling.named(returns), *map(compiling.named, kinds))

        return Part(make, emit)

    return decorate


def external(name: str, signature: str) -> Any:
    """Declare a function of libc, with Numba's names of types.

    An address can be declared as int64, because C passes both in the same way.
    """

    def make() -> Any:
        from . import compiling

        return compiling.external(name, signature)

    return Part(make)


# ---- entry points for Python and C -----------------------------------------------------------------------


def has_failpoints() -> bool:
    """Return whether entries are compiled with failpoints (kernels/failing.py).

    Entries with failpoints have cache files of their own.
    """
    return bool(config.get("FASTCOLL_FAILPOINT"))


_compiling = threading.RLock()  # so that code that several threads need is compiled once


def _after_fork() -> None:
    global _compiling
    _compiling = threading.RLock()  # the thread that held it does not exist in this process


at_fork("compiling", _after_fork)


class Entry:
    """A compiled function that Python calls.

    The first call compiles it and writes it to disk, or loads it from disk. Each parameter is annotated as a `PyObject`
    or an `Index` (kernels/pyobjects.py). The function returns an integer.

    Attributes:
        call: the function, a builtin with CPython's fastest calling convention.
        name: the function's name.
        twins: C functions that are compiled with the entry (`twin`).
    """

    def __init__(self, function: Callable[..., Any], locked: bool = False) -> None:
        self._locked = locked
        self.twins: list[Twin] = []
        self.name = function.__name__
        self.call: Callable[..., int] = self._first_call
        self.__doc__ = function.__doc__
        self._function = function

    def compile(self) -> None:
        """Compile the function, or load it from disk, unless that has been done."""
        with _compiling:
            if self.call == self._first_call:
                address, *others = self.cache().load(self._compile)
                for twin, other in zip(self.twins, others, strict=True):
                    twin.loaded = other
                self.call = python_function(address, self.name, self.__doc__ or "")

    def cache(self) -> KernelCache:
        """Return the cache file of this entry's code."""
        room = self._function.__module__.split(".")[1:2] or [self._function.__module__]
        variant = "with failpoints" if has_failpoints() else ""
        return KernelCache(self._function, f"{self.name} ({room[0]})", variant)

    def _compile(self) -> bytes:
        from . import compiling

        twins = [(twin.function, twin.signature) for twin in self.twins]
        return compiling.entry(self._function, self._locked, twins)

    def twin(self, signature: str) -> Callable[[Callable[..., Any]], Twin]:
        """Declare a C function that runs the same kernels as the entry, in the same module as the entry.

        One object file has both, so the kernels are compiled once.

        Args:
            signature: the C function's signature, with Numba's names of types.
        """

        def declare(function: Callable[..., Any]) -> Twin:
            self.twins.append(Twin(self, function, signature))
            return self.twins[-1]

        return declare

    def _first_call(self, *args: Any) -> int:
        self.compile()
        return self.call(*args)


class Twin:
    """A C function that is compiled with an entry."""

    loaded = 0

    def __init__(self, entry: Entry, function: Callable[..., Any], signature: str) -> None:
        self._entry, self.function, self.signature = entry, function, signature

    @property
    def address(self) -> int:
        """The function's address, valid until the process ends; compiles or loads the entry at first use."""
        self._entry.compile()
        return self.loaded


def entry(function: Callable[..., Any]) -> Entry:
    """Declare an entry that runs without the GIL."""
    return Entry(function)


def locked_entry(function: Callable[..., Any]) -> Entry:
    """Declare an entry that holds the GIL while it accesses objects.

    It must release the GIL for everything else (`release_gil`).
    """
    return Entry(function, locked=True)


NJIT = " --njit"
"""The option of `python -m fastcoll.warmup` that also compiles what compiled callers call (docs/compiled.md)."""


def c_function(
    function: Callable[..., Any], signature: str, what: str, option: str = "", failing: bool = False
) -> int:
    """Compile or load a function for C; return its address, valid until the process ends.

    Args:
        function: a function of a module, without a closure.
        signature: its signature, with Numba's names of types.
        what: its name in log lines.
        option: see `KernelCache`.
        failing: whether the function contains failpoints.
    """
    variant = f"{signature} with failpoints" if failing and has_failpoints() else signature

    def compile() -> bytes:
        from . import compiling

        return compiling.c_function(function, signature)

    with _compiling:
        (address,) = KernelCache(function, what, variant, option).load(compile)
        return address
