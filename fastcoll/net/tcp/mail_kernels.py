"""The compiled functions by which Python moves messages over TCP connections. They run without the GIL.

`m` is the address of a rank's table (mail_frames.py). Its word BUSY is the lock of the connections. `send` and
`receive` carry out one blocking call; if the engine (p2p/engine.py) has to continue the call, they return with BUSY
held. `post_send` and `post_receive` begin a posted operation. `begin`, `rest`, `accept` and `acknowledge` start
transfers that `advance` then continues, for all peers at once. All return within 0.1 s.

Deferred acks. If two ranks alternate (each receives, then sends to the same peer), a message follows each ack TAKEN
within a microsecond. After many alternations in a row, a blocking receive *defers* its ack, and the next send to that
peer sends the ack ahead of its own frame: one system call and one packet instead of two. Any other operation on
messages sends the deferred ack first. If this rank starts no operation, a thread, the ack flusher (`flush_deferred`),
sends the ack within 2 ms. After that, a rank defers an ack only after many more alternations, so that the 2 ms cost
less than those alternations have gained. (The thread naps for 1 ms; with 0.1 ms, its wake-ups cost more than the acks.)

A blocking send waits for its ack. While ranks alternate, no message arrives before that ack. If a message does arrive
first, the peer has posted a send, and the engine takes over: the engine can store messages that no receive matches yet.
"""

from __future__ import annotations

from ...compiler.jit import entry, inlined, kernel
from ...core.status import AGAIN, DONE, LATER, NEEDS_FLUSHER, OTHER, REFUSED, WORKED
from ...failpoints import number_of
from ...kernels.failing import reached
from ...kernels.primitives import (
    load_acquire,
    load_word,
    store_release,
    store_word,
    swap_if_equal,
    this_thread,
    word_at,
)
from ...kernels.pyobjects import DATA, Index, PyObject, integer, object_at
from ...kernels.sockets import READABLE, WRITABLE
from ...kernels.waiting import nap, now, seize_unless
from ...p2p.pipe import ACKED, ANY, ARMED, BOTH, EVENTS, GO, NOT_MINE, NOTHING, RECEIVED, TAKEN
from . import mail_frames as f
from .mail_frames import EAGER, row_of
from .mail_sweep import IO_CALLS, idle, read_next, sweep

_SEND, _SENT = number_of("tcp.send.enter"), number_of("tcp.send.after_done")
_RECEIVE, _RECEIVED = number_of("tcp.recv.enter"), number_of("tcp.recv.after_done")
_POSTED_SEND, _POSTED_RECEIVE = number_of("tcp.isend.after_post"), number_of("tcp.irecv.after_post")
_SOON = 20_000  # maximum ns from a receive to the next send for the two to count as an alternation
# How many alternations are needed before an ack is deferred. The number grows each time that a deferred ack is sent
# alone, not ahead of a message.
_FEWEST_ALTERNATIONS, _MOST_ALTERNATIONS, _GROWTH = 64, 1024, 4
_IDLE_NAPS = 20  # the flusher ends after so many naps of 1 ms during which no ack was deferred


@inlined
def _let_go(m, status):
    store_release(m + 8 * f.BUSY, 0)
    return status


# ---- deferred acks ---------------------------------------------------------------------------------


@inlined
def _alternations_needed(row):
    return max(load_word(row, f.ALTERNATIONS_NEEDED), _FEWEST_ALTERNATIONS)


@inlined
def _alternates(row):
    """Whether this rank and a peer have alternated often enough to defer acks."""
    return load_word(row, f.ALTERNATIONS) >= _alternations_needed(row)


@kernel
def _note_alternation(m, row, peer):
    """Update the number of alternations when a blocking send to `peer` begins.

    The send completes an alternation if it follows a receive from this peer at once.
    """
    alternations = 0
    if load_word(m, f.LAST_TAKEN) == peer + 1:
        soon = now(m) - load_word(m, f.TAKEN_AT) < _SOON
        alternations = load_word(row, f.ALTERNATIONS)
        alternations = (
            min(alternations + 1, _GROWTH * _alternations_needed(row)) if soon else alternations // 2
        )
    store_word(row, f.ALTERNATIONS, alternations)
    store_word(m, f.LAST_TAKEN, 0)


