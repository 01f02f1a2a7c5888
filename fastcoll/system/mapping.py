"""Memory mappings made directly with mmap(2).

They are for memory whose address the caller must choose, or that must outlive the Python objects that use it.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import resource

_FIXED, _NORESERVE, _POPULATE = 0x10, 0x4000, 0x8000
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


def map_memory(
    nbytes: int, fd: int = -1, *, offset: int = 0, at: int = 0, private: bool = False, populate: bool = False
) -> int:
    """Map a file descriptor, or private memory if there is none; return the address.

    The memory stays mapped until `unmap_memory`.

    Args:
        at: the address, where an existing mapping is replaced; 0: the kernel chooses the address.
        populate: allocate all pages at once.
    """
    flags = (mmap.MAP_PRIVATE if private else mmap.MAP_SHARED) | _NORESERVE | (_FIXED if at else 0)
    if populate:
        flags |= _POPULATE
    if fd < 0:
        flags |= mmap.MAP_ANONYMOUS | mmap.MAP_PRIVATE
    address = _libc.mmap(at, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, fd, offset)
    if address == ctypes.c_void_p(-1).value:
        raise OSError(number := ctypes.get_errno(), os.strerror(number))
    return int(address)


def unmap_memory(address: int, nbytes: int) -> None:
    """Unmap memory that `map_memory` has mapped."""
    _libc.munmap(address, nbytes)


def aside(fd: int) -> int:
    """Move a descriptor to a high number, and return the number.

    Faulty code in the program may close a descriptor twice. The second close then hits whatever reuses the number. The
    kernel reuses the lowest numbers first, so a descriptor with a high number is rarely hit.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, min(max(soft, 0) // 2, 1 << 16))
    finally:
        os.close(fd)
