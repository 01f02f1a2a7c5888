"""Kernels that can be launched: compiled for the driver, or run by the simulator.

This file imports `numba.cuda`, and finds out whether it is a simulator (SIMULATED). On a GPU, `numba.cuda` must come
from the package numba-cuda, because the CUDA target inside Numba is deprecated. Both packages have a simulator, so the
simulator can be used without numba-cuda.

A kernel's parameters are int64 words, followed by tuples of words; a launch passes all words one after the other.
Kernels with a name are compiled once, and kept on disk for other processes (compiler/gpu_code.py).
"""

from __future__ import annotations

import contextlib
import ctypes
import re
import threading
import warnings
from collections.abc import Callable, Sequence
from functools import cache
from importlib import metadata
from typing import Any

import numba
import numpy as np
from numba import types

from ...compiler import compiling
from ...compiler.gpu_code import kept
from ...compiler.undisturbed import undisturbed
from ...errors import UnavailableError
from . import INSTALL
from .driver import driver

SIMULATED = bool(numba.config.ENABLE_CUDASIM)
"""Kernels run in Python threads, on arrays in host memory."""


def _import_cuda() -> Any:
    try:
        if not SIMULATED:
            import numba_cuda
        from numba import cuda
    except ImportError as error:
        raise UnavailableError(f"CUDA kernels need the package numba-cuda ({error}): {INSTALL}") from error
    if SIMULATED:
        return cuda
    if "numba_cuda" not in (cuda.__file__ or ""):
        raise UnavailableError(
            f"numba.cuda is Numba's own ({cuda.__file__}), not numba-cuda's, although that is installed: its "
            ".pth file is not read from its folder; install it into site-packages"
        )
    from numba.cuda.descriptor import cuda_target

    try:
        # Import now what the first compilation would import. This fails if NumPy is too new for numba-cuda, which does
        # not check NumPy's version.
        cuda_target.target_context.refresh()
    except Exception as error:  # an AttributeError for a name that NumPy has removed
        raise UnavailableError(
            f"numba-cuda {numba_cuda.__version__} does not work with NumPy {np.__version__} "
            f"({type(error).__name__}: {error}): {INSTALL}, which installs versions that fit"
        ) from error
    return cuda


with warnings.catch_warnings():
    # numba-cuda uses deprecated names of NumPy; that must not fail for users who turn warnings into errors.
    warnings.simplefilter("ignore", DeprecationWarning)
    cuda: Any = _import_cuda()


def device(function: Callable[..., Any]) -> Any:
    """Return a function that kernels can call."""
    return function if SIMULATED else cuda.jit(device=True)(function)


def instruction(returns: types.Type, *kinds: Any) -> Any:
    """Return a decorator for CUDA kernels like `instruction` of compiler/jit.py.

    The simulator cannot use it.
    """
    from numba.cuda.extending import intrinsic

    return lambda emit: compiling.instruction(emit, returns, *kinds, by=intrinsic)


THREADS = 4 if SIMULATED else 256
"""Threads of a block."""

_BLOCKS = 3
"""A launch in the simulator has no more blocks. They are few, so that in tests a thread processes several items."""

_RESIDENT = 2048
"""How many threads a multiprocessor holds at once. More blocks would start only after others end, with no items left to
process."""


class CompilationError(UnavailableError):
    """Numba's compiler has failed; its own error is the cause."""


