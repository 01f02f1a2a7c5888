"""Point-to-point between ranks of a segment: one byte ring for each ordered pair, in the sender's section.

A message is sent as a *frame*: nbytes, kind (tag and dtype code) and the payload, padded to 64 bytes. The sender writes
it into the ring in pieces, so that copying in and copying out overlap: two pieces up to 32 KiB, then pieces of 16 to
64 KiB, or a quarter of the ring. A frame of up to 1 KiB becomes visible with one store. The receiver consumes frames in
order. It copies the payload into the array of the matching receive, or into memory of its own, and writes an *ack* when
a receive has matched. The order of acks may differ from the order of messages, so an ack has the message's number
(counted from 1).

    word of the ring       writer    meaning
    HEAD                   sender    bytes produced (release: the bytes below are written)
    ACKS_TAKEN             sender    acks read, updated after every ACK_BATCH acks (release)
    TAIL                   receiver  bytes consumed (release: the bytes below are read)
    ack k % ACK_SLOTS      receiver  word 0 = k + 1 (release), then message number, answer, nbytes, kind

The sender is the thread that holds BUSY on the sending rank, and the receiver the thread that holds BUSY on the
receiving rank, so each word has one writer at a time. The other end acquires HEAD, ACKS_TAKEN, TAIL and word 0 of an
ack. HEAD, ACKS_TAKEN and TAIL have 128 bytes each, so a store to one takes no other one from the cache of its writer.

A large message may be sent directly: its frame is 64 bytes with the address of the sender's array, and the receiver
reads the array before it consumes the frame. The sender must not change the array before the ack. A sender that fails
or leaves the group may change it earlier, so the receiver checks the sender's STATE after it has read the array.

Invariants:

- The sender overwrites a byte only after the receiver has read it: the sender acquires TAIL, and writes only below TAIL
  plus the ring's size.
- The receiver overwrites an ack only after the sender has read it: the receiver writes ack k only if ACKS_TAKEN > k -
  ACK_SLOTS. ACKS_TAKEN is less than ACK_BATCH behind the number of acks that the sender has read.
- Neither end touches memory that is not allocated. HEAD is allocated with the segment, since the receiver polls it
  before the first message. The sender allocates the other control words and the ring's memory before it sets OUT_READY
  (`prepare` in pipe.py), and accesses them only if OUT_READY is set. The receiver accesses them only after it has
  acquired a HEAD above 0, which the sender stores after that: it reads the ring below HEAD, stores TAIL and acks only
  for messages that it has begun to read, and loads ACKS_TAKEN only after it has written ACK_SLOTS acks. A load would
  allocate a page as well, and end the process if /dev/shm is full.
- Neither end waits for ever: the owner of an incomplete send polls for its ack, and a rank that leaves sets ACKS_TAKEN
  of all its allocated rings to the highest value, so the peers always have space for acks.

`tests/shm/test_rings_model.py` explores the schedules of this protocol.

This file has the steps of both ends, from which ring_kernels.py builds calls. The private state of a rank consists of
one table, the *mailbox*, and a *channel* for each peer. Every step can be resumed from this state.
"""

from __future__ import annotations

import errno

from ..compiler.jit import inlined, kernel
from ..core.monitor import FAILED, LEFT
from ..failpoints import number_of
from ..kernels.copy import copy_from, copy_or_stream, prefetch, prefetch_to_write
from ..kernels.failing import reached
from ..kernels.primitives import load_acquire, load_word, order_loads, store_release, store_word
from ..kernels.waiting import BACKOFF_WORDS, POLLING_WORDS
from .autotune import DIRECT, PAST, table_words
from .layout import LINE, RING_CONTROL

# Byte offsets in a ring's control words. HEAD lies apart from them.
ACKS_TAKEN = 0
TAIL = LINE
ACKS = 2 * LINE
ACK_BYTES = 64
ACK_SLOTS = (RING_CONTROL - ACKS) // ACK_BYTES
ACK_BATCH = 4
NEVER_FULL = ENDLESS = 1 << 62

