"""What Python calls to move messages through the rings: compiled functions that run without the GIL.

`m` is the address of a mailbox's table (rings.py). `send` and `receive` carry one blocking call from begin to
end, `post_send` and `post_receive` begin one that is posted; they take BUSY. Their `word` is the tag, and `size` -1,
where they are to look at the array themselves as validate.py has it; else they are its kind and its bytes. `begin`,
`accept` and `acknowledge` set things going that `advance` then carries on for all peers at once. All come back within
0.1 s.
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
    pause,
    store_release,
    store_word,
    swap_if_equal,
    this_thread,
)
from ..kernels.pyobjects import WRITEABLE, Index, PyObject, integer, object_at, release_gil, take_gil
from ..kernels.waiting import moved, rest, seize_unless
from ..p2p.pipe import (
    ACK_SPACE,
    ACKED,
    ANY,
    ARMED,
    ARRIVED,
    BOTH,
    ENTERED,
    EVENTS,
    HEADER,
    NOT_MINE,
    RECEIVED,
    TAKEN,
)
from ..p2p.pipe import NOTHING as NO_EVENT
from ..p2p.transfers import DTYPE_BITS
from . import rings as r
from .autotune import CLOSE, DIRECT, LARGE, SMALLEST, WAY, best_way, choose, choose_none, conclude
from .context_layout import SHUT
from .validate import CALL, data_of, description, is_plain, nbytes_of

_MESSAGE = signature.code_of("message")

_SEND, _SENT = number_of("shm.send.enter"), number_of("shm.send.after_done")
_RECEIVE, _RECEIVED = number_of("shm.recv.enter"), number_of("shm.recv.after_done")
POSTED_SEND, POSTED_RECEIVE = number_of("shm.isend.after_post"), number_of("shm.irecv.after_post")

NOTHING, MOVED = 0, 1  # and the events of p2p/pipe.py, of one peer

_CLOSELY = 256  # looks at one peer alone: some microseconds
_PIECES_A_CALL = 2048  # at most 128 MiB, 20 ms, between two looks at signals


@inlined
def channel_of(m, peer):
    return load_word(m, r.CHANNELS) + peer * (8 * r.CHANNEL_WORDS)


@inlined
def _ways(m, operation, nbytes, smallest):
    """The ways that a message may go, as bits; a receiver's are those of copying it out of the ring."""
    is_direct = operation == r.SENDS and nbytes >= load_word(m, r.DIRECT_FROM)
    return (load_word(m, r.WAYS) if nbytes >= smallest else 0) | (1 << DIRECT if is_direct else 0)


@inlined
def known_way(m, operation, nbytes, smallest):
    """How a message goes whose time is not measured."""
    ways = _ways(m, operation, nbytes, smallest)
    return best_way(m + 8 * r.CHOOSING, operation, nbytes, ways) if ways else CLOSE


@inlined
def _choose(m, operation, nbytes, smallest, phase):
    """How a message of a blocking call goes: as is best, or as is to be tried."""
    t = m + 8 * r.CHOOSING
    choose_none(t)
    ways = _ways(m, operation, nbytes, smallest)
    if ways:
        choose(t, operation, nbytes, ways, phase)
    return load_word(t, WAY)


@entry
def begin(mailbox: Index, peer: Index, address: Index, nbytes: Index, kind: Index) -> int:
    """Make a message the one that enters the ring to `peer`; `advance` moves the rest of it. None may be entering."""
    m = integer(mailbox)
    channel = channel_of(m, integer(peer))
    way = known_way(m, r.SENDS, integer(nbytes), SMALLEST)
    r.begin_message(channel, integer(address), integer(nbytes), integer(kind), way)
    r.push(m, channel)
    return DONE


@entry
def accept(mailbox: Index, peer: Index, address: Index) -> int:
    """Let the message whose header `advance` has read arrive at `address` (0: drop its bytes)."""
    m = integer(mailbox)
    channel = channel_of(m, integer(peer))
    r.accept_message(
        channel, integer(address), known_way(m, r.RECEIVES, load_word(channel, r.IN_NBYTES), LARGE)
    )
    return DONE


@entry
def acknowledge(
    mailbox: Index, peer: Index, number: Index, verdict: Index, nbytes: Index, kind: Index
) -> int:
    """Answer a message of `peer`, with what the receive asked for; AGAIN: no space."""
    channel = channel_of(integer(mailbox), integer(peer))
    if not r.has_ack_space(channel):
        return AGAIN
    r.write_ack(channel, integer(number), integer(verdict), integer(nbytes), integer(kind))
    return DONE


