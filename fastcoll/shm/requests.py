"""Posted messages: entries for Python's isend, irecv and wait, and C functions for compiled callers (callers/).

A *request* is a posted message; it has a *record* in the mailbox (rings.py). These functions complete requests without
the engine (p2p/engine.py); a thread that waits for one request makes progress on all of them. They handle the common
case only: the engine has no operation, the peer is known, and its next message matches a posted receive. They leave
everything else to the engine, which takes over the pending records when it next takes the rings.

BUSY, BEHIND and PENDING are words of the mailbox. BUSY is the lock of the rings.

Invariants:

- Only the thread that holds BUSY writes PENDING, or a record that is in use and has not ended.
- A blocking call must not overtake requests. It reads PENDING after it has taken BUSY, under which alone PENDING
  changes. While PENDING is not 0, the call posts a request as well, or the engine runs it.
- Only Python writes BEHIND. A thread that posts through the engine may set it at any time. `_take` fails while it is
  set.
- When a request has ended, its record belongs to the thread whose compare-and-swap of NUMBER succeeds. A wait stores
  the negative number, from which a second wait sees that the first one has finished; the engine, if it takes the
  request over, stores 0. Only the thread that succeeded releases the array, so the array is released once. Python's
  requests are collected and claimed with the GIL.
- A thread that reuses a record stores 0 to NUMBER and then writes STATE, PEER and OWNER, all with release. A thread
  that waits for the record's previous request reads PEER, with acquire, and then checks NUMBER. If NUMBER is still that
  of the previous request, the PEER that was read also belongs to that request.
- No number is used twice. From the lowest bits up, it has the record's index, a counter, and bits that differ between
  mailboxes.
"""

from __future__ import annotations

from ..compiler import llvm
from ..compiler.jit import entry, inlined, instruction, kernel, locked_entry
from ..core.operands import ANY_TAG, LARGEST_TAG
from ..core.status import DONE, LATER
from ..kernels.failing import reached
from ..kernels.primitives import (
    load_acquire,
    load_word,
    pause,
    store_release,
    store_word,
    swap_if_equal,
    this_thread,
    ticks,
)
from ..kernels.pyobjects import (
    WRITEABLE,
    Index,
    PyObject,
    add_reference,
    drop_reference,
    integer,
    object_at,
    release_gil,
    take_gil,
)
from ..kernels.waiting import BUDGET, IDLE, moved, nap, now, rest, seize_unless
from ..p2p.pipe import ANY, FINISHED, QUIET, STILL, STUCK, TAKEN
from ..p2p.transfers import DTYPE_BITS
from . import rings as r
from .autotune import CALLS, DIRECT, LARGE, ROW, SMALLEST, conclude
from .ring_kernels import (
    POSTED_RECEIVE,
    POSTED_SEND,
    channel_of,
    choose_algorithm,
    fastest_known,
    has_requests,
    is_kind,
    is_peer,
    is_ready,
    is_shut,
    let_go,
    message_of,
    run_receive,
    run_send,
)
from .validate import data_of

BESIDE = 1 << 60
"""`send_call` and `receive_call` return BESIDE + number for a request that they leave to Python; number < BESIDE."""

COUNT_AT, MAILBOX_AT = 5, 48  # positions of bit fields in a number
_FIRST = 1 << COUNT_AT

_IDLE, _MOVED, _STUCK = 0, 1, 2  # results of `_progress`
_TRIES = 2000  # tries to take BUSY, some 40 us; `attend` holds it for one piece of a message
_AT_ONCE = 8 << 10  # bytes that a post receives if they have arrived; they take 1 us
_CLOSELY = 256  # polls with the GIL, some microseconds
_GAP = 64  # pauses, about 2 us
_SOON = (
    1 << 15
)  # ticks, some 10 us: the time of a send does not count if its `wait` begins later after its `post`
_MANY = 16  # requests posted or waited for between two looks of `attend`; the next look is after 1 ms
_LONG_NAPS = 20  # the value of IDLE from which a nap takes 1 ms
_LOOKS = 10  # naps of 0.1 ms in one `attend`
MOVED = -1  # a result of `_attend`, besides those of `attend`
_DTYPES = (1 << DTYPE_BITS) - 1
_ROUNDS_A_CALL = 2048  # at most 128 MiB, which take 20 ms, between two checks for signals

