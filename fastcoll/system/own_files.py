"""Safe opens of this user's files that have predictable names in folders where other users may write.

Another user may put a symbolic link at such a name, through which one of this user's files would be overwritten, or a
pipe, on which an open would block.
"""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress
from typing import BinaryIO


def open_own(path: str | os.PathLike[str], flags: int, mode: int) -> int:
    """Open `path`, a regular file of this user without further hard links, or create it. Does not block.

    Args:
        path: the file.
        flags: for os.open, without O_TRUNC, so that a rejected file is not changed.
        mode: permissions of the file if it is created.

    Raises:
        PermissionError: `path` exists and is not such a file.
        OSError: the file cannot be created or opened; ELOOP: `path` is a symbolic link.
    """
    flags |= os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with suppress(FileExistsError):
        return os.open(path, flags | os.O_CREAT | os.O_EXCL, mode)
    fd = os.open(path, flags)
    state = os.fstat(fd)
    if stat.S_ISREG(state.st_mode) and state.st_uid == os.geteuid() and state.st_nlink <= 1:
        return fd
    os.close(fd)
    raise PermissionError(errno.EPERM, "it is a link, or no file of this user", os.fspath(path))


def open_anew(path: str | os.PathLike[str]) -> BinaryIO:
    """Unlink the file `path`, if it exists, and create it anew for writing; do not follow a symbolic link."""
    with suppress(FileNotFoundError):
        os.unlink(path)
    return open(path, "xb")