class _Simulated:
    def __init__(
        self, function: Callable[..., None], words: int, tuples: Sequence[int], name: str = ""
    ) -> None:
        self._kernel = cuda.jit(function)
        self._words, self._tuples = words, tuples

    def __call__(self, items: int, stream: int, *words: int) -> None:
        args: list[Any] = list(words[: self._words])
        at = self._words
        for length in self._tuples:
            args.append(words[at : at + length])
            at += length
        blocks = min(-(-items // THREADS), _BLOCKS)
        self._kernel[blocks, THREADS, stream](*args)

    def load(self) -> None:
        """Do nothing."""


class _Frame(threading.local):
    """A thread's buffer for the words of a launch; the driver copies them before it returns."""

    def __init__(self, count: int) -> None:
        self.words: Any = (ctypes.c_int64 * count)()
        first = ctypes.addressof(self.words)
        self.pointers = (ctypes.c_void_p * count)(*range(first, first + 8 * count, 8))


class _Compiled:
    def __init__(
        self, function: Callable[..., None], words: int, tuples: Sequence[int], name: str = ""
    ) -> None:
        self._driver = driver()
        self._function, self._words, self._tuples, self._name = function, words, tuples, name
        self._loaded: dict[int, int] = {}  # the kernel's handle in each context
        self._launch, self._frame = self._driver.launch_kernel, _Frame(words + sum(tuples))
        self._most = self._driver.multiprocessors * (_RESIDENT // THREADS)
        self.load()

    def __call__(self, items: int, stream: int, *words: int) -> None:
        kernel = self._loaded.get(self._driver.context()) or self.load()
        frame = self._frame
        frame.words[:] = words
        blocks = min(-(-items // THREADS), self._most)
        status = self._launch(kernel, blocks, 1, 1, THREADS, 1, 1, 0, stream, frame.pointers, None)
        if status:
            self._driver.check(status, "launching a kernel")

    def load(self) -> int:
        """Load the kernel into this thread's current context, if it is not there; return its handle.

        The code is that for the context's device: the devices of a process may be of different kinds.
        """
        context = self._driver.context()
        if context not in self._loaded:
            capability = self._driver.capability()
            if self._name:
                code = kept(f"{self._name}, {capability}, {_versions()}", lambda: self._compile(capability))
            else:
                code = self._compile(capability)
            entry, _, cubin = code.partition(b"\0")
            self._loaded[context] = self._driver.load(cubin, entry.decode())
        return self._loaded[context]

    def _compile(self, capability: tuple[int, int]) -> bytes:
        """Return the kernel's name in its cubin, a zero, and the cubin."""
        try:
            ptx, entry = undisturbed(
                lambda: compile_ptx(self._function, self._words, self._tuples, capability)
            )
        except Exception as error:  # Numba raises errors of many kinds
            raise CompilationError(
                f"numba-cuda cannot compile a kernel ({type(error).__name__}: {error}): {INSTALL}"
            ) from error
        return entry.encode() + b"\0" + assemble(ptx, capability)


_COMPILERS = (
    "numba-cuda", "cuda-bindings", "nvidia-nvvm", "nvidia-cuda-nvcc-cu12", "nvidia-nvjitlink", "nvidia-nvjitlink-cu12"
)  # fmt: skip


@cache
def _versions() -> str:
    """Return the versions of the packages that turn a kernel into machine code."""
    found = {}
    for name in _COMPILERS:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return str(found)


Kernel: Any = _Simulated if SIMULATED else _Compiled
"""Kernel(function, words, tuples, name) compiles a function that takes `words` words, and then a tuple of each length
in `tuples`. If it has a name, which must say everything that the code depends on beside this package, the code is kept
on disk. Calling the result with (items, stream, *words) launches a thread per item, at most as many as a device holds.
`load()` loads it into the current context in advance."""


def compile_ptx(
    function: Callable[..., None], words: int, tuples: Sequence[int], capability: tuple[int, int]
) -> tuple[str, str]:
    """Return a kernel's PTX, and the kernel's name in it."""
    parameters = [types.int64] * words + [types.UniTuple(types.int64, length) for length in tuples]
    # Numba's ABI passes a tuple as separate words.
    ptx, _ = cuda.compile(
        function, types.void(*parameters), cc=capability, device=False, abi="numba", output="ptx"
    )
    found = re.search(r"\.visible \.entry (\w+)\(", ptx)
    assert found is not None
    return ptx, found[1]


def assemble(ptx: str, capability: tuple[int, int]) -> bytes:
    """Assemble PTX to a cubin for devices of one capability.

    Even a driver that is too old for the PTX's version can load the cubin.
    """
    from cuda.bindings import nvjitlink

    code, major_minor = ptx.encode(), "".join(map(str, capability))
    try:
        linker = nvjitlink.create(1, [f"-arch=sm_{major_minor}"])
    except RuntimeError as error:
        raise UnavailableError(f"CUDA kernels need nvJitLink ({error}): {INSTALL}") from error
    try:
        nvjitlink.add_data(linker, nvjitlink.InputType.PTX, code, len(code), "kernel.ptx")
        nvjitlink.complete(linker)
        cubin = bytearray(nvjitlink.get_linked_cubin_size(linker))
        nvjitlink.get_linked_cubin(linker, cubin)
    finally:
        nvjitlink.destroy(linker)
    return bytes(cubin)
