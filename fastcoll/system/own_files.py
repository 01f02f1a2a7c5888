"""This user's files with predictable names in folders where other users may write.

Another user may put a symbolic link there, through which one of this user's files would be overwritten, or a pipe, on
which an open would block.
"""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress
from typing import BinaryIO


def open_own(path: str | os.PathLike[str], flags: int, mode: int) -> int:
    """Open `path` as a regular file of this user with no other name, or create it. Does not block.

    Args:
        path: the file.
        flags: of os.open, without O_TRUNC: a rejected file is not changed.
        mode: permissions of a file that is created.

    Raises:
        PermissionError: `path` is something else.
        OSError: it cannot be created or opened; ELOOP: it is a symbolic link.
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
    """Create `path` for writing after unlinking the old file; a symbolic link is not followed."""
    with suppress(FileNotFoundError):
        os.unlink(path)
    return open(path, "xb")
