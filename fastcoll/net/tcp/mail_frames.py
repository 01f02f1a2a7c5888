"""Frames of messages on a connection, and the steps of its two ends.

Messages travel on the connection that their sender dialed, acks come back on it. Both consist of frames of
four words, little-endian as the opening of the connection has made sure:

    word        MESSAGE                      REST              an ack
    TYPE        MESSAGE | number << 8        REST | number     verdict | number << 8
    KIND        tag and dtype                0                 those of the receiver's array
    NBYTES      of the whole message         bytes that follow of the receiver's array
    ATTACHED    bytes that follow            0                 0

An ack TAKEN may also come ahead of a message, on the connection that its receiver dialed (mail_answers.py).

A message of up to EAGER bytes travels with its header. Of a longer one the first EAGER bytes do, and the rest
follows when the receiver says GO, which it does as soon as it has an array for it: the rest goes from
array to array, and never needs memory of anybody. What a receiver has no array for it keeps: at
most WINDOW bytes of each peer, since a sender that has so many bytes on the way attaches nothing.
TAKEN and MISFIT end a message. The number of a message is its place among those of its connection, from 1.
"""

from __future__ import annotations

from ...kernels.copy import copy, move
from ...kernels.jit import inlined, kernel
from ...kernels.primitives import load_word, store_word
from ...kernels.sockets import receive_some, send_some
from ...p2p.pipe import GO, TAKEN
from .mail_words import (
    ACK_AHEAD,
    ACK_BUFFER,
    ACK_HAVE,
    ACK_KIND,
    ACK_NBYTES,
    ACK_NUMBER,
    ACK_USED,
    ACK_VERDICT,
    ANSWER,
    ANSWER_LEFT,
    ARRIVING,
    IN_ATTACHED,
    IN_BUFFER,
    IN_FD,
    IN_GONE,
    IN_HAVE,
    IN_KIND,
    IN_LEFT,
    IN_NBYTES,
    IN_NUMBER,
    IN_STAGE,
    IN_TO,
    IN_USED,
    OUT_BUFFER,
    OUT_END,
    OUT_FD,
    OUT_FROM,
    OUT_GONE,
    OUT_POSITION,
    OUT_STAGED,
    REST_NBYTES,
    REST_NUMBER,
    SENT,
    UNACKED,
)

FRAME = 32
TYPE, KIND, NBYTES, ATTACHED = range(4)
TYPE_BITS = 8
MESSAGE, REST = 8, 9

EAGER = 64 << 10
WINDOW = 1 << 20
STAGED = (
    8 << 10
)  # payload bytes that are copied behind their header, which is cheaper than a system call more
PIECE = 256 << 10  # bytes that one system call moves at most: half of a core's second-level cache
BUFFER = 2 * FRAME + STAGED
ACKS = 64 * FRAME

GARBLED = -(1 << 21)  # the peer has sent what no rank sends; below what kernels/sockets.py returns


@inlined
def write_ack(frame, number, verdict, nbytes, kind):
    store_word(frame, TYPE, verdict | number << TYPE_BITS)
    store_word(frame, KIND, kind)
    store_word(frame, NBYTES, nbytes)
    store_word(frame, ATTACHED, 0)


@inlined
def _note_ack(row, ack, ahead):
    """Read an ack into the row; its verdict."""
    store_word(row, ACK_AHEAD, ahead)
    store_word(row, ACK_NUMBER, load_word(ack, TYPE) >> TYPE_BITS)
    store_word(row, ACK_VERDICT, type_of(ack))
    store_word(row, ACK_NBYTES, load_word(ack, NBYTES))
    store_word(row, ACK_KIND, load_word(ack, KIND))
    if type_of(ack) != GO:
        store_word(row, UNACKED, load_word(row, UNACKED) - 1)
    return type_of(ack)


@inlined
def type_of(frame):
    return load_word(frame, TYPE) & ((1 << TYPE_BITS) - 1)


