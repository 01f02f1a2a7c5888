"""Compiled functions that move messages through the rings. Python calls them, and they run without the GIL.

`m` is the address of a mailbox's table (rings.py). `send` and `receive` carry out a blocking call; `post_send` and
`post_receive` begin an operation that a later call completes. All four take BUSY, the lock of the rings; the thread
that has taken it *holds the rings*. If `size` is -1, they validate the array themselves (validate.py), and `word` is
the tag; otherwise `word` is the message's kind and `size` its bytes. `begin`, `accept` and `acknowledge` start
transfers, which `advance` then continues for all peers. Every function returns within 0.1 s.
"""

from __future__ import annotations

from ..compiler.jit import entry, inlined, kernel, locked_entry
from ..core import signature
from ..core.operands import JAX_TAGS, LARGEST_TAG
from ..core.status import AGAIN, DONE, LATER, OTHER, REFUSED, WORKED
from ..failpoints import number_of
from ..kernels.failing import reached
from ..kernels.primitives import (
    load_acquire,
    load_word,
    store_release,
    store_word,
    swap_if_equal,
    this_thread,
)
from ..kernels.pyobjects import WRITEABLE, Index, PyObject, integer, object_at, release_gil, take_gil
from ..kernels.waiting import YIELDS, moved, rest, seize_unless
from ..p2p.pipe import (
    ACK_SPACE,
    ACKED,
    ANY,
    ARRIVED,
    ENTERED,
    EVENTS,
    HEADER,
    TAKEN,
)
from ..p2p.pipe import NOTHING as NO_EVENT
from ..p2p.transfers import DTYPE_BITS
from . import rings as r
from .autotune import (
    AHEAD,
    ALGORITHM,
    CLOSE,
    DIRECT,
    LARGE,
    SMALLEST,
    best_algorithm,
    choose,
    choose_none,
    conclude,
)
from .context_layout import SHUT
from .validate import CALL, data_of, is_plain, nbytes_of, spec_of

_MESSAGE = signature.code_of("message")

_SEND, _SENT = number_of("shm.send.enter"), number_of("shm.send.after_done")
_RECEIVE, _RECEIVED = number_of("shm.recv.enter"), number_of("shm.recv.after_done")
POSTED_SEND, POSTED_RECEIVE = number_of("shm.isend.after_post"), number_of("shm.irecv.after_post")

NOTHING, MOVED = 0, 1  # results of `_serve`, besides the events of p2p/pipe.py

_PIECES_A_CALL = 2048  # at most 128 MiB, which take 20 ms, between two checks for signals


@inlined
def channel_of(m, peer):
    return load_word(m, r.CHANNELS) + peer * (8 * r.CHANNEL_WORDS)


@inlined
def _algorithms(m, operation, nbytes, smallest):
    """Algorithms that a message may use, as bits: to write it into the ring, or for a receiver to copy it out."""
    is_direct = operation != r.RECEIVES and nbytes >= load_word(m, r.DIRECT_FROM)
    return (load_word(m, r.ALGORITHMS) if nbytes >= smallest else 0) | (1 << DIRECT if is_direct else 0)


@inlined
def fastest_known(m, operation, nbytes, smallest):
    """Return the algorithm with the best recorded time, for a message whose time is not measured."""
    algorithms = _algorithms(m, operation, nbytes, smallest)
    return best_algorithm(m + 8 * r.CHOOSING, operation, nbytes, algorithms) if algorithms else CLOSE


@inlined
def choose_algorithm(m, operation, nbytes, smallest, phase):
    """Choose the algorithm of a message, and take its time: the fastest known one, or one to try."""
    t = m + 8 * r.CHOOSING
    choose_none(t)
    algorithms = _algorithms(m, operation, nbytes, smallest)
    if algorithms:
        choose(t, operation, nbytes, algorithms, AHEAD, phase)
    return load_word(t, ALGORITHM)


