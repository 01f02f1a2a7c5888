"""Point-to-point between ranks of a segment: one byte ring for each ordered pair, in the sender's section.

A message is a *frame*: nbytes, kind (tag << 8 | dtype code), the payload, padded to 64 bytes. It enters
the ring piece by piece, a quarter of the ring at most, so that copying in and copying out overlap; what
fits into one piece becomes visible with one store. The receiver takes frames in order, into the array
they are meant for or into memory of its own, and answers each with an *ack* when a receive has matched it.
Acks may come in any order, so they name the message's number (frames counted from 1).

    word of the ring       writer    meaning
    HEAD                   sender    bytes produced (release: the bytes below it are written)
    ACKS_TAKEN             sender    acks read, brought up to date now and then (release)
    TAIL                   receiver  bytes consumed (release: the bytes below it are read)
    ack k % ACK_SLOTS      receiver  word 0 = k + 1 (release), then message number, verdict, nbytes, kind

Why no byte is overwritten unread: the sender writes below TAIL + ring size only, having acquired TAIL.
Why no ack is overwritten unread: the receiver writes ack k only when ACKS_TAKEN > k - ACK_SLOTS. The
sender publishes it after every ACK_BATCH acks, so it is never more than that behind what was read.
Why nobody waits for ever: an ack belongs to a send that is not complete, whose owner is polling for it;
a rank that leaves sets ACKS_TAKEN to its highest value.
`tests/shm/test_rings_model.py` explores the schedules of this protocol.

A rank's private state is the table of lanes.py; every kernel is resumable from it.
"""

from __future__ import annotations

from ..kernels.atomics import load_acquire, store_release
from ..kernels.copy import copy
from ..kernels.jit import inlined, kernel
from ..kernels.pointers import data_of, load_word, store_word
from ..kernels.polling import POLLING_WORDS, moved, rest
from .layout import LINE, RING_HEADER

# What a blocking kernel returns. OTHER: the next message is not the one asked for, and was left alone.
DONE, AGAIN, REFUSED, OTHER = range(4)

# What `advance` returns, besides AGAIN_ALL: peer * EVENTS + event.
NOTHING, MOVED, ENTERED, ACKED, HEADER, ARRIVED, ACK_SPACE = range(7)
EVENTS = 8
AGAIN_ALL = -1

# Verdicts of an ack.
TAKEN, MISFIT = 1, 2

# Byte offsets in a ring's control words.
HEAD = 0
ACKS_TAKEN = 64
TAIL = LINE
ACKS = 2 * LINE
ACK_BYTES = 64
ACK_SLOTS = (RING_HEADER - ACKS) // ACK_BYTES
ACK_BATCH = 4
_NEVER_FULL = 1 << 62

FRAME_HEADER = 16
FRAME_UNIT = 64
PIECES_A_RING = 4
_PIECES_A_CALL = 2048  # at most 128 MiB, 20 ms, between two looks at signals

# Words of a mailbox's private table, behind the polling table.
BELL = POLLING_WORDS  # not 0: somebody wants the kernel back
LANES = BELL + 1  # address of the lane to rank 0
SIZE = BELL + 2
RANK = BELL + 3
RING = BELL + 4  # bytes of a ring, a power of two
TURN = BELL + 5  # the rank to serve first, so that nobody starves
SOURCE = BELL + 6  # receive from any: the rank chosen plus 1, 0 before
MAILBOX_WORDS = BELL + 7

