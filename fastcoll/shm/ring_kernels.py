"""What Python calls to move messages through the rings: compiled functions that run without the GIL.

`m` is the address of a mailbox's table (channels.py). `send` and `receive` carry one blocking call from begin to
end; they take the table with the tags of rounds.py, look at their arguments as validate.py has it, and hold BUSY
until they are DONE. `begin`, `accept` and `acknowledge` set things going that `advance` then carries on for all
peers at once. All come back within 0.1 s, and can be called again with the same arguments.
"""

from __future__ import annotations

from ..core import signature
from ..core.operands import LARGEST_TAG
from ..core.status import AGAIN, DONE, LATER, OTHER, REFUSED, WORKED
from ..kernels.jit import entry, inlined, kernel, locked_entry
from ..kernels.primitives import load_acquire, load_word, store_release, store_word
from ..kernels.pyobjects import WRITEABLE, Index, PyObject, integer, object_at, release_gil, take_gil
from ..kernels.waiting import moved, rest, seize_unless
from ..p2p.channels import ACK_SPACE, ACKED, ANY, ARRIVED, ENTERED, HEADER, TAKEN
from ..p2p.transfers import DTYPE_BITS
from .autotune import CLOSE, LARGE, SMALLEST, WAY, best_way, choose, choose_none, conclude
from .channels import (
    ACK_VERDICT,
    BEHIND,
    BELL,
    BUSY,
    CHANNEL_WORDS,
    CHANNELS,
    CHOOSING,
    CONTEXT,
    GIVEN,
    IN_END,
    IN_KIND,
    IN_NBYTES,
    IN_TAIL,
    OUT,
    OUT_END,
    OUT_HEAD,
    OWED,
    RANK,
    RECEIVED,
    RECEIVES,
    SENDING,
    SENDS,
    SIZE,
    SOURCE,
    TURN,
    UNACKED,
    WATCHED,
)
from .context_layout import SHUT
from .rings import (
    ACKS_TAKEN,
    NEVER_FULL,
    accept_message,
    begin_message,
    has_ack_space,
    pull,
    push,
    read_ack,
    sees_header,
    write_ack,
)
from .rounds import PREPARED, RESUMED, context_of
from .validate import CALL, data_of, description, is_plain, nbytes_of

_MESSAGE = signature.code_of("message")

# What `advance` returns, besides AGAIN_ALL: peer * EVENTS + event.
NOTHING, MOVED = 0, 1
EVENTS = 8
AGAIN_ALL = -1

_PIECES_A_CALL = 2048  # at most 128 MiB, 20 ms, between two looks at signals


@inlined
def _channel(m, peer):
    return load_word(m, CHANNELS) + peer * (8 * CHANNEL_WORDS)


@inlined
def _known_way(m, operation, nbytes, smallest):
    """How a message goes whose time is not measured."""
    return best_way(m + 8 * CHOOSING, operation, nbytes) if nbytes >= smallest else CLOSE


@inlined
def _choose(m, operation, nbytes, smallest, stride):
    """How a message of a blocking call goes: as is best, or as is to be tried."""
    t = m + 8 * CHOOSING
    choose_none(t)
    if nbytes >= smallest:
        choose(t, operation, nbytes, 2, stride)
    return load_word(t, WAY)


@entry
def begin(mailbox: Index, peer: Index, address: Index, nbytes: Index, kind: Index) -> int:
    """Make a message the one that enters the ring to `peer`; `advance` moves it. None may be entering."""
    m = integer(mailbox)
    way = _known_way(m, SENDS, integer(nbytes), SMALLEST)
    begin_message(_channel(m, integer(peer)), integer(address), integer(nbytes), integer(kind), way)
    return DONE


@entry
def accept(mailbox: Index, peer: Index, address: Index) -> int:
    """Let the message whose header `advance` has read arrive at `address` (0: drop its bytes)."""
    m = integer(mailbox)
    channel = _channel(m, integer(peer))
    accept_message(channel, integer(address), _known_way(m, RECEIVES, load_word(channel, IN_NBYTES), LARGE))
    return DONE