@kernel
def _defer(m, row, peer):
    """Defer the ack of the message that was read last, which is from `peer`.

    Returns False, and does not defer it, if no send to this peer is expected soon or no ack flusher runs.
    """
    if not _alternates(row) or load_word(m, f.FLUSHER_RUNS) == 0:
        return False
    store_word(m, f.DEFERRED, peer + 1)
    store_word(m, f.DEFERRALS, load_word(m, f.DEFERRALS) + 1)
    return True


@kernel
def _send_deferred(m):
    """Send the deferred ack if there is one.

    Returns False if the ack is not completely sent; call again then.
    """
    deferred = load_word(m, f.DEFERRED)
    if deferred == 0:
        return True
    row = row_of(m, deferred - 1)
    store_word(row, f.ALTERNATIONS_NEEDED, min(_GROWTH * _alternations_needed(row), _MOST_ALTERNATIONS))
    store_word(row, f.ALTERNATIONS, 0)
    nbytes, kind = load_word(row, f.IN_NBYTES), load_word(row, f.IN_KIND)
    if not f.send_ack(row, load_word(row, f.IN_NUMBER), TAKEN, nbytes, kind):
        return False
    store_word(m, f.DEFERRED, 0)
    return True


@entry
def flush(mail: Index) -> int:
    """Send the deferred ack if there is one.

    The caller holds BUSY. Returns AGAIN if the ack is not completely sent, else DONE.
    """
    return DONE if _send_deferred(integer(mail)) else AGAIN


@entry
def flush_deferred(mail: Index, backoff: Index) -> int:
    """Send acks that stay deferred.

    Returns when no ack was deferred for 20 ms, or STOP is set. `backoff` is the address of the back-off table
    (kernels/waiting.py) for the thread's naps.
    """
    m, own = integer(mail), integer(backoff)
    store_release(m + 8 * f.FLUSHER_RUNS, 1)
    seen = -1
    naps = 0
    while load_acquire(m + 8 * f.STOP) == 0:
        nap(own)
        count = load_acquire(m + 8 * f.DEFERRALS)
        naps = naps + 1 if count == seen else 0
        seen = count
        if naps == 0 or (naps <= _IDLE_NAPS and load_acquire(m + 8 * f.DEFERRED) == 0):
            continue
        if swap_if_equal(m + 8 * f.BUSY, 0, this_thread()):
            over = _send_deferred(m) and naps > _IDLE_NAPS
            if over:
                store_word(m, f.FLUSHER_RUNS, 0)
            store_release(m + 8 * f.BUSY, 0)
            if over:
                return DONE
    store_release(m + 8 * f.FLUSHER_RUNS, 0)
    return DONE


# ---- blocking calls -----------------------------------------------------------------------------------


@entry
def send(mail: Index, dst: Index, tensor: PyObject, size: Index, word: Index) -> int:
    """Send a contiguous array of `size` bytes, and wait for its ack.

    Returns DONE, AGAIN, WORKED, OTHER, REFUSED or LATER; or NEEDS_FLUSHER: the send is done, and the caller should
    start the ack flusher. Must not be called while another message to this peer is being sent or waits for its ack.
    """
    m, peer = integer(mail), integer(dst)
    # BEHIND is set if the last holder of BUSY has left an unfinished message, which the engine continues.
    if not seize_unless(m + 8 * f.BUSY, m + 8 * f.BEHIND):
        return LATER
    row = row_of(m, peer)
    if f.fd_of(row) < 0:
        return _let_go(m, LATER)
    if load_word(m, f.DEFERRED) != peer + 1 and not _send_deferred(m):
        return _let_go(m, LATER)
    status = _send(m, row, peer, word_at(object_at(tensor) + DATA), integer(size), integer(word))
    if status != DONE:
        return status
    # NEEDS_FLUSHER: acks could be deferred, but the ack flusher is not running.
    return _let_go(m, NEEDS_FLUSHER if load_word(m, f.FLUSHER_RUNS) == 0 and _alternates(row) else DONE)


