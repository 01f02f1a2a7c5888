"""Messages over TCP: the words of a rank's table, the frames on a connection, and the steps of sending and receiving.

Two ranks have one connection for messages in both directions. It carries frames of four words each, some followed by
bytes. Words are little-endian; ranks check this when they open the connection.

    word        MESSAGE                      REST                  an ack
    TYPE        MESSAGE | number << 8        REST | number << 8    decision | number << 8
    KIND        tag and dtype                0                     those of the receiver's array
    NBYTES      of the complete message      bytes that follow     of the receiver's array
    ATTACHED    bytes that follow            0                     0

A message of up to EAGER bytes travels with its header. Of a longer message, the first EAGER bytes travel with the
header, and the rest follows when the receiver has sent the ack GO. The receiver sends GO as soon as it has an array for
the message, so the rest moves from array to array without a buffer. A receiver that has no array yet stores the bytes
behind the header. It stores at most WINDOW bytes of each peer, because a sender that has WINDOW bytes without an ack
attaches none to its next headers. An ack TAKEN or MISFIT (p2p/pipe.py) ends a message. Messages are numbered from 1,
separately in each direction.

There is one connection for both directions because a packet with data then also carries TCP's acknowledgement for the
other direction. When 72 bytes travel to another process and back, each way takes 3.7 us with one connection, and 5.5 us
with one connection for each direction; for 32 KiB it takes 4.8 and 7.4 us (Intel Xeon, Sapphire Rapids, Linux 6.18).

Neither side waits for ever. A rank that waits for an ack reads all frames that arrive. It stores up to
WINDOW bytes of messages that no receive matches. While another frame is being sent, an ack cannot be sent; `send_ack`
then returns False, and is called again later. The peer reads that other frame in any case. If it is a message, the peer
reads it because it waits for the ack, and so reads all frames. If it is a REST, the peer has an array for it. While an
ack waits to be sent, this rank reads frames as before.
"""

from __future__ import annotations

from ...compiler.jit import inlined, kernel
from ...failpoints import number_of
from ...kernels.copy import copy, move
from ...kernels.failing import reached, reached_by
from ...kernels.primitives import load_acquire, load_word, store_word
from ...kernels.sockets import VECTOR_BYTES, receive_some, send_both, send_some
from ...kernels.waiting import BACKOFF_WORDS
from ...p2p.pipe import GO, TAKEN

FRAME = 32
TYPE, KIND, NBYTES, ATTACHED = range(4)
TYPE_BITS = 8
MESSAGE, REST = 8, 9

EAGER = 64 << 10
WINDOW = 1 << 20
STAGED = 8 << 10  # payloads up to this size are copied behind their header; others are sent from the array
IO_BYTES = 256 << 10  # one system call moves no more bytes than this, half of a core's L2 cache
BUFFER = 2 * FRAME + STAGED  # bytes of the buffer for each direction
VECTOR = VECTOR_BYTES

GARBLED = -(1 << 21)  # the peer has sent an invalid frame; below every error of kernels/sockets.py

# ---- words of the table; they follow a back-off table, of which CLOCK and BUDGET are used --------------
BELL = BACKOFF_WORDS  # not 0: another thread wants the running kernel to return
BELL_FD = BELL + 1  # an eventfd that wakes a thread in poll(2); written before BELL is set
CHANNELS = BELL + 2  # address of the rows (see below), one for each rank
SIZE = BELL + 3
RANK = BELL + 4
NEXT_PEER = BELL + 5  # the rank to serve first; it changes, so that no rank starves
SOURCE = BELL + 6  # in a receive from any rank, the sender plus 1; 0 until the sender is known
BUSY = BELL + 7  # the thread that drives the connections; 0: none
SPIN = BELL + 8  # ns that a waiting thread polls before it sleeps
SINCE = BELL + 9  # when the current wait began, in ns
POLLFDS = BELL + 10  # address: the argument of poll(2)
OWNERS = BELL + 11  # address: the peer of each pollfd
# Not 0: operations are pending or the pipe is closing, so a blocking call must not take its compiled short cut.
BEHIND = BELL + 12
DEFERRED = BELL + 13  # the rank for which an ack is deferred (mail_kernels.py), plus 1; 0: none
DEFERRALS = BELL + 14  # how many acks have been deferred
FLUSHER_RUNS = BELL + 15  # not 0: the ack flusher runs, so acks may be deferred
STOP = BELL + 16  # not 0: the ack flusher has to end
LAST_TAKEN = BELL + 17  # the sender of the message that the last blocking receive got, plus 1; 0 after a send
TAKEN_AT = BELL + 18  # when that receive ended, in ns
RETURNED = BELL + 19  # how many events `advance` has returned
EVENT = BELL + 20  # the last of these events
STORED = BELL + 21  # how many stored messages wait for a receive; set from Python
MAIL_WORDS = BELL + 22

