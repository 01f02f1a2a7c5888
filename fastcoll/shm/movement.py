"""The collectives in a segment that move data without reducing it. Their entries are like those in reductions.py.

In a round, a rank waits for one peer at a time, in an order that differs between ranks, so that ranks copy from
different slots at the same time.
"""

from __future__ import annotations

from ..compiler.jit import inlined, kernel, locked_entry
from ..core import signature
from ..core.status import AGAIN, DONE, LATER, WORKED
from ..kernels.c_entries import NATIVE_CALL
from ..kernels.primitives import balance, load_word
from ..kernels.pyobjects import WRITEABLE, Index, PyObject, integer, object_at, release_gil, take_gil
from . import context_layout as at
from . import layout, single_copy
from . import rounds as r
from . import validate as v
from .autotune import copy_out, is_direct, stage

_BROADCAST = signature.code_of("broadcast")
_ALL_GATHER = signature.code_of("all_gather")
_GATHER = signature.code_of("gather")
_SCATTER = signature.code_of("scatter")
_ALL_TO_ALL = signature.code_of("all_to_all")


@locked_entry
def broadcast(handle: Index, tensor: PyObject, src: Index) -> int:
    """Copy the array of rank src into the arrays of all ranks."""
    h = integer(handle)
    c = r.take(h)
    if c == 0:
        return LATER
    x, root = object_at(tensor), integer(src)
    spec = v.spec_of(c, h, _BROADCAST, x, 0)
    here = load_word(c, at.RANK) == root
    if spec == 0 or not v.is_rank(c, root) or not v.is_plain(c, h, x, 0 if here else WRITEABLE):
        return r.give_up(h)
    data, nbytes = v.data_of(x), v.nbytes_of(x, spec)
    return take_gil(release_gil(), run_broadcast(h, c, data, nbytes, spec, root))


@broadcast.twin(NATIVE_CALL)
def broadcast_call(h, data, out, nbytes, call, peer):
    c, spec = v.take_call(h, _BROADCAST, call, peer)
    return LATER if c == 0 else run_broadcast(h, c, data, nbytes, spec, peer)


@kernel
def run_broadcast(h, c, data, nbytes, spec, root):
    """Run a broadcast; the caller has taken the context.

    The functions `run_*` need no GIL. The entries use them, and so do their twins, the native calls of compiled callers
    (callers.py).
    """
    call = load_word(spec, v.CALL) | root << signature.ROOT_SHIFT
    r.begin(h, _BROADCAST, nbytes, True, single_copy.kind_of(c, data, nbytes), nbytes)
    if is_direct(r.tuning_at(c)):
        v.list_none(c, at.TAKES)
        v.list_none(c, at.GIVES)
        if load_word(c, at.RANK) == root:
            v.list_same(c, at.GIVES, data, nbytes)
        else:
            v.list_one(c, at.TAKES, root, data, nbytes)
        return single_copy.exchange(c, call, nbytes, 0, 0)
    return _broadcast(c, data, nbytes, call, root, load_word(spec, v.ITEMSIZE))


@kernel
def _broadcast(c, x, nbytes, call, root, itemsize):
    rank = load_word(c, at.RANK)
    chunk = r.one_way_chunk(c, nbytes, itemsize)
    total = r.rounds_of(nbytes, chunk)
    while True:
        if r.may_write(c, total):
            if rank == root:
                opened = r.open_slot(c, nbytes)
                if opened != DONE:
                    return opened
                step = load_word(c, at.WROTE)
                left = nbytes - step * chunk
                stage(
                    r.tuning_at(c), r.payload_of(c, root, step, nbytes, chunk), x + step * chunk, left, chunk
                )
            r.publish(c, call, nbytes, 0)
            continue
        waited = r.meet(c, call, nbytes, 0)
        if waited != DONE:
            return waited
        if rank != root:
            step = load_word(c, at.READ)
            if r.await_peer(c, root, step) != DONE:
                return AGAIN
            start = step * chunk
            source = r.payload_of(c, root, step, nbytes, chunk)
            copy_out(r.tuning_at(c), x + start, source, min(chunk, nbytes - start))
        if r.close_round(c, total):
            return r.finish(c)
        if r.time_is_up(c):
            return WORKED