@inlined
def is_shut(m, size):
    """Whether a call that nobody has looked at may not go on."""
    return size < 0 and load_word(load_word(m, r.CONTEXT), SHUT) != 0


@inlined
def has_requests(m):
    """Whether compiled callers have requests that the engine must take over; the caller holds the rings."""
    return load_word(m, r.REQUESTS + r.PENDING) != 0


@inlined
def let_go(m, status):
    store_release(m + 8 * r.BUSY, 0)
    return status


@inlined
def _message(m, x, word, size, flags):
    """The bytes of an array, and the kind of its message; -1 bytes: ask Python."""
    if size >= 0:
        return size, word
    c = load_word(m, r.CONTEXT)
    what = description(c, 0, _MESSAGE, x, 0)
    if what == 0 or word < 0 or word > LARGEST_TAG or not is_plain(c, 0, x, flags):
        return -1, word
    return nbytes_of(x, what), word << DTYPE_BITS | load_word(what, CALL)


@inlined
def is_peer(m, rank):
    return 0 <= rank < load_word(m, r.SIZE) and rank != load_word(m, r.RANK)


@locked_entry
def send(mailbox: Index, dst: Index, tensor: PyObject, word: Index, size: Index) -> int:
    """Send an array, and wait until it is taken. DONE, AGAIN, REFUSED with the ack in the channel, or LATER.

    Only while no other message to this peer is entering or unacked.
    """
    m, x, peer = integer(mailbox), object_at(tensor), integer(dst)
    # Whoever had the rings may have left a message half-way to the engine, which says so by BEHIND.
    if is_shut(m, integer(size)) or not seize_unless(m + 8 * r.BUSY, m + 8 * r.BEHIND):
        return LATER
    nbytes, kind = _message(m, x, integer(word), integer(size), 0)
    if nbytes < 0 or not is_peer(m, peer):
        return let_go(m, LATER)
    return take_gil(release_gil(), run_send(m, peer, data_of(x), nbytes, kind))


@inlined
def run_send(m, peer, data, nbytes, kind):
    """A send that has the rings."""
    status = _send(m, channel_of(m, peer), data, nbytes, kind)
    return let_go(m, DONE) if status == DONE else status


@inlined
def is_kind(kind):
    """Whether `kind` has a user's tag or a tag of JAX programs."""
    return 0 <= kind >> DTYPE_BITS <= LARGEST_TAG or JAX_TAGS <= kind >> DTYPE_BITS <= JAX_TAGS + LARGEST_TAG


@kernel
def _send(m, channel, data, nbytes, kind):
    reached(_SEND)
    r.begin_message(channel, data, nbytes, kind, _choose(m, r.SENDS, nbytes, SMALLEST, 0))
    turn = 0
    pieces = 0
    while pieces < _PIECES_A_CALL:
        if load_word(channel, r.OUT_HEAD) < load_word(channel, r.OUT_END):
            if r.push(m, channel):
                turn = 0
                pieces += 1
                moved(m)
                continue
        elif r.read_ack(channel):
            conclude(m + 8 * r.CHOOSING)
            moved(m)
            reached(_SENT)
            return DONE if load_word(channel, r.ACK_VERDICT) == TAKEN else REFUSED
        if load_acquire(m + 8 * r.BELL) != 0 or not rest(m, turn):
            return AGAIN
        turn += 1
    return WORKED


@locked_entry
def receive(mailbox: Index, src: Index, tensor: PyObject, word: Index, size: Index) -> int:
    """Receive the next message of a rank (or of ANY) into an array, and answer it.

    -1 - rank when done, AGAIN, WORKED, OTHER or LATER. Only while no other message of that rank is
    arriving. If it is not done, word SOURCE holds the rank that was chosen, plus 1.
    """
    m, x, source = integer(mailbox), object_at(tensor), integer(src)
    if is_shut(m, integer(size)) or not seize_unless(m + 8 * r.BUSY, m + 8 * r.BEHIND):
        return LATER
    nbytes, kind = _message(m, x, integer(word), integer(size), WRITEABLE)
    if nbytes < 0 or not (source == ANY or is_peer(m, source)):
        return let_go(m, LATER)
    return take_gil(release_gil(), run_receive(m, source, data_of(x), nbytes, kind))


