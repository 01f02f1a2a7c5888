"""Compiled kernels on disk: valid for one state of the sources, compiled by one process and loaded by the others.

Numba's own cache looks only at the file of the outermost function, and would go on running the old code of an edited
helper, or with the old value of another module's constant. It numbers the signatures of a function in one index file,
so that two processes that compile two of them at once can leave one's code under the other's name. And all ranks that
miss the same code compile it at the same time.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import threading
import time
from collections.abc import Callable
from typing import Any, ClassVar

from numba.core.caching import FunctionCache, IndexDataCacheFile

from ..errors import ResourceError

_log = logging.getLogger("fastcoll")
_LONGEST_COMPILATION = 60.0  # s to wait for another process's compilation; on a laptop it takes one or two
_SILENT = 1.0  # s of compilation after which a word is due
_AGAIN = 5.0  # s until the next word about the same kernel
_PACKAGE = os.path.dirname(os.path.dirname(__file__))
_OTHER_ROOMS = {"bench", "gpu", "launch", "testing", "torch"}
"""No module with kernels for this cache may import these (tests/test_import.py)."""


def _state_of_the_sources() -> str | None:
    """A hash of all sources whose values a kernel can contain; None where there are none, as in an archive.

    By content, since builds and package managers set modification times as they like. It takes 7 ms; to import
    Numba takes 400.
    """
    found, digest = False, hashlib.blake2b(digest_size=16)
    for folder, rooms, names in os.walk(_PACKAGE):
        rooms[:] = sorted(set(rooms) - _OTHER_ROOMS)
        for name in sorted(names):
            if name.endswith(".py") and name[:-3].isidentifier():  # not an editor's file beside it
                path = f"{folder}/{name}"
                with open(path, "rb", buffering=0) as file:
                    content = file.read()
                digest.update(f"{path[len(_PACKAGE) :]} {len(content)} ".encode() + content)
                found = True
    return digest.hexdigest() if found else None


# Now, as the modules are loaded, and not at the first kernel: by then the files may be those of a newer state.
_SOURCES = _state_of_the_sources()


class Telling:
    """Says on the log, while compiling takes longer than a second, what is compiled and how far that is.

    Short compilations add up: however many there are, nobody who waits for them is without a word for longer.
    """

    _unsaid: ClassVar[float] = 0.0
    """Seconds since the last word."""
    _others: ClassVar[int] = 0
    _their_seconds: ClassVar[float] = 0.0

    def __init__(self, what: str, hint: str = "") -> None:
        self._what, self._hint = what, hint
        self._said = False
        self._done = threading.Event()
        self._began = time.perf_counter()
        # A thread, since Numba does not return in between.
        self._thread = threading.Thread(target=self._tell, name="fastcoll-telling", daemon=True)
        self._thread.start()

    def __enter__(self) -> None: ...

    def __exit__(self, *error: object) -> None:
        self.end()

    def end(self) -> None:
        """The compilation has ended, well or not."""
        self._done.set()
        self._thread.join()
        took = time.perf_counter() - self._began
        Telling._others += 1
        Telling._their_seconds += took
        Telling._unsaid = 0.0 if self._said else Telling._unsaid + took

    def _tell(self) -> None:
        # Ranks may compile at the same time, a user's reduction all of them: who has this lock speaks.
        place = os.open(_PACKAGE if _SOURCES else "/", os.O_RDONLY)
        pause = _SILENT - Telling._unsaid
        while not self._done.wait(pause):
            if not self._said and not _try_lock(place):
                pause = _SILENT
                continue
            took = time.perf_counter() - self._began
            others = f", {self._their_seconds:.0f} s for {self._others} before it" if self._others else ""
            _log.warning("fastcoll compiles %s: %.0f s so far%s%s", self._what, took, others, self._hint)
            self._said, pause = True, _AGAIN
        os.close(place)


class _Files(IndexDataCacheFile):
    """An index and the code that it names. Code, too, says of which state it is.

    Numba writes the index first; another process may read the old code in between.
    """

    def _load_index(self) -> Any:
        try:
            return super()._load_index()
        except (AttributeError, ImportError):  # of a version whose types lay elsewhere
            return {}

    def _save_data(self, name: str, data: Any) -> None:
        super()._save_data(name, (self._source_stamp, data))

    def _load_data(self, name: str) -> Any:
        stamp, data = super()._load_data(name)
        if stamp != self._source_stamp:
            raise FileNotFoundError(f"{name} is of another state of the sources")  # Numba compiles then
        return data


class KernelCache(FunctionCache):
    """The files of one function, to be set as a dispatcher's or C function's `_cache`.

    Args:
        what: its name for people.
        suffix: of the files' names, where one function is compiled for several signatures.

    Raises:
        ResourceError: no directory is writable.
    """

    compiled: ClassVar[int] = 0
    """How many functions this process has compiled, because they were not on the disk."""

    def __init__(self, function: Callable[..., Any], what: str, suffix: str = "") -> None:
        try:
            super().__init__(function)
        except RuntimeError as error:
            raise ResourceError(
                f"compiled kernels cannot be kept: neither {_PACKAGE} nor the user's cache directory is writable; set "
                "NUMBA_CACHE_DIR to a writable directory"
            ) from error
        name = self._impl.filename_base + suffix
        ours = function.__module__.partition(".")[0] == __name__.partition(".")[0]
        own = None if ours and _SOURCES else self._impl.locator.get_source_stamp()
        self._cache_file = _Files(self._cache_path, name, (_SOURCES, own))
        self._lock_path = os.path.join(self._cache_path, f"{name}.lock")
        self._lock: int | None = None
        self._what = what
        self._telling: Telling | None = None

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """The compiled function, or None: then the caller compiles it, and others wait until it is saved."""
        found = self._load(sig, target_context)
        if found is None and self._telling is None:
            self._impl.locator.ensure_cache_path()
            self._lock = _acquire(self._lock_path)
            found = self._load(sig, target_context)
            if found is not None:
                self._release()
            else:
                hint = " (kept on disk; python -m fastcoll.warmup does it ahead)"
                self._telling = Telling(self._what, hint)
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
        if self._telling is not None:
            self._telling.end()
            self._telling = None
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


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
    """Whether nobody else has it; where the file system knows no locks, everybody goes ahead."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True
