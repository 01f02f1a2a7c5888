"""What Python calls to move messages through the rings: compiled functions that run without the GIL.

`m` is the address of a mailbox's table (lanes.py). `send` and `receive` carry one blocking call from begin to
end; `begin`, `accept` and `acknowledge` set things going that `advance` then carries on for all peers at once.
All come back within 0.1 s, and can be called again with the same arguments.
"""

from __future__ import annotations

from ..kernels.atomics import load_acquire, store_release
from ..kernels.jit import inlined, kernel
from ..kernels.pointers import data_of, load_word, store_word
from ..kernels.polling import moved, rest
from .lanes import (
    ACK_VERDICT,
    BELL,
    IN_END,
    IN_KIND,
    IN_NBYTES,
    IN_TAIL,
    LANE_WORDS,
    LANES,
    OUT,
    OUT_END,
    OUT_HEAD,
    OWED,
    RANK,
    RECEIVED,
    SENDING,
    SIZE,
    SOURCE,
    TURN,
    UNACKED,
    WATCHED,
)
from .rings import (
    ACKS_TAKEN,
    NEVER_FULL,
    TAKEN,
    accept_message,
    begin_message,
    has_ack_space,
    pull,
    push,
    read_ack,
    sees_header,
    write_ack,
)

# What a blocking kernel returns. OTHER: the next message is not the one asked for, and was left alone.
DONE, AGAIN, REFUSED, OTHER = range(4)

# What `advance` returns, besides AGAIN_ALL: peer * EVENTS + event.
NOTHING, MOVED, ENTERED, ACKED, HEADER, ARRIVED, ACK_SPACE = range(7)
EVENTS = 8
AGAIN_ALL = -1

_PIECES_A_CALL = 2048  # at most 128 MiB, 20 ms, between two looks at signals


@inlined
def _lane(m, peer):
    return load_word(m, LANES) + peer * (8 * LANE_WORDS)


@kernel
def begin(m, peer, address, nbytes, kind):
    """Make a message the one that enters the ring to `peer`; `advance` moves it. None may be entering."""
    begin_message(_lane(m, peer), address, nbytes, kind)


@kernel
def accept(m, peer, address):
    """Let the message whose header `advance` has read arrive at `address` (0: drop its bytes)."""
    accept_message(_lane(m, peer), address)


@kernel
def acknowledge(m, peer, number, verdict, nbytes, kind):
    """Answer a message of `peer`, with what the receive asked for; False: no space, try again."""
    lane = _lane(m, peer)
    if not has_ack_space(lane):
        return False
    write_ack(lane, number, verdict, nbytes, kind)
    return True


@kernel
def send(m, peer, header, nbytes, kind):
    """Send an array, and wait until it is taken. DONE, AGAIN, or REFUSED with the ack in the lane.

    Only while no other message to this peer is entering or unacked.
    """
    lane = _lane(m, peer)
    if load_word(lane, SENDING) == 0:
        begin_message(lane, data_of(header), nbytes, kind)
        store_word(lane, SENDING, 1)
    turn = 0
    pieces = 0
    while pieces < _PIECES_A_CALL:
        if load_word(lane, OUT_HEAD) < load_word(lane, OUT_END):
            if push(m, lane):
                turn = 0
                pieces += 1
                moved(m)
                continue
        elif read_ack(lane):
            store_word(lane, SENDING, 0)
            moved(m)
            return DONE if load_word(lane, ACK_VERDICT) == TAKEN else REFUSED
        if load_acquire(m + 8 * BELL) != 0 or not rest(m, turn):
            return AGAIN
        turn += 1
    return AGAIN


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
            if has_ack_space(lane) and sees_header(m, lane):
                if load_word(lane, IN_KIND) != kind or load_word(lane, IN_NBYTES) != nbytes:
                    store_word(m, SOURCE, 0)
                    return OTHER
                accept_message(lane, data_of(header))
                continue
        elif pull(m, lane):
            moved(m)
            if load_word(lane, IN_TAIL) == load_word(lane, IN_END):
                write_ack(lane, load_word(lane, RECEIVED), TAKEN, nbytes, kind)
                return DONE
            turn = 0
            pieces += 1
            continue
        if load_acquire(m + 8 * BELL) != 0 or not rest(m, turn):
            return AGAIN
        turn += 1
    return AGAIN


@inlined
def _serve(m, lane, watched):
    """Move what can move between here and one peer; the first thing that concerns Python, or MOVED."""
    event = NOTHING
    if load_word(lane, OUT_HEAD) < load_word(lane, OUT_END) and push(m, lane):
        if load_word(lane, OUT_HEAD) == load_word(lane, OUT_END):
            return ENTERED
        event = MOVED
    if load_word(lane, UNACKED) > 0 and read_ack(lane):
        return ACKED
    if load_word(lane, IN_TAIL) < load_word(lane, IN_END):
        if pull(m, lane):
            if load_word(lane, IN_TAIL) == load_word(lane, IN_END):
                return ARRIVED
            event = MOVED
    elif (watched or load_word(lane, WATCHED) > 0) and sees_header(m, lane):
        return HEADER
    if load_word(lane, OWED) > 0 and has_ack_space(lane):
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
            store_release(load_word(_lane(m, peer), OUT) + ACKS_TAKEN, NEVER_FULL)