@kernel
def _send(m, row, peer, data, nbytes, kind):
    reached(_SEND)
    _note_alternation(m, row, peer)
    attached = min(nbytes, EAGER)
    with_ack = load_word(m, f.DEFERRED) == peer + 1
    f.begin_message(row, data, nbytes, kind, attached, with_ack)
    if with_ack:
        store_word(m, f.DEFERRED, 0)
    store_word(row, f.SENDING, 1)
    attempts = 0
    io_calls = 0
    while io_calls < IO_CALLS:
        entering = f.is_entering(row)
        if entering:
            if f.push(row):
                attempts = 0
                io_calls += 1
                continue
        else:
            frame = f.read_frame(row)
            if frame >= f.MESSAGE:
                return OTHER
            if frame != 0:
                asked = frame == GO and load_word(row, f.SENDING) == 1 and attached < nbytes
                if load_word(row, f.ACK_NUMBER) != load_word(row, f.SENT) or (frame == GO and not asked):
                    store_word(row, f.IN_GONE, f.GARBLED)
                elif asked:
                    f.begin_rest(row, data, nbytes, load_word(row, f.SENT), attached)
                    store_word(row, f.SENDING, 2)
                else:
                    store_word(row, f.SENDING, 0)
                    reached(_SENT)
                    return DONE if frame == TAKEN else REFUSED
                continue
        wishes, gone = (WRITABLE, f.OUT_GONE) if entering else (READABLE, f.IN_GONE)
        if not idle(m, f.fd_of(row), wishes, load_word(row, gone), attempts):
            return AGAIN
        attempts += 1
    return WORKED


@entry
def receive(mail: Index, src: Index, tensor: PyObject, size: Index, word: Index) -> int:
    """Receive the next message into an array of `size` bytes, and acknowledge it.

    The source is a rank, or ANY. Returns -1 - sender when done, else AGAIN, WORKED, OTHER or LATER. If a receive from
    ANY has found a sender but is not done, the word SOURCE holds the sender plus 1. Must not be called while another
    message of the source is arriving.
    """
    m, peer = integer(mail), integer(src)
    if not seize_unless(m + 8 * f.BUSY, m + 8 * f.BEHIND):
        return LATER
    if peer == load_word(m, f.RANK) or not _send_deferred(m):
        return _let_go(m, LATER)
    if peer == ANY:
        event = sweep(m, True, True)
        if event == NOTHING:
            return AGAIN
        peer = event // EVENTS
        store_word(m, f.SOURCE, peer + 1)
    data = word_at(object_at(tensor) + DATA)
    status = _receive(m, row_of(m, peer), peer, data, integer(size), integer(word))
    if status != DONE:
        return status
    store_word(m, f.SOURCE, 0)
    store_word(m, f.LAST_TAKEN, peer + 1)
    store_word(m, f.TAKEN_AT, now(m))
    return _let_go(m, -1 - peer)


@inlined
def _begin_receive(row, data, nbytes, kind):
    """Begin to receive the message whose header was read, if it matches.

    Returns whether the message matches.
    """
    attached = load_word(row, f.IN_ATTACHED)
    if load_word(row, f.IN_KIND) != kind or load_word(row, f.IN_NBYTES) != nbytes:
        return False
    if attached != min(nbytes, EAGER):
        return False
    f.accept_payload(row, data, attached)
    store_word(row, f.TAKING, load_word(row, f.IN_NUMBER))
    store_word(row, f.ASKING, 1 if attached < nbytes else 0)
    return True


