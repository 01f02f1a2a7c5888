"""Running a plan: one phase after the other, its rows at the same time, over nonblocking sockets.

A sweep goes over the rows of the phase and moves what can be moved without waiting; rows of one connection and
direction go one after the other. Received bytes are reduced as they land, a PIECE at a time, while they are in the
cache. Large rows are divided among the streams to the peer, in the same way on both sides.
"""

from __future__ import annotations

from ...core.status import DONE
from ...kernels.copy import copy, move
from ...kernels.jit import inlined, kernel
from ...kernels.primitives import call_reducer, load_word, store_word
from ...kernels.sockets import READABLE, WRITABLE, receive_some, send_some
from . import words as w
from .meet import GOES_ON, gone
from .plans.table import (
    BUFFER,
    BUFFER2,
    COLUMNS,
    COPY,
    FOLD,
    KIND,
    NBYTES,
    OFFSET,
    OFFSET2,
    PEER,
    PHASE,
    REDUCE,
    SEND,
    SOURCE,
)
from .words import CODE, FDS, ITEMSIZE, REDUCER, STREAMS

PIECE = 256 << 10  # bytes that one call of send or recv moves at most: half of a core's second-level cache
DIVIDED = 128 << 10  # rows from so many bytes on are divided among the streams; plans have up to 256 KiB


@inlined
def row_at(d, row):
    """The address of a row of the plan."""
    return load_word(d, w.TABLE) + 8 * COLUMNS * row


@inlined
def _place(c, row, buffer, offset):
    return load_word(load_word(c, w.BUFFERS), load_word(row, buffer)) + load_word(row, offset)


@inlined
def _is_local(kind):
    return kind in (FOLD, SOURCE, COPY)


@inlined
def _bound(d, nbytes, stream, streams):
    """Where the part of a row for a stream begins: at an item, if the row consists of items."""
    if nbytes < DIVIDED:
        return 0 if stream == 0 else nbytes
    unit = load_word(d, ITEMSIZE)
    if unit == 0 or nbytes % unit:
        unit = 1
    return nbytes // unit * stream // streams * unit


# ---- what needs no peer -------------------------------------------------------------------------------


@kernel
def _fold(c, d, row):
    """Reduce the sources that follow a FOLD row, in their order."""
    at = row_at(d, row)
    count = load_word(at, PEER)
    for k in range(count):
        store_word(load_word(c, w.SOURCES), k, _place(c, row_at(d, row + 1 + k), BUFFER, OFFSET))
    items = load_word(at, NBYTES) // load_word(d, ITEMSIZE)
    destination = _place(c, at, BUFFER, OFFSET)
    call_reducer(
        load_word(d, REDUCER), load_word(d, CODE), destination, load_word(c, w.SOURCES), count, items
    )


@kernel
def begin_phase(c, d, row):
    """Find the phase that begins at a row, do its local rows, and forget the progress of the last one."""
    end = row
    while end < load_word(d, w.ROWS) and load_word(row_at(d, end), PHASE) == load_word(row_at(d, row), PHASE):
        at = row_at(d, end)
        if load_word(at, KIND) == FOLD:
            _fold(c, d, end)
        elif load_word(at, KIND) == COPY:
            copy(_place(c, at, BUFFER, OFFSET), _place(c, at, BUFFER2, OFFSET2), load_word(at, NBYTES))
        end += 1
    for word in range(2 * (end - row) * load_word(c, STREAMS)):
        store_word(load_word(c, w.PARTS), word, 0)
    store_word(c, w.PHASE, row)
    store_word(c, w.PHASE_END, end)


# ---- what moves over sockets --------------------------------------------------------------------------


