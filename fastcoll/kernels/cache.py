"""Compiled kernels on disk: valid for one state of the sources, compiled by one process and loaded by the others.

Three things that Numba's own cache lacks. It looks only at the file of the outermost function, and would go on
running an edited helper's old code. It numbers the signatures of a function in one index file, so that two
processes that compile two of them at once can leave one's code under the other's name. And all ranks that
miss the same code compile it at the same time.
"""

from __future__ import annotations

import fcntl
import logging
import os
import time
import zlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

from numba.core.caching import FunctionCache, IndexDataCacheFile

from ..errors import ResourceError

_log = logging.getLogger("fastcoll")
_LONGEST_COMPILATION = 60.0
"""Seconds to wait for another process's compilation before doing it oneself; on a laptop it takes one or two."""


class KernelCache(FunctionCache):
    """The files of one function, to be set as a dispatcher's or C function's `_cache`.

    Attributes:
        compiled: how many functions this process has compiled, because they were not on the disk.

    Raises:
        ResourceError: no directory is writable.
    """

    compiled: ClassVar[int] = 0

    def __init__(self, function: Callable[..., Any], suffix: str = "") -> None:
        try:
            super().__init__(function)
        except RuntimeError as error:
            raise ResourceError(
                f"compiled kernels cannot be kept: neither {Path(__file__).parent} nor the user's cache directory is "
                "writable; set NUMBA_CACHE_DIR to a writable directory"
            ) from error
        name = self._impl.filename_base + suffix
        folder = Path(function.__code__.co_filename).parent
        stamp = (self._impl.locator.get_source_stamp(), _sources_stamp(folder))
        self._cache_file = IndexDataCacheFile(self._cache_path, name, stamp)
        self._lock_path = os.path.join(self._cache_path, f"{name}.lock")
        self._lock: int | None = None

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """The compiled function, or None: then the caller compiles it, and others wait until it is saved."""
        found = self._load(sig, target_context)
        if found is None and self._lock is None:
            self._impl.locator.ensure_cache_path()
            self._lock = _acquire(self._lock_path)
            found = self._load(sig, target_context)
            if found is not None:
                self._release()
            else:
                _announce()
        return found

    def _load(self, sig: Any, target_context: Any) -> Any:
        """What is on the disk. Numba would first import all that compiling needs (0.3 s); loading does not."""
        with self._guard_against_spurious_io_errors():
            return self._load_overload(sig, target_context)

    def save_overload(self, sig: Any, data: Any) -> None:
        """Keep what was compiled, and let the others go on."""
        KernelCache.compiled += 1
        try:
            super().save_overload(sig, data)
        finally:
            self._release()

    def __enter__(self) -> None:
        """Around a compilation: one that fails lets the others go on."""

    def __exit__(self, *error: object) -> None:
        self._release()

    def _release(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def _announce() -> None:
    """Say that compiling takes a while, once for each state of the sources, by whichever process is the first."""
    if _is_news(f"{zlib.crc32(repr(_sources_stamp(Path(__file__).parent)).encode()):08x}"):
        _log.warning(
            "fastcoll compiles its kernels for this machine, once: 1 s for an operation, 10 s for all of them "
            "(python -m fastcoll.warmup does it ahead)"
        )


def _is_news(state: str) -> bool:
    """Whether no process that uses this cache has told about this state."""
    locator = KernelCache._impl_class(_is_news).locator
    locator.ensure_cache_path()
    path = os.path.join(locator.get_cache_path(), "fastcoll.told")
    try:
        told = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    except PermissionError:  # another user's in a shared cache
        return True
    try:
        fcntl.flock(told, fcntl.LOCK_EX)
        news = os.pread(told, len(state), 0) != state.encode()
        if news:
            os.pwrite(told, state.encode(), 0)
        return news
    finally:
        os.close(told)


def _acquire(path: str) -> int | None:
    """A descriptor that holds the lock; None when it cannot be had, and then several processes compile the same."""
    deadline = time.monotonic() + _LONGEST_COMPILATION
    try:
        lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    except PermissionError:  # another user's lock in a shared cache
        return None
    try:
        while not _try_lock(lock):
            if time.monotonic() > deadline:
                os.close(lock)
                return None
            time.sleep(0.01)
    except BaseException:
        os.close(lock)
        raise
    return lock


def _try_lock(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@cache
def _sources_stamp(folder: Path) -> tuple[tuple[str, int, int], ...]:
    """Path, modification time and size of every source in this folder and in `folder`."""
    files = sorted({*Path(__file__).parent.glob("*.py"), *folder.glob("*.py")})
    return tuple((str(file), *_time_and_size(file)) for file in files)


def _time_and_size(file: Path) -> tuple[int, int]:
    status = file.stat()
    return status.st_mtime_ns, status.st_size