@locked_entry
def all_gather(handle: Index, outputs: PyObject, tensor: PyObject) -> int:
    """Copy rank r's array into block r of all ranks' `outputs`: a tuple of arrays, or one array of equal blocks."""
    h = integer(handle)
    c = r.take(h)
    if c == 0:
        return LATER
    x = object_at(tensor)
    spec = v.spec_of(c, h, _ALL_GATHER, x, 0)
    if spec == 0 or not v.is_plain(c, h, x, 0):
        return r.give_up(h)
    if not v.list_blocks(c, h, at.TAKES, object_at(outputs), x, spec, WRITEABLE):
        return r.give_up(h)
    nbytes = v.nbytes_of(x, spec)
    v.list_same(c, at.GIVES, v.data_of(x), nbytes)
    if not _own_fits(c) or not v.are_apart(c, h, v.data_of(x), nbytes, at.TAKES, True):
        return r.give_up(h)
    return take_gil(release_gil(), run_exchange(h, c, _ALL_GATHER, spec, 0))


@all_gather.twin(NATIVE_CALL)
def all_gather_call(h, data, out, nbytes, call, peer):
    c, spec = v.take_call(h, _ALL_GATHER, call, 0)
    if c == 0:
        return LATER
    v.list_equal(c, at.TAKES, out, nbytes)
    if not v.are_apart(c, h, data, nbytes, at.TAKES, True):
        return r.give_up(h)
    v.list_same(c, at.GIVES, data, nbytes)
    return run_exchange(h, c, _ALL_GATHER, spec, 0)


@inlined
def _balance_of(c):
    gives, takes = r.table(c, at.GIVES + 1), r.table(c, at.TAKES + 1)
    return balance(load_word(c, at.RANK), load_word(c, at.SIZE), gives, takes)


@inlined
def _own_fits(c):
    """Whether the block that this rank sends to itself has the same size in its inputs and outputs."""
    rank = load_word(c, at.RANK)
    return load_word(r.table(c, at.GIVES + 1), rank) == load_word(r.table(c, at.TAKES + 1), rank)


@inlined
def _rooted(h, operation, x, holder, root, one, many):
    """Run a gather or a scatter.

    Table `one` gets this rank's array x as its block for or from the root. On the root, `holder` has the blocks of all
    ranks, which go into table `many`; on other ranks it is None.
    """
    c = r.take(h)
    if c == 0:
        return LATER
    here = load_word(c, at.RANK) == root
    spec = v.spec_of(c, h, operation, x, 0)
    flags = WRITEABLE if one == at.TAKES else 0
    if spec == 0 or not v.is_rank(c, root) or not v.is_plain(c, h, x, flags):
        return r.give_up(h)
    if here == (holder == load_word(c, at.NONE)):
        return r.give_up(h)
    data, nbytes = v.data_of(x), v.nbytes_of(x, spec)
    v.list_none(c, one)
    v.list_one(c, one, root, data, nbytes)
    if not here:
        v.list_none(c, many)
    else:
        fits = v.list_blocks(c, h, many, holder, x, spec, WRITEABLE - flags) and _own_fits(c)
        if not fits or not v.are_apart(c, h, data, nbytes, many, True):
            return r.give_up(h)
    return take_gil(release_gil(), run_exchange(h, c, operation, spec, root))


@inlined
def _rooted_call(h, operation, block, blocks, nbytes, call, root, one, many):
    """Run a gather or a scatter for a compiled caller.

    Table `one` gets this rank's block for or from the root. On the root, table `many` gets the blocks of all ranks.
    """
    c, spec = v.take_call(h, operation, call, root)
    if c == 0:
        return LATER
    v.list_none(c, at.GIVES)
    v.list_none(c, at.TAKES)
    v.list_one(c, one, root, block, nbytes)
    if load_word(c, at.RANK) == root:
        v.list_equal(c, many, blocks, nbytes)
        if not v.are_apart(c, h, block, nbytes, many, True):
            return r.give_up(h)
    return run_exchange(h, c, operation, spec, root)


