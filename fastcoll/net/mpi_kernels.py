"""Waiting for MPI requests without the GIL: MPI moves most data only while somebody calls it.

The table of a wait, one word each from its address on:

    0-8     patience, as kernels/polling.py has it
    MODE    0: until all are complete, resting between sweeps; with ANY until one is; with BUSY without sleeping
    TEST    address of MPI_Test
    BELL    not 0: come back at once
    FLAG    what MPI_Test says
    COUNT   number of slots
    STATUS  an MPI_Status (24 bytes at most), which nobody reads
    SLOTS   and on: the address of each request's handle; 0 once it is complete
"""

from __future__ import annotations

from ..calls import UNEVEN
from ..kernels.atomics import call_reducer
from ..kernels.foreign import call_foreign, yield_core
from ..kernels.jit import entry, inlined
from ..kernels.pointers import load_word, store_word
from ..kernels.polling import POLLING_WORDS, moved, rest
from ..kernels.pyobjects import DATA, Index, PyObject, integer, object_at, word_at
from ..kernels.waiting import BUDGET, now

MODE = POLLING_WORDS
TEST = MODE + 1
BELL = MODE + 2
FLAG = MODE + 3
COUNT = MODE + 4
STATUS = MODE + 5
SLOTS = STATUS + 16

ANY, BUSY = 1, 2
DONE, AGAIN = 0, 1
_CLOCK_EVERY = 32  # sweeps between two looks at the clock, which cost 30 ns each


@inlined
def _sweep(table):
    """Test every request once: those still open, or the code of an error below 0."""
    left = 0
    for slot in range(load_word(table, COUNT)):
        request = load_word(table, SLOTS + slot)
        if request == 0:
            continue
        store_word(table, FLAG, 0)
        code = call_foreign(load_word(table, TEST), request, table + 8 * FLAG, table + 8 * STATUS)
        if code != 0:
            return -code
        if load_word(table, FLAG) & 0xFFFFFFFF:
            store_word(table, SLOTS + slot, 0)
            moved(table)
        else:
            left += 1
    return left


@inlined
def _open(table):
    """How many requests are not complete, as far as was seen."""
    left = 0
    for slot in range(load_word(table, COUNT)):
        left += load_word(table, SLOTS + slot) != 0
    return left


@entry
def poll(address: Index) -> int:
    """Wait for the requests of the table at `address`: DONE, AGAIN after 50 ms, or minus the code of an MPI error."""
    table = integer(address)
    mode = load_word(table, MODE)
    start = _open(table)
    turn = 0
    end = 0
    while True:
        left = _sweep(table)
        if left < 0:
            return left
        if left == 0 or (mode & ANY and left < start):
            return DONE
        if load_word(table, BELL) != 0:
            return AGAIN
        if mode & BUSY:
            if turn % _CLOCK_EVERY == 0:
                time = now(table)
                end = end if end else time + load_word(table, BUDGET)
                if time > end:
                    return AGAIN
            yield_core()
        elif not rest(table, turn):
            return AGAIN
        turn += 1


# A row of the meeting: what a rank says of its call, and its data where that is small.
NUMBER, CALL, SHAPE, BALANCE, NEAR, PAYLOAD = range(6)
ROW_WORDS = 16
AGREED, APART, DIFFERENT, UNBALANCED = range(4)


@entry
def compare(address: Index, size: Index) -> int:
    """Compare the rows of `size` ranks: AGREED, and all NEAR; APART: agreed, but not all near; or what is wrong."""
    rows = integer(address)
    near = 1
    balance = 0
    for rank in range(integer(size)):
        row = rows + 8 * ROW_WORDS * rank
        if load_word(row, CALL) != load_word(rows, CALL):
            return DIFFERENT
        if load_word(row, SHAPE) != load_word(rows, SHAPE) and not load_word(rows, CALL) & UNEVEN:
            return DIFFERENT
        balance += load_word(row, BALANCE)
        near &= load_word(row, NEAR)
    if balance != 0:
        return UNBALANCED
    return AGREED if near else APART


@entry
def reduce(address: Index) -> int:
    """Call a reducer with the six words at `address`: its own address, then its arguments."""
    words = integer(address)
    call_reducer(
        load_word(words, 0),
        load_word(words, 1),
        load_word(words, 2),
        load_word(words, 3),
        load_word(words, 4),
        load_word(words, 5),
    )
    return 0


@entry
def address(x: PyObject) -> int:
    """The address of an ndarray's first element, in 60 ns instead of 800."""
    return word_at(object_at(x) + DATA)
