"""The folders of compiled code, and the check whether the code in a file may be run.

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
from contextlib import suppress
from io import FileIO

from .. import config
from ..errors import ResourceError

_log = logging.getLogger("fastcoll")
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
CURE = "set NUMBA_CACHE_DIR to a folder that you alone can write to"


def digest(*parts: bytes) -> bytes:
    """Return a 16-byte hash of the parts."""
    found = hashlib.blake2b(digest_size=16)
    for part in parts:
        found.update(len(part).to_bytes(8, "little") + part)
    return found.digest()


def folders(source: str) -> list[str]:
    """Return the folders that may hold the code of a source file."""
    home = os.path.dirname(os.path.abspath(source))
    own = f"{os.path.basename(home)}_{digest(home.encode()).hex()}"
    if given := os.environ.get("NUMBA_CACHE_DIR"):
        return [f"{given}/{own}"]
    users = config.cache_folder()
    return [f"{home}/__pycache__", *([] if users is None else [f"{users}/{own}"])]


def writable(source: str) -> str:
    """Create, and return, the first folder for a source file's code that is writable and trusted.

    Raises:
        ResourceError: there is no such folder.
    """
    import tempfile  # takes 3 ms; only processes that compile need it

    refused = []
    for folder in folders(source):
        try:
            os.makedirs(folder, mode=0o755, exist_ok=True)
            if why := openness(os.stat(folder), source):
                raise PermissionError(errno.EPERM, why)
            with tempfile.TemporaryFile(dir=folder):
                return folder
        except OSError as error:
            refused.append(f"{folder} ({error.strerror})")
    raise ResourceError(f"compiled kernels cannot be kept in {' or '.join(refused)}; {CURE}")


def read(folder: str, name: str, source: str) -> bytes | None:
    """Return the content of a file in one of the `folders`, or None if it is missing or not trusted."""
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
    try:
        also = os.stat(source)
    except OSError:  # the source is in an archive
        also = None
    if state.st_uid not in (0, os.geteuid(), also and also.st_uid):
        return f"it belongs to user {state.st_uid}"
    open_to = stat.S_IMODE(state.st_mode) & 0o022
    if also is not None:
        open_to &= ~also.st_mode | (stat.S_IWGRP if also.st_gid != state.st_gid else 0)
    return f"others may write to it (mode {stat.S_IMODE(state.st_mode):04o})" if open_to else ""


@functools.cache
def _warn_of(path: str, why: str) -> None:
    """Log once per process and path."""
    _log.warning(
        "compiled code in %s is not used, since %s: remove it or chmod go-w it, or %s", path, why, CURE
    )
