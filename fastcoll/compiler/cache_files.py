"""The folders of compiled code, and the check whether the code in a file may be run.

The code of this package's functions depends on the content of the sources and on the platform, and not on the place of
the installation. All code for one content and one platform is a *set*, a folder that is named after a digest of the
two. All installations and checkouts of a user share the sets in the user's cache directory. A set is never changed,
only completed; when a new one begins, the sets that were not used for the longest time are removed. The code of a
user's function is kept by the path of its file.

The files are machine code: another user who can write to a file, or add a file to its folder, can run code as this
user. So the only users who may have write access to the file and the folder are this user, root, and users who can
change the source file, which is run anyway. The check uses the same file descriptors as the read, so neither file nor
folder can be replaced in between.
"""

from __future__ import annotations

import errno
import functools
import hashlib
import logging
import os
import stat
import time
from contextlib import suppress
from io import FileIO
from typing import NamedTuple

from .. import config
from ..errors import ResourceError

_log = logging.getLogger("fastcoll")
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_MOST_SETS = 32
"""A complete set has 2 to 3 MB, so that the sets of a user stay below 100 MB."""
_DAY = 86400.0  # s
CURE = "set NUMBA_CACHE_DIR to a folder that you alone can write to"


def digest(*parts: bytes) -> bytes:
    """Return a 16-byte hash of the parts."""
    found = hashlib.blake2b(digest_size=16)
    for part in parts:
        found.update(len(part).to_bytes(8, "little") + part)
    return found.digest()


class Places(NamedTuple):
    """The folders that may hold the code of a function, in the order of preference.

    Attributes:
        read: the folders from which code is loaded.
        write: the folders to which code is written: to the first one that is writable and trusted.
        are_sets: whether the folders are sets.
    """

    read: list[str]
    write: list[str]
    are_sets: bool


def places_by_path(source: str) -> Places:
    """Return the places of a user's function."""
    home = os.path.dirname(os.path.abspath(source))
    own = f"{os.path.basename(home)}_{digest(home.encode()).hex()}"
    if given := os.environ.get("NUMBA_CACHE_DIR"):
        found = [f"{given}/{own}"]
    else:
        users = config.cache_folder()
        found = [f"{home}/__pycache__", *([] if users is None else [f"{users}/{own}"])]
    return Places(found, found, are_sets=False)


def places_by_content(name: str, source: str, package: str) -> Places:
    """Return the places of a function of this package.

    Args:
        name: the name of the set.
        source: the function's file.
        package: the package's folder. It has sets for users without a home folder, and those that another user has
            compiled ahead (`copy_for_others`).
    """
    me = os.geteuid()
    if given := os.environ.get("NUMBA_CACHE_DIR"):
        # Users may share the directory. Each writes to a folder of its own, and reads also those of users it trusts.
        owner = getattr(_state(source), "st_uid", me)
        found = [f"{given}/fastcoll-{user}/{name}" for user in dict.fromkeys((me, owner, 0))]
        return Places(found, found[:1], are_sets=True)
    users = config.cache_folder()
    found = [] if users is None else [f"{users}/fastcoll-{me}/{name}"]
    found.append(f"{package}/__pycache__/kernels/{name}")
    return Places(found, found, are_sets=True)


def writable(places: Places, source: str) -> str:
    """Create, and return, the first folder for a function's code that is writable and trusted.

    Raises:
        ResourceError: there is no such folder.
    """
    import tempfile  # takes 3 ms; only processes that compile need it

    refused = []
    for folder in places.write:
        try:
            _make(folder, source, places.are_sets)
            with tempfile.TemporaryFile(dir=folder):
                return folder
        except OSError as error:
            refused.append(f"{folder} ({error.strerror})")
    raise ResourceError(f"compiled kernels cannot be kept in {' or '.join(refused)}; {CURE}")


