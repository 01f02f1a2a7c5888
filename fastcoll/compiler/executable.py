"""Memory for machine code. It stays mapped, because threads may be running the code until the process ends."""

from __future__ import annotations

import ctypes
import mmap

from ..errors import UnavailableError

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def reserve(size: int) -> int:
    """Map memory for `size` bytes of code; return its address."""
    address: int = _libc.mmap(
        None, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0
    )
    if address == ctypes.c_void_p(-1).value:
        raise UnavailableError(f"no memory for {size} bytes of code: errno {ctypes.get_errno()}")
    return address


def fill(address: int, image: bytes) -> None:
    """Write code to its address, and make the memory executable and read-only."""
    ctypes.memmove(address, image, len(image))
    if _libc.mprotect(address, len(image), mmap.PROT_READ | mmap.PROT_EXEC):
        raise UnavailableError(
            f"this system lets no program make code (mprotect: errno {ctypes.get_errno()})"
        )
