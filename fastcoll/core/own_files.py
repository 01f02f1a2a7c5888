"""Files of this user alone, under names that others can guess in folders that others may write to.

Another user may have put a link there, by which one of this user's files would be overwritten, or a pipe, which blocks.
"""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress
from typing import BinaryIO


def open_own(path: str | os.PathLike[str], flags: int, mode: int) -> int:
    """A descriptor of the file at `path`, made now or this user's, which has no other name. Does not block.

    Args:
        flags: of os.open, without O_TRUNC: nothing is to be changed of what is refused.

    Raises:
        PermissionError: something else is there.
        OSError: it cannot be made or opened; ELOOP: it is a symbolic link.
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
    """A new file at `path` to write to, in the place of what is there, which is not followed."""
    with suppress(FileNotFoundError):
        os.unlink(path)
    return open(path, "xb")
