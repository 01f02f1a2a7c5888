"""The collectives of a segment that move data and do not look at it; entries as in collectives.py.

Here a round waits for single peers, in an order that differs from rank to rank, so that not all copy out of the
same slot at once.
"""

from __future__ import annotations

from ..core import signature
from ..core.status import AGAIN, DONE, LATER, WORKED
from ..kernels import matching
from ..kernels.jit import inlined, kernel, locked_entry
from ..kernels.primitives import load_word
from ..kernels.pyobjects import WRITEABLE, Index, PyObject, integer, object_at, release_gil, take_gil
from .border import (
    CALL,
    are_apart,
    data_of,
    description,
    has_none,
    is_plain,
    is_rank,
    largest_of,
    list_blocks,
    list_none,
    list_one,
    list_same,
    nbytes_of,
)
from .choosing import hand_out, is_divided, stage
from .dividing import divide, narrow, part_of
from .layout import INLINE
from .rounds import (
    await_peer,
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
    table,
    take,
    time_is_up,
    ways_at,
)
from .words import GIVES, LARGEST, MET, RANK, READ, SIZE, SLOT, TAKES, WROTE


@inlined
def _balance_of(c):
    return matching.balance(load_word(c, RANK), load_word(c, SIZE), table(c, GIVES + 1), table(c, TAKES + 1))


_BROADCAST = signature.code_of("broadcast")
_ALL_GATHER = signature.code_of("all_gather")
_GATHER = signature.code_of("gather")
_SCATTER = signature.code_of("scatter")
_ALL_TO_ALL = signature.code_of("all_to_all")


@locked_entry
def broadcast(handle: Index, tensor: PyObject, src: Index) -> int:
    """Copy the array of rank src into everybody's."""
    h = integer(handle)
    if not take(h):
        return LATER
    c = context_of(h)
    x, root = object_at(tensor), integer(src)
    what = description(c, h, _BROADCAST, x, 0)
    here = load_word(c, RANK) == root
    if what == 0 or not is_rank(c, root) or not is_plain(c, h, x, 0 if here else WRITEABLE):
        return give_up(h)
    nbytes, call = nbytes_of(x, what), load_word(what, CALL) | root << signature.ROOT_SHIFT
    begin(h, _BROADCAST, nbytes, 0)
    if is_divided(ways_at(c)):
        return take_gil(release_gil(), divide(c, what, call, nbytes, 0))
    start, nbytes = part_of(c, what, nbytes)
    return take_gil(release_gil(), _broadcast(c, data_of(x) + start, nbytes, call, root))


@kernel
def _broadcast(c, x, nbytes, call, root):
    rank = load_word(c, RANK)
    inline = fits_inline(nbytes)
    chunk = load_word(c, SLOT)
    total = rounds_of(nbytes, chunk)
    while True:
        if may_write(c, total):
            if rank == root:
                if open_slot(c) != DONE:
                    return AGAIN
                step = load_word(c, WROTE)
                left = nbytes - step * chunk
                stage(ways_at(c), place_of(c, root, step, inline), x + step * chunk, left, chunk)
            publish(c, call, nbytes, 0)
            continue
        waited = meet(c, call, nbytes, 0)
        if waited != DONE:
            return waited
        if rank != root:
            step = load_word(c, READ)
            if await_peer(c, root, step) != DONE:
                return AGAIN
            start = step * chunk
            place = place_of(c, root, step, inline)
            hand_out(ways_at(c), x + start, place, min(chunk, nbytes - start))
        if close_round(c, total):
            return finish(c)
        if time_is_up(c):
            return WORKED


@locked_entry
def all_gather(handle: Index, outputs: PyObject, tensor: PyObject) -> int:
    """Copy every rank's array into block r of everybody's `outputs`: a tuple of arrays, or one in equal parts."""
    h = integer(handle)
    if not take(h):
        return LATER
    c = context_of(h)
    x = object_at(tensor)
    what = description(c, h, _ALL_GATHER, x, 0)
    if what == 0 or not is_plain(c, h, x, 0):
        return give_up(h)
    if not list_blocks(c, h, TAKES, object_at(outputs), x, what, WRITEABLE):
        return give_up(h)
    nbytes = nbytes_of(x, what)
    list_same(c, GIVES, data_of(x), nbytes)
    if not _own_fits(c) or not are_apart(c, h, data_of(x), nbytes, TAKES, True):
        return give_up(h)
    begin(h, _ALL_GATHER, nbytes * load_word(c, SIZE), 0)
    if is_divided(ways_at(c)):
        return take_gil(release_gil(), divide(c, what, load_word(what, CALL), nbytes, _balance_of(c)))
    start, nbytes = part_of(c, what, nbytes)
    narrow(c, GIVES, what)
    narrow(c, TAKES, what)
    return take_gil(release_gil(), _all_gather(c, data_of(x) + start, nbytes, load_word(what, CALL)))


