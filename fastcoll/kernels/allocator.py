"""Blocks of an arena in shared memory: C functions with which NumPy makes, grows and frees the memory of arrays.

    void *malloc(table, nbytes)   void *calloc(table, count, itemsize)
    void *realloc(table, block, nbytes)   void free(table, block, nbytes)

Blocks of SMALLEST bytes and more come out of the arena; all else, and what the arena has no room for, is left to the
functions that NumPy had before (BEFORE). Everything is counted in pages of PAGE bytes. A block is in use, or DIRTY (it
has been used), or CLEAN (its pages are there, all zeros), or a HOLE (its pages are not there; reading would take some).
The first and the last page of each have a word in the table of pages: pages * KINDS + kind; blocks that touch and are
both there, or both holes, become one. What is not in use is kept in lists by size, the last one freed first.

The pages of a hole are taken by posix_fallocate before it is used, so that a full file system is an error here and
never a SIGBUS. They go back when more than KEEP lie idle, or when only RESERVE bytes of the file system are left.

Concurrency: any thread calls these; with the GIL, which NumPy's own functions need. Whoever holds LOCK, a spin lock,
reads and writes the table. It is held for microseconds, but its holder may be off the processor, or forking. So nobody
waits for it without end: an array then comes from BEFORE, and a block to free goes to DEFERRED, a list that anybody
adds to by compare-and-swap, and that the next holder takes whole, so that an address that comes back to its head cannot
deceive anybody. A process that was forked in a way that Python does not see is not OWNER: it takes and frees nothing.
"""

from __future__ import annotations

import functools
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

PAGE = 4096
SMALLEST = 64 << 10
_LEAST = SMALLEST // PAGE  # pages of the smallest block
_STEP = (4 << 20) // PAGE  # pages taken at once: posix_fallocate of 16 pages takes 5 us, of 1024 takes 120
_AT_ONCE = (64 << 20) // PAGE  # ... by one call, which a signal interrupts and undoes
_TRIES = 100

# Words of the table. The first four are for others to read, and 0 before there is an arena.
BASE = 0  # address of the arena in this process
LIMIT = 1  # bytes of the arena's address range; 0 where peers could not map it, though it is there
FD = 2  # its descriptor
NONCE = 3  # what its first page says, to prove that it is this one
OWNER = 4  # pid of the process that may take and free
LOCK = 5
DEFERRED = 6  # first page of a block to be freed, 0 for none; the next one is in the word of its second page
PAGES = 7  # address of the table of pages
IN_USE = 8  # pages
IDLE = 9  # pages that are there and not in use
KEEP = 10  # pages that may be idle
RESERVE = 11  # bytes that others should find free in the file system
SHUT = 12  # not 0: nothing new comes out of the arena
REFUSED = 13  # times that the file system was full
TOLD = 14  # not 0: REFUSED has been passed on
TELL = 15  # address of Py_AddPendingCall; 16: of what it is to call
RANGE = 17  # bytes of the arena's address range, whoever may map it
BEFORE = 18  # what NumPy had before: 18 malloc, 19 calloc, 20 realloc, 21 free, 22 their context
_STATVFS = 24  # 112 bytes, as fstatvfs writes them
_LISTS = 48
_SIZES = 8 * 30  # lists a table: eight between two powers of two
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
    """Take the lock, unless that takes long; whether it was taken."""
    for turn in range(2000):
        if swap_if_equal(s + 8 * LOCK, 0, 1):
            _free_deferred(s)
            return True
        if turn < 1000:
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
    """Have a block freed by the next holder of the lock."""
    while True:
        head = load_acquire(s + 8 * DEFERRED)
        store_word(load_word(s, PAGES), page + 1, head)
        if swap_if_equal(s + 8 * DEFERRED, head, page):
            return


# ---- lists of blocks that are not in use; the lock is held -------------------------------------------------------


@kernel
def _size_class(count):
    """The number of the list for blocks of so many pages: that of the largest class that is no larger."""
    power = 4
    while count >> (power + 1) != 0:
        power += 1
    return (power - 4) * 8 + ((count >> (power - 3)) & 7)


@kernel
def _round_up(count):
    """So many pages, rounded up to a class, so that every block of the class's list has room."""
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
    """Enter a block that is not in use; its second and third word link it to its neighbours in the list."""
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
    """Take a block out of its list; returns its mark."""
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
    """A block of at least so many pages, which are a class, from the lists of a kind; 0: there is none."""
    head = _list_of(s, count, kind)
    for k in range(_SIZES - _size_class(count)):
        if load_word(head, k) != 0:
            return load_word(head, k)
    return 0


@kernel
def _join(s, page, count, kind):
    """Enter a block, as one with the blocks around it that are there as it is, or holes as it is; its first page."""
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
    """Give pages back; whether that could be done."""
    return _madvise(load_word(s, BASE) + PAGE * page, PAGE * count, _MADV_REMOVE) == 0


@kernel
def _punch_idle(s):
    """Give all idle pages back."""
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
    """Have the file system provide the pages of a hole; whether it could, beyond its reserve."""
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
    """A block of at least so many pages that are there, made of a hole; 0: the file system is full."""
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
    """The first page of a block of so many pages, for use, times KINDS, plus what it was; 0: there is no room."""
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
    """End the use of a block."""
    count = load_word(load_word(s, PAGES), page) // KINDS
    store_word(s, IN_USE, load_word(s, IN_USE) - count)
    kind = DIRTY
    if load_word(s, IDLE) + count > load_word(s, KEEP) and _punch(s, page, count):
        kind = HOLE
    _join(s, page, count, kind)


def begin(table: np.ndarray[Any, Any], pages: np.ndarray[Any, Any]) -> None:
    """Make one hole of all pages but the first; the word after the last page ends it. For Python, before all else."""
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
    """One of the functions that NumPy had before."""
    return _call(load_word(s, BEFORE + which), load_word(s, BEFORE + 4), b, c)


@kernel
def _make(s, nbytes):
    """A new block as `_take` says it, or 0."""
    if not SMALLEST <= nbytes < load_word(s, RANGE) or load_word(s, SHUT) != 0 or not _is_mine(s):
        return 0
    if not _enter(s):
        return 0
    taken = _take(s, -(-nbytes // PAGE))
    tell = 0
    if taken == 0:
        store_word(s, REFUSED, load_word(s, REFUSED) + 1)
        if load_word(s, TOLD) == 0:
            store_word(s, TOLD, 1)
            tell = load_word(s, TELL)
    _leave(s)
    if tell != 0:
        _call(tell, load_word(s, TELL + 1), 0, 0)
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
    # The mark of a block in use changes only when it is freed, which nobody does meanwhile.
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
    """Addresses of the C functions, which are valid until the process ends."""

    malloc: int
    calloc: int
    realloc: int
    free: int
    hold: int
    """int64 hold(table, on): take the lock and give idle pages back, 0 if it could not be had; or let go of it."""


@functools.cache
def functions() -> Functions:
    """The C functions, compiled or loaded at the first call."""
    two, three = "int64(int64, int64)", "int64(int64, int64, int64)"
    return Functions(
        c_function(_malloc, two, "malloc of shared arrays"),
        c_function(_calloc, three, "calloc of shared arrays"),
        c_function(_realloc, three, "realloc of shared arrays"),
        c_function(_release, "void(int64, int64, int64)", "free of shared arrays"),
        c_function(_hold, two, "lock of shared arrays"),
    )