# Words of a lane, what a rank keeps about one peer. Positions count bytes since the ring was made.
OUT = 0  # address of the ring to the peer
OUT_HEAD = 1
OUT_TAIL = 2  # the peer's TAIL as last seen
OUT_BODY = 3  # position of the payload of the message that enters
OUT_END = 4  # end of that message; equal to OUT_HEAD when none enters
OUT_FROM = 5  # address of the payload
OUT_NBYTES = 6
OUT_KIND = 7
SENT = 8  # messages begun
ACKS_READ = 9
SENDING = 10  # 1 while a blocking send is under way
ACK_NUMBER = 11  # the last ack read
ACK_VERDICT = 12
ACK_NBYTES = 13
ACK_KIND = 14
UNACKED = 15  # how many messages in the ring have no ack yet; set from Python
IN = 16  # address of the ring from the peer
IN_HEAD = 17  # the peer's HEAD as last seen
IN_TAIL = 18
IN_BODY = 19
IN_END = 20  # end of the message that arrives; equal to IN_TAIL when none does
IN_TO = 21  # where its payload goes; 0: nowhere
IN_NBYTES = 22  # of the last header read
IN_KIND = 23
RECEIVED = 24  # messages begun
ACKS_GIVEN = 25
IN_ACKS_TAKEN = 26  # the peer's ACKS_TAKEN as last seen
WATCHED = 27  # not 0: a posted receive may match a message of this peer; set from Python
OWED = 28  # acks that wait for space; set from Python
LANE_WORDS = 32


@inlined
def _lane(m, peer):
    return load_word(m, LANES) + peer * (8 * LANE_WORDS)


@inlined
def _frame(nbytes):
    """Bytes of a frame with this payload."""
    return (FRAME_HEADER + nbytes + FRAME_UNIT - 1) & -FRAME_UNIT


@inlined
def _span(m, position, nbytes):
    """How many of the bytes at `position` lie before the ring's end."""
    ring = load_word(m, RING)
    return min(nbytes, ring - (position & (ring - 1)))


@inlined
def _place(m, ring, position):
    """The address of the byte at `position`."""
    return ring + RING_HEADER + (position & (load_word(m, RING) - 1))


# ---- sending ---------------------------------------------------------------------------------------


@inlined
def _begin(lane, address, nbytes, kind):
    head = load_word(lane, OUT_HEAD)
    store_word(lane, OUT_BODY, head + FRAME_HEADER)
    store_word(lane, OUT_END, head + _frame(nbytes))
    store_word(lane, OUT_FROM, address)
    store_word(lane, OUT_NBYTES, nbytes)
    store_word(lane, OUT_KIND, kind)
    store_word(lane, SENT, load_word(lane, SENT) + 1)


@inlined
def _has_room(m, lane, nbytes):
    limit = load_word(lane, OUT_HEAD) + nbytes - load_word(m, RING)
    if load_word(lane, OUT_TAIL) >= limit:
        return True
    store_word(lane, OUT_TAIL, load_acquire(load_word(lane, OUT) + TAIL))
    return load_word(lane, OUT_TAIL) >= limit


