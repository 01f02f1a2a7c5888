"""PinnedPool: pinned host memory that is used again, since pinning costs more than a copy of the same size."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from ..interop.arrays import Array
from .runtime import Runtime

LEAST = 4096
KEPT = 64 << 20
"""Bytes that a pool keeps for later; what is larger is pinned for one call. Not measured on hardware."""


class PinnedPool:
    """Buffers by size, of powers of two. Thread-safe.

    Attributes:
        kept: bytes that nobody uses now.
    """

    def __init__(self, runtime: Runtime) -> None:
        self.kept = 0
        self._runtime = runtime
        self._free: dict[int, list[Array]] = {}
        self._lock = threading.Lock()
        self._closed = False

    def take(self, nbytes: int) -> Array:
        """A buffer of at least so many bytes; for `give`, or to be dropped."""
        size = max(LEAST, 1 << (nbytes - 1).bit_length()) if nbytes else LEAST
        with self._lock:
            if free := self._free.get(size):
                self.kept -= size
                return free.pop()
        return self._runtime.pinned(size)

    def give(self, buffer: Array) -> None:
        """Take a buffer back that nothing uses any more."""
        with self._lock:
            if not self._closed and self.kept + buffer.nbytes <= KEPT:
                self.kept += buffer.nbytes
                self._free.setdefault(buffer.nbytes, []).append(buffer)

    @contextmanager
    def lent(self, nbytes: int) -> Iterator[Array]:
        """A buffer for a block of code that has ended its copies when it ends; after an error it is dropped."""
        buffer = self.take(nbytes)
        yield buffer
        self.give(buffer)

    def close(self) -> None:
        """Release what is free, and keep nothing from now on."""
        with self._lock:
            self._closed = True
            self._free.clear()
            self.kept = 0