assert r.RECORDS_AT_MOST <= _FIRST


@instruction("void")
def _release(builder, function, owner):
    kind = llvm.ir.FunctionType(llvm.VOID, [llvm.WORD])
    builder.call(llvm.pointer(builder, function, kind), [owner])


@inlined
def _table(m):
    return m + 8 * r.REQUESTS


@inlined
def _record(m, index):
    return _table(m) + 8 * (r.RECORDS + index * r.RECORD_WORDS)


@inlined
def _record_of(m, number):
    """Return the record of a request; 0 if it has none, for example because a wait for it has finished."""
    record = _record(m, number & (_FIRST - 1))
    return record if load_acquire(record + 8 * r.NUMBER) == number else 0


@inlined
def _is_over(m, number):
    """Whether a request was waited for and its record has not been reused."""
    return load_acquire(_record(m, number & (_FIRST - 1)) + 8 * r.NUMBER) == -number


# ---- posting --------------------------------------------------------------------------------------------


@inlined
def _time_no_more(m):
    """Ignore the time of the send that the tuner times, because no thread has driven it from the beginning."""
    if load_word(_table(m), r.TIMED) != 0:
        row = load_word(m + 8 * r.CHOOSING, ROW)
        store_word(row, CALLS, load_word(row, CALLS) + 1)
        store_word(_table(m), r.TIMED, 0)


@inlined
def _begin(m, is_tag, peer):
    """Take the rings for a new request; return False if Python must post the request."""
    if not is_tag or not is_peer(m, peer):
        return False
    return _take(m)


@inlined
def _is_any(kind):
    return kind >> DTYPE_BITS == ANY_TAG


@inlined
def _take(m):
    """Take the rings unless the engine has operations or the group is shut; return whether they were taken.

    In a child made by fork every group is shut, because the rings belong to the parent.
    """
    if is_shut(m, -1):
        return False
    tries = 0
    while not swap_if_equal(m + 8 * r.BUSY, 0, this_thread()):
        if tries == _TRIES or load_acquire(m + 8 * r.BEHIND) != 0:
            return False
        pause()
        tries += 1
    if load_acquire(m + 8 * r.BEHIND) != 0:
        store_release(m + 8 * r.BUSY, 0)
        return False
    store_release(_table(m) + 8 * r.TOUCHED, load_word(_table(m), r.TOUCHED) + 1)
    return True


@kernel
def _free_record(m):
    """Return the index of a free record; -1: all are in use."""
    t = _table(m)
    used = load_word(t, r.USED)
    while used > 0 and load_acquire(_record(m, used - 1) + 8 * r.NUMBER) <= 0:
        used -= 1
    store_word(t, r.USED, used)
    for index in range(min(used + 1, r.RECORDS_AT_MOST)):
        if load_acquire(_record(m, index) + 8 * r.NUMBER) <= 0:
            store_word(t, r.USED, max(used, index + 1))
            return index
    return -1


@kernel
def _note(m, index, state, peer, message, kind, nbytes, data, owner):
    """Fill a record, and return the request's number."""
    t = _table(m)
    record = _record(m, index)
    count = load_word(t, r.COUNT) + 1
    number = load_word(t, r.NUMBERS) + (count << COUNT_AT) + index
    store_word(t, r.COUNT, count)
    store_release(record + 8 * r.NUMBER, 0)
    store_release(record + 8 * r.STATE, state)
    store_release(record + 8 * r.PEER, peer)
    store_release(record + 8 * r.OWNER, owner)
    store_word(record, r.MESSAGE, message)
    store_word(record, r.KIND, kind)
    store_word(record, r.NBYTES, nbytes)
    store_word(record, r.DATA, data)
    store_release(record + 8 * r.NUMBER, number)
    store_word(t, r.PENDING, load_word(t, r.PENDING) + 1)
    return number


