"""What runs without the GIL on symmetric arrays: all_reduce in place, copies, signals; and the table of these arrays.

all_reduce reduces in rank order, as the ordinary one: each rank its slice, straight from the arrays of all, and stores
the result into the arrays of all. It needs the meeting, before which a peer may still be at work on its array, and a
second round, after which all slices are there. No two ranks write the same lines.

Gathering by reading instead of storing needs a third round, and took 3 to 9 % longer up to 4 MiB and as long beyond;
storing past the caches took up to 40 % longer (2 ranks on 2 cores of an EPYC). A reduce_scatter that reads like this
took as long as the ordinary one.

The table says which ranges of this process's memory are symmetric arrays of the group; entries look addresses up in it.

    word 0      rows in use, at most
    row         ROW_WORDS words: START address of this rank's array (0: none), NBYTES of it, ID of its segment, which
                is the same on all ranks, and STRIDE from one rank's array to the next one's

Rows change while entries of other threads read them, though never the row of an array that somebody has. So START
is written last, taken back first, and looked at twice.
"""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np

from ..core import signature
from ..core.status import AGAIN, DONE, WORKED
from ..kernels.copy import copy
from ..kernels.jit import entry, inlined, kernel
from ..kernels.primitives import address_of, call_reducer, load_acquire, load_word, store_word, swap_if_equal
from ..kernels.pyobjects import Index, integer
from ..kernels.twins import start_of, weigh
from ..kernels.waiting import wait_for
from . import context_layout as at
from . import rounds as r
from . import validate as v

START, NBYTES, ID, STRIDE = range(4)
ROW_WORDS = 4
Words = np.ndarray[Any, np.dtype[np.int64]]
_FIRST_ROWS = 16


@kernel
def find_row(c, address, nbytes):
    """Address of the row of the array that holds these bytes; 0: they are no part of a symmetric array."""
    table = load_word(c, at.SYMMETRIC)
    for k in range(load_acquire(table)):
        row = table + 8 * (1 + ROW_WORDS * k)
        start = load_acquire(row)
        end = start + load_acquire(row + 8 * NBYTES)
        if start != 0 and start <= address and address + nbytes <= end and load_acquire(row) == start:
            return row
    return 0


class SymmetricTable:
    """The table of the group with this context.

    A larger one replaces it when it is full; the old ones stay, since they may be in use.
    """

    def __init__(self, context: Words) -> None:
        self._context = context
        self._tables: list[Words] = []
        self._free: list[int] = []
        self._rows = 0

    def add(self, owner: object, start: int, nbytes: int, identity: int, stride: int) -> None:
        """Enter an array, until `owner` is garbage."""
        row = self._free.pop() if self._free else self._new_row()
        words = self._tables[-1]
        first = 1 + ROW_WORDS * row
        words[first + 1 : first + ROW_WORDS] = nbytes, identity, stride
        words[first] = start
        weakref.finalize(owner, self._take_out, row).atexit = False

    def _new_row(self) -> int:
        row, self._rows = self._rows, self._rows + 1
        if not self._tables or 1 + ROW_WORDS * self._rows > self._tables[-1].size:
            self._grow()
        self._tables[-1][0] = self._rows
        return row

    def _grow(self) -> None:
        table = np.zeros(1 + ROW_WORDS * max(_FIRST_ROWS, 2 * self._rows), np.int64)
        # Known before it is filled, so that what is taken out meanwhile is taken out of it as well.
        self._tables.append(table)
        if len(self._tables) > 1:
            old = self._tables[-2]
            table[: old.size] = old
        self._context[at.SYMMETRIC] = address_of(table)

    def _take_out(self, row: int) -> None:
        for table in self._tables:
            if 1 + ROW_WORDS * row < table.size:
                table[1 + ROW_WORDS * row] = 0
        self._free.append(row)


