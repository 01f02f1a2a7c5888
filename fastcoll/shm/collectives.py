"""The reducing collectives of a segment and the barrier, each one compiled call that runs without the GIL.

An entry takes the context (rounds.py, with its tags), Python objects and integers, and returns DONE, AGAIN or
WORKED (call again with the same arguments and RESUMED), MISMATCH or LATER. It looks at its arguments first (border.py)
and then runs rounds. All reduce in rank order, so every rank gets the same bits.

Algorithms: one-shot (every rank reduces everything), and two-shot (each rank reduces its slice, then
gathers the others': Rabenseifner's reduce-scatter and all-gather, here through staged slots).
"""

from __future__ import annotations

from ..core import signature
from ..core.status import AGAIN, DONE, LATER, WORKED
from ..kernels.copy import copy
from ..kernels.jit import entry, inlined, kernel, locked_entry
from ..kernels.matching import shape_of
from ..kernels.primitives import call_reducer, load_word, store_word
from ..kernels.pyobjects import WRITEABLE, Index, PyObject, integer, object_at, release_gil, take_gil
from .border import (
    CALL,
    CODE,
    ITEMSIZE,
    REDUCER,
    are_apart,
    data_of,
    description,
    is_plain,
    is_rank,
    largest_of,
    list_blocks,
    nbytes_of,
)
from .choosing import is_divided, stage
from .dividing import divide, narrow, part_of
from .rounds import (
    await_all,
    begin,
    close_round,
    context_of,
    finish,
    fits_inline,
    give_up,
    may_write,
    meet,
    open_slot,
    place_of,
    publish,
    rounds_of,
    slot_of,
    table,
    take,
    time_is_up,
    ways_at,
)
from .symmetric_kernels import SMALLEST as SYMMETRIC_SMALLEST
from .symmetric_kernels import all_reduce_in_place
from .symmetric_table import find_row
from .words import GIVES, ONE_SHOT, RANK, READ, SIZE, SLOT, SOURCES, SYMMETRIC, WROTE

_ALL_REDUCE = signature.code_of("all_reduce")
_REDUCE = signature.code_of("reduce")
_SCAN = signature.code_of("scan")
_EXSCAN = signature.code_of("exscan")
_REDUCE_SCATTER = signature.code_of("reduce_scatter")


@inlined
def _reduce(c, what, dst, n, nbytes):
    """dst = the first n sources, reduced."""
    count = nbytes // load_word(what, ITEMSIZE)
    call_reducer(load_word(what, REDUCER), load_word(what, CODE), dst, table(c, SOURCES), n, count)


@inlined
def _whole(nbytes, itemsize):
    """The part of nbytes that is whole elements."""
    return nbytes - nbytes % itemsize


@entry
def barrier(handle: Index, call: Index) -> int:
    """Wait for every rank."""
    h = integer(handle)
    if not take(h):
        return LATER
    begin(h, 0, 0, 0)
    c = context_of(h)
    if may_write(c, 1):
        publish(c, integer(call), 0, 0)
    waited = meet(c, integer(call), 0, 0)
    if waited != DONE:
        return waited
    close_round(c, 1)
    return finish(c)


@kernel
def _one_shot(c, dst, src, nbytes, what, call, first, last):
    """Everybody publishes src; a rank with first < last reduces the ranks first..last-1 into dst."""
    rank = load_word(c, RANK)
    inline = fits_inline(nbytes)
    chunk = _whole(load_word(c, SLOT), load_word(what, ITEMSIZE))
    total = rounds_of(nbytes, chunk)
    while True:
        if may_write(c, total):
            if open_slot(c) != DONE:
                return AGAIN
            step = load_word(c, WROTE)
            stage(
                ways_at(c), place_of(c, rank, step, inline), src + step * chunk, nbytes - step * chunk, chunk
            )
            publish(c, call, nbytes, 0)
            continue
        waited = meet(c, call, nbytes, 0)
        if waited != DONE:
            return waited
        if first < last:
            if await_all(c) != DONE:
                return AGAIN
            step = load_word(c, READ)
            start = step * chunk
            for peer in range(first, last):
                place = src + start if peer == rank else place_of(c, peer, step, inline)
                store_word(table(c, SOURCES), peer - first, place)
            _reduce(c, what, dst + start, last - first, min(chunk, nbytes - start))
        if close_round(c, total):
            return finish(c)
        if time_is_up(c):
            return WORKED


