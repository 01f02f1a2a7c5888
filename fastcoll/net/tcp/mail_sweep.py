"""Waiting for connections, and moving all messages under way at once, for mail_kernels.py.

A sweep goes over all peers, from the one whose turn it is: what has been received already is decided at once, for
the rest one poll(2) says which connections are ready.
"""

from __future__ import annotations

from ...kernels.jit import inlined, kernel
from ...kernels.primitives import load_acquire, load_word, store_word
from ...kernels.sockets import READABLE, WRITABLE, wait_ready
from ...kernels.waiting import BUDGET, now
from ...p2p.pipe import ACK_SPACE, ACKED, ARRIVED, ENTERED, EVENTS, HEADER, TAKEN
from ...p2p.pipe import NOTHING as NO_EVENT
from ...p2p.pipe import REST as REST_HERE
from .mail_frames import (
    MESSAGE,
    has_ack,
    has_answer_ahead,
    has_header,
    is_entering,
    pull,
    push,
    read_ack,
    read_header,
)
from .mail_words import (
    BELL,
    BELL_FD,
    CHANNELS,
    EXPECTED,
    IDLE,
    IN_FD,
    IN_GONE,
    IN_LEFT,
    IN_STAGE,
    OUT_FD,
    OUT_GONE,
    OWED,
    OWNERS,
    POLLFDS,
    ROW_WORDS,
    SINCE,
    SIZE,
    SPIN,
    TURN,
    UNACKED,
    WATCHED,
)

NOTHING, MOVED = 0, 1  # and the events of p2p/pipe.py, of one peer

PIECES_A_CALL = 512  # at most 128 MiB, 30 ms, between two looks at signals
_EVENTS_AT, _REVENTS_AT = 32, 48  # bits of a pollfd


@inlined
def row_of(m, peer):
    return load_word(m, CHANNELS) + peer * (8 * ROW_WORDS)


@inlined
def _pollfd(m, index, fd, events):
    store_word(load_word(m, POLLFDS), index, fd | events << _EVENTS_AT)


@inlined
def _wait(m, count, turn):
    """The idle moment number `turn` since something moved, with `count` pollfds listed: how many are ready,
    -1 when it is time to look at other things. The bell becomes the last pollfd."""
    time = now(m)
    if turn == 0:
        store_word(m, SINCE, time)
    waited = time - load_word(m, SINCE)
    if waited > load_word(m, SPIN) + load_word(m, BUDGET):
        return -1
    milliseconds = 0 if waited < load_word(m, SPIN) else load_word(m, BUDGET) // 1_000_000
    _pollfd(m, count, load_word(m, BELL_FD), READABLE)
    ready = wait_ready(load_word(m, POLLFDS), count + 1, milliseconds)
    return ready if load_acquire(m + 8 * BELL) == 0 else -1


@inlined
def idle(m, fd, events, gone, turn, other):
    """As `_wait`, for a blocking call on one connection; False: go back to Python.

    `other`: a connection on which something readable matters too, or -1.
    """
    if load_acquire(m + 8 * BELL) != 0:
        return False
    if gone == 0 and fd >= 0:
        time = now(m)
        if turn == 0:
            store_word(m, SINCE, time)
        if time - load_word(m, SINCE) < load_word(m, SPIN):
            return True
        _pollfd(m, 0, fd, events)
        if other >= 0:
            _pollfd(m, 1, other, READABLE)
        return _wait(m, 2 if other >= 0 else 1, turn + 1) >= 0
    # Nothing will come: sleep until the bell rings.
    store_word(m, SINCE, now(m) - load_word(m, SPIN))
    _wait(m, 0, 1)
    return False


@inlined
def _reads(row, watch_all):
    """Whether the next header of a peer is of interest."""
    return watch_all or load_word(row, WATCHED) + load_word(row, EXPECTED) > 0


@inlined
def _header(row):
    header = read_header(row)
    if header == 0:
        return NOTHING
    if header == TAKEN:
        return ACKED
    return HEADER if header == MESSAGE else REST_HERE


@inlined
def _answer_may_come(row):
    """Whether the next frame, which is not here yet, may be an answer."""
    return load_word(row, UNACKED) > 0 and not has_header(row)


@inlined
def _acks_here(row):
    return load_word(row, UNACKED) > 0 and has_ack(row)