@kernel
def _post_send(m, data, owner, nbytes, kind, peer):
    """Begin a send to `peer`; return the request's number, or -1 to leave it to Python."""
    if not _begin(m, is_kind(kind), peer):
        return -1
    if not is_ready(m, peer):
        return let_go(m, -1)
    channel = channel_of(m, peer)
    if load_word(channel, r.OUT_HEAD) < load_word(channel, r.OUT_END):
        _progress(m)
    algorithm = fastest_known(m, r.POSTS, nbytes, SMALLEST)
    frame = r.FRAME_UNIT if algorithm == DIRECT else r.frame_of(nbytes)
    is_free = load_word(channel, r.OUT_HEAD) == load_word(channel, r.OUT_END)
    # Unread acks must fit into their slots, because perhaps no thread reads them while this rank does other work.
    unread = load_word(channel, r.SENT) - load_word(channel, r.ACKS_READ)
    # If a message does not fit into the ring now, the engine's thread must write it while this thread does other work.
    enters = frame <= load_word(m, r.RING) // r.PIECES_A_RING and r.has_room(m, channel, frame)
    is_safe = enters or load_word(_table(m), r.AWAKE) != 0
    if not (is_free and is_safe and unread < r.ACK_SLOTS - r.ACK_BATCH):
        return let_go(m, -1)
    index = _free_record(m)
    if index < 0:
        return let_go(m, -1)
    is_timed = nbytes >= SMALLEST and load_word(_table(m), r.TIMED) == 0
    if is_timed:
        algorithm = choose_algorithm(m, r.POSTS, nbytes, SMALLEST, 0)
    r.begin_message(channel, data, nbytes, kind, algorithm)
    number = _note(m, index, r.SENDING, peer, load_word(channel, r.SENT), kind, nbytes, data, owner)
    while load_word(channel, r.OUT_HEAD) < load_word(channel, r.OUT_END) and r.push(m, channel):
        pass
    reached(POSTED_SEND)
    if is_timed:
        store_word(_table(m), r.TIMED, number)
        store_word(_table(m), r.POSTED_AT, ticks())
    return let_go(m, number)


@kernel
def _post_receive(m, data, owner, nbytes, kind, peer, waits):
    """Post a receive; return the request's number, or -1 to leave it to Python.

    `waits`: whether the calling function then waits for the request.
    """
    if not _begin(m, is_kind(kind) or _is_any(kind), peer):
        return -1
    index = _free_record(m)
    # The sender blocks until the message is read. If no thread waits here, only the engine's thread can read it.
    if index < 0 or not (waits or load_word(_table(m), r.AWAKE) != 0):
        return let_go(m, -1)
    number = _note(m, index, r.RECEIVING, peer, 0, kind, nbytes, data, owner)
    reached(POSTED_RECEIVE)
    channel = channel_of(m, peer)
    if r.frame_of(nbytes) <= _AT_ONCE and _accept(m, channel, peer) == _MOVED:
        _pull(m, channel, _find(m, peer, r.ARRIVING, 0, 0))
    return let_go(m, number)


def post_send_call(m, data, owner, nbytes, kind, peer):
    number = _post_send(m, data, owner, nbytes, kind, peer)
    return LATER if number < 0 else -1 - number


def post_receive_call(m, data, owner, nbytes, kind, peer):
    number = _post_receive(m, data, owner, nbytes, kind, peer, False)
    return LATER if number < 0 else -1 - number


# ---- progress ------------------------------------------------------------------------------------------


@inlined
def _end(m, record, state):
    """Set a request's final state: ENDED, or MISFIT, for which Python raises the error."""
    if state == r.ENDED:
        store_word(_table(m), r.PENDING, load_word(_table(m), r.PENDING) - 1)
    store_release(record + 8 * r.STATE, state)


@kernel
def _find(m, peer, state, message, kind):
    """Return the oldest record in `state` of a request to or from a peer that fits; 0 if none fits.

    In state SENDING, the request with message number `message` fits; in RECEIVING, one that takes a message of `kind`.
    """
    found = 0
    for index in range(load_word(_table(m), r.USED)):
        record = _record(m, index)
        number = load_acquire(record + 8 * r.NUMBER)
        if number <= 0 or load_word(record, r.STATE) != state or load_word(record, r.PEER) != peer:
            continue
        fits = load_word(record, r.MESSAGE) == message
        if state == r.RECEIVING:
            wanted = load_word(record, r.KIND)
            is_taken_by_any = _is_any(wanted) and kind >> DTYPE_BITS <= LARGEST_TAG
            fits = wanted >> DTYPE_BITS == kind >> DTYPE_BITS or is_taken_by_any
        if fits and (found == 0 or number < load_word(found, r.NUMBER)):
            found = record
    return found