@kernel
def begin_frame(row, kind_of_frame, number, kind, nbytes, address, payload, ahead):
    """Make a frame the one that enters, behind `ahead` bytes; `payload` bytes at `address` follow its header."""
    frame = load_word(row, OUT_BUFFER) + ahead
    store_word(frame, TYPE, kind_of_frame | number << TYPE_BITS)
    store_word(frame, KIND, kind)
    store_word(frame, NBYTES, nbytes)
    store_word(frame, ATTACHED, payload if kind_of_frame == MESSAGE else 0)
    staged = min(payload, STAGED)
    copy(frame + FRAME, address, staged)
    store_word(row, OUT_POSITION, 0)
    store_word(row, OUT_END, ahead + FRAME + payload)
    store_word(row, OUT_STAGED, ahead + FRAME + staged)
    store_word(row, OUT_FROM, address - ahead)


@inlined
def _count_sent(row):
    store_word(row, SENT, load_word(row, SENT) + 1)
    store_word(row, UNACKED, load_word(row, UNACKED) + 1)


@inlined
def begin_message(row, address, nbytes, kind, attached):
    """Make a message the one that enters."""
    _count_sent(row)
    begin_frame(row, MESSAGE, load_word(row, SENT), kind, nbytes, address, attached, 0)


@inlined
def begin_with_answer(row, address, nbytes, kind, attached):
    """As `begin_message`, with the answer to the message that was read last ahead of it."""
    _count_sent(row)
    begin_frame(row, MESSAGE, load_word(row, SENT), kind, nbytes, address, attached, FRAME)
    write_ack(
        load_word(row, OUT_BUFFER),
        load_word(row, IN_NUMBER),
        TAKEN,
        load_word(row, IN_NBYTES),
        load_word(row, IN_KIND),
    )


@inlined
def begin_rest(row, address, nbytes, number, attached):
    """Make what follows the first `attached` bytes of a message the frame that enters."""
    begin_frame(row, REST, number, 0, nbytes - attached, address + attached, nbytes - attached, 0)


@inlined
def is_entering(row):
    return load_word(row, OUT_POSITION) < load_word(row, OUT_END)


@kernel
def push(row):
    """Send the next piece of the frame that enters; whether anything moved."""
    if load_word(row, OUT_GONE) != 0:
        return False
    position, staged = load_word(row, OUT_POSITION), load_word(row, OUT_STAGED)
    source = load_word(row, OUT_FROM) + position - FRAME
    end = load_word(row, OUT_END)
    if position < staged:
        source = load_word(row, OUT_BUFFER) + position
        end = staged
    moved = send_some(load_word(row, OUT_FD), source, min(end - position, PIECE))
    if moved < 0:
        store_word(row, OUT_GONE, moved)
        return False
    store_word(row, OUT_POSITION, position + moved)
    return moved > 0


@inlined
def _has_frame(row, have, used):
    return load_word(row, have) - load_word(row, used) >= FRAME


@kernel
def _fill(row, fd, gone, buffer, have, used, size):
    """Receive into a buffer until it holds a whole frame; whether it does. The others name words."""
    if _has_frame(row, have, used):
        return True
    if load_word(row, gone) != 0 or load_word(row, fd) < 0:
        return False
    rest = load_word(row, have) - load_word(row, used)
    if load_word(row, used) > 0:
        move(load_word(row, buffer), load_word(row, buffer) + load_word(row, used), rest)
        store_word(row, used, 0)
        store_word(row, have, rest)
    moved = receive_some(load_word(row, fd), load_word(row, buffer) + rest, size - rest)
    if moved < 0:
        store_word(row, gone, moved)
        return False
    store_word(row, have, rest + moved)
    return rest + moved >= FRAME


@kernel
def read_ack(row):
    """Read the next ack into the row, if it is there."""
    if not _fill(row, OUT_FD, OUT_GONE, ACK_BUFFER, ACK_HAVE, ACK_USED, ACKS):
        return False
    ack = load_word(row, ACK_BUFFER) + load_word(row, ACK_USED)
    store_word(row, ACK_USED, load_word(row, ACK_USED) + FRAME)
    verdict = type_of(ack)
    if verdict < TAKEN or verdict > GO:
        store_word(row, OUT_GONE, GARBLED)
        return False
    _note_ack(row, ack, 0)
    return True


@inlined
def has_ack(row):
    """Whether an ack has been received that was not read."""
    return _has_frame(row, ACK_HAVE, ACK_USED)