FRAME_HEADER = 16
FRAME_UNIT = 64
SMALLEST_PIECE, LARGEST_HALF, LARGEST_PIECE, PIECES_A_RING = 1 << 10, 16 << 10, 64 << 10, 4
IS_DIRECT = 1 << 62  # bit in the kind of a message
_READ_AT_ONCE = 256 << 10  # bytes; they take 20 us
_LINES_AHEAD = 4  # cache lines of the next message to prefetch

_PIECE_SENT, _PIECE_READ = number_of("shm.message.piece_sent"), number_of("shm.message.piece_read")
_BEFORE_ACK = number_of("shm.message.before_ack")

# Words of a mailbox's private table, behind the polling table.
BELL = POLLING_WORDS  # not 0: a kernel that waits must return to Python
CHANNELS = BELL + 1  # address of the channel to rank 0
SIZE = BELL + 2
RANK = BELL + 3
RING = BELL + 4  # bytes of a ring, a power of two
NEXT = BELL + 5  # the rank that `advance` serves first, so that no peer starves
SOURCE = BELL + 6  # of a receive from any rank: the chosen rank plus 1; 0: none was chosen yet
BUSY = BELL + 7  # not 0: a thread drives the rings
BEHIND = BELL + 8  # not 0: the engine (p2p/engine.py) has operations, or the mailbox has ended
CONTEXT = BELL + 9  # address of the group's context (context_layout.py), whose memo has the dtypes
BACKGROUND_YIELDS = BELL + 10  # YIELDS of the polling table while the engine's thread waits
RETURNED = BELL + 11  # events that `advance` has returned
EVENT = BELL + 12  # the last of these events
DIRECT_FROM = BELL + 13  # bytes from which on a send may be direct
ALGORITHMS = BELL + 14  # the algorithms besides DIRECT that messages may use, as bits (autotune.py)
VECTORS = BELL + 15  # 15 to 18: iovecs of the system call that reads a peer's memory
CHOOSING = BELL + 19  # the table of autotune.py, for these operations; POSTS are sends of requests
SENDS, RECEIVES, POSTS = range(3)
REQUESTS = CHOOSING + table_words(3)  # the table of requests.py

# Words of the REQUESTS table, and then of each record in it.
PENDING = 0  # number of records whose requests have not completed; a MISFIT counts too
TOUCHED = 1  # incremented when a compiled caller takes the rings
AWAKE = 2  # not 0: the engine's thread checks TOUCHED and PENDING every millisecond
NUMBERS = 3  # the high bits of this mailbox's request numbers
COUNT = 4  # requests posted so far
USED = 5  # records from here on are free
RELEASE = 6  # address of the function that releases an array's owner
IN_VAIN = 7  # the time, by CLOCK_MONOTONIC in ns, of the first test since something moved; 0: there was none
RECALLED = 8  # not 0: `attend` of requests.py must return
ATTENDANT = 9  # the engine's thread, which calls `attend`
TIMED = 10  # number of the send whose time the tuner takes; 0: none
POSTED_AT = 11  # ticks: when `post` of that send has returned
NAPS = 12  # the back-off table of that thread
RECORDS = NAPS + BACKOFF_WORDS
# The request's number. 0: the record is free; negative: free, and the last request was waited for. Until the request
# has ended, only the thread that holds BUSY writes the other words.
NUMBER = 0
STATE = 1
PEER = 2
MESSAGE = 3  # of a send: its number among the messages to the peer
KIND = 4
NBYTES = 5
DATA = 6  # address of the array
OWNER = 7  # the array's owner, held until the request was waited for; 0: the caller keeps the array alive;
IS_WORK = 1 << 62  # with this bit, the address of the Work of a request of Python
REFUSED_NBYTES = 8  # of a refused send (MISFIT): bytes and kind of the receiver's array
REFUSED_KIND = 9
RECORD_WORDS = 10
RECORDS_AT_MOST = 32
SENDING, RECEIVING, ARRIVING, MISFIT, ENDED = range(1, 6)

