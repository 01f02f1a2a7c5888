"""Messages on connections: the private words of a group's mail, the frames, and the steps of both directions.

Two ranks have one connection for messages both ways. Frames follow one another on it, each of four words, little-endian
as the opening of the connection has made sure, and perhaps bytes:

    word        MESSAGE                      REST              an ack
    TYPE        MESSAGE | number << 8        REST | number     verdict | number << 8
    KIND        tag and dtype                0                 those of the receiver's array
    NBYTES      of the whole message         bytes that follow of the receiver's array
    ATTACHED    bytes that follow            0                 0

A message of up to EAGER bytes travels with its header. Of a longer one the first EAGER bytes do, and the rest
follows when the receiver says GO, which it does as soon as it has an array for it: the rest goes from
array to array, and never needs memory of anybody. What a receiver has no array for it keeps: at
most WINDOW bytes of each peer, since a sender that has so many bytes on the way attaches nothing.
TAKEN and MISFIT end a message. The number of a message is its place among those of its direction, from 1.

One connection, since a packet the other way carries TCP's own acknowledgement along: 72 bytes there and back between
two processes take 3.7 us each way on one, and 5.5 on a connection for each direction; 32 KiB 4.8 and 7.4 (Intel Xeon,
Sapphire Rapids, Linux 6.18).

Why neither side waits for ever. Whoever waits for an ack reads all that comes, and keeps messages that no receive wants
within the window. An ack does not enter in the middle of a frame that does (`answer` says False, and is called
again): that frame is a message, which the peer reads since it waits for the ack, or a rest, for which it has an array.
While an ack waits so, frames are read as before.
"""

from __future__ import annotations

from ...compiler.jit import inlined, kernel
from ...failpoints import number_of
from ...kernels.copy import copy, move
from ...kernels.failing import reached, reached_by
from ...kernels.primitives import load_word, store_word
from ...kernels.sockets import VECTOR_BYTES, receive_some, send_both, send_some
from ...kernels.waiting import BACKOFF_WORDS
from ...p2p.pipe import GO, TAKEN

FRAME = 32
TYPE, KIND, NBYTES, ATTACHED = range(4)
TYPE_BITS = 8
MESSAGE, REST = 8, 9

EAGER = 64 << 10
WINDOW = 1 << 20
STAGED = (
    8 << 10
)  # payloads up to so many bytes are copied behind their header; others leave from where they are
IO_BYTES = 256 << 10  # bytes that one system call moves at most: half of a core's second-level cache
BUFFER = 2 * FRAME + STAGED  # of each direction
VECTOR = VECTOR_BYTES

GARBLED = -(1 << 21)  # the peer has sent what no rank sends; below what kernels/sockets.py returns

# ---- words of the table, behind the patience table (of which CLOCK and BUDGET are used) -------------------
BELL = BACKOFF_WORDS  # not 0: somebody wants the kernel back
BELL_FD = BELL + 1  # an eventfd that wakes a thread in poll(2), written before BELL is set
CHANNELS = BELL + 2  # address of the row of rank 0
SIZE = BELL + 3
RANK = BELL + 4
NEXT_PEER = BELL + 5  # the rank to serve first, so that nobody starves
SOURCE = BELL + 6  # receive from any: the rank chosen plus 1, 0 before
BUSY = BELL + 7  # not 0: a thread drives the connections
SPIN = BELL + 8  # ns that a waiting thread tries again before it sleeps
SINCE = BELL + 9  # when the wait under way began, in ns
POLLFDS = BELL + 10  # address: what poll(2) is given
OWNERS = BELL + 11  # address: of each pollfd, the peer
BEHIND = BELL + 12  # not 0: operations are under way, or the end has come; blocking calls come after them
DEFERRED = BELL + 13  # the rank whose message was taken and not answered yet, plus 1; 0: none
DEFERRALS = BELL + 14  # how often there was one
FLUSHER_RUNS = BELL + 15  # not 0: a thread sees to it that no answer stays deferred
STOP = BELL + 16  # not 0: that thread is to end
LAST_TAKEN = BELL + 17  # the rank whose message the last blocking receive took, plus 1; 0 after a send
TAKEN_AT = BELL + 18  # when that was, in ns
RETURNED = BELL + 19  # events that `advance` has told
EVENT = BELL + 20  # the last of them
STORED = BELL + 21  # messages that wait for a receive; set from Python
MAIL_WORDS = BELL + 22