@inlined
def _own_fits(c):
    """Whether this rank gives itself what it takes from itself."""
    rank = load_word(c, RANK)
    return load_word(table(c, GIVES + 1), rank) == load_word(table(c, TAKES + 1), rank)


@kernel
def _all_gather(c, x, nbytes, call):
    rank = load_word(c, RANK)
    size = load_word(c, SIZE)
    chunk = load_word(c, SLOT)
    outs, sizes = table(c, TAKES), table(c, TAKES + 1)
    balance = _balance_of(c)
    total = rounds_of(largest_of(c, TAKES), chunk)
    while True:
        if may_write(c, total):
            if open_slot(c) != DONE:
                return AGAIN
            step = load_word(c, WROTE)
            left = nbytes - step * chunk
            place = place_of(c, rank, step, fits_inline(nbytes))
            stage(ways_at(c), place, x + step * chunk, left, chunk)
            publish(c, call, nbytes, balance)
            continue
        waited = meet(c, call, nbytes, balance)
        if waited != DONE:
            return waited
        step = load_word(c, READ)
        start = step * chunk
        for turn in range(size):
            peer = (rank + turn) % size
            part = min(chunk, load_word(sizes, peer) - start)
            if part <= 0:
                continue
            out = load_word(outs, peer) + start
            if peer == rank:
                hand_out(ways_at(c), out, x + start, part)
                continue
            if await_peer(c, peer, step) != DONE:
                return AGAIN
            hand_out(ways_at(c), out, place_of(c, peer, step, fits_inline(load_word(sizes, peer))), part)
        if close_round(c, total):
            return finish(c)
        if time_is_up(c):
            return WORKED


@locked_entry
def gather(handle: Index, outputs: PyObject, tensor: PyObject, dst: Index) -> int:
    """Copy rank r's array into block r of rank dst's `outputs`, which are None elsewhere."""
    h = integer(handle)
    if not take(h):
        return LATER
    c = context_of(h)
    outs, x, root = object_at(outputs), object_at(tensor), integer(dst)
    here = load_word(c, RANK) == root
    what = description(c, h, _GATHER, x, 0)
    if what == 0 or not is_rank(c, root) or not is_plain(c, h, x, 0) or here == has_none(c, outs):
        return give_up(h)
    list_one(c, GIVES, root, data_of(x), nbytes_of(x, what))
    if here:
        if not list_blocks(c, h, TAKES, outs, x, what, WRITEABLE):
            return give_up(h)
        if not _own_fits(c) or not are_apart(c, h, data_of(x), nbytes_of(x, what), TAKES, True):
            return give_up(h)
    else:
        list_none(c, TAKES)
    begin(h, _GATHER, _largest(c) * load_word(c, SIZE), 0)
    return take_gil(
        release_gil(), _exchange_or_divide(c, what, 1, load_word(what, CALL) | root << signature.ROOT_SHIFT)
    )


@locked_entry
def scatter(handle: Index, output: PyObject, blocks: PyObject, src: Index) -> int:
    """Copy block r of rank src's `blocks`, which are None elsewhere, into rank r's `output`."""
    h = integer(handle)
    if not take(h):
        return LATER
    c = context_of(h)
    out, items, root = object_at(output), object_at(blocks), integer(src)
    here = load_word(c, RANK) == root
    what = description(c, h, _SCATTER, out, 0)
    if what == 0 or not is_rank(c, root) or not is_plain(c, h, out, WRITEABLE) or here == has_none(c, items):
        return give_up(h)
    list_one(c, TAKES, root, data_of(out), nbytes_of(out, what))
    if here:
        if not list_blocks(c, h, GIVES, items, out, what, 0):
            return give_up(h)
        if not _own_fits(c) or not are_apart(c, h, data_of(out), nbytes_of(out, what), GIVES, True):
            return give_up(h)
    else:
        list_none(c, GIVES)
    begin(h, _SCATTER, _largest(c) * load_word(c, SIZE), 0)
    return take_gil(
        release_gil(),
        _exchange_or_divide(
            c, what, load_word(c, SIZE) - 1, load_word(what, CALL) | root << signature.ROOT_SHIFT
        ),
    )


