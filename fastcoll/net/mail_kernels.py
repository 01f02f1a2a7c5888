"""What Python calls to move messages over connections: compiled functions that run without the GIL.

`m` is the address of a mail's table (mail_words.py). `send` and `receive` carry one blocking call from begin to
end, and hold BUSY until they are DONE; their first argument is the table, or the table | RESUMED. `begin`, `rest`,
`accept` and `acknowledge` set things going that `advance` then carries on for all peers at once. All come back within
0.1 s, and can be called again with the same arguments.
"""

from __future__ import annotations

from ..kernels.atomics import load_acquire, store_release, swap_if_equal, this_thread
from ..kernels.jit import entry, inlined, kernel
from ..kernels.pointers import load_word, store_word
from ..kernels.pyobjects import DATA, Index, PyObject, integer, object_at, word_at
from ..kernels.sockets import READABLE, WRITABLE, wait_ready
from ..kernels.waiting import BUDGET, now
from ..messages.channels import (
    ACK_SPACE,
    ACKED,
    AGAIN,
    ANY,
    ARRIVED,
    DONE,
    ENTERED,
    GO,
    HEADER,
    LATER,
    OTHER,
    REFUSED,
    TAKEN,
    WORKED,
)
from ..messages.channels import REST as REST_HERE
from .mail_frames import (
    EAGER,
    GARBLED,
    MESSAGE,
    REST,
    accept_payload,
    answer,
    begin_message,
    begin_rest,
    has_ack,
    has_header,
    is_entering,
    pull,
    push,
    read_ack,
    read_header,
)
from .mail_words import (
    ACK_NUMBER,
    ACK_VERDICT,
    ANSWERING,
    ASKING,
    AWAITING_REST,
    BELL,
    BELL_FD,
    BUSY,
    CHANNELS,
    EXPECTED,
    IDLE,
    IN_ATTACHED,
    IN_FD,
    IN_GONE,
    IN_KIND,
    IN_LEFT,
    IN_NBYTES,
    IN_NUMBER,
    IN_STAGE,
    OUT_FD,
    OUT_GONE,
    OWED,
    OWNERS,
    POLLFDS,
    REST_ARRIVING,
    REST_NBYTES,
    REST_NUMBER,
    ROW_WORDS,
    SENDING,
    SENT,
    SINCE,
    SIZE,
    SOURCE,
    SPIN,
    TAKING,
    TURN,
    UNACKED,
    WATCHED,
)

RESUMED = 1

# What `advance` returns, besides AGAIN_ALL: peer * EVENTS + event.
NOTHING, MOVED = 0, 1
EVENTS = 16
AGAIN_ALL = -1

_PIECES_A_CALL = 512  # at most 128 MiB, 30 ms, between two looks at signals
_EVENTS_AT, _REVENTS_AT = 32, 48  # bits of a pollfd


@inlined
def _row(m, peer):
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
def _idle(m, fd, events, gone, turn):
    """As `_wait`, for a blocking call on one connection; False: go back to Python."""
    if load_acquire(m + 8 * BELL) != 0:
        return False
    if gone == 0 and fd >= 0:
        time = now(m)
        if turn == 0:
            store_word(m, SINCE, time)
        if time - load_word(m, SINCE) < load_word(m, SPIN):
            return True
        _pollfd(m, 0, fd, events)
        return _wait(m, 1, turn + 1) >= 0
    # Nothing will come: sleep until the bell rings.
    store_word(m, SINCE, now(m) - load_word(m, SPIN))
    _wait(m, 0, 1)
    return False


@inlined
def _take(h):
    """Take the connections for a blocking call, unless it has them already."""
    return h & RESUMED != 0 or swap_if_equal((h & ~RESUMED) + 8 * BUSY, 0, this_thread())


@inlined
def _let_go(m, status):
    store_release(m + 8 * BUSY, 0)
    return status


# ---- blocking calls -----------------------------------------------------------------------------------


@entry
def send(handle: Index, dst: Index, tensor: PyObject, size: Index, word: Index) -> int:
    """Send a contiguous array of `size` bytes, and wait until it is taken: DONE, AGAIN, WORKED, REFUSED or LATER.

    Only while no other message to this peer is entering or unacked.
    """
    h = integer(handle)
    if not _take(h):
        return LATER
    m = h & ~RESUMED
    status = _send(m, _row(m, integer(dst)), word_at(object_at(tensor) + DATA), integer(size), integer(word))
    return _let_go(m, DONE) if status == DONE else status


