"""The allocator of shared arrays: C functions for NumPy's array memory.

    void *malloc(table, nbytes)   void *calloc(table, count, itemsize)
    void *realloc(table, block, nbytes)   void free(table, block, nbytes)

Blocks of SMALLEST bytes and more come from an arena in shared memory. All others, and those for which the arena has no
room, come from the functions that NumPy used before (BEFORE). Sizes are counted in pages of PAGE bytes, those of the
system: memory goes back to the file system in whole pages of the system. A block is
USED, DIRTY (free, with old data), CLEAN (free, all zeros), or a HOLE (free, without memory behind its pages; touching
them would allocate it). The table of pages has a word for each page; the words of a block's first and last page are the
block's number of pages * KINDS + kind. Adjacent free blocks become one if both are holes or neither is. Free blocks are
kept in lists by size, the last freed one first.

posix_fallocate allocates the memory of a hole before it is used, so that a full file system is an error here and never
a SIGBUS. If the free pages with memory would become more than KEEP, a block that is freed becomes a hole: its memory
goes back to the file system. If an allocation would leave the file system less than RESERVE bytes, all free blocks
become holes.

Concurrency: any thread may call these functions; it holds the GIL, which NumPy's own functions need. Only the holder of
LOCK, a spin lock, changes the free lists and the kinds of blocks. The holder needs only microseconds, but it may lose
the processor, or be forking. So a thread waits for LOCK only for a limited time. If it has not got LOCK by then, it
allocates with NumPy's previous functions instead; a block that it frees goes on DEFERRED, a list to which any thread
adds by compare-and-swap. The next holder of LOCK takes the complete list, so a block that is deferred again cannot be
mistaken for an older entry (no ABA problem). After a fork that runs no Python hooks, the child's pid is not OWNER, so
the child allocates and frees nothing in the arena.
"""

from __future__ import annotations

import functools
import mmap
from typing import Any, NamedTuple

import numpy as np

from ..compiler import llvm
from ..compiler.jit import c_function, external, instruction, kernel
from ..compiler.llvm import pointer
from .copy import copy
from .primitives import (
    load_acquire,
    load_word,
    pause,
    store_release,
    store_word,
    swap_if_equal,
)
from .waiting import yield_core

PAGE = mmap.PAGESIZE  # 4 KiB on x86; 4, 16 or 64 KiB on Arm
_LEAST = 16  # pages of the smallest block
SMALLEST = _LEAST * PAGE
# A call of posix_fallocate is for at least this many pages of a hole (or for all, if it has fewer), because a call for
# more pages takes less time per page: 5 us for 16 pages, and 120 us for 1024.
_STEP = (4 << 20) // PAGE
# A call of posix_fallocate is for no more pages than this, because a signal undoes the call.
_AT_ONCE = (64 << 20) // PAGE
_TRIES = 100  # calls of posix_fallocate before interruptions by signals count as a failure

# Words of the table. Other modules read the first four; they are 0 before there is an arena.
BASE = 0  # address of the arena in this process
LIMIT = 1  # bytes of the arena's address range; 0 if peers cannot map this arena
FD = 2  # file descriptor of the arena
NONCE = 3  # random number that is also in the arena's first page; a peer that maps the arena compares the two
OWNER = 4  # pid of the process that may allocate and free
LOCK = 5
DEFERRED = 6  # first page of a deferred block, 0: none; the word of its second page has the next block's
PAGES = 7  # address of the table of pages
IN_USE = 8  # pages of USED blocks
IDLE = 9  # free pages that have memory
KEEP = 10  # the number of free pages that may keep their memory
RESERVE = 11  # bytes of the file system to leave free for others
SHUT = 12  # not 0: the arena allocates nothing new
REFUSED = 13  # number of allocations for which there was no room
REPORTED = 14  # not 0: the log has the warning that there was no room
REPORT = 15  # address of Py_AddPendingCall; word 16: address of the reporting function that it schedules
RANGE = 17  # bytes of the arena's address range, also if peers cannot map it
BEFORE = 18  # NumPy's previous functions: 18 malloc, 19 calloc, 20 realloc, 21 free, 22 their context
_STATVFS = 24  # 112 bytes, as fstatvfs writes them
_LISTS = 48
# Size classes, eight for each power of two; each has a list of holes and a list of other free blocks.
_SIZES = 8 * 30
TABLE_WORDS = _LISTS + 2 * _SIZES