@kernel
def _push(m, channel, peer):
    """Progress the sends to a peer."""
    progress = _IDLE
    if load_word(channel, r.OUT_HEAD) < load_word(channel, r.OUT_END) and r.push(m, channel):
        progress = _MOVED
    while load_word(channel, r.SENT) > load_word(channel, r.ACKS_READ) and r.read_ack(channel):
        progress = _MOVED
        record = _find(m, peer, r.SENDING, load_word(channel, r.ACK_NUMBER), 0)
        if record != 0:
            if load_word(record, r.NUMBER) == load_word(_table(m), r.TIMED):
                conclude(m + 8 * r.CHOOSING)
                store_word(_table(m), r.TIMED, 0)
            store_word(record, r.REFUSED_NBYTES, load_word(channel, r.ACK_NBYTES))
            store_word(record, r.REFUSED_KIND, load_word(channel, r.ACK_KIND))
            _end(m, record, r.ENDED if load_word(channel, r.ACK_DECISION) == TAKEN else r.MISFIT)
    return progress


@kernel
def _accept(m, channel, peer):
    """If the header of the peer's next message has arrived, match the message with a receive.

    Return _STUCK if Python must handle the message, because no receive matches it or its size or dtype differs.
    """
    idle = load_word(channel, r.IN_TAIL) == load_word(channel, r.IN_END)
    if not (idle and r.has_ack_space(channel) and r.sees_header(m, channel)):
        return _IDLE
    kind, nbytes = load_word(channel, r.IN_KIND), load_word(channel, r.IN_NBYTES)
    record = _find(m, peer, r.RECEIVING, 0, kind)
    if (
        record == 0
        or load_word(record, r.NBYTES) != nbytes
        or (load_word(record, r.KIND) ^ kind) & _DTYPES != 0
    ):
        return _STUCK
    r.accept_message(channel, load_word(record, r.DATA), fastest_known(m, r.RECEIVES, nbytes, LARGE))
    store_release(record + 8 * r.STATE, r.ARRIVING)
    return _MOVED


@kernel
def _pull(m, channel, record):
    """Progress the receive of the arriving message."""
    if not r.pull(m, channel):
        return _IDLE
    if load_word(channel, r.IN_TAIL) == load_word(channel, r.IN_END):
        nbytes = load_word(record, r.NBYTES)
        # The peer may leave once it has the ack, and its departure fails the receives that are pending.
        _end(m, record, r.ENDED)
        r.write_ack(channel, load_word(channel, r.RECEIVED), TAKEN, nbytes, load_word(channel, r.IN_KIND))
    return _MOVED


@kernel
def _progress(m):
    """Progress all requests; return _MOVED, _IDLE, or _STUCK if Python must handle a message."""
    progress = _IDLE
    for index in range(load_word(_table(m), r.USED)):
        record = _record(m, index)
        if load_acquire(record + 8 * r.NUMBER) <= 0:
            continue
        state, peer = load_acquire(record + 8 * r.STATE), load_word(record, r.PEER)
        channel = channel_of(m, peer)
        found = _IDLE
        if state == r.SENDING:
            found = _push(m, channel, peer)
        elif state == r.RECEIVING:
            found = _accept(m, channel, peer)
        elif state == r.ARRIVING:
            found = _pull(m, channel, record)
        progress = max(progress, found)
    if progress == _MOVED:
        store_word(_table(m), r.IN_VAIN, 0)
    return progress


# ---- waiting ----------------------------------------------------------------------------------------------


