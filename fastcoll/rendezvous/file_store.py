"""FileStore: a store in a file that all ranks can reach, kept in step by SharedLog.

Every participant is written into the file with its process. The one that leaves last removes it, and
one that comes to a file whose participants are all dead starts it anew.
"""

from __future__ import annotations

import json
import os
import threading
import time
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import timedelta

from ..core.arguments import whole
from ..core.processes import ProcessId, forget, in_sight, read_process, this_process
from ..errors import ResourceError, StoreError, StoreTimeoutError, UsageError
from .file_log import MAGIC, Kind, Record, locked, open_own, read_records
from .store import DEFAULT_TIMEOUT
from .table import CHANGING, Request, Table
from .table_store import TableStore

_PAUSE_FIRST, _PAUSE_MOST = 0.001, 0.02


class FileStore(TableStore):
    """Keys and values in the file `file_name`, appended under an fcntl lock. Thread safe.

    The file is made with mode 0600 and removed when the last participant closes the store (at the
    latest when its process ends in an orderly way). A file left by processes that were killed is
    recognised by their pids and start times, and started anew.

    Args:
        file_name: in an existing directory, on a file system with fcntl locks (NFS has them).
        world_size: how many participants there will be: the file stays until so many have come and
            all have left. -1: it goes when nobody has it open.
        timeout: of blocking operations.

    Raises:
        UsageError: `file_name` is a link, another user's, in no directory, or holds something else.
    """

    def __init__(
        self,
        file_name: str | os.PathLike[str],
        world_size: int = -1,
        timeout: timedelta | float = DEFAULT_TIMEOUT,
    ) -> None:
        self._timeout = self._limit(timeout)
        self.path = os.fspath(file_name)
        self.world_size = whole("world_size", world_size)
        self._pid = os.getpid()
        self._mutex = threading.Lock()
        self._log = SharedLog(self.path, time.monotonic() + self._timeout)
        self._leave = weakref.finalize(self, _leave, self._log, self.world_size, self._pid)

    def participants(self) -> list[ProcessId]:
        """The processes that have the file open, as they wrote themselves down.

        Raises:
            StoreError: the store is closed or the file damaged.
        """
        self._check_process()
        with self._mutex, self._log.transaction(time.monotonic() + self._timeout):
            return list(self._log.participants.values())

    def clone(self) -> FileStore:
        """A participant more."""
        return FileStore(self.path, self.world_size, self._timeout)

    def close(self) -> None:
        with self._mutex:
            self._closed = True
            self._leave()

    def _ask(self, request: Request) -> list[bytes] | bytes:
        self._check_process()
        deadline = time.monotonic() + request.timeout
        pause = _PAUSE_FIRST
        answer = self._try(request)
        while isinstance(answer, bytes):
            left = deadline - time.monotonic()
            if left <= 0:
                break
            time.sleep(min(pause, left))
            pause = min(2 * pause, _PAUSE_MOST)
            if self._may_go(request):
                answer = self._try(request)
        return answer

    def _may_go(self, request: Request) -> bool:
        """Whether trying again is worth the lock: other processes or our own threads wrote."""
        with self._mutex:
            return self._closed or self._log.has_news() or self._log.table.first_missing(request) is None

    def _try(self, request: Request) -> list[bytes] | bytes:
        """The answer to `request`, or the key that it still waits for."""
        with self._mutex:
            if self._closed:
                raise StoreError(f"this FileStore on {self.path} was closed while a call waited in it")
            with self._log.transaction(time.monotonic() + self._timeout):
                missing = self._log.table.first_missing(request)
                return self._log.apply(request) if missing is None else missing

    def _check_process(self) -> None:
        if self._pid != os.getpid():
            raise UsageError(
                f"this FileStore belongs to process {self._pid} and came here by a fork; open a FileStore "
                f"of its own in process {os.getpid()}"
            )


def _leave(log: SharedLog, world_size: int, pid: int) -> None:
    if pid == os.getpid():  # a forked child must not write its parent out
        log.leave(world_size)


_LEAVE_SECONDS = 5.0


