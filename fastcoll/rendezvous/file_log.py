"""The file behind a FileStore: opening and locking it, and its bytes.

The bytes are a magic line, then records, only ever appended to. A record is a 16-byte header (big-endian: kind, three
zeros, length of the key, length of the value, CRC-32 of kind, key and value), the key and the value. A writer that is
killed leaves at most one record cut off at the end; nobody else was writing, as it held the lock, so the next writer
cuts it off and goes on.
"""

from __future__ import annotations

import fcntl
import os
import stat
import struct
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum

from ..errors import ResourceError, StoreError, StoreTimeoutError, UsageError
from .table import MAX_KEY, MAX_VALUE

MAGIC = b"fastcoll store 1\n"
_HEADER = struct.Struct("!B3xIII")


class Kind(IntEnum):
    """SET and DELETE change a key; JOIN and LEAVE tell which processes have the file open."""

    SET = 1
    DELETE = 2
    JOIN = 3
    LEAVE = 4


@dataclass(frozen=True)
class Record:
    """One change."""

    kind: Kind
    key: bytes
    value: bytes = b""

    def to_bytes(self) -> bytes:
        header = _HEADER.pack(self.kind, len(self.key), len(self.value), self.checksum())
        return header + self.key + self.value

    def checksum(self) -> int:
        return zlib.crc32(self.value, zlib.crc32(self.key, self.kind))


def read_records(data: bytes, offset: int = 0) -> Iterator[tuple[Record, int]]:
    """The whole records at the start of `data`, which begins at `offset`, each with the offset of its end.

    Ends at a record that is cut off.

    Raises:
        StoreError: the bytes are no records.
    """
    at = 0
    while at + _HEADER.size <= len(data):
        kind, key_length, value_length, checksum = _HEADER.unpack_from(data, at)
        if kind not in tuple(Kind) or key_length > MAX_KEY or value_length > MAX_VALUE:
            raise StoreError(f"byte {offset + at} of the log is no record")
        middle = at + _HEADER.size + key_length
        end = middle + value_length
        if end > len(data):
            return
        record = Record(Kind(kind), data[at + _HEADER.size : middle], data[middle:end])
        if record.checksum() != checksum:
            raise StoreError(f"the record at byte {offset + at} of the log is damaged")
        yield record, offset + end
        at = end


# struct flock: type, whence, start, length, pid. The lock belongs to the open file, not to the
# process (fcntl(2), "open file description locks"), so it also keeps threads apart.
_FLOCK = "hhqqi0q"
_PAUSE_MOST = 0.02


def open_own(path: str) -> int:
    """The descriptor of the regular file `path`, made with mode 0600 if it is missing.

    Raises:
        UsageError: a link, a directory, another user's file, or a missing directory; by name.
        ResourceError: the file cannot be opened.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    try:
        fd = os.open(path, flags, 0o600)
    except OSError as error:
        raise _cannot_open(path, error) from error
    status = os.fstat(fd)
    if stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid():
        return fd
    os.close(fd)
    if not stat.S_ISREG(status.st_mode):
        raise UsageError(f"{path} is no regular file; choose another path for the shared file")
    raise UsageError(
        f"{path} belongs to user {status.st_uid}, not to this one ({os.geteuid()}); choose another path"
    )


def _cannot_open(path: str, error: OSError) -> UsageError | ResourceError:
    if os.path.islink(path):
        return UsageError(f"{path} is a symbolic link, which is not followed; name the file itself")
    if isinstance(error, IsADirectoryError):
        return UsageError(f"{path} is a directory; name a file in it")
    folder = os.path.dirname(path) or "."
    if not os.path.isdir(folder):
        return UsageError(f"{path}: there is no directory {folder}; make it, or choose another path")
    owner = _owner(path)
    if owner not in (None, os.geteuid()):
        return UsageError(
            f"{path} belongs to user {owner}, not to this one ({os.geteuid()}); choose another path"
        )
    return ResourceError(f"{path} cannot be opened: {error.strerror}")


def _owner(path: str) -> int | None:
    try:
        return os.lstat(path).st_uid
    except OSError:
        return None


@contextmanager
def locked(fd: int, path: str, deadline: float) -> Iterator[None]:
    """Hold the exclusive lock of the file inside the `with`.

    Raises:
        StoreTimeoutError: another process holds it past `deadline` (time.monotonic).
        ResourceError: the file system has no locks.
    """
    pause = 0.0005
    while not _try_lock(fd, path):
        if time.monotonic() >= deadline:
            raise StoreTimeoutError(
                f"the lock of {path} was not free in time; a process that holds it is stopped"
            )
        time.sleep(pause)
        pause = min(2 * pause, _PAUSE_MOST)
    try:
        yield
    finally:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _flock(fcntl.F_UNLCK))


def _try_lock(fd: int, path: str) -> bool:
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _flock(fcntl.F_WRLCK))
    except (BlockingIOError, PermissionError):
        return False
    except OSError as error:
        raise ResourceError(
            f"{path} cannot be locked ({error.strerror}); use a file system with locks"
        ) from error
    return True


def _flock(kind: int) -> bytes:
    return struct.pack(_FLOCK, kind, os.SEEK_SET, 0, 0, 0)