@locked_entry
def all_to_all(handle: Index, outputs: PyObject, blocks: PyObject, like: PyObject) -> int:
    """Copy block p of every rank's `blocks` into block r of rank p's `outputs`; `like` is one of the arrays."""
    h = integer(handle)
    if not take(h):
        return LATER
    c = context_of(h)
    x = object_at(like)
    what = description(c, h, _ALL_TO_ALL, x, 0)
    if what == 0:
        return give_up(h)
    if not list_blocks(c, h, GIVES, object_at(blocks), x, what, 0):
        return give_up(h)
    if not list_blocks(c, h, TAKES, object_at(outputs), x, what, WRITEABLE) or not _own_fits(c):
        return give_up(h)
    for peer in range(load_word(c, SIZE)):
        given, nbytes = load_word(table(c, GIVES), peer), load_word(table(c, GIVES + 1), peer)
        if not are_apart(c, h, given, nbytes, TAKES, False):
            return give_up(h)
    begin(h, _ALL_TO_ALL, _largest(c) * load_word(c, SIZE), 0)
    return take_gil(
        release_gil(), _exchange_or_divide(c, what, load_word(c, SIZE) - 1, load_word(what, CALL))
    )


@inlined
def _largest(c):
    """Bytes of the largest block that this rank gives or takes."""
    return max(largest_of(c, GIVES), largest_of(c, TAKES))


@inlined
def _piece_of(c, src, dst, step, nbytes, spread, piece):
    """Where in src's slot, or in its call line if it fits, the piece for rank dst lies."""
    place = (dst - src) % load_word(c, SIZE) - 1 if spread > 1 else 0
    room = INLINE // spread & -8
    inline = nbytes <= room
    return place_of(c, src, step, inline) + place * (room if inline else piece)


@inlined
def _exchange_or_divide(c, what, spread, call):
    if is_divided(ways_at(c)):
        return divide(c, what, call, _largest(c), _balance_of(c))
    narrow(c, GIVES, what)
    narrow(c, TAKES, what)
    return _exchange(c, spread, call)


@kernel
def _exchange(c, spread, call):
    """Copy what the tables give to what the tables take; all sizes are free.

    `spread` pieces share a slot: 1 when a rank sends to one rank only, else the number of other ranks.
    """
    rank = load_word(c, RANK)
    size = load_word(c, SIZE)
    spread = max(1, spread)
    piece = load_word(c, SLOT) // spread & -64
    sends, send_sizes = table(c, GIVES), table(c, GIVES + 1)
    receives, receive_sizes = table(c, TAKES), table(c, TAKES + 1)
    largest = _largest(c)
    balance = _balance_of(c)
    while True:
        # How many rounds there are, ranks learn at the meeting.
        total = rounds_of(load_word(c, LARGEST) if load_word(c, MET) else largest, piece)
        if may_write(c, total):
            if open_slot(c) != DONE:
                return AGAIN
            step = load_word(c, WROTE)
            for peer in range(size):
                nbytes = load_word(send_sizes, peer)
                left = nbytes - step * piece
                if peer != rank and left > 0:
                    place = _piece_of(c, rank, peer, step, nbytes, spread, piece)
                    stage(ways_at(c), place, load_word(sends, peer) + step * piece, left, piece)
            publish(c, call, largest, balance)
            continue
        if load_word(c, MET) == 0:
            waited = meet(c, call, largest, balance)
            if waited != DONE:
                return waited
            continue  # there may be more rounds than this rank knew of
        step = load_word(c, READ)
        start = step * piece
        for turn in range(size):
            peer = (rank + turn) % size
            nbytes = load_word(receive_sizes, peer)
            part = min(piece, nbytes - start)
            if part <= 0:
                continue
            out = load_word(receives, peer) + start
            if peer == rank:
                hand_out(ways_at(c), out, load_word(sends, peer) + start, part)
                continue
            if await_peer(c, peer, step) != DONE:
                return AGAIN
            hand_out(ways_at(c), out, _piece_of(c, peer, rank, step, nbytes, spread, piece), part)
        if close_round(c, total):
            return finish(c)
        if time_is_up(c):
            return WORKED
