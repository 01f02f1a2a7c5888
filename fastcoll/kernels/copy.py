"""Moving bytes between addresses: libc's memcpy, which element loops cannot match (up to 4 times slower)."""

from __future__ import annotations

from numba import types

from .jit import inlined

_memcpy = types.ExternalFunction("memcpy", types.int64(types.int64, types.int64, types.int64))


@inlined
def copy(dst, src, nbytes):
    """Copy `nbytes` bytes from address `src` to address `dst`; the two ranges are equal or disjoint."""
    if nbytes > 0 and dst != src:
        _memcpy(dst, src, nbytes)