def _make(folder: str, source: str, is_set: bool) -> None:
    """Create a folder, unless it exists; raise an OSError if it is not trusted."""
    if is_set and not os.path.exists(folder):
        _remove_old_sets(os.path.dirname(folder))
    os.makedirs(folder, mode=0o755, exist_ok=True)
    if why := openness(os.stat(folder), source):
        raise PermissionError(errno.EPERM, why)


def _remove_old_sets(sets: str) -> None:
    """Make room for a new set. A process that needs a removed one compiles again."""
    import shutil  # takes 4 ms; only processes that compile need it

    with suppress(OSError):
        found = [entry for entry in os.scandir(sets) if entry.is_dir(follow_symlinks=False)]
        found.sort(key=lambda entry: entry.stat().st_mtime, reverse=True)
        for entry in found[_MOST_SETS - 1 :]:
            shutil.rmtree(entry.path, ignore_errors=True)


def mark_used(folder: str) -> None:
    """Record, at most once a day, that code of a set is in use."""
    with suppress(OSError):  # another user's set
        if time.time() - os.stat(folder).st_mtime > _DAY:
            os.utime(folder)


def write(folder: str, name: str, content: bytes) -> None:
    """Write a file atomically, because other processes may be reading it.

    Raises:
        OSError: it cannot be written; nothing is left behind.
    """
    path = f"{folder}/{name}.{os.urandom(8).hex()}"
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        with os.fdopen(fd, "wb") as file:
            file.write(content)
        os.replace(path, f"{folder}/{name}")
    except BaseException:
        with suppress(OSError):
            os.unlink(path)
        raise


def copy_for_others(places: Places, source: str) -> None:
    """Copy this user's set into the package, if this user may write there.

    Other users of this installation do not trust this user's cache directory; with the copy they need not compile.
    """
    own, *others = places.write
    for folder in others:
        with suppress(OSError):
            _make(folder, source, is_set=True)
            for name in os.listdir(own):
                content = read(own, name, source) if name.endswith(".code") else None
                if content is not None and read(folder, name, source) != content:
                    write(folder, name, content)


def read(folder: str, name: str, source: str) -> bytes | None:
    """Return the content of a file in one of the folders, or None if it is missing or not trusted."""
    file = opened(folder, name, source)
    if file is None:
        return None
    with file, suppress(OSError):
        return file.readall()
    return None


def opened(folder: str, name: str, source: str) -> FileIO | None:
    """Return an open file with code of `source`, or None if it is missing, not trusted or no regular file."""
    with suppress(OSError):
        inside = os.open(folder, _FOLDER)
        try:
            file = FileIO(os.open(name, _FILE, dir_fd=inside))
            states = {folder: os.fstat(inside), f"{folder}/{name}": os.fstat(file.fileno())}
        finally:
            os.close(inside)
        for path, state in states.items():
            if why := openness(state, source):
                _warn_of(path, why)
                break
        else:
            if stat.S_ISREG(state.st_mode):
                return file
        file.close()
    return None


def openness(state: os.stat_result, source: str) -> str:
    """Return why a file or folder with code of `source` is not trusted, or an empty string if it is."""
    also = _state(source)
    if state.st_uid not in (0, os.geteuid(), also and also.st_uid):
        return f"it belongs to user {state.st_uid}"
    open_to = stat.S_IMODE(state.st_mode) & 0o022
    if also is not None:
        open_to &= ~also.st_mode | (stat.S_IWGRP if also.st_gid != state.st_gid else 0)
    return f"others may write to it (mode {stat.S_IMODE(state.st_mode):04o})" if open_to else ""


def _state(source: str) -> os.stat_result | None:
    try:
        return os.stat(source)
    except OSError:  # the source is in an archive
        return None


@functools.cache
def _warn_of(path: str, why: str) -> None:
    """Log once per process and path."""
    _log.warning(
        "compiled code in %s is not used, since %s: remove it or chmod go-w it, or %s", path, why, CURE
    )
