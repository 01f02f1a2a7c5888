"""Which ranges of this process's memory are symmetric arrays of a group: a table that entries look addresses up in.

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

from ..kernels.jit import kernel
from ..kernels.primitives import address_of, load_acquire, load_word
from .words import SYMMETRIC

START, NBYTES, ID, STRIDE = range(4)
ROW_WORDS = 4
Words = np.ndarray[Any, np.dtype[np.int64]]
_FIRST_ROWS = 16


@kernel
def find_row(c, address, nbytes):
    """Address of the row of the array that holds these bytes; 0: they are no part of a symmetric array."""
    table = load_word(c, SYMMETRIC)
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
        self._context[SYMMETRIC] = address_of(table)

    def _take_out(self, row: int) -> None:
        for table in self._tables:
            if 1 + ROW_WORDS * row < table.size:
                table[1 + ROW_WORDS * row] = 0
        self._free.append(row)
