"""The file behind a FileStore, kept in step between processes: entering, reading on, writing, leaving."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict

from ..core.processes import ProcessId, forget, in_sight, read_process, this_process
from ..errors import ResourceError, StoreError, StoreTimeoutError, UsageError
from .file_lock import locked, open_own
from .file_log import MAGIC, Kind, Record, read_records
from .table import CHANGING, Request, Table

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