@kernel
def _receive_and_reduce(c, d, row, part, slot, fd, address, nbytes):
    """Receive into the staging area, and reduce whole items into the array: bytes received, or an error."""
    item = load_word(d, ITEMSIZE)
    done, reduced = load_word(part, 0), load_word(part, 1)
    staging = load_word(c, w.STAGING) + slot * 2 * PIECE
    rest = done - reduced  # of an item that was cut
    moved = receive_some(fd, staging + rest, min(nbytes - done, PIECE))
    if moved <= 0:
        return moved
    whole = (rest + moved) // item * item
    target = address + reduced
    left = load_word(row, OFFSET2)
    store_word(load_word(c, w.SOURCES), left, target)
    store_word(load_word(c, w.SOURCES), 1 - left, staging)
    call_reducer(load_word(d, REDUCER), load_word(d, CODE), target, load_word(c, w.SOURCES), 2, whole // item)
    move(staging, staging + whole, rest + moved - whole)
    store_word(part, 1, reduced + whole)
    return moved


@inlined
def _transfer(c, d, row, part, slot, fd, start, nbytes):
    """Move some bytes of a part of a row: how many, or an error."""
    address = _place(c, row, BUFFER, OFFSET) + start
    kind, done = load_word(row, KIND), load_word(part, 0)
    if kind == SEND:
        return send_some(fd, address + done, min(nbytes - done, PIECE))
    if kind == REDUCE:
        return _receive_and_reduce(c, d, row, part, slot, fd, address, nbytes)
    return receive_some(fd, address + done, min(nbytes - done, PIECE))


@inlined
def _connection(c, row, stream):
    """The number of a row's connection and direction."""
    direction = 0 if load_word(row, KIND) == SEND else 1
    return (2 * load_word(row, PEER) + direction) * load_word(c, STREAMS) + stream


@inlined
def _may_move(c, row, stream):
    """Whether no earlier row has the connection in this sweep; it has it from now on."""
    busy = load_word(c, w.BUSY) + 8 * _connection(c, row, stream)
    if load_word(busy, 0) == load_word(c, w.SWEEP):
        return False
    store_word(busy, 0, load_word(c, w.SWEEP))
    return True


@kernel
def sweep(c, d):
    """One sweep: DONE when all rows of the phase are complete, GOES_ON, GOES_ON - 1 (nothing moved) or GONE."""
    first, streams = load_word(c, w.PHASE), load_word(c, STREAMS)
    store_word(c, w.SWEEP, load_word(c, w.SWEEP) + 1)
    any_moved, any_left, slot = False, False, 0
    for number in range(first, load_word(c, w.PHASE_END)):
        row = row_at(d, number)
        if _is_local(load_word(row, KIND)):
            continue
        peer, total = load_word(row, PEER), load_word(row, NBYTES)
        for stream in range(streams):
            start = _bound(d, total, stream, streams)
            nbytes = _bound(d, total, stream + 1, streams) - start
            part = load_word(c, w.PARTS) + 16 * ((number - first) * streams + stream)
            if load_word(part, 0) == nbytes:
                continue
            any_left = True
            if not _may_move(c, row, stream):
                continue
            fd = load_word(load_word(c, FDS), peer * streams + stream)
            moved = _transfer(c, d, row, part, slot + stream, fd, start, nbytes)
            if moved < 0:
                return gone(c, peer, moved)
            if moved > 0:
                any_moved = True
                store_word(part, 0, load_word(part, 0) + moved)
        if load_word(row, KIND) == REDUCE:
            slot += streams
    if not any_left:
        return DONE
    return GOES_ON if any_moved else GOES_ON - 1


@kernel
def list_waiting(c, d):
    """Write the pollfds of the connections that the phase waits for: how many."""
    first, streams, count = load_word(c, w.PHASE), load_word(c, STREAMS), 0
    store_word(c, w.SWEEP, load_word(c, w.SWEEP) + 1)
    for number in range(first, load_word(c, w.PHASE_END)):
        row = row_at(d, number)
        if _is_local(load_word(row, KIND)):
            continue
        peer, total = load_word(row, PEER), load_word(row, NBYTES)
        for stream in range(streams):
            nbytes = _bound(d, total, stream + 1, streams) - _bound(d, total, stream, streams)
            part = load_word(c, w.PARTS) + 16 * ((number - first) * streams + stream)
            if load_word(part, 0) == nbytes or not _may_move(c, row, stream):
                continue
            fd = load_word(load_word(c, FDS), peer * streams + stream)
            event = WRITABLE if load_word(row, KIND) == SEND else READABLE
            store_word(load_word(c, w.POLLFDS), count, fd | event << 32)
            count += 1
    store_word(c, w.WAITING, count)
    return count
