"""The collectives of a segment, each one compiled function that runs a whole call without the GIL.

Arguments are integers: the context (rounds.py), array headers (kernels/pointers.py), sizes in bytes and
the address of a description `What`. Each returns DONE, AGAIN (call again with the same arguments) or
MISMATCH. All reduce in rank order, so every rank gets the same bits.

Algorithms: one-shot (every rank reduces everything), and two-shot (each rank reduces its slice, then
gathers the others': Rabenseifner's reduce-scatter and all-gather, here through staged slots).
"""

from __future__ import annotations

from ..kernels.atomics import call_reducer
from ..kernels.copy import copy
from ..kernels.jit import inlined, kernel
from ..kernels.pointers import data_of, load_word, store_word
from .rounds import (
    AGAIN,
    DONE,
    LARGEST,
    ONE_SHOT,
    OPEN,
    PHASE,
    RANK,
    SIZE,
    SLOT,
    SOURCES,
    STEP,
    await_all,
    await_met,
    await_peer,
    begin,
    close_round,
    finish,
    fits_inline,
    open_slot,
    place_of,
    publish,
    slot_of,
    time_is_up,
)

# Words of What, the description of a call that depends on (operation, dtype, reduce operation) only.
CALL, REDUCER, CODE, ITEMSIZE = range(4)
WHAT_WORDS = 4


@inlined
def _reduce(c, what, dst, n, nbytes):
    """dst = the first n sources, reduced."""
    count = nbytes // load_word(what, ITEMSIZE)
    call_reducer(load_word(what, REDUCER), load_word(what, CODE), dst, c + 8 * SOURCES, n, count)


@inlined
def _whole(nbytes, itemsize):
    """The part of nbytes that is whole elements."""
    return nbytes - nbytes % itemsize


@kernel
def barrier(c, call):
    """Wait for every rank."""
    begin(c)
    if load_word(c, PHASE) == OPEN:
        publish(c, call, 0, 0)
    waited = await_all(c, call, 0, 0)
    if waited != DONE:
        return waited
    close_round(c)
    return finish(c)


@kernel
def _one_shot(c, dst, src, nbytes, what, first, last, shape):
    """Everybody publishes src; a rank with first < last reduces the ranks first..last-1 into dst."""
    begin(c)
    rank = load_word(c, RANK)
    call = load_word(what, CALL)
    inline = fits_inline(nbytes)
    chunk = _whole(load_word(c, SLOT), load_word(what, ITEMSIZE))
    while True:
        start = load_word(c, STEP) * chunk
        part = min(chunk, nbytes - start)
        if load_word(c, PHASE) == OPEN:
            if open_slot(c) != DONE:
                return AGAIN
            copy(place_of(c, rank, inline), src + start, part)
            publish(c, call, shape, 0)
        waited = await_all(c, call, shape, 0)
        if waited != DONE:
            return waited
        if first < last:
            for peer in range(first, last):
                store_word(
                    c, SOURCES + peer - first, src + start if peer == rank else place_of(c, peer, inline)
                )
            _reduce(c, what, dst + start, last - first, part)
        close_round(c)
        if start + part >= nbytes:
            return finish(c)
        if time_is_up(c):
            return AGAIN