_PIECE_SENT, _PIECE_READ = number_of("tcp.message.piece_sent"), number_of("tcp.message.piece_read")
_BEFORE_ACK = number_of("tcp.message.before_ack")

# ---- words of a row, one a peer ----------------------------------------------------------------------------
FD = 0  # -1: there is no connection yet
# Not 0: nothing can be sent, or received, any more, and why, as kernels/sockets.py says it, or GARBLED.
OUT_GONE, IN_GONE = 1, 2
IN_BUFFER = 3  # address: headers and small payloads received
IN_HAVE, IN_USED = 4, 5  # bytes received there, and read

OUT_BUFFER = 6  # address: the header of the frame that enters, and a small payload
OUT_POSITION = 7  # bytes of the frame sent
OUT_END = 8  # bytes of the frame; equal to OUT_POSITION when none enters
OUT_STAGED = 9  # how many of them lie in the buffer
OUT_FROM = 10  # address of the payload
OUT_VECTOR = 11  # address: what `send_both` needs
SENDING = 12  # a blocking send is under way: 1 with its first part, 2 with its rest
SENT = 13  # number of the last message begun
UNACKED = 14  # how many messages have no ack yet, but perhaps GO
ACK_NUMBER, ACK_DECISION, ACK_NBYTES, ACK_KIND = range(15, 19)  # the last ack read

IN_STAGE = 19  # see below
IN_TO = 20  # where the next byte of the payload goes; 0: nowhere
IN_LEFT = 21  # bytes of it that have not come yet
IN_NUMBER, IN_KIND, IN_NBYTES, IN_ATTACHED = range(22, 26)  # the header read last
REST_NUMBER, REST_NBYTES = 26, 27  # and that of a REST
ASKING = 28  # not 0: a blocking receive has a GO that is not on its way
ACK_FRAME = 29  # address of the ack that is being sent
ACK_LEFT = 30  # how many of its bytes are left
ACK_BEGUN = 42  # not 0: whoever began it has not been told yet that it has gone
WATCHED = 31  # how many posted receives may match a message of this peer; set from Python
EXPECTED = 32  # how many rests have been asked for; set from Python
OWED = 33  # acks that wait for space; set from Python
TAKING = 34  # number of the message that a blocking receive takes
ALTERNATIONS = 35  # how many blocking receives in a row were followed at once by a send, to the same peer
ALTERNATIONS_NEEDED = 36  # so many, and answers are deferred
ARMED_KIND = (
    37  # of the posted receive that `advance` completes by itself; -1: none, or its message has begun to come
)
ARMED_TO, ARMED_NBYTES = 38, 39  # its array
ARMED_NUMBER, ARMED_TAKEN = (
    40,
    41,
)  # of its message, which has arrived and is not answered, and the kind; 0: none
ROW_WORDS = 48

# IN_STAGE. The engine knows IDLE and ARRIVING, a blocking receive goes through the first five, an armed one through the
# first and the last one.
IDLE, ARRIVING, AWAITING_REST, REST_ARRIVING, ANSWERING, ARMED_ARRIVING = range(6)


@inlined
def row_of(m, peer):
    return load_word(m, CHANNELS) + peer * (8 * ROW_WORDS)


@inlined
def type_of(frame):
    return load_word(frame, TYPE) & ((1 << TYPE_BITS) - 1)


# ---- what leaves ---------------------------------------------------------------------------------------------


@inlined
def _write_ack(frame, number, decision, nbytes, kind):
    store_word(frame, TYPE, decision | number << TYPE_BITS)
    store_word(frame, KIND, kind)
    store_word(frame, NBYTES, nbytes)
    store_word(frame, ATTACHED, 0)


@kernel
def _begin_frame(row, kind_of_frame, number, kind, nbytes, address, payload, ahead):
    """Make a frame the one that enters, behind `ahead` bytes; `payload` bytes at `address` follow its header."""
    frame = load_word(row, OUT_BUFFER) + ahead
    store_word(frame, TYPE, kind_of_frame | number << TYPE_BITS)
    store_word(frame, KIND, kind)
    store_word(frame, NBYTES, nbytes)
    store_word(frame, ATTACHED, payload if kind_of_frame == MESSAGE else 0)
    staged = payload if payload <= STAGED else 0
    copy(frame + FRAME, address, staged)
    store_word(row, OUT_POSITION, 0)
    store_word(row, OUT_END, ahead + FRAME + payload)
    store_word(row, OUT_STAGED, ahead + FRAME + staged)
    store_word(row, OUT_FROM, address - ahead)