@locked_entry
def gather(handle: Index, outputs: PyObject, tensor: PyObject, dst: Index) -> int:
    """Copy rank r's array into block r of rank dst's `outputs`, which are None on other ranks."""
    x, holder = object_at(tensor), object_at(outputs)
    return _rooted(integer(handle), _GATHER, x, holder, integer(dst), at.GIVES, at.TAKES)


@gather.twin(NATIVE_CALL)
def gather_call(h, data, out, nbytes, call, peer):
    return _rooted_call(h, _GATHER, data, out, nbytes, call, peer, at.GIVES, at.TAKES)


@locked_entry
def scatter(handle: Index, output: PyObject, blocks: PyObject, src: Index) -> int:
    """Copy block r of rank src's `blocks`, which are None on other ranks, into rank r's `output`."""
    x, holder = object_at(output), object_at(blocks)
    return _rooted(integer(handle), _SCATTER, x, holder, integer(src), at.TAKES, at.GIVES)


@scatter.twin(NATIVE_CALL)
def scatter_call(h, data, out, nbytes, call, peer):
    return _rooted_call(h, _SCATTER, out, data, nbytes, call, peer, at.TAKES, at.GIVES)


@locked_entry
def all_to_all(handle: Index, outputs: PyObject, blocks: PyObject, like: PyObject) -> int:
    """Copy block p of rank r's `blocks` into block r of rank p's `outputs`; `like` is any array of the call's dtype."""
    h = integer(handle)
    c = r.take(h)
    if c == 0:
        return LATER
    x = object_at(like)
    spec = v.spec_of(c, h, _ALL_TO_ALL, x, 0)
    if spec == 0 or not v.list_blocks(c, h, at.GIVES, object_at(blocks), x, spec, 0):
        return r.give_up(h)
    if not v.list_blocks(c, h, at.TAKES, object_at(outputs), x, spec, WRITEABLE) or not _own_fits(c):
        return r.give_up(h)
    for peer in range(load_word(c, at.SIZE)):
        given, nbytes = load_word(r.table(c, at.GIVES), peer), load_word(r.table(c, at.GIVES + 1), peer)
        if not v.are_apart(c, h, given, nbytes, at.TAKES, False):
            return r.give_up(h)
    return take_gil(release_gil(), run_exchange(h, c, _ALL_TO_ALL, spec, 0))


@all_to_all.twin(NATIVE_CALL)
def all_to_all_call(h, data, out, nbytes, call, peer):
    c, spec = v.take_call(h, _ALL_TO_ALL, call, 0)
    if c == 0:
        return LATER
    v.list_equal(c, at.GIVES, data, nbytes)
    v.list_equal(c, at.TAKES, out, nbytes)
    if not v.are_apart(c, h, data, nbytes * load_word(c, at.SIZE), at.TAKES, False):
        return r.give_up(h)
    return run_exchange(h, c, _ALL_TO_ALL, spec, 0)


@all_to_all.twin(NATIVE_CALL)
def all_to_all_split_call(h, data, out, sizes, call, peer):
    c, spec = v.take_call(h, _ALL_TO_ALL, call, 0)
    if c == 0:
        return LATER
    rank, size = load_word(c, at.RANK), load_word(c, at.SIZE)
    nbytes = v.list_split(c, at.GIVES, data, sizes)
    v.list_split(c, at.TAKES, out, sizes + 8 * size)
    own_fits = load_word(sizes, rank) == load_word(sizes, size + rank)
    if not own_fits or not v.are_apart(c, h, data, nbytes, at.TAKES, False):
        return r.give_up(h)
    return run_exchange(h, c, _ALL_TO_ALL, spec, 0)


@inlined
def _largest(c):
    """Return the bytes of the largest block that this rank sends or receives."""
    return max(v.largest_of(c, at.GIVES), v.largest_of(c, at.TAKES))


@inlined
def _room_of(spread):
    """Return the most bytes of a block that goes into the call line."""
    return layout.INLINE // max(1, spread) & -8


