"""How every collective begins: each rank tells each other what it calls, and attaches what is small.

    word            a header, of the same length in every call of the group
    NUMBER          how many calls the group has had
    HEAD_CALL       fingerprint of the call (core/signature.py)
    HEAD_SHAPE      bytes that this rank contributes
    HEAD_ATTACHED   bytes that follow this header
    HEAD_BALANCE    0 over all ranks if what they give is what the others expect (core/signature.py)
    SIZES           bytes given to rank 0, 1, ..., then bytes expected of rank 0, 1, ..., in groups in which
                    everybody sends to everybody: with many ranks that would be many times the rest

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
from . import words as w
from .plans.table import BUFFER, COLUMNS, NBYTES, OFFSET, PEER
from .words import (
    ATTACHED,
    CALL,
    ERROR,
    FDS,
    FRAME,
    HAVE,
    HEAD_ATTACHED,
    HEAD_BALANCE,
    HEAD_CALL,
    HEAD_SHAPE,
    HEADER,
    INBOX,
    NUMBER,
    OUTBOX,
    PAYLOADS,
    RANK,
    SENT,
    SHAPE,
    SIZE,
    SIZES,
    STREAMS,
    TABLE,
)

GOES_ON = -1  # neither finished nor failed
_MOVED = 1
_LEFT = 2


@inlined
def gone(c, peer, error):
    """Note that the connection to a peer is over."""
    store_word(c, w.PEER, peer)
    store_word(c, ERROR, error)
    return GONE


@inlined
def _tells_sizes(c):
    """Whether headers hold the sizes for each rank."""
    return load_word(c, HEADER) > 8 * SIZES


@kernel
def write_headers(c, d):
    """Write this rank's header for each peer, and what is attached to it."""
    size, rank = load_word(c, SIZE), load_word(c, RANK)
    for peer in range(size):
        frame = load_word(c, OUTBOX) + peer * load_word(c, FRAME)
        store_word(frame, NUMBER, load_word(c, w.CALLS))
        store_word(frame, HEAD_CALL, load_word(d, CALL))
        store_word(frame, HEAD_SHAPE, load_word(d, SHAPE))
        store_word(frame, HEAD_ATTACHED, 0)
        store_word(frame, HEAD_BALANCE, load_word(d, w.BALANCE))
        if _tells_sizes(c):
            copy(frame + 8 * SIZES, load_word(d, w.GIVES), 16 * size)
        store_word(load_word(c, SENT), peer, 0)
    for row in range(load_word(d, PAYLOADS)):
        at = load_word(d, TABLE) + 8 * COLUMNS * row
        frame = load_word(c, OUTBOX) + load_word(at, PEER) * load_word(c, FRAME)
        source = load_word(load_word(c, w.BUFFERS), load_word(at, BUFFER)) + load_word(at, OFFSET)
        store_word(frame, HEAD_ATTACHED, load_word(at, NBYTES))
        copy(frame + load_word(c, HEADER), source, load_word(at, NBYTES))
    own = load_word(c, INBOX) + rank * load_word(c, FRAME)
    copy(own, load_word(c, OUTBOX) + rank * load_word(c, FRAME), load_word(c, HEADER))


@inlined
def _socket(c, peer):
    return load_word(load_word(c, FDS), peer * load_word(c, STREAMS))


@inlined
def _send_frame(c, peer):
    """Send what is left of the frame to a peer: flags _MOVED and _LEFT, or a negative error."""
    frame = load_word(c, OUTBOX) + peer * load_word(c, FRAME)
    whole = load_word(c, HEADER) + load_word(frame, HEAD_ATTACHED)
    sent = load_word(load_word(c, SENT), peer)
    if sent == whole:
        return 0
    moved = send_some(_socket(c, peer), frame + sent, whole - sent)
    if moved < 0:
        return moved
    store_word(load_word(c, SENT), peer, sent + moved)
    return (_MOVED if moved else 0) | (_LEFT if sent + moved < whole else 0)


@inlined
def _fits(c, peer):
    """Whether what a peer's header announces has room."""
    frame = load_word(c, INBOX) + peer * load_word(c, FRAME)
    attached = load_word(frame, HEAD_ATTACHED)
    return attached >= 0 and attached <= load_word(c, FRAME) - load_word(c, HEADER)


@inlined
def _frame_length(c, peer):
    """How long the frame of a peer is, as far as is known; a length that cannot be is for compare() to find."""
    header = load_word(c, HEADER)
    if load_word(load_word(c, HAVE), peer) < header or not _fits(c, peer):
        return header
    frame = load_word(c, INBOX) + peer * load_word(c, FRAME)
    return header + load_word(frame, HEAD_ATTACHED)


