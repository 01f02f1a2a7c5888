"""The reductions through a shared segment, and the barrier. Each is one compiled entry that runs without the GIL.

An entry takes a handle (the context's address with the tags of rounds.py), Python objects and integers. It validates
its arguments (validate.py) and then runs rounds. After AGAIN or WORKED, the caller calls the entry again with the same
arguments and RESUMED. LATER leaves the call to Python. The other results are DONE, and UNALLOCATED, UNMAPPED,
UNREADABLE, MIXED and MISMATCH, which calls.py explains. All ranks reduce in rank order, so every rank gets the same
bits.

A reduction through the slots is one-shot (every rank reduces the complete arrays) or two-shot (each rank reduces its
slice, then gathers the slices of the others: Rabenseifner's reduce-scatter and all-gather).
"""

from __future__ import annotations

from ..compiler.jit import entry, inlined, kernel, locked_entry
from ..core import signature
from ..core.status import AGAIN, DONE, LATER, WORKED
from ..kernels.c_entries import NATIVE_CALL
from ..kernels.copy import copy
from ..kernels.primitives import call_reducer, load_word, shape_of, start_of, store_word
from ..kernels.pyobjects import WRITEABLE, Index, PyObject, integer, object_at, release_gil, take_gil
from . import context_layout as at
from . import rounds as r
from . import single_copy
from . import validate as v
from .autotune import is_direct, stage
from .symmetric import SMALLEST as SYMMETRIC_SMALLEST
from .symmetric import all_reduce_in_place, find_row

_ALL_REDUCE = signature.code_of("all_reduce")
_REDUCE = signature.code_of("reduce")
_SCAN = signature.code_of("scan")
_EXSCAN = signature.code_of("exscan")
_REDUCE_SCATTER = signature.code_of("reduce_scatter")


@inlined
def _reduce(c, spec, dst, n, nbytes):
    """Reduce the first n arrays of the table SOURCES into dst."""
    count = nbytes // load_word(spec, v.ITEMSIZE)
    call_reducer(load_word(spec, v.REDUCER), load_word(spec, v.CODE), dst, r.table(c, at.SOURCES), n, count)


@inlined
def _whole(nbytes, itemsize):
    """Round nbytes down to a whole number of elements."""
    return nbytes - nbytes % itemsize


@inlined
def _shape_of_blocks(c):
    return shape_of(r.table(c, at.GIVES + 1), load_word(c, at.SIZE))


@entry
def barrier(handle: Index, call: Index) -> int:
    """Wait for every rank."""
    h = integer(handle)
    c = r.take(h)
    if c == 0:
        return LATER
    return run_barrier(h, c, integer(call))


@barrier.twin(NATIVE_CALL)
def barrier_call(h, data, out, nbytes, call, peer):
    c = r.take(h)
    return LATER if c == 0 else run_barrier(h, c, call)


@kernel
def run_barrier(h, c, call):
    """Run a barrier; the caller has taken the context.

    The functions `run_*` need no GIL. The entries use them, and so do their twins, the native calls of compiled callers
    (callers.py).
    """
    r.begin(h, 0, 0, False, 0, 0)
    if r.may_write(c, 1):
        r.publish(c, call, 0, 0)
    waited = r.meet(c, call, 0, 0)
    if waited != DONE:
        return waited
    r.close_round(c, 1)
    return r.finish(c)


@kernel
def _one_shot(c, dst, src, nbytes, spec, call, last, has_root):
    """Publish src, and reduce the arrays of ranks 0..last-1 into dst.

    `has_root`: whether only one rank reduces, whose own array the others do not need.
    """
    rank = load_word(c, at.RANK)
    itemsize = load_word(spec, v.ITEMSIZE)
    slot = r.one_way_chunk(c, nbytes, itemsize) if has_root else load_word(c, at.SLOT)
    chunk = _whole(slot, itemsize)
    total = r.rounds_of(nbytes, chunk)
    while True:
        if r.may_write(c, total):
            if last == 0 or not has_root:
                opened = r.open_slot(c, nbytes)
                if opened != DONE:
                    return opened
                step = load_word(c, at.WROTE)
                start = step * chunk
                stage(
                    r.tuning_at(c),
                    r.payload_of(c, rank, step, nbytes, slot),
                    src + start,
                    nbytes - start,
                    chunk,
                )
            r.publish(c, call, nbytes, 0)
            continue
        waited = r.meet(c, call, nbytes, 0)
        if waited != DONE:
            return waited
        if last > 0:
            if r.await_all(c) != DONE:
                return AGAIN
            step = load_word(c, at.READ)
            start = step * chunk
            for peer in range(last):
                source = src + start if peer == rank else r.payload_of(c, peer, step, nbytes, slot)
                store_word(r.table(c, at.SOURCES), peer, source)
            _reduce(c, spec, dst + start, last, min(chunk, nbytes - start))
        if r.close_round(c, total):
            return r.finish(c)
        if r.time_is_up(c):
            return WORKED