@entry
def begin(mailbox: Index, peer: Index, address: Index, nbytes: Index, kind: Index) -> int:
    """Begin to write a message into the ring to `peer`; `advance` writes the rest.

    All earlier messages to this peer must be in the ring completely.
    """
    m = integer(mailbox)
    channel = channel_of(m, integer(peer))
    algorithm = fastest_known(m, r.SENDS, integer(nbytes), SMALLEST)
    r.begin_message(channel, integer(address), integer(nbytes), integer(kind), algorithm)
    r.push(m, channel)
    return DONE


@entry
def accept(mailbox: Index, peer: Index, address: Index) -> int:
    """Begin to receive the message whose header `advance` has read.

    The payload goes into memory at `address`; 0: it is dropped.
    """
    m = integer(mailbox)
    channel = channel_of(m, integer(peer))
    r.accept_message(
        channel, integer(address), fastest_known(m, r.RECEIVES, load_word(channel, r.IN_NBYTES), LARGE)
    )
    return DONE


@entry
def acknowledge(
    mailbox: Index, peer: Index, number: Index, decision: Index, nbytes: Index, kind: Index
) -> int:
    """Write the ack of a message of `peer`, with the size and kind that the receive expects.

    Return DONE, or AGAIN if the ring has no space for an ack now.
    """
    channel = channel_of(integer(mailbox), integer(peer))
    if not r.has_ack_space(channel):
        return AGAIN
    r.write_ack(channel, integer(number), integer(decision), integer(nbytes), integer(kind))
    return DONE


@inlined
def is_shut(m, size):
    """Whether the call must be left to Python because the group is shut.

    False if `size` is not -1, because Python has checked such a call.
    """
    return size < 0 and load_word(load_word(m, r.CONTEXT), SHUT) != 0


@inlined
def has_requests(m):
    """Whether requests (requests.py) are pending, which a blocking call must not overtake. The rings must be held."""
    return load_word(m, r.REQUESTS + r.PENDING) != 0


@inlined
def let_go(m, status):
    store_release(m + 8 * r.BUSY, 0)
    return status


@inlined
def message_of(m, x, word, size, flags):
    """Return an array's size and its message's kind; a size of -1 means that Python must validate the array."""
    if size >= 0:
        return size, word
    c = load_word(m, r.CONTEXT)
    spec = spec_of(c, 0, _MESSAGE, x, 0)
    if spec == 0 or word < 0 or word > LARGEST_TAG or not is_plain(c, 0, x, flags):
        return -1, word
    return nbytes_of(x, spec), word << DTYPE_BITS | load_word(spec, CALL)


@inlined
def is_peer(m, rank):
    return 0 <= rank < load_word(m, r.SIZE) and rank != load_word(m, r.RANK)


@inlined
def is_ready(m, rank):
    """Whether the ring to a rank is allocated."""
    return load_acquire(channel_of(m, rank) + 8 * r.OUT_READY) != 0


@locked_entry
def send(mailbox: Index, dst: Index, tensor: PyObject, word: Index, size: Index) -> int:
    """Send an array and wait until a receive has taken it.

    Return DONE, AGAIN, WORKED, LATER, or REFUSED (the ack has the reason). No earlier message to this peer may be
    incomplete in the ring or without an ack.
    """
    m, x, peer = integer(mailbox), object_at(tensor), integer(dst)
    # BEHIND is set if the last holder of the rings has left an incomplete message, which the engine continues.
    if is_shut(m, integer(size)) or not seize_unless(m + 8 * r.BUSY, m + 8 * r.BEHIND):
        return LATER
    nbytes, kind = message_of(m, x, integer(word), integer(size), 0)
    if nbytes < 0 or not is_peer(m, peer) or has_requests(m) or not is_ready(m, peer):
        return let_go(m, LATER)
    return take_gil(release_gil(), run_send(m, peer, data_of(x), nbytes, kind))