_PIECE_SENT, _PIECE_READ = number_of("tcp.message.piece_sent"), number_of("tcp.message.piece_read")
_BEFORE_ACK = number_of("tcp.message.before_ack")

# ---- words of a row; there is one row for each peer --------------------------------------------------------
FD = 0  # -1: there is no connection yet; any thread may publish it, after the addresses of the row's buffers
# OUT_GONE not 0: this rank can no longer send; IN_GONE not 0: it can no longer receive. The value is an error of
# kernels/sockets.py, or GARBLED.
OUT_GONE, IN_GONE = 1, 2
IN_BUFFER = 3  # address: headers and small payloads received
IN_HAVE, IN_USED = 4, 5  # bytes received into the buffer, and consumed

OUT_BUFFER = 6  # address: the header of the frame being sent, and a small payload
OUT_POSITION = 7  # how many bytes of the frame are sent; an ack ahead of the frame counts as part of it
OUT_END = 8  # bytes of the frame; equal to OUT_POSITION if no frame is being sent
OUT_STAGED = 9  # how many bytes of the frame are in the buffer
OUT_FROM = 10  # address of the payload, minus the bytes of the ack ahead of the frame
OUT_VECTOR = 11  # address: the vector for `send_both`
SENDING = 12  # 1: a blocking send sends its message; 2: it sends the REST; 0: there is no blocking send
SENT = 13  # number of the last message begun
UNACKED = 14  # how many messages to the peer have no ack TAKEN or MISFIT yet
ACK_NUMBER, ACK_DECISION, ACK_NBYTES, ACK_KIND = range(15, 19)  # the last ack read

IN_STAGE = 19  # see below
IN_TO = 20  # address for the next byte of the payload; 0: it is discarded
IN_LEFT = 21  # bytes of the payload that have not arrived
IN_NUMBER, IN_KIND, IN_NBYTES, IN_ATTACHED = range(22, 26)  # from the header of the message read last
REST_NUMBER, REST_NBYTES = 26, 27  # from the header of the REST read last
ASKING = 28  # not 0: a blocking receive has yet to send its GO
ACK_FRAME = 29  # address: the ack being sent
ACK_LEFT = 30  # bytes of this ack that are not sent yet
ACK_BEGUN = 42  # not 0: the caller that began this ack has not yet seen that it is sent
WATCHED = 31  # how many posted receives may match a message of this peer; set from Python
EXPECTED = 32  # how many RESTs have been requested; set from Python
OWED = 33  # acks that wait for space; set from Python
TAKING = 34  # number of the message that a blocking receive takes
ALTERNATIONS = 35  # how many blocking receives in a row were at once followed by a send to their sender
ALTERNATIONS_NEEDED = 36  # acks are deferred once ALTERNATIONS has reached this number
# An armed receive is a posted receive that `advance` completes without the engine. ARMED_KIND is its tag and dtype; -1:
# no receive is armed, or the message for it has begun to arrive.
ARMED_KIND = 37
ARMED_TO, ARMED_NBYTES = 38, 39  # the array of the armed receive
# Number and kind of the message for the armed receive, if the message has arrived and has no ack yet; number 0: no
# message is in this state.
ARMED_NUMBER, ARMED_TAKEN = 40, 41
ROW_WORDS = 48

# The stages of receiving (IN_STAGE). IDLE: no payload is arriving. ARRIVING: a message's attached bytes are arriving,
# or, if the engine receives it, its REST. Only for a blocking receive: AWAITING_REST: the REST has not begun to arrive;
# REST_ARRIVING: its bytes are arriving; ANSWERING: the message is complete, and its ack must be sent. Only for an armed
# receive: ARMED_ARRIVING: the message's bytes are arriving.
IDLE, ARRIVING, AWAITING_REST, REST_ARRIVING, ANSWERING, ARMED_ARRIVING = range(6)


@inlined
def fd_of(row):
    """Return the descriptor of the connection, or -1."""
    return load_acquire(row + 8 * FD)


@inlined
def row_of(m, peer):
    return load_word(m, CHANNELS) + peer * (8 * ROW_WORDS)


@inlined
def type_of(frame):
    return load_word(frame, TYPE) & ((1 << TYPE_BITS) - 1)


# ---- sending ---------------------------------------------------------------------------------------------


