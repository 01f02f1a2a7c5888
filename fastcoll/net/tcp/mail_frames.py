"""Messages on connections: the private words of a group's mail, the frames, and the steps of a connection's two ends.

Messages travel on the connection that their sender dialed, acks come back on it. Both consist of frames of
four words, little-endian as the opening of the connection has made sure:

    word        MESSAGE                      REST              an ack
    TYPE        MESSAGE | number << 8        REST | number     verdict | number << 8
    KIND        tag and dtype                0                 those of the receiver's array
    NBYTES      of the whole message         bytes that follow of the receiver's array
    ATTACHED    bytes that follow            0                 0

An ack TAKEN may also come ahead of a message, on the connection that its receiver dialed (mail_kernels.py).

A message of up to EAGER bytes travels with its header. Of a longer one the first EAGER bytes do, and the rest
follows when the receiver says GO, which it does as soon as it has an array for it: the rest goes from
array to array, and never needs memory of anybody. What a receiver has no array for it keeps: at
most WINDOW bytes of each peer, since a sender that has so many bytes on the way attaches nothing.
TAKEN and MISFIT end a message. The number of a message is its place among those of its connection, from 1.
"""

from __future__ import annotations

from ...failpoints import number_of
from ...kernels.copy import copy, move
from ...kernels.failing import reached, reached_by
from ...kernels.jit import inlined, kernel
from ...kernels.primitives import load_word, store_word
from ...kernels.sockets import receive_some, send_some
from ...kernels.waiting import PATIENCE_WORDS
from ...p2p.pipe import GO, TAKEN

FRAME = 32
TYPE, KIND, NBYTES, ATTACHED = range(4)
TYPE_BITS = 8
MESSAGE, REST = 8, 9

EAGER = 64 << 10
WINDOW = 1 << 20
STAGED = 8 << 10  # payload bytes copied behind their header: cheaper than a system call more
PIECE = 256 << 10  # bytes that one system call moves at most: half of a core's second-level cache
BUFFER = 2 * FRAME + STAGED
ACKS = 64 * FRAME

GARBLED = -(1 << 21)  # the peer has sent what no rank sends; below what kernels/sockets.py returns

# ---- words of the table, behind the patience table (of which CLOCK and BUDGET are used) -------------------
BELL = PATIENCE_WORDS  # not 0: somebody wants the kernel back
BELL_FD = BELL + 1  # an eventfd that wakes a thread in poll(2), written before BELL is set
CHANNELS = BELL + 2  # address of the row of rank 0
SIZE = BELL + 3
RANK = BELL + 4
TURN = BELL + 5  # the rank to serve first, so that nobody starves
SOURCE = BELL + 6  # receive from any: the rank chosen plus 1, 0 before
BUSY = BELL + 7  # not 0: a thread drives the connections
SPIN = BELL + 8  # ns that a waiting thread tries again before it sleeps
SINCE = BELL + 9  # when the wait under way began, in ns
POLLFDS = BELL + 10  # address: what poll(2) is given
OWNERS = BELL + 11  # address: of each pollfd, 2 * peer + side
BEHIND = BELL + 12  # not 0: operations are under way, or the end has come; blocking calls come after them
DEFERRED = BELL + 13  # the rank whose message was taken and not answered yet, plus 1; 0: none
DEFERRALS = BELL + 14  # how often there was one
MINDED = BELL + 15  # not 0: a thread sees to it that no answer stays deferred
STOP = BELL + 16  # not 0: that thread is to end
LAST_TAKEN = BELL + 17  # the rank whose message the last blocking receive took, plus 1; 0 after a send
TAKEN_AT = BELL + 18  # when that was, in ns
TOLD = BELL + 19  # events that `advance` has told
EVENT = BELL + 20  # the last of them
STORED = BELL + 21  # messages that wait for a receive; set from Python
MAIL_WORDS = BELL + 22

_PIECE_SENT, _PIECE_READ = number_of("tcp.message.piece_sent"), number_of("tcp.message.piece_read")
_BEFORE_ACK = number_of("tcp.message.before_ack")

# ---- words of a row, one a peer ----------------------------------------------------------------------------
# What is received on the connection that this rank has dialed, acks, and on the one that the peer has dialed: headers
# and small payloads. FD -1: there is none yet. GONE not 0: it is over, and why, as kernels/sockets.py says it, or
# GARBLED. BUFFER: an address, with the bytes received and the bytes read.
OUT, IN = 0, 5  # where the five words of each begin:
FD, GONE, HELD, HAVE, USED = range(5)
OUT_FD, OUT_GONE, ACK_BUFFER, ACK_HAVE, ACK_USED = range(OUT, OUT + 5)
IN_FD, IN_GONE, IN_BUFFER, IN_HAVE, IN_USED = range(IN, IN + 5)

OUT_BUFFER = 10  # address: the header of the frame that enters, and the beginning of its payload
OUT_POSITION = 11  # bytes of the frame sent
OUT_END = 12  # bytes of the frame; equal to OUT_POSITION when none enters
OUT_STAGED = 13  # how many of them lie in the buffer
OUT_FROM = 14  # address of the payload
SENDING = 15  # a blocking send is under way: 1 with its first part, 2 with its rest
SENT = 16  # number of the last message begun
UNACKED = 17  # how many messages have no ack yet, but perhaps GO
ACK_NUMBER, ACK_VERDICT, ACK_NBYTES, ACK_KIND = range(18, 22)  # the last ack read
ACK_AHEAD = 22  # whether it came ahead of a message

