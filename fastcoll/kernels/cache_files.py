"""Where compiled code is kept, and whether what lies there may be run.

It is machine code: whoever can write to a file of it, or put one into its folder, has this user run it. So both must be
closed to everybody but this user, root, and those that can change the source beside it, whose code is run anyway. That
is looked up through the descriptor that is read, so nothing can be exchanged in between.
"""

from __future__ import annotations

import errno
import functools
import hashlib
import logging
import os
import stat
from contextlib import suppress

from .. import config
from ..errors import ResourceError

_log = logging.getLogger("fastcoll")
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
CURE = "set NUMBA_CACHE_DIR to a folder that you alone can write to"


def digest(*parts: bytes) -> bytes:
    """16 bytes that stand for the parts."""
    found = hashlib.blake2b(digest_size=16)
    for part in parts:
        found.update(len(part).to_bytes(8, "little") + part)
    return found.digest()


def folders(source: str) -> list[str]:
    """Where the code of a source file may be."""
    place = os.path.dirname(os.path.abspath(source))
    own = f"{os.path.basename(place)}_{digest(place.encode()).hex()}"
    if given := os.environ.get("NUMBA_CACHE_DIR"):
        return [f"{given}/{own}"]
    users = config.cache_folder()
    return [f"{place}/__pycache__", *([] if users is None else [f"{users}/{own}"])]


def writable(source: str) -> str:
    """The first folder for the code of a source file in which files can be made that may be run; it is made.

    Raises:
        ResourceError: there is none.
    """
    import tempfile  # takes 3 ms, and is for those who compile

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
    """What a file in one of the `folders` holds; None: it is not there, or not to be trusted."""
    with suppress(OSError):
        inside = os.open(folder, _FOLDER)
        try:
            file = os.open(name, _FILE, dir_fd=inside)
            with os.fdopen(file, "rb", buffering=0) as opened:
                states = {folder: os.fstat(inside), f"{folder}/{name}": os.fstat(file)}
                for path, state in states.items():
                    if why := openness(state, source):
                        _warn_of(path, why)
                        return None
                return opened.readall() if stat.S_ISREG(states[f"{folder}/{name}"].st_mode) else None
        finally:
            os.close(inside)
    return None


def openness(state: os.stat_result, source: str) -> str:
    """Why a file or folder with code of `source` is not to be trusted; empty: it is."""
    try:
        also = os.stat(source)
    except OSError:  # in an archive
        also = None
    if state.st_uid not in (0, os.geteuid(), also and also.st_uid):
        return f"it belongs to user {state.st_uid}"
    open_to = stat.S_IMODE(state.st_mode) & 0o022
    if also is not None:
        open_to &= ~also.st_mode | (stat.S_IWGRP if also.st_gid != state.st_gid else 0)
    return f"others may write to it (mode {stat.S_IMODE(state.st_mode):04o})" if open_to else ""


@functools.cache
def _warn_of(path: str, why: str) -> None:
    """Once a process and path."""
    _log.warning(
        "compiled code in %s is not used, since %s: remove it or chmod go-w it, or %s", path, why, CURE
    )
