"""What runs without the GIL on symmetric arrays: all_reduce in place, copies, signals.

all_reduce reduces in rank order, as the ordinary one: each rank its slice, straight from the arrays of all, and stores
the result into the arrays of all. It needs the meeting, before which a peer may still be at work on its array, and a
second round, after which all slices are there. No two ranks write the same lines.

Gathering by reading instead of storing needs a third round, and took 3 to 9 % longer up to 4 MiB and as long beyond;
storing past the caches took up to 40 % longer (2 ranks on 2 cores of an EPYC). A reduce_scatter that reads like this
took as long as the ordinary one.
"""

from __future__ import annotations

from ..core import signature
from ..core.status import AGAIN, DONE, WORKED
from ..kernels.copy import copy
from ..kernels.jit import entry, inlined, kernel
from ..kernels.matching import weigh
from ..kernels.primitives import call_reducer, load_acquire, load_word, store_word, swap_if_equal
from ..kernels.pyobjects import Index, integer
from ..kernels.waiting import wait_for
from .border import CODE, ITEMSIZE, REDUCER
from .rounds import await_all, close_round, finish, meet, publish, table, time_is_up
from .symmetric_table import ID, START, STRIDE
from .words import DID, GIVES, RANK, READ, SIZE, SOURCES, WROTE

# Bytes; below, the ordinary way, which meets once and not twice. all_reduce after an in-place product of the array, by
# the ordinary way and by this: 8 KiB 2.5 and 1.7 us with 2 ranks, 10.6 and 13.6 with 4; 16 KiB 3.5 and 2.0, 14.1 and
# 13.3 (2 cores of an EPYC; docs/symmetric.md).
SMALLEST = 16 << 10
PIECE = (
    64 << 10
)  # bytes that are reduced before they are stored to the peers; 16 to 256 KiB took the same time
_LINE_OF_ELEMENTS = (
    64  # slices begin at multiples of so many elements, so that no two ranks write one cache line
)
_ORDINARY = signature.code_of("all_reduce")
OPERATION = signature.code_of("symmetric:all_reduce")


@inlined
def _balance_of(c, place):
    """0 in the sum over all ranks if all have the same place (kernels/matching.py): each tells it to the next."""
    rank, size = load_word(c, RANK), load_word(c, SIZE)
    return weigh(rank, (rank + 1) % size, place) - weigh((rank - 1) % size, rank, place)


@inlined
def _tell(c, row, x):
    """For the report of a mismatch: which array, and where in it."""
    store_word(table(c, GIVES + 1), 0, load_word(row, ID))
    store_word(table(c, GIVES + 1), 1, x - load_word(row, START))


@inlined
def _slice(count, size, rank):
    """Where rank's slice of `count` elements begins."""
    each = -(-count // size)
    each += -each % _LINE_OF_ELEMENTS
    return min(count, rank * each)


@inlined
def _reduce_piece(c, what, x, stride, start, part):
    """Reduce `part` bytes of all ranks' arrays into this rank's, and copy them to the peers'."""
    rank, size = load_word(c, RANK), load_word(c, SIZE)
    mine = x + start
    for peer in range(size):
        store_word(table(c, SOURCES), peer, mine + (peer - rank) * stride)
    count = part // load_word(what, ITEMSIZE)
    call_reducer(load_word(what, REDUCER), load_word(what, CODE), mine, table(c, SOURCES), size, count)
    for turn in range(1, size):
        copy(mine + ((rank + turn) % size - rank) * stride, mine, part)


@kernel
def all_reduce_in_place(c, x, nbytes, what, call, row):
    """all_reduce of nbytes at x, which are part of the symmetric array of `row`."""
    rank, size = load_word(c, RANK), load_word(c, SIZE)
    itemsize, stride = load_word(what, ITEMSIZE), load_word(row, STRIDE)
    call += OPERATION - _ORDINARY
    balance = _balance_of(c, load_word(row, ID) + x - load_word(row, START))
    if load_word(c, WROTE) == 0:
        _tell(c, row, x)
        store_word(c, DID, 0)
        publish(c, call, nbytes, balance)
    met = meet(c, call, nbytes, balance)
    if met != DONE:
        return met
    if load_word(c, READ) == 0:
        close_round(c, 2)
    low = _slice(nbytes // itemsize, size, rank) * itemsize
    high = _slice(nbytes // itemsize, size, rank + 1) * itemsize
    piece = max(1, PIECE // itemsize) * itemsize
    while low + load_word(c, DID) < high:
        start = low + load_word(c, DID)
        part = min(piece, high - start)
        _reduce_piece(c, what, x, stride, start, part)
        store_word(c, DID, load_word(c, DID) + part)
        if time_is_up(c):
            return WORKED
    if load_word(c, WROTE) == 1:
        publish(c, call, nbytes, balance)
    if await_all(c) != DONE:
        return AGAIN
    close_round(c, 2)
    return finish(c)


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
