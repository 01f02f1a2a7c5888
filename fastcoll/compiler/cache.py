"""Machine code on disk, compiled by one process and loaded by the others.

A wheel may ship code, which is used before any other (shipped.py); the rest of this file is about the other code. No
process runs code that another user may have written. A file has the code of one function for one version of Python
and Numba and one processor; the file's name has a digest of these. The file begins with a digest of everything that the
code depends on (the *stamp*), and with a digest of the code:

    bytes 0 to 15    digest of the function, the sources and the platform (`KernelCache._stamp`)
    bytes 16 to 31   digest of the rest
    the rest         an object file (machine_code.py)

If one of the two digests is not the expected one, the code is compiled again and the file is replaced atomically. The
place of the installation does not count: object files have no paths, and machine_code.py looks up addresses in each
process. So installations and checkouts with the same sources share files (cache_files.py). If NUMBA_CACHE_DIR is set,
files are read from and written to that directory only. If no directory is writable, the code is used in this process
only.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import mmap
import os
import sys
import threading
import time
from collections.abc import Callable
from functools import cache, cached_property, partial
from importlib.util import find_spec
from typing import Any, ClassVar

from ..errors import ResourceError
from . import cache_files, shipped
from .cache_files import Places, digest
from .machine_code import load
from .processor import processor
from .undisturbed import undisturbed

_log = logging.getLogger("fastcoll")
_LONGEST_COMPILATION = 60.0  # s to wait for another process's compilation, which takes 1 or 2 s on a laptop
_FIRST_LOG = 1.0  # s of compilation before the first log line
_NEXT_LOG = 5.0  # s until the next log line about the same kernel
_PACKAGE = os.path.dirname(os.path.dirname(__file__))
_SETTINGS = (
    "CPU_NAME",
    "CPU_FEATURES",
    "ENABLE_AVX",
    "OPT",
    "LOOP_VECTORIZE",
    "SLP_VECTORIZE",
    "BOUNDSCHECK",
    "DEBUGINFO",
)
"""Numba's settings, without the prefix NUMBA_, that change the code."""
_OTHER_ROOMS = {
    "api",
    "bench",
    "callers",
    "elastic",
    "gpu",
    "hybrid",
    "jax",
    "job",
    "launch",
    "pages",
    "profiling",
    "rpc",
    "testing",
    "tools",
    "torch",
}
"""Folders of this package that `_hash_sources` leaves out, because no kernel's code depends on them. So modules that
define kernels must not import from these folders (tests/test_import.py)."""


def _hash_sources() -> str | None:
    """Return a hash of all sources on which a kernel's code can depend.

    The content is hashed, and not the modification times, because builds and package managers set those as they like.
    Hashing takes 7 ms.

    Returns:
        None if there are no files, because the package is in an archive.
    """
    found, state = False, hashlib.blake2b(digest_size=16)
    for folder, rooms, names in os.walk(_PACKAGE):
        rooms[:] = sorted(set(rooms) - _OTHER_ROOMS)
        for name in sorted(names):
            if name.endswith(".py") and name[:-3].isidentifier():  # not an editor's temporary file
                path = f"{folder}/{name}"
                with open(path, "rb", buffering=0) as file:
                    content = file.read()
                state.update(f"{path[len(_PACKAGE) :]} {len(content)} ".encode() + content)
                found = True
    return state.hexdigest() if found else None


# Hashed at import, because the files may change before the first kernel is compiled.
SOURCES = _hash_sources()


class ProgressLog:
    """Logs which kernel is being compiled, once compilations take more than a second.

    The times of short compilations are added up: a line is logged when they exceed a second since the last line.
    """

    _unlogged: ClassVar[float] = 0.0
    """Seconds of compilation since the last log line."""
    _finished: ClassVar[int] = 0
    _finished_seconds: ClassVar[float] = 0.0

    def __init__(self, what: str, hint: str = "") -> None:
        self._what, self._hint = what, hint
        self._logged = False
        self._done = threading.Event()
        self._began = time.perf_counter()
        # Another thread logs, because this thread is in Numba until the compilation ends.
        self._thread = threading.Thread(target=self._log_progress, name="fastcoll-progress-log", daemon=True)
        self._thread.start()

    def __enter__(self) -> None: ...

    def __exit__(self, *error: object) -> None:
        self.end()

    def end(self) -> None:
        """End the logging; the compilation has succeeded or failed."""
        self._done.set()
        self._thread.join()
        took = time.perf_counter() - self._began
        cls = type(self)
        cls._finished += 1
        cls._finished_seconds += took
        cls._unlogged = 0.0 if self._logged else cls._unlogged + took

    def _log_progress(self) -> None:
        # Several ranks may compile at once; all ranks do for a user's reduction. Only the holder of this lock logs.
        folder = os.open(_PACKAGE if SOURCES else "/", os.O_RDONLY)
        pause = _FIRST_LOG - self._unlogged
        while not self._done.wait(pause):
            if not self._logged and not _try_lock(folder):
                pause = _FIRST_LOG
                continue
            took = time.perf_counter() - self._began
            others = (
                f", {self._finished_seconds:.0f} s for {self._finished} before it" if self._finished else ""
            )
            _log.warning("fastcoll compiles %s: %.0f s so far%s%s", self._what, took, others, self._hint)
            self._logged, pause = True, _NEXT_LOG
        os.close(folder)