# Kinds of block.
USED, DIRTY, CLEAN, HOLE = 1, 2, 3, 4
KINDS = 8

_fallocate = external("posix_fallocate", "int32(int32, int64, int64)")
_madvise = external("madvise", "int32(int64, int64, int32)")
_fstatvfs = external("fstatvfs", "int32(int32, int64)")
_memset = external("memset", "int64(int64, int32, int64)")
_getpid = external("getpid", "int32()")
_MADV_REMOVE = 9
_EINTR = 4
_FRAGMENT, _AVAILABLE = 1, 4  # words of struct statvfs on 64-bit Linux


@instruction("int64")
def _call(builder, function, a, b, c):
    """Call `int64 function(int64, int64, int64)` by its address."""
    kind = llvm.ir.FunctionType(llvm.WORD, [llvm.WORD] * 3)
    return builder.call(pointer(builder, function, kind), [a, b, c])


# ---- the lock ------------------------------------------------------------------------------------------------


@kernel
def _enter(s):
    """Try for a limited time to take the lock; return whether it was taken.

    The thread that takes it also frees the deferred blocks.
    """
    for tries in range(2000):
        if swap_if_equal(s + 8 * LOCK, 0, 1):
            _free_deferred(s)
            return True
        if tries < 1000:
            pause()
        else:
            yield_core()
    return False


@kernel
def _leave(s):
    store_release(s + 8 * LOCK, 0)


@kernel
def _free_deferred(s):
    page = load_acquire(s + 8 * DEFERRED)
    while page != 0 and not swap_if_equal(s + 8 * DEFERRED, page, 0):
        page = load_acquire(s + 8 * DEFERRED)
    while page != 0:
        after = load_word(load_word(s, PAGES), page + 1)
        _give_back(s, page)
        page = after


@kernel
def _defer(s, page):
    """Let the next holder of the lock free a block."""
    while True:
        head = load_acquire(s + 8 * DEFERRED)
        store_word(load_word(s, PAGES), page + 1, head)
        if swap_if_equal(s + 8 * DEFERRED, head, page):
            return


# ---- lists of blocks that are not in use; the lock is held -------------------------------------------------------


@kernel
def _size_class(count):
    """Return the size class of a free block of `count` pages: the largest that is not above `count`."""
    power = 4
    while count >> (power + 1) != 0:
        power += 1
    return (power - 4) * 8 + ((count >> (power - 3)) & 7)