# Bytes; below, the ordinary way, which meets once and not twice. all_reduce after an in-place product of the array, by
# the ordinary way and by this: 8 KiB 2.5 and 1.7 us with 2 ranks, 10.6 and 13.6 with 4; 16 KiB 3.5 and 2.0, 14.1 and
# 13.3 (2 cores of an EPYC; docs/symmetric.md).
SMALLEST = 16 << 10
PIECE = (
    64 << 10
)  # bytes that are reduced before they are stored to the peers; 16 to 256 KiB took the same time
_LINE_OF_ELEMENTS = 64  # slices begin at multiples of it, so that no two ranks write one cache line
_ORDINARY = signature.code_of("all_reduce")
OPERATION = signature.code_of("symmetric:all_reduce")


@inlined
def _balance_of(c, place):
    """0 in the sum over all ranks if all have the same place (kernels/twins.py): each tells it to the next."""
    rank, size = load_word(c, at.RANK), load_word(c, at.SIZE)
    return weigh(rank, (rank + 1) % size, place) - weigh((rank - 1) % size, rank, place)


@inlined
def _tell(c, row, x):
    """For the report of a mismatch: which array, and where in it."""
    store_word(r.table(c, at.GIVES + 1), 0, load_word(row, ID))
    store_word(r.table(c, at.GIVES + 1), 1, x - load_word(row, START))


@inlined
def _reduce_piece(c, what, x, stride, start, part):
    """Reduce `part` bytes of all ranks' arrays into this rank's, and copy them to the peers'."""
    rank, size = load_word(c, at.RANK), load_word(c, at.SIZE)
    mine = x + start
    for peer in range(size):
        store_word(r.table(c, at.SOURCES), peer, mine + (peer - rank) * stride)
    count = part // load_word(what, v.ITEMSIZE)
    call_reducer(
        load_word(what, v.REDUCER), load_word(what, v.CODE), mine, r.table(c, at.SOURCES), size, count
    )
    for turn in range(1, size):
        copy(mine + ((rank + turn) % size - rank) * stride, mine, part)


@kernel
def all_reduce_in_place(c, x, nbytes, what, call, row):
    """all_reduce of nbytes at x, which are part of the symmetric array of `row`."""
    rank, size = load_word(c, at.RANK), load_word(c, at.SIZE)
    itemsize, stride = load_word(what, v.ITEMSIZE), load_word(row, STRIDE)
    call += OPERATION - _ORDINARY
    balance = _balance_of(c, load_word(row, ID) + x - load_word(row, START))
    if load_word(c, at.WROTE) == 0:
        _tell(c, row, x)
        store_word(c, at.DID, 0)
        r.publish(c, call, nbytes, balance)
    met = r.meet(c, call, nbytes, balance)
    if met != DONE:
        return met
    if load_word(c, at.READ) == 0:
        r.close_round(c, 2)
    low = start_of(nbytes, size, rank, _LINE_OF_ELEMENTS * itemsize)
    high = start_of(nbytes, size, rank + 1, _LINE_OF_ELEMENTS * itemsize)
    piece = max(1, PIECE // itemsize) * itemsize
    while low + load_word(c, at.DID) < high:
        start = low + load_word(c, at.DID)
        part = min(piece, high - start)
        _reduce_piece(c, what, x, stride, start, part)
        store_word(c, at.DID, load_word(c, at.DID) + part)
        if r.time_is_up(c):
            return WORKED
    if load_word(c, at.WROTE) == 1:
        r.publish(c, call, nbytes, balance)
    if r.await_all(c) != DONE:
        return AGAIN
    r.close_round(c, 2)
    return r.finish(c)


@entry
def copy_bytes(dst: Index, src: Index, nbytes: Index) -> int:
    """Copy bytes between two ranges that are equal or disjoint."""
    copy(integer(dst), integer(src), integer(nbytes))
    return DONE


@entry
def count_signal(word: Index) -> int:
    """Add 1 to a shared word; all earlier writes are visible to whoever reads it."""
    address = integer(word)
    while True:
        count = load_acquire(address)
        if swap_if_equal(address, count, count + 1):
            return DONE


@entry
def await_signal(patience: Index, word: Index, want: Index) -> int:
    """Wait until a shared word is at least `want`: DONE, or AGAIN after 50 ms."""
    return DONE if wait_for(integer(patience), integer(word), integer(want)) else AGAIN
