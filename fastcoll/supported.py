"""The supported platforms and versions. Importing this module fails on all others, so `fastcoll` imports it first.

Compiled code relies on the memory layouts of CPython and NumPy, and on what it knows of a processor: elsewhere it would
give wrong results without an error. kernels/__init__.py checks Numba's version, because it imports Numba in any case:
reading the version without that import would take 40 ms.
"""

from __future__ import annotations

import ctypes
import os
import sys

from . import config

OLDEST = {"Python": (3, 10), "NumPy": (1, 26), "Numba": (0, 60)}
"""The oldest versions that the tests run with; pyproject.toml requires the same."""
TESTED = {
    "Python": (OLDEST["Python"], (3, 14)),
    "NumPy": (OLDEST["NumPy"], (2, 5)),
    "Numba": (OLDEST["Numba"], (0, 68)),
    "torch": ((2, 13), (2, 15)),
    "mpi4py": ((4, 1), (4, 1)),
    "JAX": ((0, 9), (0, 10)),
}
"""The oldest and the newest version of each package that the tests have run with. GPU libraries are missing, because no
GPU was available."""


_PROCESSORS = ("x86_64", "aarch64")
"""What `uname -m` prints on the processors that the tests have run on: on aarch64 in an emulator (tests/arm.sh)."""
_FROM_THE_KERNEL = ("/proc/self/stat", "/proc/self/ns/pid", "/proc/sys/kernel/random/boot_id")
"""The files by which fastcoll identifies a process. A /proc mounted with ProcSubset=pid lacks the last one."""


def _check() -> None:
    check_version("Python", sys.version)
    if why := _why_not():
        raise ImportError(f"fastcoll does not run here: {why}")
    machine = os.uname().machine
    if machine not in _PROCESSORS and not config.get("FASTCOLL_UNTESTED_PLATFORM"):
        raise ImportError(
            f"fastcoll runs on {' and '.join(_PROCESSORS)}, and was never tested on this processor, {machine}; "
            "FASTCOLL_UNTESTED_PLATFORM=1 runs it at your own risk"
        )
    import numpy  # only now: in a subinterpreter this import would fail or warn, with a less helpful text than ours

    check_version("NumPy", numpy.__version__)


def _why_not() -> str | None:
    if sys.platform != "linux":
        return (
            f"it needs Linux, and this is {sys.platform}; on other systems use a Linux container or machine"
        )
    if sys.implementation.name != "cpython":
        return f"it needs CPython, and this is {sys.implementation.name}"
    if "t" in sys.abiflags:  # also with PYTHON_GIL=1, because objects have another layout
        return "this is a free-threaded build of Python; use the ordinary one, as in python3.13 instead of python3.13t"
    if _interpreter("PyInterpreterState_Get") != _interpreter("PyInterpreterState_Main"):
        return "this is a subinterpreter; import it in the main one, or use processes"
    if sys.byteorder != "little":
        return "this machine is big-endian"
    if sys.maxsize < 1 << 32:
        return "this is a 32-bit Python; use one of 64 bits"
    if absent := [path for path in _FROM_THE_KERNEL if not os.path.lexists(path)]:
        return f"there is no {absent[0]}; mount all of /proc (mount -t proc proc /proc)"
    return None


def _interpreter(function: str) -> int | None:
    """Return the address of an interpreter, as a function of CPython without arguments returns it."""
    ask = ctypes.pythonapi[function]
    ask.restype = ctypes.c_void_p
    found: int | None = ask()
    return found


def check_version(package: str, version: str) -> None:
    """Raise ImportError if a package is older than the oldest version that the tests run with."""
    oldest = OLDEST[package]
    if tuple(map(int, version.split(".")[:2])) < oldest:
        needed = ".".join(map(str, oldest))
        raise ImportError(
            f"fastcoll needs {package} {needed} or later, and this is {version.split()[0]}; install a newer one"
        )


def check_range(package: str, version: str) -> None:
    """Raise ImportError if a package whose internals fastcoll uses is older or newer than the tested versions."""
    oldest, newest = TESTED[package]
    if not oldest <= tuple(map(int, version.split(".")[:2])) <= newest:
        first, last = (".".join(map(str, each)) for each in (oldest, newest))
        tested = f"{first} to {last}" if first != last else last
        raise ImportError(
            f"fastcoll uses parts of {package} that change between releases, and was tested with {tested}; this is "
            f"{version}: pip install '{package.lower()}=={last}.*', or a newer fastcoll"
        )


_check()