@inlined
def _piece_of(c, src, dst, step, nbytes, spread, piece):
    """Return the address of src's piece for rank dst: in src's call line if the block fits there, else in its slot."""
    index = (dst - src) % load_word(c, at.SIZE) - 1 if spread > 1 else 0
    room = _room_of(spread)
    if spread > 1 and nbytes > room:
        return r.slot_of(c, src, step) + index * piece
    return r.payload_of(c, src, step, nbytes, nbytes, room) + index * room


@kernel
def run_exchange(h, c, operation, spec, root):
    """Send the blocks in the tables GIVES, and receive into those in the tables TAKES; blocks may have any sizes.

    `spread` is the number of pieces in a slot: 1 if a rank sends to one rank only, else the number of other ranks; 0 if
    it sends the same block to all.
    """
    spread = load_word(c, at.SIZE) - 1
    if operation == _ALL_GATHER:
        spread = 0
    elif operation == _GATHER:
        spread = 1
    largest = _largest(c)
    nbytes = largest * load_word(c, at.SIZE)
    kind = 0
    if nbytes >= load_word(c, at.DIRECT_FROM):
        kind, takes = single_copy.kind_of_blocks(c, at.GIVES), single_copy.kind_of_blocks(c, at.TAKES)
        if takes == 0 or kind == single_copy.NOTHING:
            kind = takes
    # A block of an all_gather or a gather has a slot of its own, so the number of rounds does not grow with the group.
    staged = largest * spread if spread > 1 else 0
    r.begin(h, operation, nbytes, True, kind, staged)
    call = load_word(spec, v.CALL) | root << signature.ROOT_SHIFT
    if is_direct(r.tuning_at(c)):
        return single_copy.exchange(c, call, largest, _balance_of(c), spread)
    rank = load_word(c, at.RANK)
    size = load_word(c, at.SIZE)
    piece = load_word(c, at.SLOT) // max(1, spread) & -64
    sends, send_sizes = r.table(c, at.GIVES), r.table(c, at.GIVES + 1)
    receives, receive_sizes = r.table(c, at.TAKES), r.table(c, at.TAKES + 1)
    largest = _largest(c)
    balance, room = _balance_of(c), _room_of(spread)
    # The number of rounds depends on the largest block of all ranks, which is known after the meeting.
    total = r.rounds_of(load_word(c, at.LARGEST) if load_word(c, at.MET) else largest, piece)
    while True:
        if r.may_write(c, total):
            opened = r.open_slot(c, v.largest_of(c, at.GIVES), room)
            if opened != DONE:
                return opened
            step = load_word(c, at.WROTE)
            for peer in range(size):
                nbytes = load_word(send_sizes, peer)
                left = nbytes - step * piece
                if peer != rank and left > 0:
                    target = _piece_of(c, rank, peer, step, nbytes, spread, piece)
                    stage(r.tuning_at(c), target, load_word(sends, peer) + step * piece, left, piece)
                    if spread == 0:
                        break
            r.publish(c, call, largest, balance)
            continue
        if load_word(c, at.MET) == 0:
            waited = r.meet(c, call, largest, balance)
            if waited != DONE:
                return waited
            total = r.rounds_of(load_word(c, at.LARGEST), piece)
            continue  # the call may have more rounds than this rank's own blocks need
        step = load_word(c, at.READ)
        start = step * piece
        for shift in range(size):
            peer = (rank + shift) % size
            nbytes = load_word(receive_sizes, peer)
            part = min(piece, nbytes - start)
            if part <= 0:
                continue
            out = load_word(receives, peer) + start
            if peer == rank:
                copy_out(r.tuning_at(c), out, load_word(sends, peer) + start, part)
                continue
            if r.await_peer(c, peer, step) != DONE:
                return AGAIN
            copy_out(r.tuning_at(c), out, _piece_of(c, peer, rank, step, nbytes, spread, piece), part)
        if r.close_round(c, total):
            return r.finish(c)
        if r.time_is_up(c):
            return WORKED