class KernelCache:
    """The cache file of one function.

    Args:
        what: the function's name in log lines.
        signature: the function's signature or variant, if there are several.
        option: the option of `python -m fastcoll.warmup` that compiles the function in advance.

    Attributes:
        source: the file that defines the function.
    """

    compiled: ClassVar[int] = 0
    """Number of compilations in this process."""
    unkept: ClassVar[str] = ""
    """The reason why code could not be written to disk for the first time; empty if all code was written."""

    def __init__(
        self, function: Callable[..., Any], what: str, signature: str = "", option: str = ""
    ) -> None:
        self._what = what
        self._hint = f" (kept on disk; python -m fastcoll.warmup{option} does it ahead)"
        self.source = function.__code__.co_filename
        self._signature = digest(signature.encode())
        package, _, module = function.__module__.partition(".")
        self._is_ours = package == __name__.partition(".")[0] and SOURCES is not None
        if not self._is_ours:
            module = os.path.splitext(os.path.basename(self.source))[0]
        name = f"{function.__qualname__}-{function.__code__.co_firstlineno}-{self._signature[:4].hex()}"
        self._function = f"{module}.{name}"
        self._own = b"ours" if self._is_ours else _content(self.source)
        # The code of closures, and code without a source file, is not kept. A closure's values are part of its code but
        # not of the stamp; and without a source file there is no stamp.
        self._kept = function.__closure__ is None and self._own != b""

    @cached_property
    def _name(self) -> str:
        """The file's name, without an ending."""
        return f"{self._function}.{_platform()[:4].hex()}"

    @cached_property
    def places(self) -> Places:
        """The folders that may hold the code."""
        if not self._is_ours:
            return cache_files.places_by_path(self.source)
        return places_of_set(self.source)

    @cached_property
    def _stamp(self) -> bytes:
        return digest(
            _platform(), self._signature, self._function.encode(), (SOURCES or "").encode(), self._own
        )

    def is_cached(self) -> bool:
        """Return whether the code is on disk, so that nothing has to be compiled."""
        return self._kept and self._found() is not None

    def is_shipped(self) -> bool:
        """Return whether the code is in the installed package."""
        return self._shipped() is not None

    def _shipped(self) -> bytes | None:
        return shipped.code(self._function, SOURCES) if self._is_ours and SOURCES else None

    def load(self, compile: Callable[[], bytes]) -> list[int]:
        """Load the code on disk, or the result of `compile`; return the addresses of its functions.

        The result is written to disk, once it is loaded: code that cannot be loaded is not kept. Other processes that
        need the same code wait for it.
        """
        if not self._kept:
            return load(undisturbed(partial(self._compiled, compile, "")))
        found = self._found()
        if found is not None:
            return load(found)
        try:
            folder = cache_files.writable(self.places, self.source)
        except ResourceError as error:
            warn_unkept(str(error))
            return load(undisturbed(partial(self._compiled, compile, "")))
        lock = acquire(f"{folder}/{self._name}.lock")
        return undisturbed(partial(self._load_under_lock, compile, folder, lock))

    def _load_under_lock(self, compile: Callable[[], bytes], folder: str, lock: int | None) -> list[int]:
        """Load the code; compile and write it if no other process has.

        This process holds the lock, which is released at the end.
        """
        try:
            found = self._found()
            if found is not None:
                return load(found)
            code = self._compiled(compile, self._hint)
            addresses = load(code)
            keep(folder, f"{self._name}.code", self._stamp, code, self._is_ours)
            return addresses
        finally:
            if lock is not None:
                os.close(lock)

    def _compiled(self, compile: Callable[[], bytes], hint: str) -> bytes:
        with ProgressLog(self._what, hint):
            code = compile()
        KernelCache.compiled += 1
        return code

    def _found(self) -> bytes | None:
        if (code := self._shipped()) is not None:
            return code
        return kept_code(self.places, f"{self._name}.code", self._stamp, self.source)