@inlined
def run_receive(m, source, data, nbytes, kind):
    """A receive that has the rings."""
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
    turn = 0
    pieces = 0
    while pieces < _PIECES_A_CALL:
        if load_word(channel, r.IN_TAIL) == load_word(channel, r.IN_END):
            if r.has_ack_space(channel) and r.sees_header(m, channel):
                if load_word(channel, r.IN_KIND) != kind or load_word(channel, r.IN_NBYTES) != nbytes:
                    store_word(m, r.SOURCE, 0)
                    return OTHER
                # What is read where it is says nothing of how to copy out of the ring.
                smallest = r.ENDLESS if load_word(channel, r.IN_FROM) else LARGE
                r.accept_message(channel, data, _choose(m, r.RECEIVES, nbytes, smallest, 1))
                continue
        elif r.pull(m, channel):
            moved(m)
            if load_word(channel, r.IN_TAIL) == load_word(channel, r.IN_END):
                conclude(m + 8 * r.CHOOSING)
                r.write_ack(channel, load_word(channel, r.RECEIVED), TAKEN, nbytes, kind)
                reached(_RECEIVED)
                return DONE
            turn = 0
            pieces += 1
            continue
        if load_acquire(m + 8 * r.BELL) != 0 or not rest(m, turn):
            return AGAIN
        turn += 1
    return WORKED


@locked_entry
def post_send(mailbox: Index, dst: Index, tensor: PyObject, word: Index, size: Index) -> int:
    """Put a small array into the ring at once: the message's number, and BUSY stays taken; or LATER, negative."""
    m, x, peer = integer(mailbox), object_at(tensor), integer(dst)
    if is_shut(m, integer(size)) or not is_peer(m, peer):
        return -LATER
    nbytes, kind = _message(m, x, integer(word), integer(size), 0)
    way = known_way(m, r.SENDS, nbytes, SMALLEST)
    frame = r.FRAME_UNIT if way == DIRECT else r.frame_of(nbytes)
    if nbytes < 0 or frame > load_word(m, r.RING) // r.PIECES_A_RING:
        return -LATER
    if not swap_if_equal(m + 8 * r.BUSY, 0, this_thread()):
        return -LATER
    if has_requests(m):
        return let_go(m, -LATER)
    channel = channel_of(m, peer)
    # Behind what enters, and what a peer reads late.
    if load_word(channel, r.OUT_HEAD) == load_word(channel, r.OUT_END) and r.has_room(m, channel, frame):
        r.begin_message(channel, data_of(x), nbytes, kind, way)
        r.push(m, channel)
        store_word(m, r.BEHIND, 1)
        reached(POSTED_SEND)
        return load_word(channel, r.SENT)
    return let_go(m, -LATER)


@locked_entry
def post_receive(mailbox: Index, src: Index, tensor: PyObject, word: Index, size: Index) -> int:
    """Receive a small message of a peer if it is there: DONE. Else let `advance` do so: ARMED, and BUSY stays taken.

    Or LATER: where an earlier receive, or a message that is stored, may come before it.
    """
    m, x, peer = integer(mailbox), object_at(tensor), integer(src)
    if is_shut(m, integer(size)) or not is_peer(m, peer):
        return LATER
    nbytes, kind = _message(m, x, integer(word), integer(size), WRITEABLE)
    if nbytes < 0 or not swap_if_equal(m + 8 * r.BUSY, 0, this_thread()):
        return LATER
    channel = channel_of(m, peer)
    if has_requests(m) or load_word(m, r.STORED) != 0 or load_word(channel, r.WATCHED) != 0:
        return let_go(m, LATER)
    store_word(channel, r.ARMED_KIND, kind)
    store_word(channel, r.ARMED_TO, data_of(x))
    store_word(channel, r.ARMED_NBYTES, nbytes)
    store_word(channel, r.WATCHED, 1)
    if _comes_armed(m, channel):
        return let_go(m, DONE)
    store_word(m, r.BEHIND, 1)
    reached(POSTED_RECEIVE)
    return ARMED


@inlined
def _takes_armed(m, channel):
    """After a header was seen: receive the message whole, if it is the armed receive's, small, and all here."""
    if load_word(channel, r.IN_KIND) != load_word(channel, r.ARMED_KIND):
        return False
    nbytes = load_word(channel, r.IN_NBYTES)
    frame = r.frame_of(nbytes)
    if nbytes != load_word(channel, r.ARMED_NBYTES) or frame > load_word(m, r.RING) // r.PIECES_A_RING:
        return False
    if load_word(channel, r.IN_FROM) != 0:
        return False
    if not r.has_ack_space(channel) or not r.has_arrived(channel, load_word(channel, r.IN_TAIL) + frame):
        return False
    store_word(
        channel, r.ARMED_KIND, -1
    )  # before the ack: the peer may leave with it, which makes armed receives vain
    store_word(channel, r.WATCHED, load_word(channel, r.WATCHED) - 1)
    r.accept_message(channel, load_word(channel, r.ARMED_TO), CLOSE)
    r.pull(m, channel)
    r.write_ack(channel, load_word(channel, r.RECEIVED), TAKEN, nbytes, load_word(channel, r.IN_KIND))
    return True