@kernel
def _collect(m, record, number):
    """Free an ended request's record and release its array.

    Return -1 - its peer's rank, or LATER if the engine has taken the request over.

    Only one thread succeeds in swapping NUMBER, and that thread releases the array. It reads the owner before the swap,
    because afterwards the record may be in use again.
    """
    peer, owner = load_acquire(record + 8 * r.PEER), load_acquire(record + 8 * r.OWNER)
    if owner & r.IS_WORK:  # only threads with the GIL collect it, so they need no swap
        if _is_over(m, number):
            return -1 - peer
        if load_acquire(record + 8 * r.NUMBER) != number:
            return LATER
        store_release(record + 8 * r.NUMBER, -number)
        drop_reference(owner ^ r.IS_WORK)
        return -1 - peer
    if swap_if_equal(record + 8 * r.NUMBER, number, -number):
        if owner != 0:
            _release(load_word(_table(m), r.RELEASE), owner)
        return -1 - peer
    return -1 - peer if _is_over(m, number) else LATER


@inlined
def _idle_or_return(m, found, idle, rounds):
    """Rest if `found`, the result of `_progress`, is _IDLE.

    Return the new number of consecutive turns without progress, or -1 if the caller must return to Python.
    """
    if found == _MOVED and rounds < _ROUNDS_A_CALL:
        moved(m)
        return 0
    if found != _IDLE or load_acquire(m + 8 * r.BELL) != 0 or not rest(m, idle):
        return -1
    return idle + 1


@inlined
def _is_pending(m, record, number):
    """Whether a request has not ended. The rings must be held. Another thread may collect the record meanwhile."""
    return _record_of(m, number) != 0 and load_word(record, r.STATE) < r.MISFIT


@kernel
def _drive(m, record, number):
    """Progress all requests until one has ended, or Python is needed; then release the rings."""
    idle = rounds = 0
    while idle >= 0 and _is_pending(m, record, number):
        idle = _idle_or_return(m, _progress(m), idle, rounds)
        rounds += 1 if idle == 0 else 0
    return let_go(m, DONE)


@kernel
def _wait(m, number):
    """Wait for a request; return -1 - rank of its peer, or LATER if Python must continue to wait for it."""
    peer = load_acquire(_record(m, number & (_FIRST - 1)) + 8 * r.PEER)
    if _is_over(m, number):
        return -1 - peer
    record = _record_of(m, number)
    if record == 0:
        return LATER
    if load_acquire(record + 8 * r.STATE) != r.ENDED:
        if not _take(m):
            return LATER
        _drive(m, record, number)
        if _record_of(m, number) == 0 or load_acquire(record + 8 * r.STATE) != r.ENDED:
            return LATER
    return _collect(m, record, number)


def wait_call(m, number, out, nbytes, call, peer):
    return _wait(m, number)


def test_call(m, number, out, nbytes, call, peer):
    return _test(m, number)


@inlined
def _is_late(m):
    """Whether Python must check deadlines and peers, because nothing has moved for the time that a wait may take.

    The first test in which nothing moves starts the time. After this function has returned True, the next one does.
    """
    t, time = _table(m), now(m)
    since = load_word(t, r.IN_VAIN)
    is_over = since != 0 and time - since >= load_word(m, BUDGET)
    if since == 0 or is_over:
        store_word(t, r.IN_VAIN, 0 if is_over else time)
    return is_over


@kernel
def _test(m, number):
    """Return -2 if the request has ended, -1 if it has not."""
    if _is_over(m, number):
        return -2
    record = _record_of(m, number)
    if record == 0:
        return LATER
    state = load_acquire(record + 8 * r.STATE)
    if state != r.ENDED:
        if not _take(m):
            return LATER
        found = _progress(m)
        state = load_word(record, r.STATE)
        is_late = found == _IDLE and _is_late(m)
        let_go(m, DONE)
        if found == _STUCK or state == r.MISFIT or is_late:
            return LATER
        if state != r.ENDED:
            return -1
    return LATER if _collect(m, record, number) == LATER else -2


@inlined
def _ended_one(m, numbers, count):
    """Return the index of a request that has ended; -1: none has ended; -2: Python must complete one of them."""
    for index in range(count):
        if _is_over(m, load_word(numbers, index)):
            return index
        record = _record_of(m, load_word(numbers, index))
        if record == 0 or load_acquire(record + 8 * r.STATE) == r.MISFIT:
            return -2
        if load_acquire(record + 8 * r.STATE) == r.ENDED:
            return index
    return -1


