"""FileStore: a store in a file that all ranks can open. The file is a log; the class SharedLog reads and appends to it.

A *participant* is one open FileStore. The file lists the process of each participant. The last participant to close its
store removes the file. A process that opens a file whose participants are all dead clears the file.

The file has a magic line, then 8 bytes with the offset of the first valid record, then the records. A record is a
12-byte header and one request that changes the store, as a frame (frames.py). The header has, big-endian, the CRC-32 of
the frame, the length of the frame, a flag (1: the request changes the list of participants, 0: it changes keys), and
three zero bytes. The checksum also covers the flag. Records are only appended. A killed writer leaves at most one
incomplete record, at the end of the file, because it held the lock and so no other process was writing. The next
process that takes the lock removes the incomplete record.

When most of the log is obsolete, a writer compacts it: it appends the current state as new records, sets the offset to
the first of them, and frees the disk blocks of all records before that one (it punches a hole). If the writer is killed
before it sets the offset, the new records only repeat the current state, which is harmless.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import stat
import struct
import threading
import weakref
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta

from ..core.operands import whole
from ..errors import ResourceError, StoreError, StoreTimeoutError, UsageError
from ..system.processes import ProcessId, forget, in_sight, this_process
from .frames import HEADER, MAX_BODY, check_request_header, decode_request, encode_request
from .store import DEFAULT_TIMEOUT, StalledError, limit_of, tries
from .table import CHANGING, Missing, Op, StoreRequest, Table, TableStore, check_process, closed_meanwhile

MAGIC = b"fastcoll store 4\n"
_BEGIN = struct.Struct("!Q")
FIRST = len(MAGIC) + _BEGIN.size  # where the records of a new file begin
_HEADER = struct.Struct("!II?3x")
_OPENED = b"opened"  # a key in the records of participants: how many participants have ever opened the file
# The log is compacted when its records take more than _MOST_HISTORY bytes, and more than _HISTORY_SHARE times the bytes
# of the current state.
_MOST_HISTORY, _HISTORY_SHARE = 1 << 20, 4
_RECORD_BYTES = 64  # the approximate size of a record without its key and value
_PUNCH_HOLE = 0x02 | 0x01  # FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE of fallocate(2)
# struct flock: type, whence, start, length, pid. The lock belongs to the open file description and not to the process
# (fcntl(2), "open file description locks"), so it also excludes other threads.
_FLOCK = struct.Struct("hhqqi0q")
_PAUSE_MOST = 0.02  # the longest pause between two polls of the file or its lock
_LEAVE_SECONDS = 5.0  # how long a participant that closes its store waits for the lock
_GRACE_SECONDS = 5.0  # how much longer than an operation's own timeout it waits for the lock


class FileStore(TableStore):
    """A store in the file `file_name`, which every operation locks with fcntl. Thread safe.

    The file is created with mode 0600. It is removed when the last participant closes the store, or when the process of
    that participant exits normally. If all processes that had the file open were killed, the next process that opens it
    detects this by their pids and start times, and clears the file.

    Args:
        file_name: a path in an existing directory, on a file system with fcntl locks (NFS has them).
        world_size: the number of participants. The file stays until this many have opened the store and all of them
            have closed it. -1: the file is removed as soon as no process has it open.
        timeout: the time limit of blocking operations.

    Raises:
        UsageError: `file_name` is a link, belongs to another user, is writable by others, or holds other data; or its
            directory does not exist.
    """

    def __init__(
        self,
        file_name: str | os.PathLike[str],
        world_size: int = -1,
        timeout: timedelta | float = DEFAULT_TIMEOUT,
    ) -> None:
        self.set_timeout(timeout)
        self.path = os.path.abspath(file_name)  # also right after the program has changed its folder
        self.world_size = whole("world_size", world_size)
        self._pid = os.getpid()
        self._mutex = threading.RLock()
        self._is_inside = False  # the thread that holds the lock is in an operation
        self._log = SharedLog(self.path, limit_of(self))
        self._leave = weakref.finalize(self, _leave, self._log, self.world_size, self._pid)

    def participants(self) -> list[ProcessId]:
        """Return the processes that have the file open, as listed in it."""
        check_process(self, self._pid)
        with self._turn(), self._log.transaction(min(_GRACE_SECONDS, limit_of(self))):
            return list(self._log.participants.values())

    def clone(self) -> FileStore:
        """Open the store once more, as another participant."""
        return FileStore(self.path, self.world_size, self.timeout)

    def close(self) -> None:
        self._closed = True
        # In a forked child, a thread of the parent may hold the mutex's copy for ever.
        if self._pid != os.getpid():
            return
        with self._mutex:
            # If a signal handler has interrupted an operation, this process leaves at its exit.
            if not self._is_inside:
                self._leave()

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """Exclude other threads in the `with`; UsageError: a signal handler has interrupted an operation."""
        with self._mutex:
            if self._is_inside:
                raise UsageError("a signal handler may not use the FileStore whose operation it interrupted")
            self._is_inside = True
            try:
                yield
            finally:
                self._is_inside = False

    def _ask(self, request: StoreRequest) -> list[bytes] | Missing:
        check_process(self, self._pid)
        log, missing = self._log, None
        limit = min(request.timeout + _GRACE_SECONDS, limit_of(self))
        for _ in tries(request.timeout, most=_PAUSE_MOST):
            with self._turn():
                if self._closed:
                    raise closed_meanwhile(self)
                # Do not take the file's lock if since the last look no process has written to the file, and no other
                # thread of this process has read the missing keys into the table.
                if (
                    missing is not None
                    and not log.has_news()
                    and log.table.first_missing(request) is not None
                ):
                    continue
                with log.transaction(limit):
                    if log.table.first_missing(request) is None:
                        return log.apply(request)
                    missing = log.table.missing(request)
        assert missing is not None, "the loop runs at least once"
        return missing


def _leave(log: SharedLog, world_size: int, pid: int) -> None:
    if pid == os.getpid():  # a forked child must not remove its parent from the participants
        log.leave(world_size)


class SharedLog:
    """The log, as opened by one participant. Not thread safe: the caller must hold a lock against other threads.

    The constructor adds this process to the participants. `transaction` locks the file against other processes. Call
    `apply` only inside it; outside it, `table` and `participants` may be out of date.

    Attributes:
        table: the keys and values, from the records read so far.
        participants: the processes that have the file open.
    """

    def __init__(self, path: str, limit: float) -> None:
        self.path = path
        self._me = os.urandom(8)  # this participant's key in the list of participants
        self._offset: int  # offset of the end of the records that were read
        self._begin: int  # offset of the first valid record
        self._opened: int  # how many participants have ever opened the file
        self._forget()
        for _ in tries(limit):
            self._fd = open_own(path)
            try:
                with locked(self._fd, path, limit):
                    if self._is_at_path():
                        self._enter()
                        return
            except BaseException:
                os.close(self._fd)
                raise
            # Between this process's open and its lock, the last participant removed the file.
            os.close(self._fd)
        raise StoreTimeoutError(f"{path} is removed and created again repeatedly")

    @contextmanager
    def transaction(self, limit: float) -> Iterator[None]:
        """Hold the file's lock inside the `with`; before its body runs, read all new records."""
        with locked(self._fd, self.path, limit):
            self._catch_up()
            yield

    def has_news(self) -> bool:
        """Return whether the file has grown since it was read."""
        return os.fstat(self._fd).st_size != self._offset

    def apply(self, request: StoreRequest) -> list[bytes]:
        """Execute `request` in the table, and append it to the log if it changes the store."""
        if request.op not in CHANGING:
            return self.table.apply(request)
        try:
            answer = self.table.apply(request)
            self._write(record_of(request))
        except BaseException:
            self._forget()
            self._catch_up()
            raise
        holds = self.table.size + _RECORD_BYTES * len(self.table.items())
        if self._offset - self._begin > max(_MOST_HISTORY, _HISTORY_SHARE * holds):
            with suppress(ResourceError):  # the disk is full, so the log is not compacted
                self._begin_anew()
        return answer

    def leave(self, world_size: int) -> None:
        """Remove this process from the participants, and remove the file if it is no longer needed.

        The file is no longer needed in two cases: other participants are still listed, but all of them are dead; or no
        other participant is listed, and at least `world_size` have ever opened the file.
        """
        try:
            with self.transaction(_LEAVE_SECONDS):
                del self.participants[self._me]
                is_over = self._all_gone() if self.participants else self._opened >= world_size
                if is_over and self._is_at_path():
                    os.unlink(self.path)
                else:
                    self._write(record_of(StoreRequest(Op.DELETE, (self._me,)), True))
        finally:
            os.close(self._fd)

    def _begin_anew(self) -> None:
        """Compact the log: append the current state, and free the records before it."""
        begin, opened = self._offset, self._opened
        here = [StoreRequest(Op.SET, (me,), (it.to_bytes(),)) for me, it in self.participants.items()]
        records = [record_of(request, True) for request in here]
        records.append(record_of(StoreRequest(Op.SET, (_OPENED,), (b"%d" % opened,)), True))
        records += [record_of(StoreRequest(Op.SET, (key,), (value,))) for key, value in self.table.items()]
        self._write(b"".join(records))
        os.pwrite(self._fd, _BEGIN.pack(begin), len(MAGIC))
        self._begin = begin
        offset, length = ctypes.c_int64(FIRST), ctypes.c_int64(begin - FIRST)
        # On a file system without holes this fails, and the obsolete records keep their blocks.
        ctypes.CDLL(None).fallocate(self._fd, _PUNCH_HOLE, offset, length)

    def _all_gone(self) -> bool:
        return all(_is_gone(process, self._fd) for process in self.participants.values())

    def _enter(self) -> None:
        """Clear the file if all its participants are dead, and add this process to the participants."""
        start = self._read(0, FIRST)
        if not MAGIC.startswith(start[: len(MAGIC)]):
            raise UsageError(f"{self.path} is not a fastcoll store; choose another path or remove it")
        # The first writer may have been killed before it had written the magic line and the offset.
        if len(start) < FIRST:
            os.ftruncate(self._fd, 0)
        self._catch_up()
        if self.participants and self._all_gone():
            os.ftruncate(self._fd, 0)
            self._forget()
        joining = StoreRequest(Op.SET, (self._me,), (this_process().to_bytes(),))
        self._write((b"" if self._offset else MAGIC + _BEGIN.pack(FIRST)) + record_of(joining, True))
        self._take(joining, True)

    def _catch_up(self) -> None:
        """Read the new records. If a killed writer has left an incomplete record at the end, remove it."""
        size, head = os.fstat(self._fd).st_size, self._read(0, FIRST)
        begin = int.from_bytes(head[len(MAGIC) :], "big")
        sound = head[: len(MAGIC)] == MAGIC and FIRST <= begin <= size
        if size < self._offset or (size > 0 and not sound):
            raise StoreError(f"{self.path} was changed by another program")
        # If another process has compacted the log, the records from `begin` on are the whole state.
        if self._offset < begin:
            self._forget()
            self._offset = begin
        self._begin = begin
        data = self._read(self._offset, size - self._offset)
        try:
            for request, is_of_participants, end in read_records(data, self._offset):
                self._take(request, is_of_participants)
                self._offset = end
        except (StoreError, ValueError) as error:
            raise StoreError(f"the store in {self.path} cannot be read: {error}") from error
        if self._offset < size:
            os.ftruncate(self._fd, self._offset)

    def _forget(self) -> None:
        self.table = Table()
        self.participants: dict[bytes, ProcessId] = {}
        self._opened = 0
        self._offset = self._begin = 0

    def _take(self, request: StoreRequest, is_of_participants: bool) -> None:
        key = request.keys[0]
        if not is_of_participants:
            self.table.apply(request)
        elif key == _OPENED:
            self._opened = int(request.values[0])
        elif request.op is Op.SET:
            self._opened += key not in self.participants
            self.participants[key] = ProcessId.from_bytes(request.values[0])
        else:
            self.participants.pop(key, None)

    def _write(self, data: bytes) -> None:
        """Append records to the file, all or none; do not apply them to the table."""
        try:
            done = 0
            while done < len(data):
                done += os.pwrite(self._fd, data[done:], self._offset + done)
        except OSError as error:
            os.ftruncate(self._fd, self._offset)
            raise ResourceError(f"the store in {self.path} cannot be written: {error.strerror}") from error
        self._offset += len(data)

    def _read(self, offset: int, count: int) -> bytes:
        parts = []
        while count > 0 and (part := os.pread(self._fd, count, offset)):
            parts.append(part)
            offset, count = offset + len(part), count - len(part)
        return b"".join(parts)

    def _is_at_path(self) -> bool:
        """Return whether `path` still names the open file."""
        try:
            there = os.stat(self.path, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return os.path.samestat(there, os.fstat(self._fd))


def _is_gone(process: ProcessId, fd: int) -> bool:
    """Return whether a participant is proven dead.

    It is dead if its process has ended, or if it ran on this machine before the last boot and nothing has been written
    to the store's file `fd` since that boot.
    """
    if in_sight(process):
        alive = process.alive()
        forget([process])
        return alive is False
    if process.host != os.uname().nodename or process.boot_id == this_process().boot_id:
        return False
    with open("/proc/stat", encoding="ascii") as file:
        booted = next(line for line in file if line.startswith("btime ")).split()[1]
    return os.fstat(fd).st_mtime < float(booted)


def record_of(request: StoreRequest, is_of_participants: bool = False) -> bytes:
    """Return the record of a request that changes the store."""
    frame = encode_request(request)
    return _HEADER.pack(zlib.crc32(frame, is_of_participants), len(frame), is_of_participants) + frame


def read_records(data: bytes, offset: int = 0) -> Iterator[tuple[StoreRequest, bool, int]]:
    """Yield (request, whether it changes the participants, end) for each complete record.

    `data` is the content of the file from `offset` on. `end` is the offset in the file at which the record ends.
    StoreError, ProtocolError: the bytes are not a record.
    """
    at = 0
    while (start := at + _HEADER.size) <= len(data):
        checksum, length, is_of_participants = _HEADER.unpack_from(data, at)
        if not HEADER.size <= length <= HEADER.size + MAX_BODY:
            raise StoreError(f"byte {offset + at} of the log is not a record")
        frame, end = data[start : start + length], start + length
        if end > len(data):
            return
        if zlib.crc32(frame, is_of_participants) != checksum:
            raise StoreError(f"the record at byte {offset + at} of the log is damaged")
        header, body = frame[: HEADER.size], frame[HEADER.size :]
        check_request_header(header)
        yield decode_request(header, body), is_of_participants, offset + end
        at = end


def open_own(path: str) -> int:
    """Open the regular file `path`, or create it with mode 0600; return its descriptor.

    UsageError: it is not a regular file, belongs to another user, or may be written by others. ResourceError: it cannot
    be opened.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    try:
        fd = os.open(path, flags, 0o600)
    except OSError as error:
        if os.path.islink(path):
            raise UsageError(
                f"{path} is a symbolic link, which is not followed; name the file itself"
            ) from error
        if isinstance(error, IsADirectoryError):
            raise UsageError(f"{path} is a directory; name a file in it") from error
        folder = os.path.dirname(path) or "."
        if not os.path.isdir(folder):
            raise UsageError(
                f"{path}: there is no directory {folder}; make it, or choose another path"
            ) from error
        with suppress(OSError):
            _check_owner(path, os.lstat(path))
        raise ResourceError(f"{path} cannot be opened: {error.strerror}") from error
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise UsageError(f"{path} is not a regular file; choose another path for the shared file")
        _check_owner(path, status)
        if (mode := stat.S_IMODE(status.st_mode)) & 0o022:
            raise UsageError(
                f"others may write to {path} (mode {mode:04o}), and so join the job; chmod 600 {path}, or "
                "choose another path"
            )
    except UsageError:
        os.close(fd)
        raise
    return fd


def _check_owner(path: str, status: os.stat_result) -> None:
    if status.st_uid != os.geteuid():
        raise UsageError(
            f"{path} belongs to user {status.st_uid}, not to this one ({os.geteuid()}); choose another path"
        )


@contextmanager
def locked(fd: int, path: str, limit: float) -> Iterator[None]:
    """Hold the exclusive lock of the file inside the `with`.

    StalledError: another process held the lock for `limit` seconds. ResourceError: the file system has no locks.
    """
    for _ in tries(limit, 0.0005, _PAUSE_MOST):
        try:
            _set_lock(fd, fcntl.F_WRLCK)
            break
        except (BlockingIOError, PermissionError):
            continue
        except OSError as error:
            raise ResourceError(
                f"{path} cannot be locked ({error.strerror}); use a file system with locks"
            ) from error
    else:
        raise StalledError(
            f"the lock of {path} was not free in time; the process that holds it may be stopped"
        )
    try:
        yield
    finally:
        _set_lock(fd, fcntl.F_UNLCK)


def _set_lock(fd: int, kind: int) -> None:
    fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _FLOCK.pack(kind, os.SEEK_SET, 0, 0, 0))