class SharedLog:
    """The open file of one participant: what was read of it, and how it is written.

    Opening it writes this process in, after starting the file anew if its participants are all dead.
    Everything else happens inside `transaction`. Not thread safe: the owner brings a lock.

    Attributes:
        table: the keys and values, as far as they have been read.
        participants: the processes that have the file open now.

    Raises:
        UsageError, ResourceError: the file cannot be used; see `open_own`.
        StoreTimeoutError: its lock is not free before `deadline` (time.monotonic).
    """

    def __init__(self, path: str, deadline: float) -> None:
        self.path = path
        self.table = Table()
        self.participants: dict[bytes, ProcessId] = {}
        self._opened = 0
        self._offset = 0
        self._me = os.urandom(8)
        self._fd = self._open(deadline)

    @contextmanager
    def transaction(self, deadline: float) -> Iterator[None]:
        """Inside the `with` the lock is held and everything in the file has been read."""
        with locked(self._fd, self.path, deadline):
            self._catch_up()
            yield

    def has_news(self) -> bool:
        """Whether the file has grown since it was read."""
        return os.fstat(self._fd).st_size != self._offset

    def apply(self, request: Request) -> list[bytes]:
        """Carry out `request` inside a transaction and write what it changed."""
        if request.op not in CHANGING:
            return self.table.apply(request)
        try:
            answer = self.table.apply(request)
            values = [(key, self.table.get(key)) for key in request.keys]
            self._write(
                Record(Kind.SET, key, value) if value is not None else Record(Kind.DELETE, key)
                for key, value in values
            )
        except BaseException:
            self._read_anew()
            raise
        return answer

    def leave(self, world_size: int) -> None:
        """Write ourselves out, and remove the file if nobody needs it any more."""
        try:
            with self.transaction(time.monotonic() + _LEAVE_SECONDS):
                del self.participants[self._me]
                if self._is_done_with(world_size) and self._is_at_path():
                    os.unlink(self.path)
                else:
                    self._write([Record(Kind.LEAVE, self._me)])
        finally:
            os.close(self._fd)

    def _is_done_with(self, world_size: int) -> bool:
        """Whether nobody will come back to the file: all have left, or those that have not are dead."""
        if self.participants:
            return self._all_gone()
        return self._opened >= world_size

    def _all_gone(self) -> bool:
        return all(_is_gone(process, self._fd) for process in self.participants.values())

    def _catch_up(self) -> None:
        """Read what others have written, and cut off what a killed writer left half-written."""
        size = os.fstat(self._fd).st_size
        if size < self._offset or (self._offset == 0 and size > 0 and self._read(0, len(MAGIC)) != MAGIC):
            raise StoreError(f"{self.path} was changed by something else than a fastcoll store")
        if self._offset == 0:
            self._offset = min(size, len(MAGIC))
        data = self._read(self._offset, size - self._offset)
        try:
            for record, end in read_records(data, self._offset):
                self._take(record)
                self._offset = end
        except (StoreError, ValueError) as error:
            raise StoreError(f"the store in {self.path} cannot be read: {error}") from error
        if self._offset < size:
            os.ftruncate(self._fd, self._offset)

    def _open(self, deadline: float) -> int:
        """Open the file, start it anew if it is stale, and write ourselves in."""
        while True:
            self._fd = open_own(self.path)
            try:
                with locked(self._fd, self.path, deadline):
                    if self._is_at_path():
                        self._enter()
                        return self._fd
            except BaseException:
                os.close(self._fd)
                raise
            # Its last participant removed it between our opening and locking it.
            os.close(self._fd)
            if time.monotonic() >= deadline:
                raise StoreTimeoutError(f"{self.path} is removed and made again without end")

    def _enter(self) -> None:
        self._refuse_foreign_content()
        self._catch_up()
        if self.participants and self._all_gone():
            self._start_anew()
        me = json.dumps(asdict(this_process())).encode()
        magic = MAGIC if self._offset == 0 else b""
        joining = Record(Kind.JOIN, self._me, me)
        self._write([joining], magic)
        self._take(joining)

    def _refuse_foreign_content(self) -> None:
        start = self._read(0, len(MAGIC))
        if start == MAGIC or not start:
            return
        if MAGIC.startswith(start):  # its first writer was killed at once
            os.ftruncate(self._fd, 0)
            return
        raise UsageError(
            f"{self.path} holds something else than a fastcoll store; choose another path or remove it"
        )

    def _start_anew(self) -> None:
        os.ftruncate(self._fd, 0)
        self._forget()

    def _read_anew(self) -> None:
        self._forget()
        self._catch_up()

    def _forget(self) -> None:
        self.table, self.participants, self._opened, self._offset = Table(), {}, 0, 0

    def _take(self, record: Record) -> None:
        match record.kind:
            case Kind.SET:
                self.table.put(record.key, record.value)
            case Kind.DELETE:
                self.table.remove(record.key)
            case Kind.JOIN:
                self.participants[record.key] = read_process(json.loads(record.value))
                self._opened += 1
            case Kind.LEAVE:
                self.participants.pop(record.key, None)

    def _write(self, records: Iterable[Record], magic: bytes = b"") -> None:
        """Append records whose effect on the table is already made; all of them or none."""
        data = magic + b"".join(record.to_bytes() for record in records)
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
        """Whether `path` still names the file that is open."""
        try:
            there = os.stat(self.path, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return os.path.samestat(there, os.fstat(self._fd))


def _is_gone(process: ProcessId, fd: int) -> bool:
    """Whether a participant is proven dead: its process has ended, or its machine has booted since."""
    if in_sight(process):
        alive = process.alive()
        forget([process])
        return alive is False
    rebooted = process.host == os.uname().nodename and process.boot_id != this_process().boot_id
    return rebooted and os.fstat(fd).st_mtime < _boot_time()


def _boot_time() -> float:
    """When this machine booted, in seconds since the epoch."""
    with open("/proc/stat", encoding="ascii") as file:
        return float(next(line for line in file if line.startswith("btime ")).split()[1])