@inlined
def run_send(m, peer, data, nbytes, kind):
    """Carry out a send; the caller holds the rings."""
    status = _send(m, channel_of(m, peer), data, nbytes, kind)
    return let_go(m, DONE) if status == DONE else status


@inlined
def is_kind(kind):
    """Whether the tag in `kind` is one that users or JAX programs may use."""
    return 0 <= kind >> DTYPE_BITS <= LARGEST_TAG or JAX_TAGS <= kind >> DTYPE_BITS <= JAX_TAGS + LARGEST_TAG


@kernel
def _send(m, channel, data, nbytes, kind):
    reached(_SEND)
    r.begin_message(channel, data, nbytes, kind, choose_algorithm(m, r.SENDS, nbytes, SMALLEST, 0))
    idle = 0
    pieces = 0
    while pieces < _PIECES_A_CALL:
        if load_word(channel, r.OUT_HEAD) < load_word(channel, r.OUT_END):
            if r.push(m, channel):
                idle = 0
                pieces += 1
                moved(m)
                continue
        elif r.read_ack(channel):
            conclude(m + 8 * r.CHOOSING)
            moved(m)
            reached(_SENT)
            return DONE if load_word(channel, r.ACK_DECISION) == TAKEN else REFUSED
        if load_acquire(m + 8 * r.BELL) != 0 or not rest(m, idle):
            return AGAIN
        idle += 1
    return WORKED


@locked_entry
def receive(mailbox: Index, src: Index, tensor: PyObject, word: Index, size: Index) -> int:
    """Receive the next message of a rank, or of ANY, into an array and write its ack.

    Return -1 - rank if done, else AGAIN, WORKED, OTHER or LATER. After AGAIN and WORKED, SOURCE is 1 plus the rank that
    was chosen for ANY, or 0 if none was chosen. No earlier message of that rank may be incompletely received.
    """
    m, x, source = integer(mailbox), object_at(tensor), integer(src)
    if is_shut(m, integer(size)) or not seize_unless(m + 8 * r.BUSY, m + 8 * r.BEHIND):
        return LATER
    nbytes, kind = message_of(m, x, integer(word), integer(size), WRITEABLE)
    if nbytes < 0 or not (source == ANY or is_peer(m, source)) or has_requests(m):
        return let_go(m, LATER)
    return take_gil(release_gil(), run_receive(m, source, data_of(x), nbytes, kind))


