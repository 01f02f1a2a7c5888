"""The flight recorder: the calls of each group of this process, in memory that other processes can read (record.py).

Each process has one memfd, which it makes with its first group and closes with its last one. Each group has a block in
that file. The block also has the private *context* of the group's backend: the words that the backend's compiled code
reads and writes, such as the number of the call and the rank for which it waits. So compiled code records a call with a
few stores, and other processes read the context without any work by this process.

The thread that makes or closes a group writes the file's header and its table of groups, under `_lock`. The thread
whose call is running writes the block's *ring*, which has the last calls. A thread that waits writes its wait into its
own slot of the block.

In a child process made by fork, each block is replaced with private memory, so the child shares nothing with its
parent. The record has no secrets: only signatures, sizes, times, names of groups and hosts, and texts of errors.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import inspect
import itertools
import json
import logging
import mmap
import os
import struct
import threading
import time
import weakref
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import config
from .._version import __version__
from ..errors import encodable
from ..system.forks import at_fork
from ..system.handing import hand_over
from ..system.mapping import aside, map_memory, unmap_memory
from ..system.processes import Member
from . import record as r
from .record import Record, parse, read

__all__ = ["GroupRecorder", "Record", "read"]

_log = logging.getLogger("fastcoll")
_PAGE = mmap.PAGESIZE
_SIGNATURE = struct.Struct("=3q")  # NUMBER, CALL, SHAPE
_KEEP_SIZE, _PUNCH_HOLE = 1, 2  # modes of fallocate(2)
_MOST_CLOSED = 64  # closed groups whose blocks, of 72 KiB and more, stay in the file for metrics/
_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long]


class _File:
    """The memfd of this process. `fd` is -1 before `open`, after `close`, and if the system could not make a memfd."""

    def __init__(self) -> None:
        self.fd = -1
        self.end = -(-r.BLOCKS // _PAGE) * _PAGE
        self.groups: set[int] = set()  # the rows of the table of groups that are not closed
        # For each closed group that is kept, its row and its block.
        self._closed: deque[tuple[int, object]] = deque()

    def open(self, me: Member, job: str) -> None:
        """Make the memfd of this process.

        Args:
            job: a text that identifies the job, the same in all its processes.
        """
        try:
            self.fd = aside(os.memfd_create(r.NAME, os.MFD_CLOEXEC))
            os.ftruncate(self.fd, self.end)
        except OSError as error:
            _log.debug("there is no flight record: %s", error)
            return
        about = {"job": job, "rank": me.rank, "world_size": me.world_size, "host": me.host}
        text = json.dumps(about | {"version": __version__}).encode()
        now = time.monotonic_ns()
        head = (
            r.MAGIC,
            r.VERSION,
            me.pid,
            me.start_time,
            now,
            time.time_ns() - now,
            len(text),
            zlib.crc32(text),
        )
        os.pwrite(self.fd, text, r.TEXT)
        os.pwrite(self.fd, struct.pack("8q", *head), 0)
        if name := config.get("FASTCOLL_METRICS_SOCKET"):
            try:
                hand_over(self.fd, name)
            except OSError as error:
                _log.warning("this rank is not in the metrics: %s", error)

    def free_row(self) -> int:
        """Return the lowest free row of the table; -1: there is none."""
        used = self.groups.union(row for row, _ in self._closed)
        return next((row for row in range(r.ROWS) if row not in used), -1)

    def retire(self, row: int, block: object) -> None:
        """Mark the group in a row as closed, and keep its `block` until _MOST_CLOSED more groups are closed."""
        if self.fd >= 0:
            os.pwrite(self.fd, struct.pack("q", 1), r.TABLE + 8 * (r.ROW_WORDS * row + 3))
        self._closed.append((row, block))
        if len(self._closed) > _MOST_CLOSED:
            self.publish(self._closed.popleft()[0], 0, 0, 0)

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
        self.fd = -1

    def block(self, nbytes: int) -> tuple[int, int]:
        """Add a block; return its address and its offset in the file.

        If there is no file, or it cannot grow, the block is private memory, and the offset is 0.
        """
        offset, self.end = self.end, self.end + nbytes
        try:
            if self.fd >= 0:
                os.ftruncate(self.fd, self.end)
                return map_memory(nbytes, self.fd, offset=offset, populate=True), offset
        except OSError as error:
            _log.debug("a group is not in the flight record: %s", error)
        return map_memory(nbytes, private=True), 0

    def publish(self, row: int, serial: int, offset: int, nbytes: int) -> None:
        """Write a row of the table: first the block's offset and size, then the serial number; 0 frees the row."""
        at = r.TABLE + 8 * r.ROW_WORDS * row
        if self.fd >= 0:
            if serial:
                os.pwrite(self.fd, struct.pack("3q", offset, nbytes, 0), at + 8)
            os.pwrite(self.fd, struct.pack("q", serial), at)