@inlined
def has_header(row):
    """Whether a header has been received that was not accepted."""
    return _has_frame(row, IN_HAVE, IN_USED)


@inlined
def has_answer_ahead(row):
    """Whether the header that was received and not accepted is that of an answer."""
    frame = load_word(row, IN_BUFFER) + load_word(row, IN_USED)
    return has_header(row) and type_of(frame) == TAKEN


@kernel
def read_header(row):
    """Read the next header into the row, if it is there, and leave it to `accept`: its type, 0 for none.

    An answer ahead of a message is read as `read_ack` does: TAKEN.
    """
    if not _fill(row, IN_FD, IN_GONE, IN_BUFFER, IN_HAVE, IN_USED, BUFFER):
        return 0
    frame = load_word(row, IN_BUFFER) + load_word(row, IN_USED)
    type_of_frame = type_of(frame)
    number = load_word(frame, TYPE) >> TYPE_BITS
    if type_of_frame == TAKEN and load_word(row, UNACKED) > 0:
        store_word(row, IN_USED, load_word(row, IN_USED) + FRAME)
        return _note_ack(row, frame, 1)
    if type_of_frame == MESSAGE:
        store_word(row, IN_NUMBER, number)
        store_word(row, IN_KIND, load_word(frame, KIND))
        store_word(row, IN_NBYTES, load_word(frame, NBYTES))
        store_word(row, IN_ATTACHED, load_word(frame, ATTACHED))
    elif type_of_frame == REST:
        store_word(row, REST_NUMBER, number)
        store_word(row, REST_NBYTES, load_word(frame, NBYTES))
    else:
        store_word(row, IN_GONE, GARBLED)
        store_word(row, IN_USED, load_word(row, IN_HAVE))
        return 0
    return type_of_frame


@kernel
def accept_payload(row, address, nbytes):
    """Let `nbytes` bytes behind the header that was read arrive at `address` (0: drop them)."""
    used = load_word(row, IN_USED) + FRAME
    there = min(nbytes, load_word(row, IN_HAVE) - used)
    if address != 0:
        copy(address, load_word(row, IN_BUFFER) + used, there)
        address += there
    store_word(row, IN_USED, used + there)
    store_word(row, IN_TO, address)
    store_word(row, IN_LEFT, nbytes - there)
    store_word(row, IN_STAGE, ARRIVING)


@kernel
def pull(row):
    """Receive the next piece of the arriving payload; whether anything moved."""
    if load_word(row, IN_GONE) != 0:
        return False
    # What was received beyond the header has been taken, so the buffer is free for bytes that are dropped.
    target = load_word(row, IN_TO)
    if target != 0:
        moved = receive_some(load_word(row, IN_FD), target, min(load_word(row, IN_LEFT), PIECE))
    else:
        moved = receive_some(
            load_word(row, IN_FD), load_word(row, IN_BUFFER), min(load_word(row, IN_LEFT), BUFFER)
        )
    if moved < 0:
        store_word(row, IN_GONE, moved)
        return False
    if target != 0:
        store_word(row, IN_TO, target + moved)
    store_word(row, IN_LEFT, load_word(row, IN_LEFT) - moved)
    return moved > 0


@kernel
def answer(row, number, verdict, nbytes, kind):
    """Send an ack; False: not all of it could be sent, call again with the same."""
    frame = load_word(row, ANSWER)
    name = verdict | number << TYPE_BITS
    if load_word(row, ANSWER_LEFT) > 0 and load_word(frame, TYPE) != name and not _flush(row):
        return False
    if load_word(row, ANSWER_LEFT) == 0:
        write_ack(frame, number, verdict, nbytes, kind)
        store_word(row, ANSWER_LEFT, FRAME)
    return _flush(row)


@kernel
def _flush(row):
    left = load_word(row, ANSWER_LEFT)
    moved = send_some(load_word(row, IN_FD), load_word(row, ANSWER) + FRAME - left, left)
    if moved < 0:
        # Whoever is gone needs no answer, and what it sent before counts.
        store_word(row, IN_GONE, moved)
        moved = left
    store_word(row, ANSWER_LEFT, left - moved)
    return left == moved
