"""Functions that wait for connections, and that move the pending messages of all peers; mail_kernels.py calls them.

A sweep goes over all peers, beginning with the peer in the word NEXT_PEER. If it finds a frame that is already in a
buffer, it handles this frame without a system call. Otherwise, one poll(2) returns the connections that are ready. A
function returns an *event* (p2p/pipe.py) when Python has to decide what to do next.
"""

from __future__ import annotations

from ...compiler.jit import inlined, kernel
from ...kernels.primitives import load_acquire, load_word, store_word
from ...kernels.sockets import READABLE, WRITABLE, wait_ready
from ...kernels.waiting import BUDGET, now
from ...p2p import pipe as events
from . import mail_frames as f
from .mail_frames import row_of

NOTHING, MOVED = 0, 1  # results that are not events of p2p/pipe.py; MOVED: bytes moved, but there is no event

# A kernel returns after this many I/O calls, so that Python can handle signals. These calls move at most 128 MiB, which
# takes 30 ms.
IO_CALLS = 512
_EVENTS_AT, _REVENTS_AT = 32, 48  # the bits at which the fields `events` and `revents` of a pollfd begin


@inlined
def _pollfd(m, index, fd, wishes):
    store_word(load_word(m, f.POLLFDS), index, fd | wishes << _EVENTS_AT)


@inlined
def _wait(m, count, attempts):
    """Poll the first `count` pollfds and the bell, an eventfd with which other threads wake this one.

    `attempts` is the number of polls since bytes last moved. During the first SPIN ns of a wait, a poll returns at
    once; after that, it sleeps for at most BUDGET ns. Returns the number of pollfds that are ready. Returns -1 if the
    bell has rung, or if Python has to check signals, the deadline and the peers.
    """
    time = now(m)
    if attempts == 0:
        store_word(m, f.SINCE, time)
    waited = time - load_word(m, f.SINCE)
    if waited > load_word(m, f.SPIN) + load_word(m, BUDGET):
        return -1
    milliseconds = 0 if waited < load_word(m, f.SPIN) else load_word(m, BUDGET) // 1_000_000
    _pollfd(m, count, load_word(m, f.BELL_FD), READABLE)
    ready = wait_ready(load_word(m, f.POLLFDS), count + 1, milliseconds)
    return ready if load_acquire(m + 8 * f.BELL) == 0 else -1


@inlined
def idle(m, fd, wishes, gone, attempts):
    """Wait for one connection in a blocking call, like `_wait`.

    `wishes` is what to wait for: READABLE, WRITABLE or both. `gone` is not 0 if the connection is lost. Returns False
    if the caller has to return to Python.
    """
    if load_acquire(m + 8 * f.BELL) != 0:
        return False
    if gone == 0 and fd >= 0:
        time = now(m)
        if attempts == 0:
            store_word(m, f.SINCE, time)
        if time - load_word(m, f.SINCE) < load_word(m, f.SPIN):
            return True
        _pollfd(m, 0, fd, wishes)
        return _wait(m, 1, attempts + 1) >= 0
    # The connection is gone: sleep until the bell rings, for at most BUDGET ns.
    store_word(m, f.SINCE, now(m) - load_word(m, f.SPIN))
    _wait(m, 0, 1)
    return False


# ---- one connection ------------------------------------------------------------------------------------------


@inlined
def _wants_frame(row, watch_all):
    """Return whether to read the next frame of a peer.

    This is so if a posted receive may match the peer's next message, if an ack or the rest of a message (REST) is
    expected, or if `watch_all` is set.
    """
    wanted = load_word(row, f.WATCHED) + load_word(row, f.EXPECTED) + load_word(row, f.UNACKED)
    return watch_all or wanted > 0


@inlined
def _read(row):
    """Read the next frame of a peer; return the event, MOVED or NOTHING."""
    frame = f.read_frame(row)
    if frame == 0:
        return NOTHING
    if frame < f.MESSAGE:
        return events.ACKED
    if frame != f.MESSAGE:
        return events.REST
    return _take_armed(row) if f.is_for_armed(row) else events.HEADER


@inlined
def _take_armed(row):
    return events.RECEIVED if f.take_armed(row) else MOVED


@kernel
def read_next(row):
    """Read the next frame of a peer, or continue the armed receive from that peer.

    An armed receive is a posted receive that compiled code completes alone (mail_frames.py). Returns the event, or
    events.NOTHING.
    """
    event = NOTHING
    if load_word(row, f.ARMED_NUMBER) != 0:
        event = events.RECEIVED if f.acknowledge_armed(row) else NOTHING
    elif load_word(row, f.IN_STAGE) == f.IDLE:
        event = _read(row)
    elif load_word(row, f.IN_STAGE) == f.ARMED_ARRIVING:
        event = _take_armed(row)
    return event if event > MOVED else events.NOTHING


@inlined
def _has_buffered_event(row, watch_all):
    """Return whether a received frame or payload gives an event without a system call."""
    if load_word(row, f.IN_STAGE) != f.IDLE:
        return load_word(row, f.IN_STAGE) == f.ARRIVING and load_word(row, f.IN_LEFT) == 0
    return f.has_frame(row) and _wants_frame(row, watch_all)