_file = _File()
_serials = itertools.count(1)
# Reentrant, because while a thread makes a group, the garbage collector may close another group on the same thread.
_lock = threading.RLock()
_blocks: weakref.WeakSet[_Block] = weakref.WeakSet()


class _Block:
    """The memory of one group's block.

    This object is the base of every array in that memory, so the memory lives as long as any of the arrays.
    """

    def __init__(self, file: _File, nbytes: int) -> None:
        self.nbytes = nbytes
        self.address, self.offset = file.block(nbytes)
        _blocks.add(self)
        weakref.finalize(self, _release, self.address, nbytes, file, self.offset).atexit = False

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return {"version": 3, "typestr": "<i8", "shape": (self.nbytes // 8,), "data": (self.address, False)}

    def make_own(self) -> None:
        """In a child process made by fork: replace the block with private memory of the same content."""
        content = ctypes.string_at(self.address, self.nbytes)
        map_memory(self.nbytes, at=self.address, private=True)
        ctypes.memmove(self.address, content, self.nbytes)


def _release(address: int, nbytes: int, file: _File, offset: int) -> None:
    unmap_memory(address, nbytes)
    if offset and file.fd >= 0:
        _libc.fallocate(file.fd, _KEEP_SIZE | _PUNCH_HOLE, offset, nbytes)


@contextlib.contextmanager
def joining() -> Iterator[None]:
    """Let other processes see, while the `with` runs, that this process is in a rendezvous and so has no record yet."""
    fd = -1
    with contextlib.suppress(OSError):
        fd = aside(os.memfd_create(r.JOINING, os.MFD_CLOEXEC))
    try:
        yield
    finally:
        if fd >= 0:
            os.close(fd)


def _after_fork() -> None:
    global _file, _lock
    for block in list(_blocks):
        block.make_own()
    _file.close()
    _file, _lock = _File(), threading.RLock()


at_fork("record", _after_fork)


def has_groups() -> bool:
    """Return whether this process has groups."""
    return bool(_file.groups)


def own() -> Record | None:
    """Return the record of this process, or None if it has no record."""
    fd = _file.fd
    return parse(lambda nbytes, offset: os.pread(fd, nbytes, offset)) if fd >= 0 else None


class GroupRecorder:
    """The writer of one group's block.

    Args:
        name: the group's name.
        members: the group's members, in the order of their group ranks.
        rank: this process's group rank.
        backend: the name of the group's backend.
        words: the number of words of the backend's context.

    Attributes:
        context: the words of the backend's context, zeros at first.
        ring: the address of the first row of the ring, which has one row for each of the last calls.
    """

    def __init__(self, name: str, members: Sequence[Member], rank: int, backend: str, words: int = 0) -> None:
        global _file
        text = json.dumps(_about(name, members, rank, backend)).encode()
        context_at = -(-(r.MEMBERS_START + len(text)) // _PAGE) * _PAGE
        sites_at = context_at + 8 * words
        keeps_sites = config.get("FASTCOLL_TRACE_SITES")
        nbytes = -(-(sites_at + keeps_sites * r.SITE_BYTES * r.MOST_SITES) // _PAGE) * _PAGE
        me = members[rank]
        with _lock:
            if not _file.groups:
                _file = _File()
                first = members[0]
                _file.open(me, f"{first.host}:{first.pid}:{first.start_time}")
            self._file = _file
            self._row = _file.free_row()
            if self._row >= 0:
                _file.groups.add(self._row)
            self.serial = next(_serials)
            block = _Block(_file, nbytes)
            self._words = np.asarray(block)
            self._bytes = self._words.view(np.uint8)
            self.context: NDArray[np.int64] = self._words[context_at // 8 : context_at // 8 + words]
            self._context_at = context_at
            self.ring = block.address + r.RING_AT
            self._cells = memoryview(self._words)  # type: ignore[arg-type]
            self._bytes[r.MEMBERS_START : r.MEMBERS_START + len(text)] = np.frombuffer(text, np.uint8)
            self._words[r.MEMBERS_AT : r.MEMBERS_CRC + 1] = r.MEMBERS_START, len(text), zlib.crc32(text)
            self._words[r.CALLS_AT], self._words[r.FINISHED_AT] = 8 * r.OWN_CALLS, 8 * r.OWN_FINISHED
            self._words[r.SITES_AT] = sites_at if keeps_sites else 0
            self._words[r.SERIAL], self._words[r.BYTES] = self.serial, nbytes
            if self._row >= 0 and block.offset:
                _file.publish(self._row, self.serial, block.offset, nbytes)
        self._calls, self._finished = r.OWN_CALLS, r.OWN_FINISHED

        self._sites: dict[tuple[str, int], int] = {}

    @property
    def keeps_sites(self) -> bool:
        """Whether call sites are recorded (`called_from`)."""
        return bool(self._words[r.SITES_AT])

    def __del__(self) -> None:
        self.close()  # if the group could not be made, nothing else calls `close`

    def follow(
        self,
        calls: int,
        finished: int,
        since: int | None = None,
        late: int | None = None,
        pending: int | None = None,
    ) -> None:
        """Record which words of the backend's context have the values of CALLS_AT to PENDING_AT (record.py).

        Each argument is the index of a word in the context; None: no word has this value.
        """
        start = self._context_at // 8
        self._calls, self._finished = start + calls, start + finished
        places = ((r.CALLS_AT, calls), (r.FINISHED_AT, finished), (r.SINCE_AT, since), (r.LATE_AT, late))
        for at, word in (*places, (r.PENDING_AT, pending)):
            if word is not None:
                self._words[at] = 8 * (start + word)

    # ---- calls that Python runs ----------------------------------------------------------------------------

    def begin(self, call: int, shape: int) -> int:
        """Record the start of a call; return its number.

        The calling thread holds the lock of the group's gate (core/gate.py), which lets one call run at a time.
        """
        cells = self._cells
        number = cells[self._calls] + 1
        cells[self._calls] = number
        row = r.row_of(number)
        cells[row + r.CALL], cells[row + r.SHAPE] = call, shape
        cells[row + r.BEGAN], cells[row + r.ENDED] = time.monotonic_ns(), 0
        cells[row + r.NUMBER] = number
        return number

    def end(self, number: int, how: str = "done") -> None:
        """Record the end of a call; `how` is one of record.ENDS."""
        row = r.row_of(number)
        self._cells[row + r.ENDED] = time.monotonic_ns() & ~7 | r.ENDS.index(how)
        if how == "done":
            self._cells[self._finished] = number

    def last_call(self) -> tuple[int, int, int]:
        """Return the number and signature of the last call; the signature is 0, 0 if the call was not published."""
        number = self._cells[self._calls]
        published, call, shape = _SIGNATURE.unpack_from(self._cells, 8 * r.row_of(number))
        return (number, call, shape) if published == number else (number, 0, 0)

    def entry(self, number: int) -> tuple[int, int, int, int]:
        """Return the signature and the times of one of the last calls, zeros if unknown; times in ns of time.monotonic.

        The times are 0 if the call was not timed.
        """
        cells, row = self._cells, r.row_of(number)
        if cells[row + r.NUMBER] != number:
            return 0, 0, 0, 0
        return cells[row + r.CALL], cells[row + r.SHAPE], cells[row + r.BEGAN], cells[row + r.ENDED] & ~7

    def called_from(self, file: str, line: int) -> None:
        """Record the call site of this thread's next call, which will run after all calls that are queued now."""
        cells = self._cells
        which = self._sites.setdefault((file, line), len(self._sites))
        if which >= r.MOST_SITES:
            return
        if which == cells[r.SITES]:
            text = encodable(f"{file}:{line}").encode()[-r.SITE_BYTES :]
            at = cells[r.SITES_AT] + which * r.SITE_BYTES
            self._bytes[at : at + len(text)] = np.frombuffer(text, np.uint8)
            cells[r.SITES] = which + 1
        pending = cells[cells[r.PENDING_AT] // 8] if cells[r.PENDING_AT] else 0
        number = cells[self._calls] + 1 + pending
        cells[r.row_of(number) + r.SITE] = number << 16 | which

    # ---- rare events -------------------------------------------------------------------------------------

    def broken_off(self, how: str) -> None:
        """Record the end of the call under way, if there is one."""
        cells, number = self._cells, self._cells[self._calls]
        row = r.row_of(number)
        if number > cells[self._finished]:
            if cells[row + r.NUMBER] != number:  # the call had not been published
                cells[row : row + r.ENTRY_WORDS] = memoryview(np.zeros(r.ENTRY_WORDS, np.int64))  # type: ignore[arg-type]
                cells[row + r.NUMBER] = number
            if cells[row + r.ENDED] & 7 == 0:
                self.end(number, how)
                if how == "mismatch":
                    self._count("MismatchError")

    def did_not_match(self, number: int) -> None:
        """Record that a call did not match the calls of the other ranks. The call may have ended before."""
        row = r.row_of(number)
        if self._cells[row + r.NUMBER] == number:
            self._count("MismatchError")
            self._cells[row + r.ENDED] = self._cells[row + r.ENDED] & ~7 | r.ENDS.index("mismatch")

    def failed(self, why: str, error: str) -> None:
        """Record why the group has failed, and that the call under way has failed with it.

        Args:
            error: the class of the error, one of record.ERRORS.
        """
        self._count(error)
        text = why.encode()[: r.FAILURE_BYTES]
        self._bytes[r.FAILURE_AT : r.FAILURE_AT + len(text)] = np.frombuffer(text, np.uint8)
        self._words[r.FAILURE] = len(text)
        self.broken_off("failed")

    def _count(self, error: str) -> None:
        self._cells[r.ERROR_COUNTS + r.ERRORS.index(error)] += 1

    def unawaited(self, number: int) -> None:
        """Record that a thread other than its caller carries an asynchronous call on. That thread calls this."""
        self._cells[r.UNAWAITED] = number

    def waits(
        self,
        slot: int,
        doing: str,
        ranks: Sequence[int],
        since: float,
        message: bool = False,
        awaited: bool = True,
    ) -> None:
        """Record a thread's wait for group ranks, or a message that was posted.

        Args:
            slot: the index of the wait's slot in the block: slot 0 is for a Wait (core/monitor.py), the other slots are
                for messages (p2p/checks.py).
            doing: the name of the operation that error texts use.
            since: the start of the wait, by time.monotonic.
            message: whether the thread waits in a send or receive, and not in a call.
            awaited: False for a message for which no thread waits.
        """
        start = r.WAITS_AT // 8 + slot * r.WAIT_WORDS
        text = doing.encode()[: 8 * (r.WAIT_WORDS - r.WAIT_TEXT_AT)]
        at = 8 * (start + r.WAIT_TEXT_AT)
        self._words[start + r.WAIT_CALL] = 0
        self._bytes[at : at + len(text)] = np.frombuffer(text, np.uint8)
        listed = ranks[: r.WAIT_RANKS]
        first = start + r.WAIT_RANKS_AT
        self._words[first : first + len(listed)] = listed
        self._words[start + r.WAIT_SINCE] = int(since * 1e9)
        self._words[start + r.WAIT_COUNT], self._words[start + r.WAIT_TEXT] = len(ranks), len(text)
        kind = r.MESSAGE if awaited else r.POSTED
        self._words[start + r.WAIT_CALL] = kind if message else self._cells[self._calls]

    @property
    def is_in_call(self) -> bool:
        """Whether the last call is under way, or has ended with an error."""
        return self._cells[self._calls] > self._cells[self._finished]

    def waits_no_more(self, slot: int) -> None:
        """Free the slot of a wait that has ended."""
        self._words[r.WAITS_AT // 8 + slot * r.WAIT_WORDS + r.WAIT_CALL] = 0

    def close(self) -> None:
        """Remove the group from the record. A second call has no effect.

        The memory of the context lives as long as any array refers to it.
        """
        with _lock:
            if self._row >= 0 and self._file is _file:
                if config.get("FASTCOLL_METRICS") or config.get("FASTCOLL_METRICS_SOCKET"):
                    self._file.retire(self._row, self._words)
                else:
                    self._file.publish(self._row, 0, 0, 0)
                self._file.groups.discard(self._row)
                if not self._file.groups:
                    self._file.close()
            self._row = -1


def _about(name: str, members: Sequence[Member], rank: int, backend: str) -> dict[str, Any]:
    """Describe a group as data for JSON, in which the name of each host occurs only once."""
    hosts = list(dict.fromkeys(member.host for member in members))
    places = {host: place for place, host in enumerate(hosts)}
    return {
        "name": name,
        "backend": backend,
        "rank": rank,
        "ranks": [member.rank for member in members],
        "pids": [member.pid for member in members],
        "hosts": hosts,
        "host": [places[member.host] for member in members],
    }


_OURS = os.path.dirname(os.path.dirname(__file__)) + os.sep


def located(method: Callable[..., Any], record: GroupRecorder) -> Callable[..., Any]:
    """Wrap a method so that it first records where the user's program calls it."""

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        frame = inspect.currentframe()
        while frame is not None and frame.f_code.co_filename.startswith(_OURS):
            frame = frame.f_back
        if frame is not None:
            record.called_from(frame.f_code.co_filename, frame.f_lineno)
        return method(*args, **kwargs)

    return call