MAILBOX_WORDS = REQUESTS + RECORDS + RECORDS_AT_MOST * RECORD_WORDS

# Words of a channel, a rank's state for one peer. Positions count bytes since the ring was made.
OUT = 0  # address of the control words of the ring to the peer
OUT_HEAD = 1
OUT_TAIL = 2  # the peer's TAIL as last seen
OUT_BODY = 3  # position of the payload of the message that is entering the ring
OUT_END = 4  # end of that message; equal to OUT_HEAD if none is entering
OUT_FROM = 5  # address of the payload
OUT_NBYTES = 6
OUT_KIND = 7
SENT = 8  # number of messages to the peer that were begun
ACKS_READ = 9  # number of acks that were read
OUT_DATA = 10  # address of the memory of the ring to the peer
ACK_NUMBER = 11  # 11 to 14: the four fields of the last ack read
ACK_DECISION = 12
ACK_NBYTES = 13
ACK_KIND = 14
OUT_READY = 15  # 1: the ring to the peer is allocated
IN = 16  # address of the control words of the ring from the peer
IN_HEAD = 17  # the peer's HEAD as last seen
IN_TAIL = 18
IN_BODY = 19
IN_END = 20  # end of the message that is arriving; equal to IN_TAIL if none is arriving
IN_TO = 21  # address for its payload; 0: drop the payload
IN_NBYTES = 22  # 22 and 23: from the last header that was read
IN_KIND = 23
RECEIVED = 24  # number of messages that this rank has begun to receive
ACKS_GIVEN = 25  # number of acks that were written
IN_ACKS_TAKEN = 26  # the peer's ACKS_TAKEN as last seen
WATCHED = 27  # posted receives that may match a message of this peer
OWED = 28  # number of acks that wait for space; set by Python
OUT_ALGORITHM = 29  # CLOSE, PAST or DIRECT (autotune.py): how the message that is entering is written
IN_ALGORITHM = 30  # CLOSE or PAST: how the arriving message is copied out
IN_DATA = 31  # address of the memory of the ring from the peer
IN_FROM = 33  # of the last header read: address of the sender's array if the message is direct, else 0
IN_DID = 34  # number of bytes of that array that were read so far
IN_PID = 35  # the peer's process ID
IN_STATE = 36  # address of the peer's STATE
IN_REFUSED = 37  # errno with which reading the peer's array has failed; 0: it has not failed
OUT_HEAD_AT = 38  # address of HEAD of the ring to the peer
IN_HEAD_AT = 39  # address of HEAD of the ring from the peer
CHANNEL_WORDS = 40


@inlined
def frame_of(nbytes):
    """Return the bytes of a frame with a payload of nbytes."""
    return (FRAME_HEADER + nbytes + FRAME_UNIT - 1) & -FRAME_UNIT