IN_STAGE = 23  # see below
IN_TO = 24  # where the next byte of the payload goes; 0: nowhere
IN_LEFT = 25  # bytes of it that have not come yet
IN_NUMBER, IN_KIND, IN_NBYTES, IN_ATTACHED = range(26, 30)  # the header read last
REST_NUMBER, REST_NBYTES = 30, 31  # and that of a REST
ASKING = 32  # not 0: a blocking receive has a GO that is not on its way
ANSWER = 33  # address of the ack that is being sent
ANSWER_LEFT = 34  # how many of its bytes are left
WATCHED = 35  # how many posted receives may match a message of this peer; set from Python
EXPECTED = 36  # how many rests have been asked for; set from Python
OWED = 37  # acks that wait for space; set from Python
TAKING = 38  # number of the message that a blocking receive takes
TURNS = 39  # how many blocking receives in a row were followed at once by a send, to the same peer
TURNS_NEEDED = 40  # so many, and answers are deferred
ARMED_KIND = (
    41  # of the posted receive that `advance` completes by itself; -1: there is none, or its message arrives
)
ARMED_TO, ARMED_NBYTES = 42, 43  # its array
ROW_WORDS = 48

# IN_STAGE. The engine knows IDLE and ARRIVING, a blocking receive goes through the first five, an armed one through the
# last two.
IDLE, ARRIVING, AWAITING_REST, REST_ARRIVING, ANSWERING, ARMED_ARRIVING, ARMED_ANSWERING = range(7)


@inlined
def row_of(m, peer):
    return load_word(m, CHANNELS) + peer * (8 * ROW_WORDS)


@inlined
def type_of(frame):
    return load_word(frame, TYPE) & ((1 << TYPE_BITS) - 1)


# ---- what leaves ---------------------------------------------------------------------------------------------


@inlined
def _write_ack(frame, number, verdict, nbytes, kind):
    store_word(frame, TYPE, verdict | number << TYPE_BITS)
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
    staged = min(payload, STAGED)
    copy(frame + FRAME, address, staged)
    store_word(row, OUT_POSITION, 0)
    store_word(row, OUT_END, ahead + FRAME + payload)
    store_word(row, OUT_STAGED, ahead + FRAME + staged)
    store_word(row, OUT_FROM, address - ahead)


@inlined
def begin_message(row, address, nbytes, kind, attached, answers):
    """Make a message the one that enters; `answers`: with the answer to the message read last ahead of it."""
    store_word(row, SENT, load_word(row, SENT) + 1)
    store_word(row, UNACKED, load_word(row, UNACKED) + 1)
    ahead = 0
    if answers:
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
    reached_by(_PIECE_SENT, moved)
    return moved > 0


@kernel
def answer(row, number, verdict, nbytes, kind):
    """Send an ack; False: not all of it could be sent, call again with the same."""
    frame = load_word(row, ANSWER)
    name = verdict | number << TYPE_BITS
    if load_word(row, ANSWER_LEFT) > 0 and load_word(frame, TYPE) != name and not _flush(row):
        return False
    if load_word(row, ANSWER_LEFT) == 0:
        reached(_BEFORE_ACK)
        _write_ack(frame, number, verdict, nbytes, kind)
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


# ---- what comes ----------------------------------------------------------------------------------------------


@inlined
def has_frame(row, side):
    """Whether a frame has been received on a side, OUT or IN, that was not read."""
    return load_word(row, side + HAVE) - load_word(row, side + USED) >= FRAME


@kernel
def _fill(row, side, size):
    """Receive into a side's buffer until it holds a whole frame; whether it does."""
    if has_frame(row, side):
        return True
    fd = load_word(row, side + FD)
    if load_word(row, side + GONE) != 0 or fd < 0:
        return False
    buffer, used = load_word(row, side + HELD), load_word(row, side + USED)
    rest = load_word(row, side + HAVE) - used
    if used > 0:
        move(buffer, buffer + used, rest)
        store_word(row, side + USED, 0)
        store_word(row, side + HAVE, rest)
    moved = receive_some(fd, buffer + rest, size - rest)
    if moved < 0:
        store_word(row, side + GONE, moved)
        return False
    store_word(row, side + HAVE, rest + moved)
    return rest + moved >= FRAME


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


@kernel
def read_ack(row):
    """Read the next ack into the row, if it is there."""
    if not _fill(row, OUT, ACKS):
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
def has_answer_ahead(row):
    """Whether the header that was received and not accepted is that of an answer."""
    return has_frame(row, IN) and type_of(load_word(row, IN_BUFFER) + load_word(row, IN_USED)) == TAKEN


@kernel
def read_header(row):
    """Read the next header into the row, if it is there, and leave it to `accept`: its type, 0 for none.

    An answer ahead of a message is read as `read_ack` does: TAKEN.
    """
    if not _fill(row, IN, BUFFER):
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
    kept = load_word(row, IN_TO) != 0
    target, most = load_word(row, IN_TO if kept else IN_BUFFER), PIECE if kept else BUFFER
    moved = receive_some(load_word(row, IN_FD), target, min(load_word(row, IN_LEFT), most))
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
    whole = load_word(row, IN_NBYTES) == nbytes and load_word(row, IN_ATTACHED) == nbytes
    return whole and load_word(row, ANSWER_LEFT) == 0


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
    store_word(row, IN_STAGE, ARMED_ANSWERING)
    nbytes, kind = load_word(row, IN_NBYTES), load_word(row, IN_KIND)
    if not answer(row, load_word(row, IN_NUMBER), TAKEN, nbytes, kind):
        return False
    store_word(row, IN_STAGE, IDLE)
    store_word(row, WATCHED, load_word(row, WATCHED) - 1)
    return True
