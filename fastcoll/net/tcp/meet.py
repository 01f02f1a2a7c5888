"""How every collective begins: each rank tells each other what it calls, and attaches what is small.

    word            a header
    NUMBER          how many calls the group has had
    HEAD_CALL       fingerprint of the call (core/signature.py)
    HEAD_SHAPE      bytes that this rank contributes
    HEAD_BALANCE    0 over all ranks if what they give is what the others expect (core/signature.py)
    HEAD_ATTACHED   bytes that follow this header

Every rank sees every header, and compares all of them in the same way: either all ranks go on, or all raise,
with nothing under way, so that the group stays usable. A rank's next header comes only after it has read
those of this call, and the bytes of a plan only after all of them agree; hence what is received beyond the end of a
frame is the beginning of the peer's next one, and is kept.
"""

from __future__ import annotations

from ...core.signature import UNEVEN
from ...core.status import DONE, GARBLED, GONE, MISMATCH
from ...kernels.copy import copy, move
from ...kernels.jit import inlined, kernel
from ...kernels.primitives import load_word, store_word
from ...kernels.sockets import READABLE, WRITABLE, receive_some, send_some
from . import engine_layout as w
from .plans import plan as t
from .plans.shape import HEADER_BYTES

GOES_ON = -1  # neither finished nor failed


@inlined
def gone(c, peer, error):
    """Note that the connection to a peer is over."""
    store_word(c, w.PEER, peer)
    store_word(c, w.ERROR, error)
    return GONE


@inlined
def _outgoing(c, peer):
    return load_word(c, w.OUTBOX) + peer * load_word(c, w.FRAME)


@inlined
def _header(c, rank):
    return load_word(c, w.INBOX) + rank * load_word(c, w.FRAME)


@inlined
def _socket(c, peer):
    return load_word(load_word(c, w.FDS), peer * load_word(c, w.STREAMS))


@kernel
def write_headers(c, d):
    """Write this rank's header for each peer, and what is attached to it."""
    size, rank = load_word(c, w.SIZE), load_word(c, w.RANK)
    for peer in range(size):
        frame = _outgoing(c, peer)
        store_word(frame, w.NUMBER, load_word(c, w.CALLS))
        store_word(frame, w.HEAD_CALL, load_word(d, w.CALL))
        store_word(frame, w.HEAD_SHAPE, load_word(d, w.SHAPE))
        store_word(frame, w.HEAD_ATTACHED, 0)
        store_word(frame, w.HEAD_BALANCE, load_word(d, w.BALANCE))
        store_word(load_word(c, w.SENT), peer, 0)
    for row in range(load_word(d, w.PAYLOADS)):
        at = load_word(d, w.TABLE) + 8 * t.COLUMNS * row
        frame = _outgoing(c, load_word(at, t.PEER))
        source = load_word(load_word(c, w.BUFFERS), load_word(at, t.BUFFER)) + load_word(at, t.OFFSET)
        store_word(frame, w.HEAD_ATTACHED, load_word(at, t.NBYTES))
        copy(frame + HEADER_BYTES, source, load_word(at, t.NBYTES))
    copy(_header(c, rank), _outgoing(c, rank), HEADER_BYTES)


@inlined
def _fits(c, peer):
    """Whether what a peer's header announces has room."""
    attached = load_word(_header(c, peer), w.HEAD_ATTACHED)
    return attached >= 0 and attached <= load_word(c, w.FRAME) - HEADER_BYTES


@inlined
def _length_to_send(c, peer):
    return HEADER_BYTES + load_word(_outgoing(c, peer), w.HEAD_ATTACHED)


@inlined
def _length_to_come(c, peer):
    """How long the frame of a peer is, as far as is known; a length that cannot be is for compare() to find."""
    if load_word(load_word(c, w.HAVE), peer) < HEADER_BYTES or not _fits(c, peer):
        return HEADER_BYTES
    return HEADER_BYTES + load_word(_header(c, peer), w.HEAD_ATTACHED)