@kernel
def _receive(m, row, peer, data, nbytes, kind):
    reached(_RECEIVE)
    attempts = 0
    io_calls = 0
    while io_calls < IO_CALLS:
        events = READABLE
        if load_word(row, f.ASKING) != 0:
            if f.send_ack(row, load_word(row, f.TAKING), GO, nbytes, kind):
                store_word(row, f.ASKING, 0)
            else:
                events |= WRITABLE
        stage = load_word(row, f.IN_STAGE)
        if stage in (f.IDLE, f.AWAITING_REST):
            header = f.read_frame(row)
            if header != 0 and header < f.MESSAGE:  # an ack, but this rank waits for none
                store_word(row, f.IN_GONE, f.GARBLED)
            elif header != 0 and stage == f.IDLE:
                if header != f.MESSAGE or not _begin_receive(row, data, nbytes, kind):
                    store_word(m, f.SOURCE, 0)
                    return OTHER
                continue
            elif header != 0:
                # This should be the requested REST. If another message arrives first, the engine takes over.
                left, number = nbytes - EAGER, load_word(row, f.TAKING)
                wanted = load_word(row, f.REST_NUMBER) == number and load_word(row, f.REST_NBYTES) == left
                if header != f.REST or not wanted:
                    return OTHER
                f.accept_payload(row, data + EAGER, left)
                store_word(row, f.IN_STAGE, f.REST_ARRIVING)
                continue
        elif stage == f.ANSWERING:
            number = load_word(row, f.TAKING)
            if (nbytes <= EAGER and _defer(m, row, peer)) or f.send_ack(row, number, TAKEN, nbytes, kind):
                store_word(row, f.IN_STAGE, f.IDLE)
                reached(_RECEIVED)
                return DONE
            events = WRITABLE
        elif load_word(row, f.IN_LEFT) == 0:
            is_complete = stage == f.REST_ARRIVING or nbytes <= EAGER
            store_word(row, f.IN_STAGE, f.ANSWERING if is_complete else f.AWAITING_REST)
            continue
        elif f.pull(row):
            attempts = 0
            io_calls += 1
            continue
        if not idle(m, f.fd_of(row), events, load_word(row, f.IN_GONE), attempts):
            return AGAIN
        attempts += 1
    return WORKED


# ---- posted operations --------------------------------------------------------------------------------


@entry
def post_send(mail: Index, dst: Index, tensor: PyObject, size: Index, word: Index) -> int:
    """Begin to send a small message of `size` bytes.

    Returns twice the message's number, plus 1 if the event ENTERED is yet to come, and keeps BUSY. Returns -LATER if
    nothing has begun. Must not be called while another operation for this peer is queued.
    """
    m, nbytes = integer(mail), integer(size)
    if nbytes > f.STAGED or not swap_if_equal(m + 8 * f.BUSY, 0, this_thread()):
        return -LATER
    row = row_of(m, integer(dst))
    if f.fd_of(row) < 0 or f.is_entering(row) or not _send_deferred(m):
        return _let_go(m, -LATER)
    f.begin_message(row, word_at(object_at(tensor) + DATA), nbytes, integer(word), nbytes, False)
    f.push(row)
    store_word(m, f.BEHIND, 1)
    reached(_POSTED_SEND)
    return load_word(row, f.SENT) << 1 | f.is_entering(row)


@entry
def post_receive(mail: Index, src: Index, tensor: PyObject, size: Index, word: Index) -> int:
    """Have `advance` receive the next message of a peer into a small array.

    Returns ARMED and keeps BUSY. Returns LATER, with nothing done, if this is not possible, for example because an
    earlier receive or a stored message may come first.
    """
    m, nbytes = integer(mail), integer(size)
    if nbytes > f.STAGED or not swap_if_equal(m + 8 * f.BUSY, 0, this_thread()):
        return LATER
    row = row_of(m, integer(src))
    free = load_word(m, f.STORED) == 0 and load_word(row, f.WATCHED) == 0
    if not free or load_word(row, f.IN_STAGE) != f.IDLE or not _send_deferred(m):
        return _let_go(m, LATER)
    store_word(row, f.ARMED_KIND, integer(word))
    store_word(row, f.ARMED_TO, word_at(object_at(tensor) + DATA))
    store_word(row, f.ARMED_NBYTES, nbytes)
    store_word(row, f.WATCHED, 1)
    store_word(m, f.BEHIND, 1)
    reached(_POSTED_RECEIVE)
    return ARMED