@inlined
def begin_message(row, address, nbytes, kind, attached, with_ack):
    """Make a message the one that enters; `answers`: with the answer to the message read last ahead of it."""
    store_word(row, SENT, load_word(row, SENT) + 1)
    store_word(row, UNACKED, load_word(row, UNACKED) + 1)
    ahead = 0
    if with_ack:
        ahead = FRAME
        number, nbytes_taken = load_word(row, IN_NUMBER), load_word(row, IN_NBYTES)
        _write_ack(load_word(row, OUT_BUFFER), number, TAKEN, nbytes_taken, load_word(row, IN_KIND))
    _begin_frame(row, MESSAGE, load_word(row, SENT), kind, nbytes, address, attached, ahead)


@inlined
def begin_rest(row, address, nbytes, number, attached):
    """Make what follows the first `attached` bytes of a message the frame that enters."""
    _begin_frame(row, REST, number, 0, nbytes - attached, address + attached, nbytes - attached, 0)


@inlined
def is_entering(row):
    return load_word(row, OUT_POSITION) < load_word(row, OUT_END)


@kernel
def push(row):
    """Send the next piece of the frame that enters, after an ack of which a part was sent; whether anything moved."""
    if load_word(row, OUT_GONE) != 0 or (load_word(row, ACK_LEFT) > 0 and not _flush(row)):
        return False
    fd, position, staged = load_word(row, FD), load_word(row, OUT_POSITION), load_word(row, OUT_STAGED)
    source, end = load_word(row, OUT_FROM) + max(position, staged) - FRAME, load_word(row, OUT_END)
    most = min(end - max(position, staged), IO_BYTES)
    if position >= staged:
        moved = send_some(fd, source, most)
    else:
        buffer = load_word(row, OUT_BUFFER) + position
        if most == 0:
            moved = send_some(fd, buffer, staged - position)
        else:
            moved = send_both(fd, load_word(row, OUT_VECTOR), buffer, staged - position, source, most)
    if moved < 0:
        store_word(row, OUT_GONE, moved)
        return False
    store_word(row, OUT_POSITION, position + moved)
    reached_by(_PIECE_SENT, moved)
    return moved > 0


@kernel
def send_ack(row, number, decision, nbytes, kind):
    """Send an ack; False: not all of it could be sent, call again with the same.

    Who has begun one is the only one who may go on: the rest of it may have gone ahead of a frame meanwhile.
    """
    if load_word(row, OUT_GONE) != 0:
        return True  # whoever is gone needs no answer, and what it sent before counts
    frame = load_word(row, ACK_FRAME)
    if load_word(row, ACK_BEGUN) == 0:
        if is_entering(row):
            return False
        reached(_BEFORE_ACK)
        _write_ack(frame, number, decision, nbytes, kind)
        store_word(row, ACK_LEFT, FRAME)
        store_word(row, ACK_BEGUN, 1)
    elif load_word(frame, TYPE) != decision | number << TYPE_BITS:
        return False
    if load_word(row, ACK_LEFT) > 0 and not _flush(row):
        return False
    store_word(row, ACK_BEGUN, 0)
    return True


@kernel
def _flush(row):
    left = load_word(row, ACK_LEFT)
    moved = send_some(load_word(row, FD), load_word(row, ACK_FRAME) + FRAME - left, left)
    if moved < 0:
        store_word(row, OUT_GONE, moved)
        moved = left
    store_word(row, ACK_LEFT, left - moved)
    return left == moved


# ---- what comes ----------------------------------------------------------------------------------------------


@inlined
def has_frame(row):
    """Whether a frame has been received that was not read."""
    return load_word(row, IN_HAVE) - load_word(row, IN_USED) >= FRAME


@kernel
def _fill(row):
    """Receive into the buffer until it holds a whole frame; whether it does."""
    if has_frame(row):
        return True
    fd = load_word(row, FD)
    if load_word(row, IN_GONE) != 0 or fd < 0:
        return False
    buffer, used = load_word(row, IN_BUFFER), load_word(row, IN_USED)
    rest = load_word(row, IN_HAVE) - used
    if used > 0:
        move(buffer, buffer + used, rest)
        store_word(row, IN_USED, 0)
        store_word(row, IN_HAVE, rest)
    moved = receive_some(fd, buffer + rest, BUFFER - rest)
    if moved < 0:
        store_word(row, IN_GONE, moved)
        return False
    store_word(row, IN_HAVE, rest + moved)
    return rest + moved >= FRAME


