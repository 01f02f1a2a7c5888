"""The arena: shared memory of one process for arrays that its peers read in place.

    arena  = first page: MAGIC, nonce | blocks (kernels/allocator.py)

An arena is a POSIX shared memory object whose name is unlinked at once, so the kernel frees it when no process has it
mapped, whichever process is killed. Its address range is as large as the machine's memory and is reserved at once, but
only the pages of blocks are allocated. So a peer that has mapped the arena also sees later blocks. The arena exists
until the process ends, because arrays may outlive every group and may be freed in the interpreter's last moments.

A peer on the node opens the arena as /proc/PID/fd/FD and checks the nonce. The owner keeps the words BASE, LIMIT, FD
and NONCE (kernels/allocator.py) in its private table at STATE_ADDRESS; they are 0 if there is no arena. A call on an
array in the arena copies these words into the owner's section of the segment (layout.py, REACH), where the peers read
them.

A fork copies the blocks that are in use. Before the fork the parent creates a second arena and copies the blocks into
it, and the child maps this second arena at the addresses of the first. So parent and child share no arrays, just as
they share no other memory.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import struct
import threading
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from ..arrays.arrays import Array
from ..arrays.numpy_memory import default_handler
from ..errors import ResourceError
from ..failpoints import reach
from ..kernels import allocator as a
from ..kernels import shared_words
from ..kernels.primitives import address_of
from ..system.forks import at_fork
from ..system.mapping import aside, map_memory, unmap_memory
from . import segment as shared

_log = logging.getLogger("fastcoll")

MAGIC = 0x6661737463_04
_HEADER_BYTES = 16
_KEEP_BYTES = 256 << 20
"""Pages of freed arrays stay allocated up to this number of bytes, or up to an eighth of /dev/shm if that is less; more
pages are returned to the system."""
_LOCK_SECONDS = 1.0  # how long a fork waits for other threads' allocations, which take microseconds

_MREMAP_TO = 3  # MREMAP_MAYMOVE | MREMAP_FIXED
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mremap.restype = ctypes.c_void_p
_libc.mremap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]


def _words(address: int, count: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.frombuffer(memoryview((ctypes.c_int64 * count).from_address(address)), np.int64)


STATE_ADDRESS = map_memory(8 * a.TABLE_WORDS, private=True)
"""Address of the table of this process's arena, valid until the process ends."""
_state = _words(STATE_ADDRESS, a.TABLE_WORDS)
_making = threading.Lock()


def exists() -> bool:
    """Whether this process has an arena."""
    return bool(_state[a.BASE])


def is_shared(x: Array) -> bool:
    """Whether an ndarray's memory is in this process's arena and peers may map it."""
    return 0 <= address_of(x) - int(_state[a.BASE]) < int(_state[a.LIMIT])


def descriptor() -> int:
    """Return the descriptor of the arena, which stays open until the process ends; -1: there is no arena."""
    return int(_state[a.FD]) if exists() else -1


def functions() -> tuple[int, tuple[int, ...]]:
    """Return the parts of a NumPy memory handler: STATE_ADDRESS, and addresses of malloc, calloc, realloc and free."""
    return STATE_ADDRESS, a.functions()[:4]


def ordinary_functions() -> tuple[int, ...]:
    """Return the addresses of NumPy's own malloc, calloc, realloc and free."""
    return tuple(_state[a.BEFORE : a.BEFORE + 4].tolist())


def bytes_in_use() -> int:
    """Return the bytes of all blocks in use."""
    return int(_state[a.IN_USE]) * a.PAGE


def refused() -> int:
    """Return the number of arrays that were made in ordinary memory because the arena had no room."""
    return int(_state[a.REFUSED])