@entry
def complete(mail: Index, handled: Index, peer: Index, number: Index) -> int:
    """Take BUSY and `advance`, beginning with `peer`.

    Completes a receive from this peer that `post_receive` has armed and, if `number` is not 0, a send to it that
    `post_send` has begun. Expects the peer's message first, then the ack of this rank's message, as the function of the
    same name in shm/ring_kernels.py does. Returns the event, or NOT_MINE if another thread holds BUSY or has driven the
    connections since `handled` was read.
    """
    m = integer(mail)
    if not swap_if_equal(m + 8 * f.BUSY, 0, this_thread()):
        return NOT_MINE
    if load_word(m, f.RETURNED) != integer(handled) or not _send_deferred(m):
        return _let_go(m, NOT_MINE)
    row = row_of(m, integer(peer))
    last = BOTH if integer(number) else RECEIVED
    event = 0
    since = now(m)
    while event < last and not f.is_entering(row) and now(m) - since < load_word(m, f.SPIN):
        following = read_next(row)
        if following == ACKED and event == RECEIVED:
            event = BOTH
        elif following != NOTHING and event == 0:
            event = following
            if event != RECEIVED:
                break
        elif following != NOTHING:  # a message; `advance` reads it again
            break
    event = event + integer(peer) * EVENTS if event else sweep(m, False, True)
    return _return_event(m, event)


@inlined
def _return_event(m, event):
    if event != NOTHING:
        store_word(m, f.EVENT, event)
        store_word(m, f.RETURNED, load_word(m, f.RETURNED) + 1)
    return event


# ---- steps of the engine ------------------------------------------------------------------------------


@entry
def begin(mail: Index, peer: Index, address: Index, nbytes: Index, kind: Index, attached: Index) -> int:
    """Begin to send a message with its first `attached` bytes; `advance` continues to send it."""
    row = row_of(integer(mail), integer(peer))
    f.begin_message(row, integer(address), integer(nbytes), integer(kind), integer(attached), False)
    f.push(row)
    return DONE


@entry
def rest(mail: Index, peer: Index, address: Index, nbytes: Index, number: Index, attached: Index) -> int:
    """Begin to send all but the first `attached` bytes of a message, as its REST.

    `advance` continues to send it.
    """
    row = row_of(integer(mail), integer(peer))
    f.begin_rest(row, integer(address), integer(nbytes), integer(number), integer(attached))
    return DONE


@entry
def accept(mail: Index, peer: Index, address: Index, nbytes: Index) -> int:
    """Begin to receive the bytes behind the header that was read last, at `address`.

    If `address` is 0, the bytes are discarded.
    """
    f.accept_payload(row_of(integer(mail), integer(peer)), integer(address), integer(nbytes))
    return DONE


@entry
def acknowledge(mail: Index, peer: Index, number: Index, decision: Index, nbytes: Index, kind: Index) -> int:
    """Acknowledge a message of `peer`.

    `nbytes` and `kind` are those of the receiver's array. Returns DONE, or AGAIN if the ack is not completely sent.
    """
    row = row_of(integer(mail), integer(peer))
    sent = f.send_ack(row, integer(number), integer(decision), integer(nbytes), integer(kind))
    return DONE if sent else AGAIN


@entry
def advance(mail: Index, handled: Index, wait: Index) -> int:
    """Move all pending messages until one needs a decision of the engine.

    Returns the event (see p2p/pipe.py).
    """
    m = integer(mail)
    if load_word(m, f.RETURNED) > integer(handled):
        return load_word(m, f.EVENT)
    return _return_event(m, sweep(m, False, integer(wait) != 0))