@kernel
def _push(m, lane):
    """Put the next piece of the entering message into the ring, if there is room."""
    head = load_word(lane, OUT_HEAD)
    part = min(load_word(lane, OUT_END) - head, load_word(m, RING) // PIECES_A_RING)
    if not _has_room(m, lane, part):
        return False
    ring = load_word(lane, OUT)
    body = load_word(lane, OUT_BODY)
    if head < body:
        place = _place(m, ring, head)
        store_word(place, 0, load_word(lane, OUT_NBYTES))
        store_word(place, 1, load_word(lane, OUT_KIND))
    start = max(head, body)
    nbytes = min(head + part, body + load_word(lane, OUT_NBYTES)) - start
    source = load_word(lane, OUT_FROM) + start - body
    first = _span(m, start, nbytes)
    copy(_place(m, ring, start), source, first)
    copy(ring + RING_HEADER, source + first, nbytes - first)
    store_word(lane, OUT_HEAD, head + part)
    store_release(ring + HEAD, head + part)
    return True


@kernel
def _read_ack(lane):
    """Read the next ack into the lane, if it is there."""
    taken = load_word(lane, ACKS_READ)
    ring = load_word(lane, OUT)
    ack = ring + ACKS + ACK_BYTES * (taken % ACK_SLOTS)
    if load_acquire(ack) != taken + 1:
        return False
    store_word(lane, ACK_NUMBER, load_word(ack, 1))
    store_word(lane, ACK_VERDICT, load_word(ack, 2))
    store_word(lane, ACK_NBYTES, load_word(ack, 3))
    store_word(lane, ACK_KIND, load_word(ack, 4))
    store_word(lane, ACKS_READ, taken + 1)
    if (taken + 1) % ACK_BATCH == 0:
        store_release(ring + ACKS_TAKEN, taken + 1)
    return True


@kernel
def begin(m, peer, address, nbytes, kind):
    """Make a message the one that enters the ring to `peer`; `advance` moves it. None may be entering."""
    _begin(_lane(m, peer), address, nbytes, kind)


@kernel
def send(m, peer, header, nbytes, kind):
    """Send an array, and wait until it is taken. DONE, AGAIN, or REFUSED with the ack in the lane.

    Only while no other message to this peer is entering or unacked.
    """
    lane = _lane(m, peer)
    if load_word(lane, SENDING) == 0:
        _begin(lane, data_of(header), nbytes, kind)
        store_word(lane, SENDING, 1)
    turn = 0
    pieces = 0
    while pieces < _PIECES_A_CALL:
        if load_word(lane, OUT_HEAD) < load_word(lane, OUT_END):
            if _push(m, lane):
                turn = 0
                pieces += 1
                moved(m)
                continue
        elif _read_ack(lane):
            store_word(lane, SENDING, 0)
            moved(m)
            return DONE if load_word(lane, ACK_VERDICT) == TAKEN else REFUSED
        if load_acquire(m + 8 * BELL) != 0 or not rest(m, turn):
            return AGAIN
        turn += 1
    return AGAIN


# ---- receiving -------------------------------------------------------------------------------------


@inlined
def _sees(lane, position):
    """Whether the ring holds bytes up to `position`."""
    if load_word(lane, IN_HEAD) >= position:
        return True
    store_word(lane, IN_HEAD, load_acquire(load_word(lane, IN) + HEAD))
    return load_word(lane, IN_HEAD) >= position


@kernel
def _sees_header(m, lane):
    """Read the header of the next message into the lane, if one is there."""
    tail = load_word(lane, IN_TAIL)
    if not _sees(lane, tail + 1):
        return False
    place = _place(m, load_word(lane, IN), tail)
    store_word(lane, IN_NBYTES, load_word(place, 0))
    store_word(lane, IN_KIND, load_word(place, 1))
    return True


@inlined
def _accept(lane, address):
    """Let the message whose header was read arrive at `address` (0: drop its bytes)."""
    tail = load_word(lane, IN_TAIL)
    store_word(lane, IN_BODY, tail + FRAME_HEADER)
    store_word(lane, IN_END, tail + _frame(load_word(lane, IN_NBYTES)))
    store_word(lane, IN_TO, address)
    store_word(lane, RECEIVED, load_word(lane, RECEIVED) + 1)


@kernel
def _pull(m, lane):
    """Take the next piece of the arriving message out of the ring, if it is there."""
    tail = load_word(lane, IN_TAIL)
    part = min(load_word(lane, IN_END) - tail, load_word(m, RING) // PIECES_A_RING)
    if not _sees(lane, tail + part):
        return False
    ring = load_word(lane, IN)
    body = load_word(lane, IN_BODY)
    start = max(tail, body)
    nbytes = min(tail + part, body + load_word(lane, IN_NBYTES)) - start
    if load_word(lane, IN_TO) != 0:
        target = load_word(lane, IN_TO) + start - body
        first = _span(m, start, nbytes)
        copy(target, _place(m, ring, start), first)
        copy(target + first, ring + RING_HEADER, nbytes - first)
    store_word(lane, IN_TAIL, tail + part)
    store_release(ring + TAIL, tail + part)
    return True


@inlined
def _has_ack_space(lane):
    limit = load_word(lane, ACKS_GIVEN) - ACK_SLOTS
    if load_word(lane, IN_ACKS_TAKEN) > limit:
        return True
    store_word(lane, IN_ACKS_TAKEN, load_acquire(load_word(lane, IN) + ACKS_TAKEN))
    return load_word(lane, IN_ACKS_TAKEN) > limit


@inlined
def _acknowledge(lane, number, verdict, nbytes, kind):
    given = load_word(lane, ACKS_GIVEN)
    ack = load_word(lane, IN) + ACKS + ACK_BYTES * (given % ACK_SLOTS)
    store_word(ack, 1, number)
    store_word(ack, 2, verdict)
    store_word(ack, 3, nbytes)
    store_word(ack, 4, kind)
    store_word(lane, ACKS_GIVEN, given + 1)
    store_release(ack, given + 1)


@kernel
def accept(m, peer, address):
    """Let the message whose header `advance` has read arrive at `address` (0: drop its bytes)."""
    _accept(_lane(m, peer), address)


@kernel
def acknowledge(m, peer, number, verdict, nbytes, kind):
    """Answer a message of `peer`, with what the receive asked for; False: no space, try again."""
    lane = _lane(m, peer)
    if not _has_ack_space(lane):
        return False
    _acknowledge(lane, number, verdict, nbytes, kind)
    return True


@kernel
def receive(m, source, header, nbytes, kind):
    """Receive the next message of a rank (-1: of any) into an array, and answer it. DONE, AGAIN or OTHER.

    Only while no other message of that rank is arriving. From any, word SOURCE holds the rank plus 1.
    """
    if source < 0 and load_word(m, SOURCE) == 0:
        event = advance(m, True)
        if event == AGAIN_ALL:
            return AGAIN
        store_word(m, SOURCE, event // EVENTS + 1)
    lane = _lane(m, load_word(m, SOURCE) - 1 if source < 0 else source)
    turn = 0
    pieces = 0
    while pieces < _PIECES_A_CALL:
        if load_word(lane, IN_TAIL) == load_word(lane, IN_END):
            if _has_ack_space(lane) and _sees_header(m, lane):
                if load_word(lane, IN_KIND) != kind or load_word(lane, IN_NBYTES) != nbytes:
                    return OTHER
                _accept(lane, data_of(header))
                continue
        elif _pull(m, lane):
            moved(m)
            if load_word(lane, IN_TAIL) == load_word(lane, IN_END):
                _acknowledge(lane, load_word(lane, RECEIVED), TAKEN, nbytes, kind)
                return DONE
            turn = 0
            pieces += 1
            continue
        if load_acquire(m + 8 * BELL) != 0 or not rest(m, turn):
            return AGAIN
        turn += 1
    return AGAIN


# ---- everything at once ----------------------------------------------------------------------------


@inlined
def _serve(m, lane, watched):
    """Move what can move between here and one peer; the first thing that concerns Python, or MOVED."""
    event = NOTHING
    if load_word(lane, OUT_HEAD) < load_word(lane, OUT_END) and _push(m, lane):
        if load_word(lane, OUT_HEAD) == load_word(lane, OUT_END):
            return ENTERED
        event = MOVED
    if load_word(lane, UNACKED) > 0 and _read_ack(lane):
        return ACKED
    if load_word(lane, IN_TAIL) < load_word(lane, IN_END):
        if _pull(m, lane):
            if load_word(lane, IN_TAIL) == load_word(lane, IN_END):
                return ARRIVED
            event = MOVED
    elif (watched or load_word(lane, WATCHED) > 0) and _sees_header(m, lane):
        return HEADER
    if load_word(lane, OWED) > 0 and _has_ack_space(lane):
        return ACK_SPACE
    return event


@kernel
def advance(m, watch_all):
    """Move all messages under way until one of them needs a decision: peer * EVENTS + event.

    AGAIN_ALL: nothing to decide, but the bell rang or it is time to look at signals and deadlines.
    """
    size = load_word(m, SIZE)
    turn = 0
    rounds = 0
    while rounds < _PIECES_A_CALL:
        progress = False
        for step in range(size):
            peer = (load_word(m, TURN) + step) % size
            if peer == load_word(m, RANK):
                continue
            event = _serve(m, _lane(m, peer), watch_all)
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


@kernel
def retire(m):
    """Tell all peers that acks are no longer read here."""
    for peer in range(load_word(m, SIZE)):
        if peer != load_word(m, RANK):
            store_release(load_word(_lane(m, peer), OUT) + ACKS_TAKEN, _NEVER_FULL)