@inlined
def _wants_space(row):
    """Return whether a frame or an ack waits for space in the socket."""
    waits = f.is_entering(row) or load_word(row, f.OWED) > 0 or load_word(row, f.ARMED_NUMBER) != 0
    return waits and load_word(row, f.OUT_GONE) == 0


@kernel
def _list(m, peer, count, watch_all):
    """Add one peer's pollfd to the list if there is something to receive or send.

    Returns the new number of pollfds in the list.
    """
    row = row_of(m, peer)
    if f.fd_of(row) < 0:
        return count
    reads = load_word(row, f.IN_STAGE) != f.IDLE or _wants_frame(row, watch_all)
    reads &= load_word(row, f.IN_GONE) == 0
    wishes = (READABLE if reads else 0) | (WRITABLE if _wants_space(row) else 0)
    if wishes:
        _pollfd(m, count, f.fd_of(row), wishes)
        store_word(load_word(m, f.OWNERS), count, peer)
        count += 1
    return count


@kernel
def _serve_out(row):
    """Send as many bytes to a peer as its socket accepts.

    An ack is sent only between two frames. Returns the event, MOVED or NOTHING.
    """
    if f.is_entering(row):
        moved = f.push(row)
        if load_word(row, f.OUT_GONE) == 0:
            if not moved:
                return NOTHING
            return MOVED if f.is_entering(row) else events.ENTERED
    if load_word(row, f.ARMED_NUMBER) != 0 and f.acknowledge_armed(row):
        return events.RECEIVED
    return events.ACK_SPACE if load_word(row, f.OWED) > 0 else NOTHING


@kernel
def _serve_in(row, watch_all):
    """Receive from a peer as far as possible; return the event, MOVED or NOTHING."""
    if load_word(row, f.IN_STAGE) == f.IDLE:
        return _read(row) if _wants_frame(row, watch_all) else NOTHING
    if load_word(row, f.IN_STAGE) == f.ARMED_ARRIVING:
        return _take_armed(row)
    if load_word(row, f.IN_LEFT) > 0 and f.pull(row):
        if load_word(row, f.IN_LEFT) > 0:
            return MOVED
        store_word(row, f.IN_STAGE, f.IDLE)
        return events.ARRIVED
    return NOTHING


@inlined
def _serve(row, ready, watch_all):
    """Serve both directions of a ready connection.

    If sending gives an event, this function does not receive; the next poll finds the connection readable again.
    """
    sent = NOTHING
    if ready & ~READABLE and _wants_space(row):
        sent = _serve_out(row)
    if sent > MOVED:
        return sent
    received = _serve_in(row, watch_all) if ready & ~WRITABLE else NOTHING
    return max(sent, received)


@kernel
def _serve_buffered(row):
    """Handle the frame or payload that `_has_buffered_event` has found, and return its event."""
    if load_word(row, f.IN_STAGE) != f.IDLE:
        store_word(row, f.IN_STAGE, f.IDLE)
        return events.ARRIVED
    return _read(row)


# ---- all connections -----------------------------------------------------------------------------------------


@inlined
def _return_event(m, peer, event):
    """Return the number by which `advance` reports an event of a peer.

    The next sweep begins with the peer after this one.
    """
    store_word(m, f.NEXT_PEER, peer + 1)
    return peer * events.EVENTS + event


@kernel
def _serve_ready(m, count, watch_all):
    """Serve the ready connections.

    Returns what `_return_event` returns for the first event, or MOVED or NOTHING.
    """
    result = NOTHING
    for index in range(count):
        ready = load_word(load_word(m, f.POLLFDS), index) >> _REVENTS_AT & 0xFFFF
        if ready == 0:
            continue
        peer = load_word(load_word(m, f.OWNERS), index)
        event = _serve(row_of(m, peer), ready, watch_all)
        if event > MOVED:
            return _return_event(m, peer, event)
        if event == MOVED:
            result = MOVED
    return result


@kernel
def sweep(m, watch_all, wait):
    """Move all messages until there is an event.

    Returns what `_return_event` returns for the event, or events.NOTHING.
    """
    size = load_word(m, f.SIZE)
    attempts = 0
    for _ in range(IO_CALLS):
        count = 0
        buffered = -1
        for step in range(size):
            peer = (load_word(m, f.NEXT_PEER) + step) % size
            if _has_buffered_event(row_of(m, peer), watch_all):
                buffered = peer
                break
            count = _list(m, peer, count, watch_all)
        if buffered < 0:
            ready = 0 if wait else wait_ready(load_word(m, f.POLLFDS), count, 0)
            while ready == 0 and wait:
                ready = _wait(m, count, attempts)
                attempts += 1
            if ready <= 0:
                return events.NOTHING
        elif count > 0:
            # A frame of the peer `buffered` can be handled at once. Serve the ready connections of the peers listed
            # before it first.
            wait_ready(load_word(m, f.POLLFDS), count, 0)
        event = _serve_ready(m, count, watch_all)
        if event > MOVED:
            return event
        if buffered >= 0:
            event = _serve_buffered(row_of(m, buffered))
            if event > MOVED:
                return _return_event(m, buffered, event)
        attempts = 0 if event == MOVED else attempts
    return events.NOTHING