@inlined
def _slice(part, size, rank, itemsize):
    """Where rank's slice of a chunk of `part` bytes begins."""
    count = part // itemsize
    each = -(-count // size)
    return min(count, rank * each) * itemsize


@kernel
def _two_shot(c, dst, src, nbytes, what, call, keep):
    """Rounds in pairs: each rank reduces its slice of a chunk, then ranks with `keep` gather all slices."""
    rank = load_word(c, RANK)
    size = load_word(c, SIZE)
    itemsize = load_word(what, ITEMSIZE)
    chunk = _whole(load_word(c, SLOT), itemsize)
    total = 2 * rounds_of(nbytes, chunk)
    while True:
        step = load_word(c, READ)
        start = step // 2 * chunk
        part = min(chunk, nbytes - start)
        low = _slice(part, size, rank, itemsize)
        high = _slice(part, size, rank + 1, itemsize)
        mine = slot_of(c, rank, step)
        if load_word(c, WROTE) == step:
            if open_slot(c) != DONE:
                return AGAIN
            if step % 2 == 0:
                stage(ways_at(c), mine, src + start, low, low)
                stage(ways_at(c), mine + high, src + start + high, part - high, part - high)
            else:
                for peer in range(size):
                    place = src + start if peer == rank else slot_of(c, peer, step - 1)
                    store_word(table(c, SOURCES), peer, place + low)
                _reduce(c, what, mine + low, size, high - low)
            publish(c, call, nbytes, 0)
        waited = meet(c, call, nbytes, 0)
        if waited != DONE:
            return waited
        if await_all(c) != DONE:
            return AGAIN
        if step % 2 and keep:
            for peer in range(size):
                begins = _slice(part, size, peer, itemsize)
                ends = _slice(part, size, peer + 1, itemsize)
                copy(dst + start + begins, slot_of(c, peer, step) + begins, ends - begins)
        if close_round(c, total):
            return finish(c)
        if time_is_up(c):
            return WORKED


@locked_entry
def all_reduce(handle: Index, tensor: PyObject, op: PyObject) -> int:
    """Reduce an array over all ranks, in place."""
    h = integer(handle)
    if not take(h):
        return LATER
    c = context_of(h)
    x = object_at(tensor)
    what = description(c, h, _ALL_REDUCE, x, object_at(op))
    if what == 0 or not is_plain(c, h, x, WRITEABLE):
        return give_up(h)
    data, nbytes, call = data_of(x), nbytes_of(x, what), load_word(what, CALL)
    size = load_word(c, SIZE)
    if nbytes >= SYMMETRIC_SMALLEST and load_word(c, SYMMETRIC) != 0 and size > 1:
        row = find_row(c, data, nbytes)
        if row != 0:
            begin(h, _ALL_REDUCE, 0, 0)
            return take_gil(release_gil(), all_reduce_in_place(c, data, nbytes, what, call, row))
    begin(h, _ALL_REDUCE, nbytes, load_word(what, ITEMSIZE))
    if is_divided(ways_at(c)):
        return take_gil(release_gil(), divide(c, what, call, nbytes, 0))
    start, nbytes = part_of(c, what, nbytes)
    data += start
    if size <= 2 or nbytes <= load_word(c, ONE_SHOT):
        return take_gil(release_gil(), _one_shot(c, data, data, nbytes, what, call, 0, size))
    return take_gil(release_gil(), _two_shot(c, data, data, nbytes, what, call, True))


@locked_entry
def reduce(handle: Index, output: PyObject, tensor: PyObject, op: PyObject, dst: Index) -> int:
    """Reduce over all ranks into `output` of rank dst (which may be the tensor itself)."""
    h = integer(handle)
    if not take(h):
        return LATER
    c = context_of(h)
    out, x, root = object_at(output), object_at(tensor), integer(dst)
    here = load_word(c, RANK) == root
    what = description(c, h, _REDUCE, x, object_at(op))
    if what == 0 or not is_rank(c, root) or not is_plain(c, h, x, WRITEABLE if here else 0):
        return give_up(h)
    nbytes, call = nbytes_of(x, what), load_word(what, CALL) | root << signature.ROOT_SHIFT
    begin(h, _REDUCE, nbytes, load_word(what, ITEMSIZE))
    if is_divided(ways_at(c)):
        return take_gil(release_gil(), divide(c, what, call, nbytes, 0))
    start, nbytes = part_of(c, what, nbytes)
    dst, src = data_of(out) + start, data_of(x) + start
    size = load_word(c, SIZE)
    if size <= 2 or nbytes <= load_word(c, ONE_SHOT):
        return take_gil(release_gil(), _one_shot(c, dst, src, nbytes, what, call, 0, size if here else 0))
    return take_gil(release_gil(), _two_shot(c, dst, src, nbytes, what, call, here))


@locked_entry
def scan(handle: Index, output: PyObject, tensor: PyObject, op: PyObject, exclusive: Index) -> int:
    """Reduce ranks 0..rank (exclusive: 0..rank-1) into `output`; exclusive leaves rank 0's untouched."""
    h = integer(handle)
    if not take(h):
        return LATER
    c = context_of(h)
    out, x = object_at(output), object_at(tensor)
    operation = _EXSCAN if integer(exclusive) else _SCAN
    what = description(c, h, operation, x, object_at(op))
    if what == 0 or not is_plain(c, h, x, WRITEABLE):
        return give_up(h)
    nbytes, call = nbytes_of(x, what), load_word(what, CALL)
    begin(h, operation, nbytes, load_word(what, ITEMSIZE))
    if is_divided(ways_at(c)):
        return take_gil(release_gil(), divide(c, what, call, nbytes, 0))
    start, nbytes = part_of(c, what, nbytes)
    last = load_word(c, RANK) + (0 if integer(exclusive) else 1)
    return take_gil(
        release_gil(), _one_shot(c, data_of(out) + start, data_of(x) + start, nbytes, what, call, 0, last)
    )


@locked_entry
def reduce_scatter(handle: Index, output: PyObject, blocks: PyObject, op: PyObject) -> int:
    """Reduce block r of every rank into `output` of rank r; a tuple of arrays, or one array of equal blocks.

    The blocks' sizes must be the same on all ranks.
    """
    h = integer(handle)
    if not take(h):
        return LATER
    c = context_of(h)
    out = object_at(output)
    what = description(c, h, _REDUCE_SCATTER, out, object_at(op))
    if what == 0 or not is_plain(c, h, out, WRITEABLE):
        return give_up(h)
    if not list_blocks(c, h, GIVES, object_at(blocks), out, what, 0):
        return give_up(h)
    nbytes = nbytes_of(out, what)
    if nbytes != load_word(table(c, GIVES + 1), load_word(c, RANK)):
        return give_up(h)
    if not are_apart(c, h, data_of(out), nbytes, GIVES, True):
        return give_up(h)
    begin(h, _REDUCE_SCATTER, largest_of(c, GIVES), load_word(what, ITEMSIZE))
    if is_divided(ways_at(c)):
        return take_gil(
            release_gil(),
            divide(c, what, load_word(what, CALL), shape_of(table(c, GIVES + 1), load_word(c, SIZE)), 0),
        )
    start, _ = part_of(c, what, nbytes)
    narrow(c, GIVES, what)
    return take_gil(release_gil(), _reduce_scatter(c, data_of(out) + start, what))


@kernel
def _reduce_scatter(c, dst, what):
    """A slot holds a piece for each of the other ranks."""
    rank = load_word(c, RANK)
    size = load_word(c, SIZE)
    call = load_word(what, CALL)
    blocks, sizes = table(c, GIVES), table(c, GIVES + 1)
    shape = shape_of(table(c, GIVES + 1), load_word(c, SIZE))
    longest = largest_of(c, GIVES)
    piece = _whole(load_word(c, SLOT) // max(1, size - 1), load_word(what, ITEMSIZE))
    total = rounds_of(longest, piece)
    while True:
        if may_write(c, total):
            if open_slot(c) != DONE:
                return AGAIN
            step = load_word(c, WROTE)
            start = step * piece
            mine = slot_of(c, rank, step)
            for turn in range(1, size):
                peer = (rank + turn) % size
                left = load_word(sizes, peer) - start
                stage(ways_at(c), mine + (turn - 1) * piece, load_word(blocks, peer) + start, left, piece)
            publish(c, call, shape, 0)
            continue
        waited = meet(c, call, shape, 0)
        if waited != DONE:
            return waited
        if await_all(c) != DONE:
            return AGAIN
        step = load_word(c, READ)
        start = step * piece
        part = min(piece, load_word(sizes, rank) - start)
        if part > 0:
            for peer in range(size):
                place = slot_of(c, peer, step) + ((rank - peer) % size - 1) * piece
                own = load_word(blocks, rank) + start
                store_word(table(c, SOURCES), peer, own if peer == rank else place)
            _reduce(c, what, dst + start, size, part)
        if close_round(c, total):
            return finish(c)
        if time_is_up(c):
            return WORKED