@kernel
def _two_shot(c, dst, src, nbytes, spec, call, keep):
    """Reduce each chunk in two rounds: each rank reduces its slice, then ranks with `keep` gather all slices."""
    rank = load_word(c, at.RANK)
    size = load_word(c, at.SIZE)
    itemsize = load_word(spec, v.ITEMSIZE)
    chunk = _whole(load_word(c, at.SLOT), itemsize)
    total = 2 * r.rounds_of(nbytes, chunk)
    while True:
        step = load_word(c, at.READ)
        start = step // 2 * chunk
        part = min(chunk, nbytes - start)
        low = start_of(part, size, rank, itemsize)
        high = start_of(part, size, rank + 1, itemsize)
        mine = r.part_of_slot(c, rank, step, nbytes)
        if load_word(c, at.WROTE) == step:
            opened = r.open_slot(c, nbytes, 0)
            if opened != DONE:
                return opened
            if step % 2 == 0:
                stage(r.tuning_at(c), mine, src + start, low, low)
                stage(r.tuning_at(c), mine + high, src + start + high, part - high, part - high)
            else:
                for peer in range(size):
                    source = src + start if peer == rank else r.part_of_slot(c, peer, step - 1, nbytes)
                    store_word(r.table(c, at.SOURCES), peer, source + low)
                _reduce(c, spec, mine + low, size, high - low)
            r.publish(c, call, nbytes, 0)
        waited = r.meet(c, call, nbytes, 0)
        if waited != DONE:
            return waited
        if r.await_all(c) != DONE:
            return AGAIN
        if step % 2 and keep:
            for peer in range(size):
                begins = start_of(part, size, peer, itemsize)
                ends = start_of(part, size, peer + 1, itemsize)
                copy(dst + start + begins, r.part_of_slot(c, peer, step, nbytes) + begins, ends - begins)
        if r.close_round(c, total):
            return r.finish(c)
        if r.time_is_up(c):
            return WORKED


@inlined
def _reduce_arrays(c, dst, src, nbytes, spec, call, last, of_all, has_root):
    """Reduce the arrays of ranks 0..last-1 into dst, through the slots.

    If `last` is 0, this rank only contributes its array. `of_all`: whether each rank's `last` is either 0 or the number
    of ranks. `has_root`: whether it is 0 on all ranks but one.
    """
    if of_all and load_word(c, at.SIZE) > 2 and nbytes > load_word(c, at.ONE_SHOT):
        return _two_shot(c, dst, src, nbytes, spec, call, last > 0)
    return _one_shot(c, dst, src, nbytes, spec, call, last, has_root)


@locked_entry
def all_reduce(handle: Index, tensor: PyObject, op: PyObject) -> int:
    """Reduce an array over all ranks, in place."""
    h = integer(handle)
    c = r.take(h)
    if c == 0:
        return LATER
    x = object_at(tensor)
    spec = v.spec_of(c, h, _ALL_REDUCE, x, object_at(op))
    if spec == 0 or not v.is_plain(c, h, x, WRITEABLE):
        return r.give_up(h)
    data, nbytes = v.data_of(x), v.nbytes_of(x, spec)
    return take_gil(release_gil(), run_all_reduce(h, c, data, nbytes, spec))


@all_reduce.twin(NATIVE_CALL)
def all_reduce_call(h, data, out, nbytes, call, peer):
    c, spec = v.take_call(h, _ALL_REDUCE, call, 0)
    return LATER if c == 0 else run_all_reduce(h, c, data, nbytes, spec)