@inlined
def _slice(part, size, rank, itemsize):
    """Where rank's slice of a chunk of `part` bytes begins."""
    count = part // itemsize
    each = -(-count // size)
    return min(count, rank * each) * itemsize


@kernel
def _two_shot(c, dst, src, nbytes, what, keep):
    """Rounds in pairs: each rank reduces its slice of a chunk, then ranks with `keep` gather all slices."""
    begin(c)
    rank = load_word(c, RANK)
    size = load_word(c, SIZE)
    call = load_word(what, CALL)
    itemsize = load_word(what, ITEMSIZE)
    chunk = _whole(load_word(c, SLOT), itemsize)
    while True:
        start = load_word(c, STEP) // 2 * chunk
        part = min(chunk, nbytes - start)
        low = _slice(part, size, rank, itemsize)
        high = _slice(part, size, rank + 1, itemsize)
        if load_word(c, STEP) % 2 == 0:
            if load_word(c, PHASE) == OPEN:
                if open_slot(c) != DONE:
                    return AGAIN
                mine = slot_of(c, rank)
                copy(mine, src + start, low)
                copy(mine + high, src + start + high, part - high)
                publish(c, call, nbytes, 0)
            waited = await_all(c, call, nbytes, 0)
            if waited != DONE:
                return waited
            for peer in range(size):
                store_word(c, SOURCES + peer, src + start + low if peer == rank else slot_of(c, peer) + low)
            close_round(c)
        if load_word(c, PHASE) == OPEN:
            if open_slot(c) != DONE:
                return AGAIN
            _reduce(c, what, slot_of(c, rank) + low, size, high - low)
            publish(c, call, nbytes, 0)
        if await_all(c, call, nbytes, 0) != DONE:
            return AGAIN
        if keep:
            for peer in range(size):
                begins = _slice(part, size, peer, itemsize)
                ends = _slice(part, size, peer + 1, itemsize)
                copy(dst + start + begins, slot_of(c, peer) + begins, ends - begins)
        close_round(c)
        if start + part >= nbytes:
            return finish(c)
        if time_is_up(c):
            return AGAIN


@kernel
def all_reduce(c, header, nbytes, what):
    """Reduce the array at `header` over all ranks, in place."""
    x = data_of(header)
    size = load_word(c, SIZE)
    if size <= 2 or nbytes <= load_word(c, ONE_SHOT):
        return _one_shot(c, x, x, nbytes, what, 0, size, nbytes)
    return _two_shot(c, x, x, nbytes, what, True)


@kernel
def reduce(c, out, header, nbytes, what, root):
    """Reduce over all ranks into `out` of the root (which may be the array at `header` itself)."""
    dst = data_of(out)
    src = data_of(header)
    size = load_word(c, SIZE)
    here = load_word(c, RANK) == root
    if size <= 2 or nbytes <= load_word(c, ONE_SHOT):
        return _one_shot(c, dst, src, nbytes, what, 0, size if here else 0, nbytes)
    return _two_shot(c, dst, src, nbytes, what, here)


@kernel
def scan(c, out, header, nbytes, what, exclusive):
    """Reduce ranks 0..rank (exclusive: 0..rank-1) into `out`; exclusive leaves rank 0's untouched."""
    last = load_word(c, RANK) + (0 if exclusive else 1)
    return _one_shot(c, data_of(out), data_of(header), nbytes, what, 0, last, nbytes)


@kernel
def reduce_scatter(c, out, blocks, sizes, what, shape):
    """Reduce block r of every rank into `out` of rank r.

    `blocks` and `sizes` are addresses of one word a rank: a block's address, its bytes. Sizes are the
    same on all ranks (`shape` sums them up).
    """
    begin(c)
    dst = data_of(out)
    rank = load_word(c, RANK)
    size = load_word(c, SIZE)
    call = load_word(what, CALL)
    piece = _whole(load_word(c, SLOT) // size, load_word(what, ITEMSIZE))
    longest = 0
    for peer in range(size):
        longest = max(longest, load_word(sizes, peer))
    while True:
        start = load_word(c, STEP) * piece
        if load_word(c, PHASE) == OPEN:
            if open_slot(c) != DONE:
                return AGAIN
            mine = slot_of(c, rank)
            for peer in range(size):
                part = min(piece, load_word(sizes, peer) - start)
                if peer != rank and part > 0:
                    copy(mine + peer * piece, load_word(blocks, peer) + start, part)
            publish(c, call, shape, 0)
        waited = await_all(c, call, shape, 0)
        if waited != DONE:
            return waited
        part = min(piece, load_word(sizes, rank) - start)
        if part > 0:
            for peer in range(size):
                own = load_word(blocks, rank) + start
                store_word(c, SOURCES + peer, own if peer == rank else slot_of(c, peer) + rank * piece)
            _reduce(c, what, dst + start, size, part)
        close_round(c)
        if start + piece >= longest:
            return finish(c)
        if time_is_up(c):
            return AGAIN


@kernel
def broadcast(c, header, nbytes, call, root):
    """Copy the root's array into everybody's."""
    begin(c)
    x = data_of(header)
    rank = load_word(c, RANK)
    inline = fits_inline(nbytes)
    chunk = load_word(c, SLOT)
    while True:
        start = load_word(c, STEP) * chunk
        part = min(chunk, nbytes - start)
        if load_word(c, PHASE) == OPEN:
            if rank == root:
                if open_slot(c) != DONE:
                    return AGAIN
                copy(place_of(c, rank, inline), x + start, part)
            publish(c, call, nbytes, 0)
        waited = await_met(c, call, nbytes, 0)
        if waited != DONE:
            return waited
        if rank != root:
            if await_peer(c, root) != DONE:
                return AGAIN
            copy(x + start, place_of(c, root, inline), part)
        close_round(c)
        if start + part >= nbytes:
            return finish(c)
        if time_is_up(c):
            return AGAIN


@kernel
def all_gather(c, outs, sizes, header, nbytes, call, balance):
    """Copy every rank's array into block r of everybody's `outs` (addresses and bytes, a word a rank)."""
    begin(c)
    x = data_of(header)
    rank = load_word(c, RANK)
    size = load_word(c, SIZE)
    chunk = load_word(c, SLOT)
    while True:
        start = load_word(c, STEP) * chunk
        if load_word(c, PHASE) == OPEN:
            if open_slot(c) != DONE:
                return AGAIN
            part = min(chunk, nbytes - start)
            if part > 0:
                copy(place_of(c, rank, fits_inline(nbytes)), x + start, part)
            publish(c, call, nbytes, balance)
        waited = await_met(c, call, nbytes, balance)
        if waited != DONE:
            return waited
        for turn in range(size):
            peer = (rank + turn) % size
            part = min(chunk, load_word(sizes, peer) - start)
            if part <= 0:
                continue
            if peer == rank:
                if load_word(outs, peer) != x:
                    copy(load_word(outs, peer) + start, x + start, part)
                continue
            if await_peer(c, peer) != DONE:
                return AGAIN
            inline = fits_inline(load_word(sizes, peer))
            copy(load_word(outs, peer) + start, place_of(c, peer, inline), part)
        close_round(c)
        if start + chunk >= load_word(c, LARGEST):
            return finish(c)
        if time_is_up(c):
            return AGAIN


@kernel
def exchange(c, sends, send_sizes, receives, receive_sizes, call, spread, largest, balance):
    """Copy block p of every rank's `sends` to block r of rank p's `receives`.

    gather, scatter and all_to_all, all ranks' sizes free. `spread` pieces share a slot: 1 when a rank
    sends to one rank only (then all pieces lie at the slot's start), else the number of ranks.
    """
    begin(c)
    rank = load_word(c, RANK)
    size = load_word(c, SIZE)
    piece = load_word(c, SLOT) // spread
    offset = piece if spread > 1 else 0
    while True:
        start = load_word(c, STEP) * piece
        if load_word(c, PHASE) == OPEN:
            if open_slot(c) != DONE:
                return AGAIN
            mine = slot_of(c, rank)
            for peer in range(size):
                part = min(piece, load_word(send_sizes, peer) - start)
                if peer != rank and part > 0:
                    copy(mine + peer * offset, load_word(sends, peer) + start, part)
            publish(c, call, largest, balance)
        waited = await_met(c, call, largest, balance)
        if waited != DONE:
            return waited
        for turn in range(size):
            peer = (rank + turn) % size
            part = min(piece, load_word(receive_sizes, peer) - start)
            if part <= 0:
                continue
            if peer == rank:
                copy(load_word(receives, peer) + start, load_word(sends, peer) + start, part)
                continue
            if await_peer(c, peer) != DONE:
                return AGAIN
            copy(load_word(receives, peer) + start, slot_of(c, peer) + rank * offset, part)
        close_round(c)
        if start + piece >= load_word(c, LARGEST):
            return finish(c)
        if time_is_up(c):
            return AGAIN
