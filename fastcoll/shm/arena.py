"""The arena: one piece of shared memory a process, for the arrays that its peers read where they are.

    arena  = first page: MAGIC, nonce | blocks (kernels/allocator.py)

It is a POSIX shared memory object whose name is gone as soon as it is made, so it ends with the last process that has
it mapped, whatever is killed. Its address range is as large as the machine's memory and reserved at once; only the
pages of blocks exist. So a peer that has mapped it sees all that comes later. It stays until the process ends, since
arrays may outlive every group and are freed as late as in the interpreter's last moments.

A peer on the node opens it by /proc/PID/fd/FD and compares the nonce. What it needs to know is in the table at
STATE_ADDRESS, whose words BASE, LIMIT, FD and NONCE (kernels/allocator.py) are 0 until there is an arena.

A fork copies what is in use: the parent makes another arena just before it and copies the blocks, and the child has
that one at the same addresses. So parent and child share nothing, as with all other memory.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import secrets
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
from ..kernels.primitives import address_of
from ..system.forks import at_fork
from ..system.mapping import aside, map_memory, unmap_memory
from . import segment as shared

_log = logging.getLogger("fastcoll")

MAGIC = 0x6661737463_04
_HEADER_BYTES = 16
_KEEP_BYTES = 256 << 20
"""Idle bytes that stay in the arena, at most an eighth of /dev/shm; pages of larger arrays come and go with them."""
_LOCK_SECONDS = 1.0  # that a fork waits for other threads' allocations, of microseconds

_MREMAP_TO = 3  # MREMAP_MAYMOVE | MREMAP_FIXED
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mremap.restype = ctypes.c_void_p
_libc.mremap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]


def _words(address: int, count: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.ctypeslib.as_array((ctypes.c_int64 * count).from_address(address))


STATE_ADDRESS = map_memory(8 * a.TABLE_WORDS, private=True)
"""The address of the table of this process's arena, valid until the process ends."""
_state = _words(STATE_ADDRESS, a.TABLE_WORDS)
_making = threading.Lock()


def exists() -> bool:
    """Whether this process has an arena."""
    return bool(_state[a.BASE])


def is_shared(x: Array) -> bool:
    """Whether the memory of an ndarray, or of a view, is in this process's arena, and peers may map that."""
    return 0 <= address_of(x) - int(_state[a.BASE]) < int(_state[a.LIMIT])


def descriptor() -> int:
    """The descriptor of the arena, which is open until the process ends; -1: there is none."""
    return int(_state[a.FD]) if exists() else -1


def functions() -> tuple[int, tuple[int, ...]]:
    """What a memory handler is made of: STATE_ADDRESS, and addresses of malloc, calloc, realloc and free."""
    return STATE_ADDRESS, a.functions()[:4]


def ordinary_functions() -> tuple[int, ...]:
    """Addresses of NumPy's own malloc, calloc, realloc and free."""
    return tuple(_state[a.BEFORE : a.BEFORE + 4].tolist())


def bytes_in_use() -> int:
    """Bytes of all blocks in use."""
    return int(_state[a.IN_USE]) * a.PAGE


def refused() -> int:
    """How many arrays were made in ordinary memory since the arena had no room."""
    return int(_state[a.REFUSED])