@inlined
def _piece(m, nbytes):
    """Return the most bytes of a message of `nbytes` that are written or read at once."""
    half = min(max(SMALLEST_PIECE, nbytes // 2), LARGEST_HALF)
    return min(max(half, nbytes // 32), LARGEST_PIECE, load_word(m, RING) // PIECES_A_RING)


@inlined
def _span(m, position, nbytes):
    """Return how many of the nbytes at `position` lie before the end of the ring's memory."""
    ring = load_word(m, RING)
    return min(nbytes, ring - (position & (ring - 1)))


@inlined
def _address(m, data, position):
    """Return the address of the byte at `position`, in the memory of a ring at `data`."""
    return data + (position & (load_word(m, RING) - 1))


@inlined
def begin_message(channel, address, nbytes, kind, algorithm):
    head = load_word(channel, OUT_HEAD)
    store_word(channel, OUT_BODY, head + FRAME_HEADER)
    store_word(channel, OUT_END, head + (FRAME_UNIT if algorithm == DIRECT else frame_of(nbytes)))
    store_word(channel, OUT_FROM, address)
    store_word(channel, OUT_NBYTES, nbytes)
    store_word(channel, OUT_KIND, kind)
    store_word(channel, OUT_ALGORITHM, algorithm)
    store_word(channel, SENT, load_word(channel, SENT) + 1)


@inlined
def _reaches(channel, seen, address, least):
    """Whether a peer's counter at `address` is at least `least`.

    Word `seen` of the channel has the counter's last known value; the counter is read only if that value is too small.
    """
    if load_word(channel, seen) >= least:
        return True
    store_word(channel, seen, load_acquire(address))
    return load_word(channel, seen) >= least


@inlined
def has_room(m, channel, nbytes):
    """Whether the ring to the peer has room for nbytes."""
    least = load_word(channel, OUT_HEAD) + nbytes - load_word(m, RING)
    return _reaches(channel, OUT_TAIL, load_word(channel, OUT) + TAIL, least)


@kernel
def push(m, channel):
    """Write the next piece of the message that was begun into the ring; return False if there is no room."""
    head = load_word(channel, OUT_HEAD)
    part = min(load_word(channel, OUT_END) - head, _piece(m, load_word(channel, OUT_NBYTES)))
    if not has_room(m, channel, part):
        return False
    data = load_word(channel, OUT_DATA)
    body = load_word(channel, OUT_BODY)
    if head < body:
        address = _address(m, data, head)
        store_word(address, 0, load_word(channel, OUT_NBYTES))
        store_word(address, 1, load_word(channel, OUT_KIND))
    if load_word(channel, OUT_ALGORITHM) == DIRECT:
        address = _address(m, data, head)
        store_word(address, 1, load_word(channel, OUT_KIND) | IS_DIRECT)
        store_word(address, 2, load_word(channel, OUT_FROM))
    else:
        start = max(head, body)
        nbytes = min(head + part, body + load_word(channel, OUT_NBYTES)) - start
        source = load_word(channel, OUT_FROM) + start - body
        first = _span(m, start, nbytes)
        past = load_word(channel, OUT_ALGORITHM) == PAST
        copy_or_stream(past, _address(m, data, start), source, first)
        copy_or_stream(past, data, source + first, nbytes - first)
    store_word(channel, OUT_HEAD, head + part)
    store_release(load_word(channel, OUT_HEAD_AT), head + part)
    reached(_PIECE_SENT)
    # Fetch the cache lines of the next message now, so that the next `push` need not wait for them. Without this, 64
    # bytes take 0.68 us one way (2 cores).
    for line in range(_LINES_AHEAD):
        prefetch_to_write(_address(m, data, head + part) + FRAME_UNIT * line)
    return True


@kernel
def read_ack(channel):
    """Read the next ack into the channel; return False if there is none."""
    taken = load_word(channel, ACKS_READ)
    ring = load_word(channel, OUT)
    ack = ring + ACKS + ACK_BYTES * (taken % ACK_SLOTS)
    if load_acquire(ack) != taken + 1:
        return False
    for field in range(4):
        store_word(channel, ACK_NUMBER + field, load_word(ack, 1 + field))
    store_word(channel, ACKS_READ, taken + 1)
    if (taken + 1) % ACK_BATCH == 0:
        store_release(ring + ACKS_TAKEN, taken + 1)
    return True


@inlined
def has_arrived(channel, position):
    """Whether the peer has written the ring up to `position`."""
    return _reaches(channel, IN_HEAD, load_word(channel, IN_HEAD_AT), position)


@kernel
def sees_header(m, channel):
    """Read the header of the next message into the channel; return False if there is none."""
    tail = load_word(channel, IN_TAIL)
    if not has_arrived(channel, tail + 1):
        return False
    address = _address(m, load_word(channel, IN_DATA), tail)
    for line in range(_LINES_AHEAD):
        prefetch(address + FRAME_UNIT * line)
    kind = load_word(address, 1)
    store_word(channel, IN_NBYTES, load_word(address, 0))
    store_word(channel, IN_KIND, kind & ~IS_DIRECT)
    store_word(channel, IN_FROM, load_word(address, 2) if kind & IS_DIRECT else 0)
    return True


@inlined
def accept_message(channel, address, algorithm):
    """Begin to receive the message whose header was read, into memory at `address`; 0: its payload is dropped."""
    tail = load_word(channel, IN_TAIL)
    store_word(channel, IN_BODY, tail + FRAME_HEADER)
    is_direct = load_word(channel, IN_FROM) != 0
    store_word(channel, IN_END, tail + (FRAME_UNIT if is_direct else frame_of(load_word(channel, IN_NBYTES))))
    store_word(channel, IN_DID, 0)
    store_word(channel, IN_TO, address)
    store_word(channel, IN_ALGORITHM, algorithm)
    store_word(channel, RECEIVED, load_word(channel, RECEIVED) + 1)


@kernel
def _read(m, channel):
    """Read the next piece of a direct message from the sender's array; consume its frame after the last piece."""
    did, nbytes = load_word(channel, IN_DID), load_word(channel, IN_NBYTES)
    if load_word(channel, IN_TO) != 0 and did < nbytes:
        part = min(_READ_AT_ONCE, nbytes - did)
        target, source = load_word(channel, IN_TO) + did, load_word(channel, IN_FROM) + did
        moved = copy_from(load_word(channel, IN_PID), m + 8 * VECTORS, target, source, part)
        if moved <= 0:
            # ESRCH: the peer has ended, which Python detects in its own check.
            store_word(channel, IN_REFUSED, 0 if moved == -errno.ESRCH else -moved)
            return False
        store_word(channel, IN_DID, did + moved)
        reached(_PIECE_READ)
        if did + moved < nbytes:
            return True
    order_loads()
    state = load_acquire(load_word(channel, IN_STATE))
    if state in (FAILED, LEFT):
        return False
    _take(channel, load_word(channel, IN_END))
    return True


@inlined
def _take(channel, position):
    """Publish that all bytes below `position` are read."""
    store_word(channel, IN_TAIL, position)
    store_release(load_word(channel, IN) + TAIL, position)


@kernel
def pull(m, channel):
    """Receive the next piece of the arriving message; return False if it has not arrived."""
    if load_word(channel, IN_FROM) != 0:
        return _read(m, channel)
    tail = load_word(channel, IN_TAIL)
    part = min(load_word(channel, IN_END) - tail, _piece(m, load_word(channel, IN_NBYTES)))
    if not has_arrived(channel, tail + part):
        return False
    data = load_word(channel, IN_DATA)
    body = load_word(channel, IN_BODY)
    start = max(tail, body)
    nbytes = min(tail + part, body + load_word(channel, IN_NBYTES)) - start
    if load_word(channel, IN_TO) != 0:
        target = load_word(channel, IN_TO) + start - body
        first = _span(m, start, nbytes)
        past = load_word(channel, IN_ALGORITHM) == PAST
        copy_or_stream(past, target, _address(m, data, start), first)
        copy_or_stream(past, target + first, data, nbytes - first)
    reached(_PIECE_READ)
    _take(channel, tail + part)
    return True


@inlined
def has_ack_space(channel):
    least = load_word(channel, ACKS_GIVEN) - ACK_SLOTS + 1
    return _reaches(channel, IN_ACKS_TAKEN, load_word(channel, IN) + ACKS_TAKEN, least)


@inlined
def write_ack(channel, number, decision, nbytes, kind):
    reached(_BEFORE_ACK)
    given = load_word(channel, ACKS_GIVEN)
    ack = load_word(channel, IN) + ACKS + ACK_BYTES * (given % ACK_SLOTS)
    store_word(ack, 1, number)
    store_word(ack, 2, decision)
    store_word(ack, 3, nbytes)
    store_word(ack, 4, kind)
    store_word(channel, ACKS_GIVEN, given + 1)
    store_release(ack, given + 1)
    prefetch_to_write(load_word(channel, IN) + ACKS + ACK_BYTES * ((given + 1) % ACK_SLOTS))