@entry
def acknowledge(
    mailbox: Index, peer: Index, number: Index, verdict: Index, nbytes: Index, kind: Index
) -> int:
    """Answer a message of `peer`, with what the receive asked for; AGAIN: no space."""
    channel = _channel(integer(mailbox), integer(peer))
    if not has_ack_space(channel):
        return AGAIN
    write_ack(channel, integer(number), integer(verdict), integer(nbytes), integer(kind))
    return DONE


@inlined
def _take(h):
    """Take the rings for a blocking call, unless it has them already."""
    if h & RESUMED:
        return True
    m = context_of(h)
    shut = load_word(load_word(m, CONTEXT), SHUT) if h & PREPARED == 0 else 0
    # Whoever had them may have left a message half-way to the courier, which says so by BEHIND.
    return shut == 0 and seize_unless(m + 8 * BUSY, m + 8 * BEHIND)


@inlined
def _let_go(m, status):
    store_release(m + 8 * BUSY, 0)
    return status


@inlined
def _message(h, x, word, flags):
    """The bytes of an array, and the kind of its message; -1 bytes: ask Python.

    `word` is the tag, or in a PREPARED call the kind.
    """
    m = context_of(h)
    if h & PREPARED:
        return load_word(m, GIVEN), word
    c = load_word(m, CONTEXT)
    what = description(c, h, _MESSAGE, x, 0)
    if what == 0 or word < 0 or word > LARGEST_TAG or not is_plain(c, h, x, flags):
        return -1, word
    return nbytes_of(x, what), word << DTYPE_BITS | load_word(what, CALL)


@inlined
def _is_peer(m, rank):
    return 0 <= rank < load_word(m, SIZE) and rank != load_word(m, RANK)


@locked_entry
def send(handle: Index, dst: Index, tensor: PyObject, tag: Index) -> int:
    """Send an array, and wait until it is taken. DONE, AGAIN, REFUSED with the ack in the channel, or LATER.

    Only while no other message to this peer is entering or unacked.
    """
    h = integer(handle)
    if not _take(h):
        return LATER
    m, x, peer = context_of(h), object_at(tensor), integer(dst)
    nbytes, kind = _message(h, x, integer(tag), 0)
    if nbytes < 0 or not _is_peer(m, peer):
        return _let_go(m, LATER)
    status = take_gil(release_gil(), _send(m, _channel(m, peer), data_of(x), nbytes, kind))
    return _let_go(m, DONE) if status == DONE else status


@kernel
def _send(m, channel, data, nbytes, kind):
    if load_word(channel, SENDING) == 0:
        begin_message(channel, data, nbytes, kind, _choose(m, SENDS, nbytes, SMALLEST, 1))
        store_word(channel, SENDING, 1)
    turn = 0
    pieces = 0
    while pieces < _PIECES_A_CALL:
        if load_word(channel, OUT_HEAD) < load_word(channel, OUT_END):
            if push(m, channel):
                turn = 0
                pieces += 1
                moved(m)
                continue
        elif read_ack(channel):
            store_word(channel, SENDING, 0)
            conclude(m + 8 * CHOOSING)
            moved(m)
            return DONE if load_word(channel, ACK_VERDICT) == TAKEN else REFUSED
        if load_acquire(m + 8 * BELL) != 0 or not rest(m, turn):
            return AGAIN
        turn += 1
    return WORKED