def create() -> None:
    """Make the arena, unless there is one.

    Raises:
        ResourceError: there is no /dev/shm, it is full, or this process may not reserve so much address space.
    """
    global _hold
    with _making:
        if exists():
            return
        _hold = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)(a.functions().hold)
        limit = os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE // a.PAGE * a.PAGE
        _state[a.FD], base, _state[a.NONCE] = _new(limit)
        _state[a.LIMIT] = _state[a.RANGE] = limit
        _state[a.OWNER] = os.getpid()
        _state[a.KEEP] = min(_KEEP_BYTES, shared.all_bytes() // 8) // a.PAGE
        _state[a.RESERVE] = shared.all_bytes() // 16
        _state[a.BEFORE : a.BEFORE + 5] = *default_handler().functions, default_handler().context or 0
        _state[a.TELL] = _address_of_function(ctypes.pythonapi.Py_AddPendingCall)
        _state[a.TELL + 1] = _address_of_function(_tell)
        count = limit // a.PAGE + 1
        _state[a.PAGES] = map_memory(8 * count, private=True)
        a.begin(_state, _words(int(_state[a.PAGES]), count))
        _state[a.BASE] = base  # last: whoever sees it sees all the rest
        reach("shm.arena.after_create")


_hold: Any = None


def _address_of_function(function: Any) -> int:
    return int(ctypes.cast(function, ctypes.c_void_p).value or 0)


def _warn_of_full(_: int | None) -> int:
    """Say once that there is no room. The C functions cannot: they have Python call this when it comes to it."""
    _log.warning(
        "shared arrays are made in ordinary memory from now on where %s is full: %d KiB of it are shared arrays, "
        "%d KiB are free, of which a part is left for others; make it larger (docker: --shm-size=1g)",
        shared.DIRECTORY,
        bytes_in_use() >> 10,
        shared.free_bytes() >> 10,
    )
    return 0


_tell = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(_warn_of_full)


def _new(limit: int) -> tuple[int, int, int]:
    """A new, empty arena: its descriptor, its address and its nonce."""
    fd = aside(shared.nameless())
    try:
        os.ftruncate(fd, limit)
        os.posix_fallocate(fd, 0, a.PAGE)  # ftruncate alone would let a full /dev/shm end in SIGBUS
        base, nonce = map_memory(limit, fd), secrets.randbits(62) + 1
    except OSError as error:
        os.close(fd)
        raise ResourceError(
            f"cannot make the arena of shared arrays, with an address range of {limit >> 20} MiB: {error}; "
            f"{shared.DIRECTORY} has {shared.free_bytes() >> 10} KiB free, and `ulimit -v` must allow for that range"
        ) from error
    _words(base, 2)[:] = MAGIC, nonce
    return fd, base, nonce


def withdraw(address: int, nbytes: int) -> None:
    """Make part of the arena this process's own memory: what peers still write there, it does not see.

    Where that was necessary arrays are shared no more: new ones lie in ordinary memory, and calls take all for such.
    """
    reach("shm.arena.before_withdraw")
    _state[a.SHUT] = 1
    start, end = address // a.PAGE * a.PAGE, -(-(address + nbytes) // a.PAGE) * a.PAGE
    own = map_memory(end - start, private=True)
    ctypes.memmove(own, start, end - start)
    _libc.mremap(own, end - start, end - start, _MREMAP_TO, start)


# ---- arenas of peers ----------------------------------------------------------------------------------------------


class Mapping:
    """A peer's arena in this process, from `address` on; it is a context manager, and closing it twice is fine.

    It keeps the memory alive even when the peer is dead. What the peer frees may be gone at any time, and is then read
    as anything.
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
    """Map the arena of another process of this node, all of it, to read and write.

    Args:
        fd, nonce, nbytes: what the words FD, NONCE and LIMIT of its table say.

    Raises:
        ResourceError: it cannot be opened or mapped, or it is another one; says which.
    """
    path = f"/proc/{pid}/fd/{fd}"
    try:
        # Anything may have this number by now; the opening of a pipe would wait.
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
    """An arena like this process's, in which a child will find its arrays."""

    fd: int
    address: int
    nonce: int


_copy: _Copy | None = None
_held = False


def _before_fork() -> None:
    """Take the lock, for no thread of the child could let go of it, and copy what is in use."""
    global _copy, _held
    _making.acquire()
    _copy, _held = None, False
    if not exists():
        return
    end = time.monotonic() + _LOCK_SECONDS
    while not (_held := bool(_hold(STATE_ADDRESS, 1))) and time.monotonic() < end:
        os.sched_yield()
    if not _state[a.LIMIT]:
        return  # this process was forked itself, and its arrays lie in memory of its own
    try:
        _copy = _copied()
    except (OSError, ResourceError) as error:
        _log.warning(
            "the shared arrays are not copied for a forked process (%s): it will see them change where this process "
            "writes into them, until it writes there itself",
            error,
        )


def _copied() -> _Copy:
    limit = int(_state[a.RANGE])
    if not _held:
        raise ResourceError("another thread does not end making an array")
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
    """Where each block in use begins, and its bytes."""
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
    if _held:
        _hold(STATE_ADDRESS, 0)
    _making.release()


def _after_fork_in_child() -> None:
    if exists():
        if _state[a.LIMIT]:
            _put_in_place()
        _state[a.OWNER] = os.getpid()
        _hold(STATE_ADDRESS, 0)  # whoever held it
    _making.release()


def _put_in_place() -> None:
    """Let the copy be this child's arena, or else a private view of the parent's."""
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