def wait_any_call(m, numbers, out, count, call, peer):
    """Wait until one of these requests has ended; return -1 - its index, or LATER if Python must continue."""
    if not _take(m):
        return LATER
    idle = rounds = 0
    index = _ended_one(m, numbers, count)
    while index == -1 and idle >= 0:
        idle = _idle_or_return(m, _progress(m), idle, rounds)
        rounds += 1 if idle == 0 else 0
        index = _ended_one(m, numbers, count)
    let_go(m, DONE)
    if index < 0:
        return LATER
    number = load_word(numbers, index)
    record = _record_of(m, number)
    if record != 0 and _collect(m, record, number) == LATER:
        return LATER
    return -1 - index


# ---- calls that block -----------------------------------------------------------------------------------------


@inlined
def _finish(m, number):
    """Wait for a request of this call; return the result of `_wait`, or BESIDE + number if Python must complete it."""
    if number < 0:
        return LATER
    found = _wait(m, number)
    return BESIDE + number if found == LATER else found


def send_call(m, data, out, nbytes, kind, peer):
    """Send as `send` of ring_kernels.py does; while requests are pending, post a request and wait."""
    if not is_kind(kind) or is_shut(m, -1) or not seize_unless(m + 8 * r.BUSY, m + 8 * r.BEHIND):
        return LATER
    if not is_peer(m, peer) or not is_ready(m, peer):
        return let_go(m, LATER)
    if has_requests(m):
        let_go(m, LATER)
        found = _finish(m, _post_send(m, data, 0, nbytes, kind, peer))
        return DONE if found < DONE else found
    return run_send(m, peer, data, nbytes, kind)


def receive_call(m, data, out, nbytes, kind, source):
    """Receive as `receive` of ring_kernels.py does; while requests are pending, or for ANY_TAG, post and wait."""
    if _is_any(kind):
        return _finish(m, _post_receive(m, data, 0, nbytes, kind, source, True))
    if not is_kind(kind) or is_shut(m, -1) or not seize_unless(m + 8 * r.BUSY, m + 8 * r.BEHIND):
        return LATER
    if not (source == ANY or is_peer(m, source)):
        return let_go(m, LATER)
    if has_requests(m):
        let_go(m, LATER)
        return _finish(m, _post_receive(m, data, 0, nbytes, kind, source, True))
    return run_receive(m, source, data, nbytes, kind)


# ---- requests of Python ---------------------------------------------------------------------------------------
#
# The record of such a request owns a reference to its Work, which keeps the array alive. The engine's thread is awake
# while such requests are pending: it calls `attend`.


@locked_entry
def post_send(mailbox: Index, dst: Index, tensor: PyObject, word: Index, size: Index, work: PyObject) -> int:
    """Begin a send whose Work is `work`; return the request's number, or -1 to leave it to the engine."""
    m, x = integer(mailbox), object_at(tensor)
    nbytes, kind = message_of(m, x, integer(word), integer(size), 0)
    if nbytes < 0 or load_acquire(_table(m) + 8 * r.AWAKE) == 0:
        return -1
    owner = object_at(work)
    number = _post_send(m, data_of(x), owner | r.IS_WORK, nbytes, kind, integer(dst))
    if number >= 0:  # the reference is dropped with the GIL, so not before this
        add_reference(owner)
    return number


@locked_entry
def post_receive(
    mailbox: Index, src: Index, tensor: PyObject, word: Index, size: Index, work: PyObject
) -> int:
    """Post a receive whose Work is `work`; return the request's number, or -1 to leave it to the engine."""
    m, x = integer(mailbox), object_at(tensor)
    nbytes, kind = message_of(m, x, integer(word), integer(size), WRITEABLE)
    if nbytes < 0:
        return -1
    owner = object_at(work)
    number = _post_receive(m, data_of(x), owner | r.IS_WORK, nbytes, kind, integer(src), False)
    if number >= 0:
        add_reference(owner)
    return number


