"""The one place with Numba's flags: how a kernel, a helper and a C function are compiled and cached.

No fastmath anywhere: the same inputs give the same bits. Kernels release the GIL, never raise, and divide as
NumPy does. Compiled code is kept on disk and is valid for one state of the sources in this folder and in the
function's own: Numba alone looks only at the function's file and would go on running an edited helper's old code.
"""

from __future__ import annotations

import fcntl
import threading
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

import numba
from numba.core.caching import IndexDataCacheFile
from numba.core.ccallback import CFunc

from ..errors import ResourceError

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
    _keep_on_disk(compiled, function, function)
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
        _keep_on_disk(compiled, function, f"-{zlib.crc32(str(signature).encode()):08x}")
    compiled.compile()
    return compiled


def _keep_on_disk(compiled: Any, function: Callable[..., Any], suffix: str = "") -> None:
    """Let Numba cache a function, in files whose names end with `suffix`, while no kernel source changes.

    Numba numbers a function's compiled signatures in one index file, so that two processes that compile two of
    them at once can leave one's code under the other's name: each signature needs files of its own.
    """
    try:
        compiled.enable_caching()
    except RuntimeError as error:
        raise ResourceError(
            f"compiled kernels cannot be kept: neither {Path(__file__).parent} nor the user's cache directory is "
            "writable; set NUMBA_CACHE_DIR to a writable directory"
        ) from error
    kept, implementation = compiled._cache, compiled._cache._impl
    kept._cache_file = IndexDataCacheFile(
        cache_path=kept.cache_path,
        filename_base=implementation.filename_base + suffix,
        source_stamp=(
            implementation.locator.get_source_stamp(),
            _sources_stamp(Path(function.__code__.co_filename).parent),
        ),
    )
    _one_at_a_time(compiled)


@cache
def _sources_stamp(folder: Path) -> tuple[tuple[str, int, int], ...]:
    """Path, modification time and size of every source in this folder and in `folder`."""
    files = sorted({*Path(__file__).parent.glob("*.py"), *folder.glob("*.py")})
    return tuple((str(file), *_time_and_size(file)) for file in files)


def _time_and_size(file: Path) -> tuple[int, int]:
    status = file.stat()
    return status.st_mtime_ns, status.st_size