@locked_entry
def receive(handle: Index, src: Index, tensor: PyObject, tag: Index) -> int:
    """Receive the next message of a rank (or of ANY) into an array, and answer it.

    -1 - rank when done, AGAIN, WORKED, OTHER or LATER. Only while no other message of that rank is
    arriving. Meanwhile word SOURCE holds the rank that was chosen, plus 1.
    """
    h = integer(handle)
    if not _take(h):
        return LATER
    m, x, source = context_of(h), object_at(tensor), integer(src)
    nbytes, kind = _message(h, x, integer(tag), WRITEABLE)
    if nbytes < 0 or not (source == ANY or _is_peer(m, source)):
        return _let_go(m, LATER)
    if source == ANY and load_word(m, SOURCE) == 0:
        event = take_gil(release_gil(), _advance(m, True))
        if event == AGAIN_ALL:
            return AGAIN
        store_word(m, SOURCE, event // EVENTS + 1)
    peer = load_word(m, SOURCE) - 1 if source == ANY else source
    status = take_gil(release_gil(), _receive(m, _channel(m, peer), data_of(x), nbytes, kind))
    if status != DONE:
        return status
    store_word(m, SOURCE, 0)
    return _let_go(m, -1 - peer)


@kernel
def _receive(m, channel, data, nbytes, kind):
    turn = 0
    pieces = 0
    while pieces < _PIECES_A_CALL:
        if load_word(channel, IN_TAIL) == load_word(channel, IN_END):
            if has_ack_space(channel) and sees_header(m, channel):
                if load_word(channel, IN_KIND) != kind or load_word(channel, IN_NBYTES) != nbytes:
                    store_word(m, SOURCE, 0)
                    return OTHER
                accept_message(channel, data, _choose(m, RECEIVES, nbytes, LARGE, 2))
                continue
        elif pull(m, channel):
            moved(m)
            if load_word(channel, IN_TAIL) == load_word(channel, IN_END):
                conclude(m + 8 * CHOOSING)
                write_ack(channel, load_word(channel, RECEIVED), TAKEN, nbytes, kind)
                return DONE
            turn = 0
            pieces += 1
            continue
        if load_acquire(m + 8 * BELL) != 0 or not rest(m, turn):
            return AGAIN
        turn += 1
    return WORKED


@inlined
def _serve(m, channel, watched):
    """Move what can move between here and one peer; the first thing that concerns Python, or MOVED."""
    event = NOTHING
    if load_word(channel, OUT_HEAD) < load_word(channel, OUT_END) and push(m, channel):
        if load_word(channel, OUT_HEAD) == load_word(channel, OUT_END):
            return ENTERED
        event = MOVED
    if load_word(channel, UNACKED) > 0 and read_ack(channel):
        return ACKED
    if load_word(channel, IN_TAIL) < load_word(channel, IN_END):
        if pull(m, channel):
            if load_word(channel, IN_TAIL) == load_word(channel, IN_END):
                return ARRIVED
            event = MOVED
    elif (watched or load_word(channel, WATCHED) > 0) and sees_header(m, channel):
        return HEADER
    if load_word(channel, OWED) > 0 and has_ack_space(channel):
        return ACK_SPACE
    return event


@entry
def advance(mailbox: Index) -> int:
    """Move all messages under way until one of them needs a decision: peer * EVENTS + event.

    AGAIN_ALL: nothing to decide, but the bell rang or it is time to look at signals and deadlines.
    """
    return _advance(integer(mailbox), False)


@kernel
def _advance(m, watch_all):
    size = load_word(m, SIZE)
    turn = 0
    rounds = 0
    while rounds < _PIECES_A_CALL:
        progress = False
        for step in range(size):
            peer = (load_word(m, TURN) + step) % size
            if peer == load_word(m, RANK):
                continue
            event = _serve(m, _channel(m, peer), watch_all)
            if event > MOVED:
                store_word(m, TURN, peer + 1)
                moved(m)
                return peer * EVENTS + event
            progress |= event == MOVED
        if progress:
            turn = 0
            rounds += 1
            moved(m)
            continue
        if load_acquire(m + 8 * BELL) != 0 or not rest(m, turn):
            return AGAIN_ALL
        turn += 1
    return AGAIN_ALL


@entry
def retire(mailbox: Index) -> int:
    """Tell all peers that acks are no longer read here."""
    m = integer(mailbox)
    for peer in range(load_word(m, SIZE)):
        if peer != load_word(m, RANK):
            store_release(load_word(_channel(m, peer), OUT) + ACKS_TAKEN, NEVER_FULL)
    return DONE