@locked_entry
def wait(mailbox: Index, number: Index) -> int:
    """Wait for a request of Python: -1 - its peer, or LATER if the engine must continue it.

    A message that arrives soon costs no release of the GIL, which takes 0.2 us.
    """
    m, n = integer(mailbox), integer(number)
    record = _record(m, n & (_FIRST - 1))
    peer = load_acquire(record + 8 * r.PEER)
    if _is_over(m, n):
        return -1 - peer
    if _record_of(m, n) == 0 or load_word(_table(m), r.ATTENDANT) == this_thread():
        return LATER
    if load_acquire(record + 8 * r.STATE) != r.ENDED:
        if not _take(m):
            return LATER
        if load_word(_table(m), r.TIMED) == n and ticks() - load_word(_table(m), r.POSTED_AT) > _SOON:
            _time_no_more(m)
        polls = 0
        while polls < _CLOSELY and _is_pending(m, record, n):
            if _progress(m) == _IDLE:
                pause()
                polls += 1
            else:
                polls += _CLOSELY // 4
        if _is_pending(m, record, n):
            take_gil(release_gil(), _drive(m, record, n))
        else:
            let_go(m, DONE)
        if _record_of(m, n) == 0 or load_acquire(record + 8 * r.STATE) != r.ENDED:
            return LATER
    return _collect(m, record, n)


@locked_entry
def test(mailbox: Index, number: Index) -> int:
    """Return -2 if a request of Python has ended, -1 if it has not, LATER if the engine must continue it."""
    return _test(integer(mailbox), integer(number))


@kernel
def _has_ended_work(m):
    """Whether a request of Python has ended and was not waited for."""
    for index in range(r.RECORDS_AT_MOST):
        record = _record(m, index)
        is_work = load_acquire(record + 8 * r.OWNER) & r.IS_WORK
        if (
            load_acquire(record + 8 * r.NUMBER) > 0
            and is_work
            and load_acquire(record + 8 * r.STATE) == r.ENDED
        ):
            return True
    return False


@kernel
def _attend(m):
    """Progress all requests once, unless another thread holds the rings."""
    if not swap_if_equal(m + 8 * r.BUSY, 0, this_thread()):
        return QUIET
    found = QUIET
    if load_acquire(m + 8 * r.BEHIND) == 0 and has_requests(m):
        _time_no_more(m)
        found = _progress(m)
        if found == _STUCK or load_acquire(m + 8 * r.BELL) != 0:
            found = STUCK
        elif found == _IDLE:
            found = STILL
        else:
            found = MOVED
    return let_go(m, found)


@entry
def attend(mailbox: Index) -> int:
    """Progress the requests for a millisecond, whenever no other thread has done so since the last look.

    The looks are 0.1 ms apart. They are 1 ms apart while other threads use requests often, so that they cost 2 % of a
    core at most, and after ten looks that have found no request.

    Returns:
        STUCK: the engine must take over the requests. FINISHED: requests of Python have ended. STILL: requests are
        pending, and nothing has moved. QUIET: none of these.
    """
    m = integer(mailbox)
    t = _table(m)
    found = STILL
    touched = load_acquire(t + 8 * r.TOUCHED)
    for _ in range(_LOOKS):
        nap(t + 8 * r.NAPS)
        if load_acquire(t + 8 * r.RECALLED) != 0:
            store_release(t + 8 * r.RECALLED, 0)
            break
        before, touched = touched, load_acquire(t + 8 * r.TOUCHED)
        if touched != before:
            found = QUIET
            store_word(t, r.NAPS + IDLE, _LONG_NAPS if touched - before > _MANY else 0)
            continue
        turn = _attend(m)
        while turn == MOVED:
            found = QUIET
            for _ in range(_GAP):  # so that another thread that wants the rings gets them
                pause()
            turn = _attend(m) if load_acquire(t + 8 * r.TOUCHED) == touched else QUIET
        if turn == STUCK:
            return STUCK
        if _has_ended_work(m):
            return FINISHED
        if turn == QUIET:
            found = QUIET
            idle = min(load_word(t, r.NAPS + IDLE) + 2, _LONG_NAPS)
            store_word(t, r.NAPS + IDLE, idle)
            if idle == _LONG_NAPS:
                break
    return FINISHED if _has_ended_work(m) else found