@kernel
def run_all_reduce(h, c, data, nbytes, spec):
    call, size = load_word(spec, v.CALL), load_word(c, at.SIZE)
    if nbytes >= SYMMETRIC_SMALLEST and load_word(c, at.SYMMETRIC) != 0 and size > 1:
        row = find_row(c, data, nbytes)
        if row != 0:
            r.begin(h, _ALL_REDUCE, 0, False, 0, 0)
            return all_reduce_in_place(c, data, nbytes, spec, call, row)
    r.begin(h, _ALL_REDUCE, nbytes, False, single_copy.kind_of(c, data, nbytes), nbytes)
    if is_direct(r.tuning_at(c)):
        return single_copy.all_reduce(c, data, nbytes, spec, call)
    return _reduce_arrays(c, data, data, nbytes, spec, call, size, True, False)


@locked_entry
def reduce(handle: Index, output: PyObject, tensor: PyObject, op: PyObject, dst: Index) -> int:
    """Reduce `tensor` over all ranks into rank dst's `output`, which may be the same array as its `tensor`."""
    h = integer(handle)
    c = r.take(h)
    if c == 0:
        return LATER
    x, root = object_at(tensor), integer(dst)
    here = load_word(c, at.RANK) == root
    spec = v.spec_of(c, h, _REDUCE, x, object_at(op))
    if spec == 0 or not v.is_rank(c, root) or not v.is_plain(c, h, x, WRITEABLE if here else 0):
        return r.give_up(h)
    out, data, nbytes = v.data_of(object_at(output)), v.data_of(x), v.nbytes_of(x, spec)
    return take_gil(release_gil(), run_reduce(h, c, out, data, nbytes, spec, root))


@reduce.twin(NATIVE_CALL)
def reduce_call(h, data, out, nbytes, call, peer):
    c, spec = v.take_call(h, _REDUCE, call, peer)
    return LATER if c == 0 else run_reduce(h, c, data, data, nbytes, spec, peer)


@kernel
def run_reduce(h, c, out, data, nbytes, spec, root):
    call = load_word(spec, v.CALL) | root << signature.ROOT_SHIFT
    last = load_word(c, at.SIZE) if load_word(c, at.RANK) == root else 0
    r.begin(h, _REDUCE, nbytes, False, single_copy.kind_of(c, data, nbytes), nbytes)
    if is_direct(r.tuning_at(c)):
        return single_copy.reduce(c, out, data, nbytes, spec, call, root)
    return _reduce_arrays(c, out, data, nbytes, spec, call, last, True, True)


@locked_entry
def scan(handle: Index, output: PyObject, tensor: PyObject, op: PyObject, exclusive: Index) -> int:
    """Reduce the arrays of ranks 0..rank into `output`.

    `exclusive`: reduce only those of ranks 0..rank-1; rank 0's output does not change.
    """
    h = integer(handle)
    c = r.take(h)
    if c == 0:
        return LATER
    x = object_at(tensor)
    operation = _EXSCAN if integer(exclusive) else _SCAN
    spec = v.spec_of(c, h, operation, x, object_at(op))
    if spec == 0 or not v.is_plain(c, h, x, WRITEABLE):
        return r.give_up(h)
    out, data, nbytes = v.data_of(object_at(output)), v.data_of(x), v.nbytes_of(x, spec)
    return take_gil(release_gil(), run_scan(h, c, out, data, nbytes, spec, operation))


@scan.twin(NATIVE_CALL)
def scan_call(h, data, out, nbytes, call, peer):
    c, spec = v.take_call(h, _SCAN, call, 0)
    return LATER if c == 0 else run_scan(h, c, data, data, nbytes, spec, _SCAN)


@scan.twin(NATIVE_CALL)
def exscan_call(h, data, out, nbytes, call, peer):
    c, spec = v.take_call(h, _EXSCAN, call, 0)
    return LATER if c == 0 else run_scan(h, c, data, data, nbytes, spec, _EXSCAN)


@kernel
def run_scan(h, c, out, data, nbytes, spec, operation):
    last = load_word(c, at.RANK) + (0 if operation == _EXSCAN else 1)
    r.begin(h, operation, nbytes, False, 0, 0)
    return _reduce_arrays(c, out, data, nbytes, spec, load_word(spec, v.CALL), last, False, False)


