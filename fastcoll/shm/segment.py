"""Create, map and unlink segments, which are POSIX shared memory. No other file uses posix_ipc.

Rank 0 creates the segment with a random name and announces it. All ranks map the segment, and each proves it by
publishing the segment's nonce (meeting.py). Every rank unlinks the name when it finds that all ranks have mapped the
segment, or that the meeting has failed. The kernel frees the memory when no process has it mapped. `sweep` unlinks
names whose maker is dead. The survivors of the meeting call it, because rank 0 may have died before they knew the name.
If all ranks of a job were killed at once, the user's next job calls it.

The kernel ends a process that accesses shared memory for which there is no room (SIGBUS). So rank 0 allocates what
every group needs, and a rank allocates the rest of its section itself (`allocate`) before it first writes there. Thus a
group that makes only small calls takes 8 KiB a rank (up to 33 ranks; 36 KiB for 256), and not 3 MiB. The memory is then
also on the rank's NUMA node.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
from collections.abc import Iterable
from functools import cache

import numpy as np
import posix_ipc

from ..errors import ResourceError
from ..kernels import shared_words
from ..system.processes import ProcessId, has_ended, session, status_of
from .layout import (
    ATTACHED,
    MAGIC,
    REACH,
    REACH_WORDS,
    Layout,
)

DIRECTORY = "/dev/shm"
_PREFAULT_BYTES = 4 << 20
_MADV_POPULATE_WRITE = 23  # linux/mman.h; Python has no name for it
MOUNT = f"mount a writable tmpfs there (mount -t tmpfs none {DIRECTORY})"
# A pid is only valid in its own pid namespace.
_PREFIX = f"fastcoll-{os.getuid()}-{os.stat('/proc/self/ns/pid').st_ino}-"


def new_name() -> str:
    """Return a new, unguessable name, which contains this process's pid and start time for `sweep`."""
    return f"{_PREFIX}{os.getpid()}-{_start_time(os.getpid())}-{os.urandom(8).hex()}{session()}"


def new_nonce() -> int:
    """Return a random number from 1 to 2**62."""
    return int.from_bytes(os.urandom(8), "little") // 4 + 1


