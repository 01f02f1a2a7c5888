"""Code for GPUs on disk, compiled by one process and loaded by the others.

The files are in the same folders as those for processors, in the set of these sources and this platform
(cache_files.py), and begin with two digests, too: that of everything the code depends on, and that of the code.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from ..errors import ResourceError
from . import cache_files
from .cache import SOURCES, acquire, keep, kept_code, places_of_set, warn_unkept
from .cache_files import digest


def kept(name: str, compile: Callable[[], bytes]) -> bytes:
    """Return the code with a name: from disk, or from `compile`, whose result is written to disk.

    Other processes that need the same code wait for it.

    Args:
        name: everything that the code depends on, except this package's sources and the platform: the kernel, the
            GPU's compute capability, the versions of the compilers.
    """
    if SOURCES is None:  # the package is in an archive
        return compile()
    places, stamp = places_of_set(__file__), digest(SOURCES.encode(), name.encode())
    file = f"{stamp.hex()}.gpu"
    if (code := kept_code(places, file, stamp, __file__)) is not None:
        return code
    try:
        folder = cache_files.writable(places, __file__)
    except ResourceError as error:
        warn_unkept(str(error))
        return compile()
    lock = acquire(f"{folder}/{file}.lock")
    try:
        if (code := kept_code(places, file, stamp, __file__)) is None:
            code = compile()
            keep(folder, file, stamp, code, True)
        return code
    finally:
        if lock is not None:
            os.close(lock)