@inlined
def _write_ack(frame, number, decision, nbytes, kind):
    store_word(frame, TYPE, decision | number << TYPE_BITS)
    store_word(frame, KIND, kind)
    store_word(frame, NBYTES, nbytes)
    store_word(frame, ATTACHED, 0)


@kernel
def _begin_frame(row, kind_of_frame, number, kind, nbytes, address, payload, ahead):
    """Begin to send the first `ahead` bytes of the buffer, and a frame behind them.

    The `payload` bytes at `address` follow the frame's header.
    """
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
    """Begin to send a message.

    With `with_ack`, the ack of the message that was read last is sent ahead of the new message.
    """
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
    """Begin to send the REST of a message, which follows its first `attached` bytes."""
    _begin_frame(row, REST, number, 0, nbytes - attached, address + attached, nbytes - attached, 0)


@inlined
def is_entering(row):
    return load_word(row, OUT_POSITION) < load_word(row, OUT_END)


@kernel
def push(row):
    """Send some bytes of the current frame, after the rest of any unfinished ack.

    Returns whether bytes moved.
    """
    if load_word(row, OUT_GONE) != 0 or (load_word(row, ACK_LEFT) > 0 and not _flush(row)):
        return False
    fd, position, staged = fd_of(row), load_word(row, OUT_POSITION), load_word(row, OUT_STAGED)
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
    """Send an ack.

    Returns False if the ack is not completely sent; call again with the same arguments then. Only the caller that began
    an ack may finish it: `push` may already have sent the remainder ahead of a frame.
    """
    if load_word(row, OUT_GONE) != 0:
        return True  # the peer has gone and needs no ack; its message counts as received all the same
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
    moved = send_some(fd_of(row), load_word(row, ACK_FRAME) + FRAME - left, left)
    if moved < 0:
        store_word(row, OUT_GONE, moved)
        moved = left
    store_word(row, ACK_LEFT, left - moved)
    return left == moved


# ---- receiving ----------------------------------------------------------------------------------------------


@inlined
def has_frame(row):
    """Whether the buffer holds a frame that has not been read."""
    return load_word(row, IN_HAVE) - load_word(row, IN_USED) >= FRAME


@kernel
def _fill(row):
    """Receive into the buffer unless it already holds the header of a frame.

    Returns whether it holds one afterwards.
    """
    if has_frame(row):
        return True
    fd = fd_of(row)
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
    """Read the header of the next frame into the row.

    Returns its type, or 0 if none has arrived. Must not be called while a payload arrives. An ack is consumed; a
    MESSAGE or REST is read again by the next call, until `accept_payload` consumes its header.
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
    """Consume the header that was read, and begin to receive its payload.

    The `nbytes` bytes behind the header go to `address`; if `address` is 0, they are discarded.
    """
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
    """Receive some bytes of the arriving payload; return whether bytes moved."""
    if load_word(row, IN_GONE) != 0:
        return False
    # `accept_payload` has consumed the buffer, so it is free for bytes that are discarded.
    kept = load_word(row, IN_TO) != 0
    target, most = load_word(row, IN_TO if kept else IN_BUFFER), IO_BYTES if kept else BUFFER
    moved = receive_some(fd_of(row), target, min(load_word(row, IN_LEFT), most))
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
    """Whether the header that was read matches the armed receive.

    Returns False also while an earlier ack waits for space in the socket.
    """
    if load_word(row, IN_KIND) != load_word(row, ARMED_KIND) or load_word(row, OWED) != 0:
        return False
    nbytes = load_word(row, ARMED_NBYTES)
    fits = load_word(row, IN_NBYTES) == nbytes and load_word(row, IN_ATTACHED) == nbytes
    return fits and load_word(row, ACK_BEGUN) == 0


@kernel
def take_armed(row):
    """Continue to receive the message of the armed receive.

    Returns whether the message has arrived and its ack is sent.
    """
    if load_word(row, IN_STAGE) == IDLE:
        # Do this before the ack is sent. Once the peer has the ack, it may leave; a receive from it would then fail
        # if it is still armed.
        store_word(row, ARMED_KIND, -1)
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
    """Acknowledge the message of the armed receive; return whether the ack is sent."""
    number, kind = load_word(row, ARMED_NUMBER), load_word(row, ARMED_TAKEN)
    if not send_ack(row, number, TAKEN, load_word(row, ARMED_NBYTES), kind):
        return False
    store_word(row, ARMED_NUMBER, 0)
    store_word(row, WATCHED, load_word(row, WATCHED) - 1)
    return True