@kernel
def _round_up(count):
    """Round a number of pages up to a size class.

    Every block in that class's list is then large enough.
    """
    count = max(count, _LEAST)
    step = 1
    while count >> 4 >= step:
        step *= 2
    return -(-count // step) * step


@kernel
def _list_of(s, count, kind):
    return s + 8 * (_LISTS + (_SIZES if kind == HOLE else 0) + _size_class(count))


@kernel
def _mark(s, page, count, kind):
    pages = load_word(s, PAGES)
    store_word(pages, page, count * KINDS + kind)
    store_word(pages, page + count - 1, count * KINDS + kind)


@kernel
def _add(s, page, count, kind):
    """Add a free block to its list; the words of its second and third page link it to its neighbours."""
    pages, head = load_word(s, PAGES), _list_of(s, count, kind)
    _mark(s, page, count, kind)
    first = load_word(head, 0)
    store_word(pages, page + 1, first)
    store_word(pages, page + 2, 0)
    if first != 0:
        store_word(pages, first + 2, page)
    store_word(head, 0, page)
    if kind != HOLE:
        store_word(s, IDLE, load_word(s, IDLE) + count)


@kernel
def _remove(s, page):
    """Remove a block from its list; return its mark, the word of its first page."""
    pages = load_word(s, PAGES)
    mark = load_word(pages, page)
    after, ahead = load_word(pages, page + 1), load_word(pages, page + 2)
    if ahead != 0:
        store_word(pages, ahead + 1, after)
    else:
        store_word(_list_of(s, mark // KINDS, mark % KINDS), 0, after)
    if after != 0:
        store_word(pages, after + 2, ahead)
    if mark % KINDS != HOLE:
        store_word(s, IDLE, load_word(s, IDLE) - mark // KINDS)
    return mark


@kernel
def _find(s, count, kind):
    """Return a free block of a kind with at least `count` pages, or 0.

    `count` must be a size class, as `_round_up` returns it.
    """
    head = _list_of(s, count, kind)
    for k in range(_SIZES - _size_class(count)):
        if load_word(head, k) != 0:
            return load_word(head, k)
    return 0


@kernel
def _join(s, page, count, kind):
    """Add a free block, merged with the adjacent free blocks; return its first page.

    Two blocks are merged only if both are holes or neither is.
    """
    pages = load_word(s, PAGES)
    before, after = load_word(pages, page - 1), load_word(pages, page + count)
    if before % KINDS != USED and (before % KINDS == HOLE) == (kind == HOLE):
        page -= before // KINDS
        count += before // KINDS
        kind = min(kind, before % KINDS)
        _remove(s, page)
    if after % KINDS != USED and (after % KINDS == HOLE) == (kind == HOLE):
        _remove(s, page + count)
        count += after // KINDS
        kind = min(kind, after % KINDS)
    _add(s, page, count, kind)
    return page


# ---- pages from and to the file system; the lock is held ---------------------------------------------------------


@kernel
def _punch(s, page, count):
    """Return the memory of pages to the file system; return whether that succeeded."""
    return _madvise(load_word(s, BASE) + PAGE * page, PAGE * count, _MADV_REMOVE) == 0


@kernel
def _punch_idle(s):
    """Return the memory of all free blocks to the file system."""
    for k in range(_SIZES):
        while load_word(s, _LISTS + k) != 0:
            page = load_word(s, _LISTS + k)
            count = load_word(load_word(s, PAGES), page) // KINDS
            if not _punch(s, page, count):
                return
            _remove(s, page)
            _join(s, page, count, HOLE)


@kernel
def _take_pages(s, page, count):
    """Allocate memory for the pages of a hole; return whether that succeeded.

    It fails if the file system would have less than its reserve left.
    """
    fd = load_word(s, FD)
    if _fstatvfs(fd, s + 8 * _STATVFS) != 0:
        return False
    free = load_word(s, _STATVFS + _AVAILABLE) * load_word(s, _STATVFS + _FRAGMENT)
    if free - PAGE * count < load_word(s, RESERVE):
        return False
    for start in range(0, count, _AT_ONCE):
        part = min(_AT_ONCE, count - start)
        failed = _EINTR
        for _ in range(_TRIES):
            failed = _fallocate(fd, PAGE * (page + start), PAGE * part)
            if failed != _EINTR:
                break
        if failed != 0:
            _punch(s, page, start + part)
            return False
    return True


@kernel
def _fill_hole(s, count):
    """Turn a hole, or its first pages, into a CLEAN block of at least `count` pages.

    Returns:
        the block, or 0 if there is no such hole or no memory for it.
    """
    hole = _find(s, max(count, _STEP), HOLE)
    if hole == 0:
        hole = _find(s, count, HOLE)
    if hole == 0:
        return 0
    room = load_word(load_word(s, PAGES), hole) // KINDS
    wanted = min(max(count, _STEP), room)
    if not _take_pages(s, hole, room if room - wanted < _LEAST else wanted):
        wanted = count
        if not _take_pages(s, hole, room if room - wanted < _LEAST else wanted):
            return 0
    if room - wanted < _LEAST:
        wanted = room
    _remove(s, hole)
    if room > wanted:
        _add(s, hole + wanted, room - wanted, HOLE)
    return _join(s, hole, wanted, CLEAN)


# ---- blocks; the lock is held -------------------------------------------------------------------------------------


@kernel
def _take(s, count):
    """Allocate a block of `count` pages.

    Returns:
        its first page times KINDS, plus its previous kind; 0 if there is no room.
    """
    count = _round_up(count)
    page = _find(s, count, CLEAN)
    if page == 0:
        page = _fill_hole(s, count)
        if page == 0:
            _punch_idle(s)
            page = _fill_hole(s, count)
            if page == 0:
                return 0
    mark = _remove(s, page)
    rest = mark // KINDS - count
    if rest >= _LEAST:
        _add(s, page + count, rest, mark % KINDS)
    else:
        count += rest
    _mark(s, page, count, USED)
    store_word(s, IN_USE, load_word(s, IN_USE) + count)
    return page * KINDS + mark % KINDS


@kernel
def _give_back(s, page):
    """Free a block."""
    count = load_word(load_word(s, PAGES), page) // KINDS
    store_word(s, IN_USE, load_word(s, IN_USE) - count)
    kind = DIRTY
    if load_word(s, IDLE) + count > load_word(s, KEEP) and _punch(s, page, count):
        kind = HOLE
    _join(s, page, count, kind)


def begin(table: np.ndarray[Any, Any], pages: np.ndarray[Any, Any]) -> None:
    """Make one hole of all pages except the first.

    Python calls this before any function below. Two words of `pages` are marked USED, so that no block is merged beyond
    the hole's bounds: the word of the first page, and an additional word behind that of the last page.
    """
    count = len(pages) - 2
    pages[0] = pages[-1] = KINDS + USED
    pages[1] = pages[count] = count * KINDS + HOLE
    table[_LISTS + _SIZES + _size_class.py_func(count)] = 1


# ---- the four functions ---------------------------------------------------------------------------------------------


@kernel
def _is_inside(s, block):
    base = load_word(s, BASE)
    return base != 0 and base <= block < base + load_word(s, RANGE)


@kernel
def _is_mine(s):
    return load_word(s, OWNER) == _getpid()


@kernel
def _before(s, which, b, c):
    """Call one of NumPy's previous functions."""
    return _call(load_word(s, BEFORE + which), load_word(s, BEFORE + 4), b, c)


@kernel
def _make(s, nbytes):
    """Allocate a block; return the result of `_take`."""
    if not SMALLEST <= nbytes < load_word(s, RANGE) or load_word(s, SHUT) != 0 or not _is_mine(s):
        return 0
    if not _enter(s):
        return 0
    taken = _take(s, -(-nbytes // PAGE))
    report = 0
    if taken == 0:
        store_word(s, REFUSED, load_word(s, REFUSED) + 1)
        if load_word(s, REPORTED) == 0:
            store_word(s, REPORTED, 1)
            report = load_word(s, REPORT)
    _leave(s)
    if report != 0:
        _call(report, load_word(s, REPORT + 1), 0, 0)
    return taken


@kernel
def _address(s, taken):
    return load_word(s, BASE) + taken // KINDS * PAGE


@kernel
def _free(s, block):
    """Free a block of the arena."""
    if _is_mine(s):
        page = (block - load_word(s, BASE)) // PAGE
        if _enter(s):
            _give_back(s, page)
            _leave(s)
        else:
            _defer(s, page)


def _malloc(s, nbytes):
    taken = _make(s, nbytes)
    return _address(s, taken) if taken != 0 else _before(s, 0, nbytes, 0)


def _calloc(s, count, itemsize):
    nbytes = count * itemsize
    taken = 0
    if count > 0 and itemsize > 0 and count <= load_word(s, RANGE) // itemsize:
        taken = _make(s, nbytes)
    if taken == 0:
        return _before(s, 1, count, itemsize)
    if taken % KINDS != CLEAN:
        _memset(_address(s, taken), 0, nbytes)
    return _address(s, taken)


def _realloc(s, block, nbytes):
    if not _is_inside(s, block):
        return _before(s, 2, block, nbytes)
    page = (block - load_word(s, BASE)) // PAGE
    # Read without LOCK: a used block's word changes only when the block is freed, and the caller does not free it now.
    room = load_word(load_word(s, PAGES), page) // KINDS * PAGE
    if room // 2 <= nbytes <= room:
        return block
    taken = _make(s, nbytes)
    larger = _address(s, taken) if taken != 0 else _before(s, 0, nbytes, 0)
    if larger != 0:
        copy(larger, block, min(room, nbytes))
        _free(s, block)
    return larger


def _release(s, block, nbytes):
    if _is_inside(s, block):
        _free(s, block)
    else:
        _before(s, 3, block, nbytes)


def _hold(s, on):
    if on == 0:
        _leave(s)
    elif _enter(s):
        _punch_idle(s)
    else:
        return 0
    return 1


class Functions(NamedTuple):
    """Addresses of the C functions, valid until the process ends."""

    malloc: int
    calloc: int
    realloc: int
    free: int
    hold: int
    """int64 hold(table, on): if `on` is 0, release the lock and return 1. Else take the lock and return the memory of
    all free pages to the file system; return 1, or 0 if the lock was not taken in time."""


@functools.cache
def functions() -> Functions:
    """Return the C functions, compiled or loaded at the first call."""
    two, three = "int64(int64, int64)", "int64(int64, int64, int64)"
    return Functions(
        c_function(_malloc, two, "malloc of shared arrays"),
        c_function(_calloc, three, "calloc of shared arrays"),
        c_function(_realloc, three, "realloc of shared arrays"),
        c_function(_release, "void(int64, int64, int64)", "free of shared arrays"),
        c_function(_hold, two, "lock of shared arrays"),
    )