@inlined
def run_receive(m, source, data, nbytes, kind):
    """Carry out a receive; the caller holds the rings."""
    if source == ANY:
        event = _advance(m, True, True)
        if event == NO_EVENT:
            return AGAIN
        store_word(m, r.SOURCE, event // EVENTS + 1)
    peer = load_word(m, r.SOURCE) - 1 if source == ANY else source
    status = _receive(m, channel_of(m, peer), data, nbytes, kind)
    if status != DONE:
        return status
    store_word(m, r.SOURCE, 0)
    return let_go(m, -1 - peer)


@kernel
def _receive(m, channel, data, nbytes, kind):
    reached(_RECEIVE)
    idle = 0
    pieces = 0
    while pieces < _PIECES_A_CALL:
        if load_word(channel, r.IN_TAIL) == load_word(channel, r.IN_END):
            if r.has_ack_space(channel) and r.sees_header(m, channel):
                if load_word(channel, r.IN_KIND) != kind or load_word(channel, r.IN_NBYTES) != nbytes:
                    store_word(m, r.SOURCE, 0)
                    return OTHER
                # A direct message is not copied out of the ring, so it is not measured for these algorithms.
                smallest = r.ENDLESS if load_word(channel, r.IN_FROM) else LARGE
                r.accept_message(channel, data, choose_algorithm(m, r.RECEIVES, nbytes, smallest, 1))
                continue
        elif r.pull(m, channel):
            moved(m)
            if load_word(channel, r.IN_TAIL) == load_word(channel, r.IN_END):
                conclude(m + 8 * r.CHOOSING)
                r.write_ack(channel, load_word(channel, r.RECEIVED), TAKEN, nbytes, kind)
                reached(_RECEIVED)
                return DONE
            idle = 0
            pieces += 1
            continue
        if load_acquire(m + 8 * r.BELL) != 0 or not rest(m, idle):
            return AGAIN
        idle += 1
    return WORKED


@inlined
def _serve(m, channel, watched):
    """Make progress with one peer. Return the first event that Python must handle, else MOVED or NOTHING."""
    event = NOTHING
    if load_word(channel, r.OUT_HEAD) < load_word(channel, r.OUT_END) and r.push(m, channel):
        if load_word(channel, r.OUT_HEAD) == load_word(channel, r.OUT_END):
            return ENTERED
        event = MOVED
    if load_word(channel, r.SENT) > load_word(channel, r.ACKS_READ) and r.read_ack(channel):
        return ACKED
    if load_word(channel, r.IN_TAIL) < load_word(channel, r.IN_END):
        if r.pull(m, channel):
            if load_word(channel, r.IN_TAIL) == load_word(channel, r.IN_END):
                return ARRIVED
            event = MOVED
    elif (watched or load_word(channel, r.WATCHED) > 0) and r.sees_header(m, channel):
        return HEADER
    if load_word(channel, r.OWED) > 0 and r.has_ack_space(channel):
        return ACK_SPACE
    return event


@inlined
def _return_event(m, event):
    if event != NO_EVENT:
        store_word(m, r.EVENT, event)
        store_word(m, r.RETURNED, load_word(m, r.RETURNED) + 1)
    return event


@entry
def advance(mailbox: Index, handled: Index, wait: Index) -> int:
    """Make progress on all messages until one needs a decision of the engine (p2p/engine.py); see p2p/pipe.py."""
    m = integer(mailbox)
    if load_word(m, r.RETURNED) > integer(handled):
        return load_word(m, r.EVENT)
    yields = load_word(m, YIELDS)
    if this_thread() == load_word(m, r.REQUESTS + r.ATTENDANT):
        store_word(m, YIELDS, load_word(m, r.BACKGROUND_YIELDS))
    event = _advance(m, False, integer(wait) != 0)
    store_word(m, YIELDS, yields)
    return _return_event(m, event)


@kernel
def _advance(m, watch_all, wait):
    size = load_word(m, r.SIZE)
    idle = 0
    rounds = 0
    while rounds < _PIECES_A_CALL:
        progress = False
        for step in range(size):
            peer = (load_word(m, r.NEXT) + step) % size
            if peer == load_word(m, r.RANK):
                continue
            event = _serve(m, channel_of(m, peer), watch_all)
            if event > MOVED:
                store_word(m, r.NEXT, peer + 1)
                moved(m)
                return peer * EVENTS + event
            progress |= event == MOVED
        if progress:
            idle = 0
            rounds += 1
            moved(m)
            continue
        if not wait or load_acquire(m + 8 * r.BELL) != 0 or not rest(m, idle):
            return NO_EVENT
        idle += 1
    return NO_EVENT


@locked_entry
def claim(mailbox: Index, index: Index, number: Index) -> int:
    """Claim the request with this number for the engine: DONE, or AGAIN if a wait has collected it first."""
    word = integer(mailbox) + 8 * (r.REQUESTS + r.RECORDS + integer(index) * r.RECORD_WORDS + r.NUMBER)
    return DONE if swap_if_equal(word, integer(number), 0) else AGAIN


@entry
def retire(mailbox: Index) -> int:
    """Let all peers write any number of acks, since this rank will read no more of them.

    A ring that is not allocated has carried no message, so its receiver writes no acks.
    """
    m = integer(mailbox)
    for peer in range(load_word(m, r.SIZE)):
        if peer != load_word(m, r.RANK) and is_ready(m, peer):
            store_release(load_word(channel_of(m, peer), r.OUT) + r.ACKS_TAKEN, r.NEVER_FULL)
    return DONE