@kernel
def read_frame(row):
    """Read the next frame into the row, if it is there: its type, 0 for none. Not while bytes of one arrive.

    An ack is over then; a MESSAGE or REST is read again until `accept_payload`.
    """
    if not _fill(row):
        return 0
    frame = load_word(row, IN_BUFFER) + load_word(row, IN_USED)
    type_of_frame = type_of(frame)
    number = load_word(frame, TYPE) >> TYPE_BITS
    if type_of_frame == MESSAGE:
        store_word(row, IN_NUMBER, number)
        store_word(row, IN_KIND, load_word(frame, KIND))
        store_word(row, IN_NBYTES, load_word(frame, NBYTES))
        store_word(row, IN_ATTACHED, load_word(frame, ATTACHED))
    elif type_of_frame == REST:
        store_word(row, REST_NUMBER, number)
        store_word(row, REST_NBYTES, load_word(frame, NBYTES))
    elif type_of_frame < TAKEN or type_of_frame > GO or load_word(row, UNACKED) == 0:
        store_word(row, IN_GONE, GARBLED)
        store_word(row, IN_USED, load_word(row, IN_HAVE))
        return 0
    else:
        store_word(row, IN_USED, load_word(row, IN_USED) + FRAME)
        store_word(row, ACK_NUMBER, number)
        store_word(row, ACK_DECISION, type_of_frame)
        store_word(row, ACK_NBYTES, load_word(frame, NBYTES))
        store_word(row, ACK_KIND, load_word(frame, KIND))
        if type_of_frame != GO:
            store_word(row, UNACKED, load_word(row, UNACKED) - 1)
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
    kept = load_word(row, IN_TO) != 0
    target, most = load_word(row, IN_TO if kept else IN_BUFFER), IO_BYTES if kept else BUFFER
    moved = receive_some(load_word(row, FD), target, min(load_word(row, IN_LEFT), most))
    if moved < 0:
        store_word(row, IN_GONE, moved)
        return False
    if kept:
        store_word(row, IN_TO, target + moved)
    store_word(row, IN_LEFT, load_word(row, IN_LEFT) - moved)
    reached_by(_PIECE_READ, moved)
    return moved > 0


# ---- an armed receive ----------------------------------------------------------------------------------------


@inlined
def is_for_armed(row):
    """Whether the message whose header was read is the armed receive's, and no answer waits that must go before its."""
    if load_word(row, IN_KIND) != load_word(row, ARMED_KIND) or load_word(row, OWED) != 0:
        return False
    nbytes = load_word(row, ARMED_NBYTES)
    fits = load_word(row, IN_NBYTES) == nbytes and load_word(row, IN_ATTACHED) == nbytes
    return fits and load_word(row, ACK_BEGUN) == 0


@kernel
def take_armed(row):
    """Go on with the message for the armed receive, whose header was read; whether it has arrived and is answered."""
    if load_word(row, IN_STAGE) == IDLE:
        store_word(row, ARMED_KIND, -1)  # before the answer: the peer may leave with it
        accept_payload(row, load_word(row, ARMED_TO), load_word(row, IN_NBYTES))
        store_word(row, IN_STAGE, ARMED_ARRIVING)
    if load_word(row, IN_LEFT) > 0:
        pull(row)
    if load_word(row, IN_LEFT) > 0:
        return False
    store_word(row, IN_STAGE, IDLE)
    store_word(row, ARMED_NUMBER, load_word(row, IN_NUMBER))
    store_word(row, ARMED_TAKEN, load_word(row, IN_KIND))
    return acknowledge_armed(row)


@kernel
def acknowledge_armed(row):
    """Answer the message that the armed receive has; whether it is answered."""
    number, kind = load_word(row, ARMED_NUMBER), load_word(row, ARMED_TAKEN)
    if not send_ack(row, number, TAKEN, load_word(row, ARMED_NBYTES), kind):
        return False
    store_word(row, ARMED_NUMBER, 0)
    store_word(row, WATCHED, load_word(row, WATCHED) - 1)
    return True