class Segment:
    """Shared memory of one group on one node, mapped into this process at `address`."""

    def __init__(self, layout: Layout, mapping: mmap.mmap) -> None:
        self.layout = layout
        self._mapping = mapping
        self._closed = False
        self._export = ctypes.c_char.from_buffer(mapping)
        self.address = ctypes.addressof(self._export)
        self.words = np.frombuffer(mapping, np.int64)

    @classmethod
    def create(cls, name: str, layout: Layout) -> Segment:
        """Create the segment with mode 0600, and allocate the memory that is always there.

        If the kernel cannot allocate the rest later, allocate all of it.

        Raises:
            ResourceError: /dev/shm is full, too small or missing; the text has the needed size and the cure.
        """
        memory = _create(name)
        try:
            os.ftruncate(memory.fd, layout.nbytes)
            parts = (
                [(0, layout.header), *_always_there(layout)] if allocates_later() else [(0, layout.nbytes)]
            )
            for start, nbytes in parts:
                os.posix_fallocate(memory.fd, start, nbytes)
            segment = cls(layout, mmap.mmap(memory.fd, layout.nbytes))
        except OSError as error:
            posix_ipc.unlink_shared_memory("/" + name)
            raise ResourceError(f"{shortage(layout.nbytes, layout.cure)} ({error})") from error
        finally:
            memory.close_fd()
        segment.words[:3] = MAGIC, new_nonce(), layout.size
        return segment

    @classmethod
    def attach(cls, name: str, layout: Layout) -> Segment:
        """Map a segment that another rank has created.

        Raises:
            ResourceError: the segment does not exist, or is not the announced one.
        """
        try:
            memory = posix_ipc.SharedMemory("/" + name, 0)
        except (OSError, posix_ipc.Error) as error:
            raise ResourceError(f"cannot attach the shared memory {name}: {error}") from error
        try:
            if os.fstat(memory.fd).st_size != layout.nbytes:
                raise ResourceError(
                    f"the shared memory {name} has {os.fstat(memory.fd).st_size} bytes, expected {layout.nbytes}; "
                    "all ranks must use the same FASTCOLL_SHM_BYTES_PER_RANK"
                )
            segment = cls(layout, mmap.mmap(memory.fd, layout.nbytes))
        finally:
            memory.close_fd()
        if segment.words[0] != MAGIC or segment.words[2] != layout.size:
            segment.close()
            raise ResourceError(f"the shared memory {name} is not a segment of this version of fastcoll")
        return segment

    @property
    def nonce(self) -> int:
        """The segment's random number, which no other segment has."""
        return int(self.words[1])

    def word(self, rank: int, offset: int) -> int:
        """Return the index, in `words`, of the word that is `offset` bytes behind the start of a rank's section."""
        return (self.layout.section(rank) + offset) // 8

    def reach(self, rank: int) -> np.ndarray:
        """Return a rank's words about access to its memory (reach.py)."""
        start = self.word(rank, REACH)
        return self.words[start : start + REACH_WORDS]

    def prefault(self, rank: int) -> None:
        """Populate this process's page table with the memory that is always there, instead of page by page in calls.

        If that is much memory, populate the pages of this rank's section only. 8 MiB take 3.4 ms (2-core VM, Linux
        6.18).
        """
        parts = _always_there(self.layout)
        if sum(nbytes for _, nbytes in parts) > _PREFAULT_BYTES:
            parts = self.layout.always_there(rank)
        if allocates_later():
            for start, nbytes in parts:
                self._populate(start, nbytes)

    def allocate(self, start: int, nbytes: int) -> None:
        """Allocate memory before the first write to it. Any thread may call this; if the segment is closed, do nothing.

        Raises:
            ResourceError: /dev/shm is full.
        """
        try:
            if allocates_later() and not self._closed:
                self._populate(start, nbytes)
        except OSError as error:  # EFAULT: the write would have ended in SIGBUS
            raise ResourceError(shortage(nbytes, self.layout.cure)) from error

    def _populate(self, start: int, nbytes: int) -> None:
        first = start // mmap.PAGESIZE * mmap.PAGESIZE  # the processor's pages may be larger than layout.PAGE
        self._mapping.madvise(_MADV_POPULATE_WRITE, first, start + nbytes - first)

    def publish_attached(self, rank: int) -> None:
        """Publish that this rank has mapped the segment."""
        self.publish(rank, ATTACHED, self.nonce)

    def missing(self) -> list[int]:
        """Return the ranks that have not mapped the segment yet."""
        return [r for r in range(self.layout.size) if self.acquire(r, ATTACHED) != self.nonce]

    def publish(self, rank: int, offset: int, value: int) -> None:
        """Write a word of a rank's section; a reader that acquires the word sees all earlier writes of this rank."""
        shared_words.publish_in(self.words, self.word(rank, offset), value)

    def acquire(self, rank: int, offset: int) -> int:
        """Read a word of a rank's section; all writes that its writer made before it are then visible."""
        return shared_words.read_in(self.words, self.word(rank, offset))

    def read(self, rank: int, offset: int, nbytes: int) -> bytes:
        """Return bytes of a rank's section."""
        start = self.layout.section(rank) + offset
        return bytes(self._mapping[start : start + nbytes])

    def write(self, rank: int, offset: int, data: bytes) -> None:
        """Write bytes into a rank's section."""
        start = self.layout.section(rank) + offset
        self._mapping[start : start + len(data)] = data

    def close(self) -> None:
        """Unmap. Nothing may use the address afterwards. Closing twice is fine."""
        if not self._closed:
            self._closed = True
            del self.words, self._export
            # BufferError: a traceback still refers to a view, and the memory is unmapped when the traceback is freed.
            with contextlib.suppress(BufferError):
                self._mapping.close()