@kernel
def exchange(c, d):
    """One sweep over all peers: DONE when every frame is sent and received, GOES_ON or GOES_ON - 1 (nothing moved)."""
    rank, size = load_word(c, w.RANK), load_word(c, w.SIZE)
    any_moved, any_left = False, False
    for step in range(1, size):
        peer = (rank + step) % size
        whole, sent = _length_to_send(c, peer), load_word(load_word(c, w.SENT), peer)
        if sent < whole:
            moved = send_some(_socket(c, peer), _outgoing(c, peer) + sent, whole - sent)
            if moved < 0:
                return gone(c, peer, moved)
            store_word(load_word(c, w.SENT), peer, sent + moved)
            any_moved |= moved > 0
            any_left |= sent + moved < whole
    for step in range(1, size):
        peer = (rank + size - step) % size
        whole, have = _length_to_come(c, peer), load_word(load_word(c, w.HAVE), peer)
        if have < whole:
            # In one go with what should be attached to it.
            end = max(whole, HEADER_BYTES + load_word(load_word(d, w.ATTACHED), peer))
            moved = receive_some(_socket(c, peer), _header(c, peer) + have, end - have)
            if moved < 0:
                return gone(c, peer, moved)
            store_word(load_word(c, w.HAVE), peer, have + moved)
            any_moved |= moved > 0
            any_left |= have + moved < _length_to_come(c, peer)
    if not any_left:
        return DONE
    return GOES_ON if any_moved else GOES_ON - 1


@kernel
def calls_match(first, stride, size):
    """Whether the headers of all ranks, `stride` bytes from one to the next, are of calls that match."""
    call, shape, balance = load_word(first, w.HEAD_CALL), load_word(first, w.HEAD_SHAPE), 0
    for rank in range(size):
        head = first + stride * rank
        if load_word(head, w.HEAD_CALL) != call:
            return False
        if load_word(head, w.HEAD_SHAPE) != shape and call & UNEVEN == 0:
            return False
        balance += load_word(head, w.HEAD_BALANCE)
    return balance == 0


@kernel
def compare(c, d):
    """Compare the headers of all ranks: DONE, MISMATCH or GARBLED."""
    size = load_word(c, w.SIZE)
    for rank in range(size):
        if load_word(_header(c, rank), w.NUMBER) != load_word(c, w.CALLS) or not _fits(c, rank):
            store_word(c, w.PEER, rank)
            return GARBLED
    if not calls_match(load_word(c, w.INBOX), load_word(c, w.FRAME), size):
        return MISMATCH
    for rank in range(size):
        attached = load_word(_header(c, rank), w.HEAD_ATTACHED)
        if rank != load_word(c, w.RANK) and attached != load_word(load_word(d, w.ATTACHED), rank):
            store_word(c, w.PEER, rank)
            return GARBLED
    return DONE


@kernel
def forget_frames(c):
    """The call was made: all frames are used up, to the last byte."""
    for peer in range(load_word(c, w.SIZE)):
        store_word(load_word(c, w.HAVE), peer, 0)


@kernel
def keep_rest(c):
    """The calls did not match: move what was received beyond their frames to where the next ones begin."""
    for peer in range(load_word(c, w.SIZE)):
        if peer != load_word(c, w.RANK):
            whole = _length_to_come(c, peer)
            rest = max(0, load_word(load_word(c, w.HAVE), peer) - whole)
            store_word(load_word(c, w.HAVE), peer, rest)
            move(_header(c, peer), _header(c, peer) + whole, rest)


@kernel
def list_missing(c):
    """Write the pollfds of the connections that the meeting waits for."""
    count = 0
    for peer in range(load_word(c, w.SIZE)):
        writes = load_word(load_word(c, w.SENT), peer) < _length_to_send(c, peer)
        reads = load_word(load_word(c, w.HAVE), peer) < _length_to_come(c, peer)
        events = (WRITABLE if writes else 0) | (READABLE if reads else 0)
        if peer != load_word(c, w.RANK) and events:
            store_word(load_word(c, w.POLLFDS), count, _socket(c, peer) | events << 32)
            count += 1
    store_word(c, w.WAITING, count)