def kept_code(places: Places, name: str, stamp: bytes, source: str) -> bytes | None:
    """Return the code in a file with this name and stamp, from the first of the places that has one, or None.

    Args:
        source: the file that defines the function.
    """
    for folder in places.read:
        content = cache_files.read(folder, name, source)
        if content is not None and content[:16] == stamp and content[16:32] == digest(content[32:]):
            if places.are_sets:
                cache_files.mark_used(folder)
            return content[32:]
    return None


def keep(folder: str, name: str, stamp: bytes, code: bytes, is_ours: bool) -> None:
    """Write a file with code, if that is possible.

    Args:
        is_ours: whether the code is that of a function of this package.
    """
    # A module that was imported after an edit would be in the set of the old sources.
    if is_ours and _hash_sources() != SOURCES:
        warn_unkept("compiled kernels are not kept, since fastcoll's files have changed; start again")
        return
    from numba.core import config

    # The stamp is made without Numba, and a program, or a file .numba_config.yaml, may set another processor.
    chosen = [getattr(config, name) or "" for name in ("CPU_NAME", "CPU_FEATURES")]
    if chosen != [os.environ.get(f"NUMBA_{name}", "") for name in ("CPU_NAME", "CPU_FEATURES")]:
        warn_unkept(
            "compiled kernels are not kept, since numba.config has another processor than the environment"
        )
        return
    try:
        cache_files.write(folder, name, stamp + digest(code) + code)
    except OSError as error:
        warn_unkept(f"compiled kernels cannot be kept in {folder} ({error.strerror}); {cache_files.CURE}")


def warn_unkept(reason: str) -> None:
    """Log, once per process, that code is not written."""
    if not KernelCache.unkept:
        KernelCache.unkept = reason
        _log.warning("%s; until then each process compiles what it needs", reason)


def places_of_set(source: str) -> Places:
    """Return the places of the set for these sources and this platform; `source` is a file of the package."""
    return cache_files.places_by_content(
        digest((SOURCES or "").encode(), _platform()).hex(), source, _PACKAGE
    )


def copy_for_others() -> None:
    """Copy what this user has compiled into the package, for other users of this installation."""
    if SOURCES is not None:
        cache_files.copy_for_others(places_of_set(__file__), __file__)


def codes_of_set() -> dict[str, bytes]:
    """Return the code in the set, by the functions' names in packs (shipped.py)."""
    codes = {}
    for folder in filter(os.path.isdir, places_of_set(__file__).read):
        for name in os.listdir(folder):
            content = cache_files.read(folder, name, __file__) if name.endswith(".code") else None
            if content is not None and content[16:32] == digest(content[32:]):
                codes[name.rsplit(".", 2)[0]] = content[32:]
    return codes


@cache
def _platform() -> bytes:
    """Return a digest of the platform for which code is compiled, and of the compilers' versions.

    To get the versions, the files `_version.py` of Numba and llvmlite are read; neither is imported.
    """
    # Debug builds and builds without the GIL have other objects, and musl has other structures than glibc. The
    # allocator's code has the size of a page.
    layout = (sys.abiflags, object.__basicsize__, tuple.__basicsize__, mmap.PAGESIZE)
    system = getattr(sys.implementation, "_multiarch", "")
    parts = [sys.implementation.cache_tag, hex(sys.hexversion), *layout, system]
    parts += [os.environ.get(f"NUMBA_{what}", "") for what in _SETTINGS]
    return digest(" ".join(map(str, parts)).encode(), processor(), *map(_version, ("numba", "llvmlite")))


def _version(package: str) -> bytes:
    """Return a digest of what identifies a package's version and build."""
    spec = find_spec(package)
    folder = os.path.dirname(spec.origin or "") if spec is not None else ""
    above = os.path.dirname(folder)
    # A source tree has no version in its file, which asks git, so the place of the tree stands for the version.
    place = folder if os.path.exists(f"{above}/setup.py") else ""
    library = f"{folder}/binding/libllvmlite.so"  # builds of the same version differ in LLVM
    size = os.path.getsize(library) if os.path.exists(library) else 0
    return digest(_content(os.path.join(folder, "_version.py")), place.encode(), str(size).encode())


def _content(path: str) -> bytes:
    """Return a hash of a file, or of the archive that contains it."""
    while path and not os.path.isfile(path) and path != os.path.dirname(path):
        path = os.path.dirname(path)
    try:
        with open(path, "rb") as file:
            return digest(file.read())
    except OSError:
        return b""


def acquire(path: str) -> int | None:
    """Return a descriptor that holds the lock, or None if it cannot be taken; closing it releases the lock.

    Without the lock, several processes may compile the same code.
    """
    deadline = time.monotonic() + _LONGEST_COMPILATION
    try:
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    except OSError:  # the lock in a shared cache belongs to another user, or the disk is full
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
    """Try to take the lock; return False if another process holds it."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True
