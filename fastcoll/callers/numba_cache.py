"""Numba's cache on disk, for ranks that compile one function at the same time (numba.njit with cache=True).

Numba keeps an index for each function, which says which file has the code of which signature, and takes no lock: two
processes that compile the function for different signatures may choose the same file, and one of them, or a later
process, then runs the other's code (https://github.com/numba/numba/issues/10128 is about such a case). Ranks of one
program do this often, as they reach a call together and may have arrays of different layouts there.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import wraps
from typing import Any

from numba.core.caching import IndexDataCacheFile

from ..compiler.cache import acquire

LOCK = ".lock"  # the name of the lock's file is that of the index, and this


def lock_caches() -> None:
    """Make Numba load and save under a lock of the function's index, in this process."""
    for name in ("load", "save"):
        setattr(IndexDataCacheFile, name, _locked(getattr(IndexDataCacheFile, name)))


def _locked(method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def locked(self: Any, *args: Any) -> Any:
        lock = acquire(self._index_path + LOCK)
        try:
            return method(self, *args)
        finally:
            if lock is not None:
                os.close(lock)

    return locked
