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

from ...kernels.atomics import call_reducer
from ...kernels.foreign import call_foreign, yield_core
from ...kernels.jit import entry, inlined, kernel
from ...kernels.pointers import load_word, store_word
from ...kernels.polling import POLLING_WORDS, moved, rest
from ...kernels.pyobjects import DATA, Index, PyObject, integer, object_at, word_at
from ...kernels.waiting import BUDGET, now

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


@kernel
def wait(table):
    """Wait for the requests of a table: DONE, AGAIN after 50 ms, or minus the code of an MPI error."""
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


@entry
def poll(address: Index) -> int:
    """`wait` for the table at `address`."""
    return wait(integer(address))


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