@inlined
def _receive_frame(c, d, peer):
    """Receive more of the frame of a peer: flags _MOVED and _LEFT, or a negative error."""
    have = load_word(load_word(c, HAVE), peer)
    whole = _frame_length(c, peer)
    if have >= whole:
        return 0
    # In one go with what should be attached to it.
    hoped = load_word(c, HEADER) + load_word(load_word(d, ATTACHED), peer)
    end = max(whole, hoped)
    frame = load_word(c, INBOX) + peer * load_word(c, FRAME)
    moved = receive_some(_socket(c, peer), frame + have, end - have)
    if moved < 0:
        return moved
    have += moved
    store_word(load_word(c, HAVE), peer, have)
    return (_MOVED if moved else 0) | (_LEFT if have < _frame_length(c, peer) else 0)


@kernel
def exchange(c, d):
    """One sweep over all peers: DONE when every frame is sent and received, GOES_ON or GOES_ON - 1 (nothing moved)."""
    rank, size = load_word(c, RANK), load_word(c, SIZE)
    seen = 0
    for step in range(1, size):
        peer = (rank + step) % size
        flags = _send_frame(c, peer)
        if flags < 0:
            return gone(c, peer, flags)
        seen |= flags
    for step in range(1, size):
        peer = (rank + size - step) % size
        flags = _receive_frame(c, d, peer)
        if flags < 0:
            return gone(c, peer, flags)
        seen |= flags
    if seen & _LEFT == 0:
        return DONE
    return GOES_ON if seen & _MOVED else GOES_ON - 1


@kernel
def compare(c, d):
    """Compare the headers of all ranks: DONE, MISMATCH or GARBLED."""
    size = load_word(c, SIZE)
    result, balance = DONE, 0
    for rank in range(size):
        head = _header(c, rank)
        if load_word(head, NUMBER) != load_word(c, w.CALLS) or not _fits(c, rank):
            store_word(c, w.PEER, rank)
            return GARBLED
        if not _agrees(c, d, rank):
            result = MISMATCH
        balance += load_word(head, HEAD_BALANCE)
    if result == MISMATCH or balance != 0:
        return MISMATCH
    for rank in range(size):
        attached = load_word(_header(c, rank), HEAD_ATTACHED)
        if rank != load_word(c, RANK) and attached != load_word(load_word(d, ATTACHED), rank):
            store_word(c, w.PEER, rank)
            return GARBLED
    return result


@inlined
def _header(c, rank):
    return load_word(c, INBOX) + rank * load_word(c, FRAME)


@inlined
def _agrees(c, d, rank):
    """Whether a rank makes the same call, and gives each other what that expects."""
    size = load_word(c, SIZE)
    head = _header(c, rank)
    if load_word(head, HEAD_CALL) != load_word(d, CALL):
        return False
    if load_word(d, CALL) & UNEVEN == 0 and load_word(head, HEAD_SHAPE) != load_word(d, SHAPE):
        return False
    for other in range(size if _tells_sizes(c) else 0):
        if load_word(head, SIZES + other) != load_word(_header(c, other), SIZES + size + rank):
            return False
    return True


@kernel
def forget_frames(c):
    """The call was made: all frames are used up, to the last byte."""
    for peer in range(load_word(c, SIZE)):
        store_word(load_word(c, HAVE), peer, 0)


@kernel
def keep_rest(c):
    """The calls did not match: move what was received beyond their frames to where the next ones begin."""
    for peer in range(load_word(c, SIZE)):
        if peer != load_word(c, RANK):
            whole = _frame_length(c, peer)
            rest = max(0, load_word(load_word(c, HAVE), peer) - whole)
            store_word(load_word(c, HAVE), peer, rest)
            move(_header(c, peer), _header(c, peer) + whole, rest)


@kernel
def list_missing(c):
    """Write the pollfds of the connections that the meeting waits for: how many."""
    count = 0
    for peer in range(load_word(c, SIZE)):
        frame = load_word(c, OUTBOX) + peer * load_word(c, FRAME)
        events = 0
        if load_word(load_word(c, SENT), peer) < load_word(c, HEADER) + load_word(frame, HEAD_ATTACHED):
            events |= WRITABLE
        if load_word(load_word(c, HAVE), peer) < _frame_length(c, peer):
            events |= READABLE
        if peer != load_word(c, RANK) and events:
            store_word(load_word(c, w.POLLFDS), count, _socket(c, peer) | events << 32)
            count += 1
    store_word(c, w.WAITING, count)
    return count