@cache
def allocates_later() -> bool:
    """Whether the kernel can allocate a part of a mapping on demand, with an error if there is no room: Linux 5.14."""
    with mmap.mmap(-1, mmap.PAGESIZE) as page:
        try:
            page.madvise(_MADV_POPULATE_WRITE)
        except OSError:
            return False
    return True


def _always_there(layout: Layout) -> list[tuple[int, int]]:
    """Return offset and bytes of each part of the sections that is allocated with the segment."""
    return [part for rank in range(layout.size) for part in layout.always_there(rank)]


def _create(name: str) -> posix_ipc.SharedMemory:
    try:
        return posix_ipc.SharedMemory("/" + name, posix_ipc.O_CREX, mode=0o600)
    except (OSError, posix_ipc.Error) as error:
        raise ResourceError(
            f"cannot create shared memory in {DIRECTORY}: {error}; {MOUNT}, or choose backend='tcp'"
        ) from error


def nameless() -> int:
    """Create empty shared memory without a name; return its descriptor, which the caller closes.

    Raises:
        ResourceError: there is no /dev/shm, or it is not writable.
    """
    name = new_name()
    memory = _create(name)
    unlink(name)
    return int(memory.fd)


def unlink(name: str) -> None:
    """Remove a segment's name if it exists; mappings stay."""
    # OSError: /dev/shm is read-only, so the name does not exist.
    with contextlib.suppress(posix_ipc.ExistentialError, OSError):
        posix_ipc.unlink_shared_memory("/" + name)


def sweep(gone: Iterable[ProcessId] = ()) -> list[str]:
    """Unlink this user's segments whose maker is dead; return their names.

    A name exists for milliseconds while a group is made. If its maker (pid and start time) has ended, the job was
    killed in these milliseconds. A test session ignores the names of other sessions.

    Args:
        gone: processes that peers have found dead. Some of them may still exist, because a killed process closes its
            connections before it ends. Their segments are unlinked nevertheless.
    """
    swept = []
    for name in stale(gone):
        with contextlib.suppress(posix_ipc.Error):  # another user's file may have a similar name
            unlink(name)
            swept.append(name)
    return swept


def stale(gone: Iterable[ProcessId] = ()) -> list[str]:
    """Return the names that `sweep` would remove."""
    found, ended = [], {(str(process.pid), str(process.start_time)) for process in gone}
    for name in os.listdir(DIRECTORY) if os.path.isdir(DIRECTORY) else ():
        pid, _, start = name.removeprefix(_PREFIX).rpartition("-")[0].partition("-")
        ours = name.startswith(_PREFIX) and name.endswith(session())
        if ours and pid.isdigit() and ((pid, start) in ended or _start_time(int(pid)) != start):
            found.append(name)
    return found


def free_bytes() -> int:
    """Return the bytes that are free in /dev/shm."""
    status = os.statvfs(DIRECTORY)
    return status.f_bavail * status.f_frsize


def all_bytes() -> int:
    """Return the size of /dev/shm in bytes."""
    status = os.statvfs(DIRECTORY)
    return status.f_blocks * status.f_frsize


def _start_time(pid: int) -> str:
    """Return the start time of a process in clock ticks since boot; "gone" if it has ended or is a zombie."""
    try:
        status = status_of(pid)
    except OSError:
        return "gone"
    return "gone" if has_ended(status) else status[19].decode()


def shortage(need: int, cure: str = Layout.cure) -> str:
    """Return the text of an error: free bytes in /dev/shm, needed bytes, and the cure."""
    return (
        f"{DIRECTORY} has {free_bytes() >> 10} KiB free, {need >> 10} KiB are needed; make it larger "
        "(docker: --shm-size=1g; kubernetes: an emptyDir with medium: Memory; mount -o remount,size=1g /dev/shm), "
        f"or {cure}"
    )