@inlined
def _is_decided_here(row, watch_all):
    """Whether there is something to decide without any system call."""
    if load_word(row, IN_STAGE) != IDLE:
        return _acks_here(row) or load_word(row, IN_LEFT) == 0
    if load_word(row, UNACKED) > 0 and has_answer_ahead(row):
        return True
    return _acks_here(row) or (has_header(row) and _reads(row, watch_all))


@kernel
def _serve_buffered(row):
    """What `_is_decided_here` has found."""
    if _acks_here(row) and read_ack(row):
        return ACKED
    if load_word(row, IN_STAGE) != IDLE:
        store_word(row, IN_STAGE, IDLE)
        return ARRIVED
    return _header(row)


@inlined
def _wishes_out(row):
    """The events of the outgoing connection that are of interest."""
    if load_word(row, OUT_GONE) != 0 or load_word(row, OUT_FD) < 0:
        return 0
    return (WRITABLE if is_entering(row) else 0) | (READABLE if load_word(row, UNACKED) > 0 else 0)


@inlined
def _wishes_in(row, watch_all):
    if load_word(row, IN_GONE) != 0 or load_word(row, IN_FD) < 0:
        return 0
    reads = load_word(row, IN_STAGE) != IDLE or _reads(row, watch_all) or _answer_may_come(row)
    return (READABLE if reads else 0) | (WRITABLE if load_word(row, OWED) > 0 else 0)


@kernel
def _list(m, row, peer, count, watch_all):
    """List what is to be polled of one peer; the new count."""
    for side in range(2):
        wishes = _wishes_in(row, watch_all) if side else _wishes_out(row)
        if wishes:
            _pollfd(m, count, load_word(row, IN_FD if side else OUT_FD), wishes)
            store_word(load_word(m, OWNERS), count, 2 * peer + side)
            count += 1
    return count


@kernel
def _serve_out(row, events):
    """Move what can move on the outgoing connection; what concerns Python, or MOVED."""
    if events & ~READABLE and is_entering(row) and push(row):
        return MOVED if is_entering(row) else ENTERED
    if events & ~WRITABLE and load_word(row, UNACKED) > 0 and read_ack(row):
        return ACKED
    return NOTHING


@kernel
def _serve_in(row, events, watch_all):
    if events & WRITABLE and load_word(row, OWED) > 0:
        return ACK_SPACE
    if load_word(row, IN_STAGE) == IDLE:
        if _reads(row, watch_all):
            return _header(row)
        return ACKED if _answer_may_come(row) and read_header(row) == TAKEN else NOTHING
    if load_word(row, IN_LEFT) > 0 and pull(row):
        if load_word(row, IN_LEFT) > 0:
            return MOVED
        store_word(row, IN_STAGE, IDLE)
        return ARRIVED
    return NOTHING


@kernel
def sweep(m, watch_all, wait):
    size = load_word(m, SIZE)
    turn = 0
    for _ in range(PIECES_A_CALL):
        count = 0
        here = size
        for step in range(size):
            peer = (load_word(m, TURN) + step) % size
            if _is_decided_here(row_of(m, peer), watch_all):
                here = step
                break
            count = _list(m, row_of(m, peer), peer, count, watch_all)
        if here == size:
            ready = 0 if wait else wait_ready(load_word(m, POLLFDS), count, 0)
            while ready == 0 and wait:
                ready = _wait(m, count, turn)
                turn += 1
            if ready <= 0:
                return NO_EVENT
        elif count > 0:
            # Those whose turn it is before that one go first, if they can.
            wait_ready(load_word(m, POLLFDS), count, 0)
        event = _serve_ready(m, count, watch_all)
        if event > MOVED:
            return event
        if here < size:
            peer = (load_word(m, TURN) + here) % size
            event = _serve_buffered(row_of(m, peer))
            if event > MOVED:
                store_word(m, TURN, peer + 1)
                return peer * EVENTS + event
        turn = 0 if event == MOVED else turn
    return NO_EVENT


@kernel
def _serve_ready(m, count, watch_all):
    """Serve the connections that are ready: the first event, as `advance` returns it, MOVED or NOTHING."""
    result = NOTHING
    for index in range(count):
        events = load_word(load_word(m, POLLFDS), index) >> _REVENTS_AT & 0xFFFF
        if events == 0:
            continue
        owner = load_word(load_word(m, OWNERS), index)
        peer = owner // 2
        row = row_of(m, peer)
        event = _serve_in(row, events, watch_all) if owner & 1 else _serve_out(row, events)
        if event > MOVED:
            store_word(m, TURN, peer + 1)
            return peer * EVENTS + event
        if event == MOVED:
            result = MOVED
    return result