@kernel
def _send(m, row, data, nbytes, kind):
    attached = min(nbytes, EAGER)
    if load_word(row, SENDING) == 0:
        begin_message(row, data, nbytes, kind, attached)
        store_word(row, SENDING, 1)
    turn = 0
    pieces = 0
    while pieces < _PIECES_A_CALL:
        entering = is_entering(row)
        if entering:
            if push(row):
                turn = 0
                pieces += 1
                continue
        elif read_ack(row):
            verdict = load_word(row, ACK_VERDICT)
            asked = verdict == GO and load_word(row, SENDING) == 1 and attached < nbytes
            if load_word(row, ACK_NUMBER) != load_word(row, SENT) or (verdict == GO and not asked):
                store_word(row, OUT_GONE, GARBLED)
            elif asked:
                begin_rest(row, data, nbytes, load_word(row, SENT), attached)
                store_word(row, SENDING, 2)
                continue
            else:
                store_word(row, SENDING, 0)
                return DONE if verdict == TAKEN else REFUSED
        events = WRITABLE if entering else READABLE
        if not _idle(m, load_word(row, OUT_FD), events, load_word(row, OUT_GONE), turn):
            return AGAIN
        turn += 1
    return WORKED


@entry
def receive(handle: Index, src: Index, tensor: PyObject, size: Index, word: Index) -> int:
    """Receive the next message of a rank (or of ANY) into a contiguous array of `size` bytes, and answer it.

    -1 - rank when done, AGAIN, WORKED, OTHER or LATER. Only while no other message of that rank is
    arriving. Meanwhile word SOURCE holds the rank that was chosen, plus 1.
    """
    h, source = integer(handle), integer(src)
    if not _take(h):
        return LATER
    m = h & ~RESUMED
    if source == ANY and load_word(m, SOURCE) == 0:
        event = _advance(m, True)
        if event == AGAIN_ALL:
            return AGAIN
        store_word(m, SOURCE, event // EVENTS + 1)
    peer = load_word(m, SOURCE) - 1 if source == ANY else source
    status = _receive(m, _row(m, peer), word_at(object_at(tensor) + DATA), integer(size), integer(word))
    if status != DONE:
        return status
    store_word(m, SOURCE, 0)
    return _let_go(m, -1 - peer)


@inlined
def _begin_receive(row, data, nbytes, kind):
    """Let the message whose header was read arrive, if it is the one that is wanted."""
    attached = load_word(row, IN_ATTACHED)
    if load_word(row, IN_KIND) != kind or load_word(row, IN_NBYTES) != nbytes:
        return False
    if attached != min(nbytes, EAGER):
        return False
    accept_payload(row, data, attached)
    store_word(row, TAKING, load_word(row, IN_NUMBER))
    store_word(row, ASKING, 1 if attached < nbytes else 0)
    return True


@inlined
def _begin_rest(row, data, nbytes):
    """Let the rest that was asked for arrive, if it is that."""
    if load_word(row, REST_NUMBER) != load_word(row, TAKING) or load_word(row, REST_NBYTES) != nbytes - EAGER:
        return False
    accept_payload(row, data + EAGER, nbytes - EAGER)
    store_word(row, IN_STAGE, REST_ARRIVING)
    return True


@kernel
def _receive(m, row, data, nbytes, kind):
    turn = 0
    pieces = 0
    while pieces < _PIECES_A_CALL:
        events = READABLE
        if load_word(row, ASKING) != 0:
            if answer(row, load_word(row, TAKING), GO, nbytes, kind):
                store_word(row, ASKING, 0)
            else:
                events |= WRITABLE
        stage = load_word(row, IN_STAGE)
        if stage == IDLE:
            header = read_header(row)
            if header != 0:
                if header != MESSAGE or not _begin_receive(row, data, nbytes, kind):
                    store_word(m, SOURCE, 0)
                    return OTHER
                continue
        elif stage == AWAITING_REST:
            header = read_header(row)
            if header != 0:
                # Other messages may come before it.
                if header != REST or not _begin_rest(row, data, nbytes):
                    return OTHER
                continue
        elif stage == ANSWERING:
            if answer(row, load_word(row, TAKING), TAKEN, nbytes, kind):
                store_word(row, IN_STAGE, IDLE)
                return DONE
            events = WRITABLE
        elif load_word(row, IN_LEFT) == 0:
            whole = stage == REST_ARRIVING or nbytes <= EAGER
            store_word(row, IN_STAGE, ANSWERING if whole else AWAITING_REST)
            continue
        elif pull(row):
            turn = 0
            pieces += 1
            continue
        if not _idle(m, load_word(row, IN_FD), events, load_word(row, IN_GONE), turn):
            return AGAIN
        turn += 1
    return WORKED


# ---- the courier's steps ------------------------------------------------------------------------------


@entry
def begin(mail: Index, peer: Index, address: Index, nbytes: Index, kind: Index, attached: Index) -> int:
    """Make a message the one that enters, with its first `attached` bytes; `advance` moves it."""
    row = _row(integer(mail), integer(peer))
    begin_message(row, integer(address), integer(nbytes), integer(kind), integer(attached))
    return DONE


@entry
def rest(mail: Index, peer: Index, address: Index, nbytes: Index, number: Index, attached: Index) -> int:
    """Make all but the first `attached` bytes of a message what enters."""
    row = _row(integer(mail), integer(peer))
    begin_rest(row, integer(address), integer(nbytes), integer(number), integer(attached))
    return DONE


@entry
def accept(mail: Index, peer: Index, address: Index, nbytes: Index) -> int:
    """Let the bytes behind the header that `advance` has read arrive at `address` (0: drop them)."""
    accept_payload(_row(integer(mail), integer(peer)), integer(address), integer(nbytes))
    return DONE


@entry
def acknowledge(mail: Index, peer: Index, number: Index, verdict: Index, nbytes: Index, kind: Index) -> int:
    """Answer a message of `peer`, with what the receive asked for; AGAIN: not all of it could be sent."""
    row = _row(integer(mail), integer(peer))
    sent = answer(row, integer(number), integer(verdict), integer(nbytes), integer(kind))
    return DONE if sent else AGAIN


@inlined
def _reads(row, watch_all):
    """Whether the next header of a peer is of interest."""
    return watch_all or load_word(row, WATCHED) + load_word(row, EXPECTED) > 0


@inlined
def _header(row):
    header = read_header(row)
    if header == 0:
        return NOTHING
    return HEADER if header == MESSAGE else REST_HERE


@inlined
def _acks_here(row):
    return load_word(row, UNACKED) > 0 and has_ack(row)


@inlined
def _is_decided_here(row, watch_all):
    """Whether there is something to decide without any system call."""
    if load_word(row, IN_STAGE) != IDLE:
        return _acks_here(row) or load_word(row, IN_LEFT) == 0
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
    reads = load_word(row, IN_STAGE) != IDLE or _reads(row, watch_all)
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
        return _header(row) if _reads(row, watch_all) else NOTHING
    if load_word(row, IN_LEFT) > 0 and pull(row):
        if load_word(row, IN_LEFT) > 0:
            return MOVED
        store_word(row, IN_STAGE, IDLE)
        return ARRIVED
    return NOTHING


@entry
def advance(mail: Index) -> int:
    """Move all messages under way until one of them needs a decision: peer * EVENTS + event.

    AGAIN_ALL: nothing to decide, but the bell rang or it is time to look at signals and deadlines.
    """
    return _advance(integer(mail), False)


@kernel
def _advance(m, watch_all):
    size = load_word(m, SIZE)
    turn = 0
    for _ in range(_PIECES_A_CALL):
        count = 0
        here = size
        for step in range(size):
            peer = (load_word(m, TURN) + step) % size
            if _is_decided_here(_row(m, peer), watch_all):
                here = step
                break
            count = _list(m, _row(m, peer), peer, count, watch_all)
        if here == size:
            ready = 0
            while ready == 0:
                ready = _wait(m, count, turn)
                turn += 1
            if ready < 0:
                return AGAIN_ALL
        elif count > 0:
            # Those whose turn it is before that one go first, if they can.
            wait_ready(load_word(m, POLLFDS), count, 0)
        event = _serve_ready(m, count, watch_all)
        if event > MOVED:
            return event
        if here < size:
            peer = (load_word(m, TURN) + here) % size
            event = _serve_buffered(_row(m, peer))
            if event > MOVED:
                store_word(m, TURN, peer + 1)
                return peer * EVENTS + event
        turn = 0 if event == MOVED else turn
    return AGAIN_ALL


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
        row = _row(m, peer)
        event = _serve_in(row, events, watch_all) if owner & 1 else _serve_out(row, events)
        if event > MOVED:
            store_word(m, TURN, peer + 1)
            return peer * EVENTS + event
        if event == MOVED:
            result = MOVED
    return result