def create() -> None:
    """Create the arena, unless it exists.

    Raises:
        ResourceError: there is no /dev/shm, it is full, or this process may not reserve the address space.
    """
    global _lock
    with _making:
        if exists():
            return
        _lock = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)(a.functions().hold)
        limit = os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE // a.PAGE * a.PAGE
        _state[a.FD], base, _state[a.NONCE] = _new(limit)
        _state[a.LIMIT] = _state[a.RANGE] = limit
        _state[a.OWNER] = os.getpid()
        _state[a.KEEP] = min(_KEEP_BYTES, shared.all_bytes() // 8) // a.PAGE
        _state[a.RESERVE] = shared.all_bytes() // 16
        _state[a.BEFORE : a.BEFORE + 5] = *default_handler().functions, default_handler().context or 0
        _state[a.REPORT] = _address_of_function(ctypes.pythonapi.Py_AddPendingCall)
        _state[a.REPORT + 1] = _address_of_function(_tell)
        count = limit // a.PAGE + 1
        _state[a.PAGES] = map_memory(8 * count, private=True)
        a.begin(_state, _words(int(_state[a.PAGES]), count))
        # Published last: a reader that acquires BASE sees all other words.
        shared_words.publish.call(STATE_ADDRESS + 8 * a.BASE, base)
        reach("shm.arena.after_create")


_lock: Any = None


def _address_of_function(function: Any) -> int:
    return int(ctypes.cast(function, ctypes.c_void_p).value or 0)


def _warn_of_full(_: int | None) -> int:
    """Warn once that the arena has no room. The allocator's C functions schedule this call by Py_AddPendingCall."""
    _log.warning(
        "%s is full, so new shared arrays are made in ordinary memory: %d KiB of it are shared arrays, %d KiB are "
        "free, of which a part is reserved for other programs; make it larger (docker: --shm-size=1g)",
        shared.DIRECTORY,
        bytes_in_use() >> 10,
        shared.free_bytes() >> 10,
    )
    return 0


_tell = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(_warn_of_full)


def _new(limit: int) -> tuple[int, int, int]:
    """Create an empty arena; return its descriptor, address and nonce."""
    fd = aside(shared.nameless())
    try:
        os.ftruncate(fd, limit)
        os.posix_fallocate(fd, 0, a.PAGE)  # with ftruncate alone a full /dev/shm would end in SIGBUS
        base, nonce = map_memory(limit, fd), shared.new_nonce()
    except OSError as error:
        os.close(fd)
        raise ResourceError(
            f"cannot make the arena of shared arrays, with an address range of {limit >> 20} MiB: {error}; "
            f"{shared.DIRECTORY} has {shared.free_bytes() >> 10} KiB free, and `ulimit -v` must allow for that range"
        ) from error
    _words(base, 2)[:] = MAGIC, nonce
    return fd, base, nonce


def withdraw(address: int, nbytes: int) -> None:
    """Replace part of the arena by private memory with the same content, so that this process sees no writes of peers.

    Afterwards new arrays are made in ordinary memory, and calls treat all arrays of this process as ordinary ones.
    """
    reach("shm.arena.before_withdraw")
    _state[a.SHUT] = 1
    start, end = address // a.PAGE * a.PAGE, -(-(address + nbytes) // a.PAGE) * a.PAGE
    own = map_memory(end - start, private=True)
    ctypes.memmove(own, start, end - start)
    _libc.mremap(own, end - start, end - start, _MREMAP_TO, start)


# ---- arenas of peers ----------------------------------------------------------------------------------------------


class Mapping:
    """A peer's arena, mapped at `address`. A Mapping is a context manager, and may be closed twice.

    The mapping keeps the memory alive if the peer dies. The content of memory that the peer has freed is undefined.
    """

    def __init__(self, address: int, nbytes: int) -> None:
        self.address, self.nbytes = address, nbytes
        self._open = True

    def close(self) -> None:
        """Unmap. Nothing may use the address afterwards."""
        if self._open:
            self._open = False
            unmap_memory(self.address, self.nbytes)

    def __enter__(self) -> Mapping:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def map_peer(pid: int, fd: int, nonce: int, nbytes: int) -> Mapping:
    """Map the complete arena of another process of this node, for reading and writing.

    Args:
        fd, nonce, nbytes: the words FD, NONCE and LIMIT of that process's table.

    Raises:
        ResourceError: the arena cannot be opened or mapped, or the descriptor refers to something else.
    """
    path = f"/proc/{pid}/fd/{fd}"
    try:
        # O_NONBLOCK: the peer's descriptor number may by now belong to a pipe, and opening a pipe could block.
        mine = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            status, header = os.fstat(mine), os.pread(mine, _HEADER_BYTES, 0)
            if header != struct.pack("=qq", MAGIC, nonce) or status.st_size != nbytes:
                raise ResourceError(
                    f"cannot map the shared arrays of process {pid}: {path} is something else"
                )
            return Mapping(map_memory(nbytes, mine), nbytes)
        finally:
            os.close(mine)
    except OSError as error:
        raise ResourceError(f"cannot map the shared arrays of process {pid} from {path}: {error}") from error


# ---- a fork -----------------------------------------------------------------------------------------------------


class _Copy(NamedTuple):
    """A copy of this process's arena for a child process."""

    fd: int
    address: int
    nonce: int


_copy: _Copy | None = None
_is_locked = False


def _before_fork() -> None:
    """Take the allocator's lock, and copy the blocks in use.

    The lock is taken because, if another thread held it during the fork, no thread of the child could release it.
    """
    global _copy, _is_locked
    _making.acquire()
    _copy, _is_locked = None, False
    if not exists():
        return
    end = time.monotonic() + _LOCK_SECONDS
    while not (_is_locked := bool(_lock(STATE_ADDRESS, 1))) and time.monotonic() < end:
        os.sched_yield()
    if not _state[a.LIMIT]:
        return  # this process is itself a forked child without a copy, so its arrays are in private memory
    try:
        _copy = _copied()
    except (OSError, ResourceError) as error:
        _log.warning(
            "the shared arrays are not copied for a forked process (%s): it sees this process's writes to a page of "
            "them until it writes to the page itself",
            error,
        )


def _copied() -> _Copy:
    limit = int(_state[a.RANGE])
    if not _is_locked:
        raise ResourceError("another thread does not finish an allocation")
    if shared.free_bytes() - bytes_in_use() < int(_state[a.RESERVE]):
        raise ResourceError(shared.shortage(bytes_in_use(), "make fewer shared arrays"))
    copy = _Copy(*_new(limit))
    try:
        for start, nbytes in _blocks_in_use():
            os.posix_fallocate(copy.fd, start, nbytes)
            ctypes.memmove(copy.address + start, int(_state[a.BASE]) + start, nbytes)
        reach("shm.arena.after_copy")
    except OSError:
        _drop(copy)
        raise
    return copy


def _blocks_in_use() -> Iterator[tuple[int, int]]:
    """Yield the offset and size of each block in use."""
    count = int(_state[a.RANGE]) // a.PAGE
    pages, page = _words(int(_state[a.PAGES]), count), 1
    while page < count:
        length, kind = divmod(int(pages[page]), a.KINDS)
        if kind == a.USED:
            yield page * a.PAGE, length * a.PAGE
        page += length


def _drop(copy: _Copy) -> None:
    unmap_memory(copy.address, int(_state[a.RANGE]))
    os.close(copy.fd)


def _after_fork_in_parent() -> None:
    if _copy is not None:
        _drop(_copy)
    if _is_locked:
        _lock(STATE_ADDRESS, 0)
    _making.release()


def _after_fork_in_child() -> None:
    if exists():
        if _state[a.LIMIT]:
            _replace_in_child()
        _state[a.OWNER] = os.getpid()
        _lock(STATE_ADDRESS, 0)  # release the lock, whichever thread held it
    _making.release()


def _replace_in_child() -> None:
    """Use the copy of the parent's arena as this child's arena; without a copy, map the parent's arena privately."""
    base, limit, fd = int(_state[a.BASE]), int(_state[a.RANGE]), int(_state[a.FD])
    if _copy is not None:
        _libc.mremap(_copy.address, limit, limit, _MREMAP_TO, base)
        _state[a.FD], _state[a.NONCE] = _copy.fd, _copy.nonce
    else:
        map_memory(limit, fd, at=base, private=True)
        _state[a.FD], _state[a.NONCE], _state[a.LIMIT] = -1, 0, 0
        _state[a.SHUT], _state[a.KEEP] = 1, limit
    os.close(fd)


at_fork("arena", _after_fork_in_child, before=_before_fork, in_parent=_after_fork_in_parent)