@locked_entry
def reduce_scatter(handle: Index, output: PyObject, blocks: PyObject, op: PyObject) -> int:
    """Reduce block r of every rank's `blocks` into `output` of rank r.

    `blocks` is a tuple of arrays, or one array of equal blocks. The blocks' sizes must be the same on all ranks.
    """
    h = integer(handle)
    c = r.take(h)
    if c == 0:
        return LATER
    out = object_at(output)
    spec = v.spec_of(c, h, _REDUCE_SCATTER, out, object_at(op))
    if spec == 0 or not v.is_plain(c, h, out, WRITEABLE):
        return r.give_up(h)
    if not v.list_blocks(c, h, at.GIVES, object_at(blocks), out, spec, 0):
        return r.give_up(h)
    data, nbytes = v.data_of(out), v.nbytes_of(out, spec)
    own = load_word(r.table(c, at.GIVES + 1), load_word(c, at.RANK))
    if nbytes != own or not v.are_apart(c, h, data, nbytes, at.GIVES, True):
        return r.give_up(h)
    return take_gil(release_gil(), run_reduce_scatter(h, c, data, nbytes, spec))


@reduce_scatter.twin(NATIVE_CALL)
def reduce_scatter_call(h, data, out, nbytes, call, peer):
    c, spec = v.take_call(h, _REDUCE_SCATTER, call, 0)
    if c == 0:
        return LATER
    v.list_equal(c, at.GIVES, data, nbytes)
    if not v.are_apart(c, h, out, nbytes, at.GIVES, True):
        return r.give_up(h)
    return run_reduce_scatter(h, c, out, nbytes, spec)


@reduce_scatter.twin(NATIVE_CALL)
def reduce_scatter_split_call(h, data, out, sizes, call, peer):
    c, spec = v.take_call(h, _REDUCE_SCATTER, call, 0)
    if c == 0:
        return LATER
    v.list_split(c, at.GIVES, data, sizes)
    nbytes = load_word(sizes, load_word(c, at.SIZE))
    if nbytes != load_word(sizes, load_word(c, at.RANK)) or not v.are_apart(
        c, h, out, nbytes, at.GIVES, True
    ):
        return r.give_up(h)
    return run_reduce_scatter(h, c, out, nbytes, spec)


@kernel
def run_reduce_scatter(h, c, data, nbytes, spec):
    """Run a reduce_scatter of the blocks in the table GIVES; the caller has taken the context."""
    longest, call = v.largest_of(c, at.GIVES), load_word(spec, v.CALL)
    kind = single_copy.kind_of_blocks(c, at.GIVES) if longest >= load_word(c, at.DIRECT_FROM) else 0
    r.begin(h, _REDUCE_SCATTER, longest, False, kind, longest * load_word(c, at.SIZE))
    if is_direct(r.tuning_at(c)):
        return single_copy.reduce_scatter(c, data, nbytes, _shape_of_blocks(c), spec, call)
    return _reduce_scatter(c, data, spec)


@kernel
def _reduce_scatter(c, dst, spec):
    """Run a reduce_scatter through the slots; a slot has one piece for each of the other ranks."""
    rank = load_word(c, at.RANK)
    size = load_word(c, at.SIZE)
    call = load_word(spec, v.CALL)
    blocks, sizes = r.table(c, at.GIVES), r.table(c, at.GIVES + 1)
    shape = _shape_of_blocks(c)
    longest = v.largest_of(c, at.GIVES)
    piece = _whole(load_word(c, at.SLOT) // max(1, size - 1), load_word(spec, v.ITEMSIZE))
    total = r.rounds_of(longest, piece)
    pace = min(piece, (longest + 63) & -64)  # bytes from one peer's piece to the next
    while True:
        if r.may_write(c, total):
            opened = r.open_slot(c, longest, 0)
            if opened != DONE:
                return opened
            step = load_word(c, at.WROTE)
            start = step * piece
            mine = r.part_of_slot(c, rank, step, pace * (size - 1))
            for shift in range(1, size):
                peer = (rank + shift) % size
                left = load_word(sizes, peer) - start
                stage(r.tuning_at(c), mine + (shift - 1) * pace, load_word(blocks, peer) + start, left, piece)
            r.publish(c, call, shape, 0)
            continue
        waited = r.meet(c, call, shape, 0)
        if waited != DONE:
            return waited
        if r.await_all(c) != DONE:
            return AGAIN
        step = load_word(c, at.READ)
        start = step * piece
        part = min(piece, load_word(sizes, rank) - start)
        if part > 0:
            for peer in range(size):
                theirs = r.part_of_slot(c, peer, step, pace * (size - 1))
                source = theirs + ((rank - peer) % size - 1) * pace
                own = load_word(blocks, rank) + start
                store_word(r.table(c, at.SOURCES), peer, own if peer == rank else source)
            _reduce(c, spec, dst + start, size, part)
        if r.close_round(c, total):
            return r.finish(c)
        if r.time_is_up(c):
            return WORKED