@inlined
def _serve(m, channel, watched):
    """Move what can move between here and one peer; the first thing that concerns Python, or MOVED."""
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
        return RECEIVED if _takes_armed(m, channel) else HEADER
    if load_word(channel, r.OWED) > 0 and r.has_ack_space(channel):
        return ACK_SPACE
    return event


@entry
def complete(mailbox: Index, handled: Index, peer: Index, number: Index) -> int:
    """Take BUSY and `advance`, first of all a send and a receive of one peer that short cuts have posted.

    A rank that exchanges small messages waits for both in one call: the message comes, and then the ack of its own.
    """
    m = integer(mailbox)
    if not swap_if_equal(m + 8 * r.BUSY, 0, this_thread()):
        return NOT_MINE
    # `handled` was read before this thread had the rings: another one may have dealt with an event since.
    if load_word(m, r.TOLD) != integer(handled):
        return let_go(m, NOT_MINE)
    channel = channel_of(m, integer(peer))
    event = NOTHING
    turn = 0
    # Others' messages rest for so long; a send without an ack yet, or a receive, goes on below.
    while turn < _CLOSELY and event < (BOTH if integer(number) else RECEIVED):
        if load_word(channel, r.ARMED_KIND) >= 0 and _comes_armed(m, channel):
            event = RECEIVED
        if integer(number) and r.is_taken(channel, integer(number)) and r.read_ack(channel):
            event = BOTH if event == RECEIVED else ACKED
            break
        pause()
        turn += 1
    if event == NOTHING:
        event = _advance(m, False, True)
    else:
        event += integer(peer) * EVENTS
        moved(m)
    return _tell(m, event)


@inlined
def _comes_armed(m, channel):
    """Receive the message of the armed receive, if it is there."""
    idle = load_word(channel, r.IN_TAIL) == load_word(channel, r.IN_END)
    return idle and r.sees_header(m, channel) and _takes_armed(m, channel)


@inlined
def _tell(m, event):
    if event != NO_EVENT:
        store_word(m, r.EVENT, event)
        store_word(m, r.TOLD, load_word(m, r.TOLD) + 1)
    return event


@entry
def advance(mailbox: Index, handled: Index, wait: Index) -> int:
    """Move all messages under way until one of them needs a decision, as p2p/pipe.py has it."""
    m = integer(mailbox)
    if load_word(m, r.TOLD) > integer(handled):
        return load_word(m, r.EVENT)
    return _tell(m, _advance(m, False, integer(wait) != 0))


@kernel
def _advance(m, watch_all, wait):
    size = load_word(m, r.SIZE)
    turn = 0
    rounds = 0
    while rounds < _PIECES_A_CALL:
        progress = False
        for step in range(size):
            peer = (load_word(m, r.TURN) + step) % size
            if peer == load_word(m, r.RANK):
                continue
            event = _serve(m, channel_of(m, peer), watch_all)
            if event > MOVED:
                store_word(m, r.TURN, peer + 1)
                moved(m)
                return peer * EVENTS + event
            progress |= event == MOVED
        if progress:
            turn = 0
            rounds += 1
            moved(m)
            continue
        if not wait or load_acquire(m + 8 * r.BELL) != 0 or not rest(m, turn):
            return NO_EVENT
        turn += 1
    return NO_EVENT


@entry
def claim(mailbox: Index, place: Index, number: Index) -> int:
    """Take the request with this number out of its record: DONE, or AGAIN where a wait has just collected it."""
    word = integer(mailbox) + 8 * (r.REQUESTS + r.RECORDS + integer(place) * r.RECORD_WORDS + r.NUMBER)
    return DONE if swap_if_equal(word, integer(number), 0) else AGAIN


@entry
def retire(mailbox: Index) -> int:
    """Tell all peers that acks are no longer read here."""
    m = integer(mailbox)
    for peer in range(load_word(m, r.SIZE)):
        if peer != load_word(m, r.RANK):
            store_release(load_word(channel_of(m, peer), r.OUT) + r.ACKS_TAKEN, r.NEVER_FULL)
    return DONE
