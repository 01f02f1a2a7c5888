"""The meeting: each rank sends every other rank a header with its call, and small data behind the header.

    word            in a header
    NUMBER          number of the call in the group, from 1
    HEAD_CALL       call word (core/signature.py)
    HEAD_SHAPE      bytes that this rank contributes
    HEAD_BALANCE    hash of the sizes sent minus hash of those expected; if all match, the sum over all ranks is 0
    HEAD_ATTACHED   bytes that follow this header
    HEAD_DIFFERS    not 0 if this header combines others that differ (combine.py)
    HEAD_BLOCK      bytes of each array whose size is compared; -1 if they, or those of combined headers, differ in size

A header and the data behind it are a *frame*. A *synchronising* call waits for the headers of all ranks. All ranks
compare the same headers, so either all of them go on or all raise, before any result is written. An *early-return* call
waits only for headers that carry data for this rank. The root of a small broadcast and the senders of a small reduce
need no header, so they may return early; the ranks that receive data in these calls synchronise. A call that is part of
a larger operation always synchronises, because a rank on which it raises does not make the operation's later calls.

Each rank records the call word and shape of every call that it makes. It reads skipped headers later, and compares them
with the record. If they differ, the rank reports the mismatch at the end of a later call, namely the first call that
ends after the rank has read all ranks' headers of the call that did not match. The later call itself is carried out,
and so are all other calls of the operation that it is a part of (`Gate.earlier`). So all ranks have always made the
same number of calls.

In a group of two, the receiver may return early as well. It still waits for the other rank's header, which carries the
data; returning early only allows it to delay its own header (see "Piggybacked headers"). If the two headers differ, the
receiver synchronises.

How far a rank may run ahead is limited. A call ends only when fewer than AHEAD headers of each peer are unread. So the
record of a call still exists when the call's last header is read, and a mismatch is reported in time. Each rank
sends each other rank one header in every call, and a header that this rank may skip has no data behind it. So the
unread bytes of a peer are at most AHEAD headers, and the data of frames that this rank still needs. If the sockets
cannot buffer that much, the sender blocks until the reader catches up.

No rank waits for ever. Consider a rank in the lowest-numbered call in progress. Ranks in later calls have passed all
their frames of that call to the kernel, except delayed headers (see below), which no rank needs. A rank that waits
keeps sending to all peers. It also reads each peer's frames up to the frame of its own call, even those that it does
not need, so that the peer can go on sending. So every frame that a waiting rank needs is sent and received. Ranks wait
only in the engine, which returns to Python regularly, and Python checks the deadline and the peers.

Piggybacked headers. In a group of two, the receiver of an early-return call delays its header, which has no data, and
sends it together with those of later calls. It does so if another call is likely to follow soon, that is, if bytes of
the peer's next frame have already arrived, or if each of the last calls began soon after the one before. They are sent
when the rank waits (after about 5 us), when PIGGYBACK_BYTES have accumulated, in a synchronising call, and in `settle`.
So two ranks that broadcast in a row exchange one message a call, not two. After the last broadcast, the delayed headers
stay unsent until the next call. Only a peer that closes the group waits for them, and only for a limited time. The peer
can do without them, because they only confirm that the calls matched. (A rank that sees a mismatch synchronises, which
sends its delayed headers.)

A peer that ends. If a peer dies or leaves, its connection breaks, and the next read or write fails. If the headers that
were read before differ, the mismatch is raised instead. If a write fails, but the peer had done its part of the call
before it left, its frame can still be read, and this rank drops what it had to send to the peer. Before a rank closes
the group, it reads the headers that it skipped (`settle`), because closing a connection that has unread bytes would
discard bytes on their way to the peer.

How received bytes are assigned to calls. A peer's frames arrive in the order of its calls. NEXT is the call number of
the first frame that has not been consumed, and HAVE the number of bytes received of this frame and those behind it.
After the meeting, a plan (plans/plan.py) moves bytes without headers. A peer sends the plan's bytes only after it has
received this rank's header of the same call. So if the plan of this rank's call moves bytes, they may follow the peer's
header at once, and the meeting receives nothing beyond that header. If it moves none, only further frames can follow,
and the meeting may receive several small frames at once.
"""

from __future__ import annotations

from ...compiler.jit import inlined, kernel
from ...core.signature import NOTE_BYTES, REFUSED
from ...core.status import DONE, GARBLED, GONE, MISMATCH
from ...failpoints import number_of
from ...kernels.copy import copy, move
from ...kernels.failing import failing, reached_by
from ...kernels.headers import calls_match
from ...kernels.primitives import load_word, store_word
from ...kernels.sockets import READABLE, WRITABLE, receive_some, send_some
from . import engine_layout as w
from .plans import plan as t
from .plans.shape import HEADER_BYTES

PENDING = -1  # neither complete nor failed; PENDING - 1 means the same, and that nothing moved
_PUBLISHED = number_of("tcp.OPERATION.after_publish")
AHEAD = 64
"""How many calls a rank records. It can make that many while a peer on a shared core waits for its time slice."""
_SPARE = 1024  # bytes that may be received beyond a frame if only further frames can follow it
PIGGYBACK_BYTES = 15 * HEADER_BYTES  # maximum of delayed headers for each peer
# A waiting rank reads headers that its call does not need once in so many sweeps in which nothing moved.
SEEN_EVERY = 16
# A call begins soon after the call before if it begins within SOON ns. After _STREAK such calls in a row, the rank
# expects another one.
SOON, _STREAK = 20_000, 32


@inlined
def gone(c, peer, error):
    """Record that the connection to a peer is lost; return GONE."""
    store_word(c, w.PEER, peer)
    store_word(c, w.ERROR, error)
    return GONE


@inlined
def _outbox(c, peer):
    return load_word(c, w.OUTBOX) + peer * (load_word(c, w.FRAME) + PIGGYBACK_BYTES)


@inlined
def _outgoing(c, peer):
    """Return where the current call's frame is in a peer's outbox: behind the delayed headers."""
    return _outbox(c, peer) + load_word(load_word(c, w.BEGINS), peer)


@inlined
def _end_to_send(c, peer):
    return load_word(load_word(c, w.ENDS), peer)


@inlined
def _header(c, rank):
    return load_word(c, w.INBOX) + rank * load_word(c, w.FRAME)


@inlined
def _socket(c, peer):
    return load_word(load_word(c, w.FDS), peer * load_word(c, w.STREAMS))


@inlined
def _record(c, number):
    """Return the address of a call's record: the call word and shape of each rank."""
    return load_word(c, w.RECORDS) + number % AHEAD * (16 * load_word(c, w.SIZE))


@kernel
def write_headers(c, d, returns_early):
    """Write this rank's header and attached data into each peer's outbox; carried data into its own.

    If ranks exchange headers directly, this also writes the record of the call.
    """
    size, rank, keeps = load_word(c, w.SIZE), load_word(c, w.RANK), load_word(c, w.MEETING) == 0
    record = _record(c, load_word(c, w.CALLS))
    for peer in range(size):
        ends = _end_to_send(c, peer)
        if load_word(load_word(c, w.SENT), peer) == ends or peer == rank or not keeps:
            ends = 0
            store_word(load_word(c, w.SENT), peer, 0)
        store_word(load_word(c, w.BEGINS), peer, ends)
        store_word(load_word(c, w.ENDS), peer, ends + HEADER_BYTES)
        frame = _outgoing(c, peer)
        store_word(frame, w.NUMBER, load_word(c, w.CALLS))
        store_word(frame, w.HEAD_CALL, load_word(d, w.CALL))
        store_word(frame, w.HEAD_SHAPE, load_word(d, w.SHAPE))
        store_word(frame, w.HEAD_ATTACHED, 0)
        store_word(frame, w.HEAD_BALANCE, load_word(d, w.BALANCE))
        store_word(frame, w.HEAD_DIFFERS, 0)
        store_word(frame, w.HEAD_BLOCK, load_word(d, w.BLOCK))
        if keeps:
            store_word(record, 2 * peer, load_word(d, w.CALL))
            store_word(record, 2 * peer + 1, load_word(d, w.SHAPE))
    carried, own = load_word(d, w.CARRIED), _outgoing(c, rank) + HEADER_BYTES
    for word in range(-(-carried // 8)):
        store_word(own, word, 0)
    for row in range(load_word(d, w.PAYLOADS)):
        at = load_word(d, w.TABLE) + 8 * t.COLUMNS * row
        peer = load_word(at, t.PEER)
        frame = _outgoing(c, peer)
        store_word(load_word(c, w.ENDS), peer, _end_to_send(c, peer) + load_word(at, t.NBYTES))
        source = load_word(load_word(c, w.BUFFERS), load_word(at, t.BUFFER)) + load_word(at, t.OFFSET)
        store_word(frame, w.HEAD_ATTACHED, load_word(at, t.NBYTES))
        copy(frame + HEADER_BYTES + load_word(at, t.OFFSET2), source, load_word(at, t.NBYTES))
    copy(_header(c, rank), _outgoing(c, rank), HEADER_BYTES + carried)
    store_word(c, w.CARRYING, d if carried > 0 else 0)
    store_word(c, w.SYNCHRONISING, 0 if returns_early else 1)


# ---- frames of a peer ----------------------------------------------------------------------------------


@inlined
def _next_call(c, peer):
    return load_word(load_word(c, w.NEXT), peer)


@inlined
def _fits(c, peer):
    """Whether the data that a peer's header announces fits into a frame's space."""
    attached = load_word(_header(c, peer), w.HEAD_ATTACHED)
    return attached >= 0 and attached <= load_word(c, w.FRAME) - HEADER_BYTES


@inlined
def _length_to_come(c, peer):
    """Return the length of a peer's current frame as far as it is known.

    This is the length of a header until the frame's header has arrived, and also if the header has an impossible
    length, which `_check` and `compare` reject.
    """
    if load_word(load_word(c, w.HAVE), peer) < HEADER_BYTES or not _fits(c, peer):
        return HEADER_BYTES
    return HEADER_BYTES + load_word(_header(c, peer), w.HEAD_ATTACHED)


@inlined
def _has_frame(c, peer):
    return load_word(load_word(c, w.HAVE), peer) >= _length_to_come(c, peer)


@inlined
def _has_arrived(c, peer, number):
    """Whether a peer's frame of a call has arrived."""
    following = _next_call(c, peer)
    return following > number or (following == number and _has_frame(c, peer))


@kernel
def _consume_frame(c, peer):
    """Discard a peer's current frame, and move received bytes of the next one to its place."""
    length = _length_to_come(c, peer)
    rest = load_word(load_word(c, w.HAVE), peer) - length
    store_word(load_word(c, w.HAVE), peer, rest)
    if rest > 0:
        move(_header(c, peer), _header(c, peer) + length, rest)
    store_word(load_word(c, w.NEXT), peer, _next_call(c, peer) + 1)


@inlined
def _garbled(c, peer):
    store_word(c, w.PEER, peer)
    return GARBLED


@kernel
def _check(c, peer):
    """Compare a peer's frame with the record of its call, and consume it.

    The frame has arrived completely. Returns DONE or GARBLED.
    """
    number, header = _next_call(c, peer), _header(c, peer)
    if load_word(header, w.NUMBER) != number or not _fits(c, peer):
        return _garbled(c, peer)
    own = _record(c, number) + 16 * load_word(c, w.RANK)
    call, shape = load_word(header, w.HEAD_CALL), load_word(header, w.HEAD_SHAPE)
    if call != load_word(own, 0) or shape != load_word(own, 1):
        entry = _record(c, number) + 16 * peer
        store_word(entry, 0, call)
        store_word(entry, 1, shape)
        if load_word(c, w.DIFFERS) == 0 or number < load_word(c, w.DIFFERS):
            store_word(c, w.DIFFERS, number)
        if call == REFUSED and load_word(header, w.HEAD_ATTACHED) == NOTE_BYTES:
            note = load_word(c, w.NOTES) + peer * (8 + NOTE_BYTES)
            store_word(note, 0, number)
            copy(note + 8, header + HEADER_BYTES, NOTE_BYTES)
    _consume_frame(c, peer)
    return DONE


@inlined
def _receive_limit(c, d, peer, call):
    """Return how many bytes of a peer's frames the inbox may hold now.

    The last paragraph of the module's docstring has the reasons.
    """
    end, before = _length_to_come(c, peer), call - _next_call(c, peer)
    if d != 0 and before == 0:
        end = max(end, HEADER_BYTES + load_word(load_word(d, w.ATTACHED), peer))
    spare = before * HEADER_BYTES if d != 0 and load_word(d, w.MOVES) else _SPARE
    return min(end + spare, load_word(c, w.FRAME))


@kernel
def _read_frames(c, d, peer, call):
    """Receive a peer's frames up to that of a call, and consume the frames before it.

    Returns PENDING if bytes moved, PENDING - 1 if not, GONE or GARBLED.
    """
    result = PENDING - 1
    while not _has_arrived(c, peer, call):
        if _has_frame(c, peer):
            if _check(c, peer) != DONE:
                return GARBLED
            continue
        have = load_word(load_word(c, w.HAVE), peer)
        moved = receive_some(
            _socket(c, peer), _header(c, peer) + have, _receive_limit(c, d, peer, call) - have
        )
        if moved < 0:
            return gone(c, peer, moved)
        if moved == 0:
            break
        store_word(load_word(c, w.HAVE), peer, have + moved)
        result = PENDING
    return result


# ---- the meeting ---------------------------------------------------------------------------------------


@inlined
def _is_needed(c, d, peer):
    return load_word(c, w.SYNCHRONISING) != 0 or load_word(load_word(d, w.ATTACHED), peer) > 0


@inlined
def _is_missing(c, d, peer):
    """Whether the call waits for a frame of a peer.

    If the call needs the peer's frame, it waits for that frame. Otherwise, it waits only for a frame of an earlier call
    whose record is about to be reused.
    """
    call = load_word(c, w.CALLS)
    if _is_needed(c, d, peer):
        return not _has_arrived(c, peer, call)
    return call - _next_call(c, peer) >= AHEAD - 1


@inlined
def _has_unsent(c, peer):
    return load_word(load_word(c, w.SENT), peer) < _end_to_send(c, peer)


@inlined
def _may_piggyback(c, peer):
    """Whether the call may delay all unsent bytes for the only peer.

    It may if it returns early and these bytes are at most PIGGYBACK_BYTES of headers without data.
    """
    if load_word(c, w.SYNCHRONISING) != 0 or load_word(c, w.SIZE) != 2:
        return False
    if load_word(_outgoing(c, peer), w.HEAD_ATTACHED) != 0:
        return False
    return _end_to_send(c, peer) <= PIGGYBACK_BYTES


@inlined
def _is_ahead(c, peer, call):
    """Whether a peer has begun the call after `call`."""
    return _next_call(c, peer) == call and load_word(load_word(c, w.HAVE), peer) > _length_to_come(c, peer)


@failing
def _hit_published(c, peer, moved):
    reached_by(_PUBLISHED + (load_word(_outgoing(c, peer), w.HEAD_CALL) & 0xFF), moved)


@kernel
def _send_frames(c, peer):
    """Send unsent bytes to a peer.

    Returns PENDING if bytes moved, PENDING - 1 if not, or GONE.
    """
    sent, ends = load_word(load_word(c, w.SENT), peer), _end_to_send(c, peer)
    if sent == ends:
        return PENDING - 1
    moved = send_some(_socket(c, peer), _outbox(c, peer) + sent, ends - sent)
    if moved < 0:
        return gone(c, peer, moved)
    store_word(load_word(c, w.SENT), peer, sent + moved)
    _hit_published(c, peer, moved)
    return PENDING if moved > 0 else PENDING - 1


@kernel
def _send_or_drop(c, d, peer, call):
    """Send unsent bytes to a peer, or drop them if the peer has left and its frame of the call has arrived.

    The peer has then done its part of the call, and what it sent before it left can still be read. Returns PENDING if
    bytes moved or were dropped, PENDING - 1 if not, GONE or GARBLED.
    """
    status = _send_frames(c, peer)
    if status == GONE:
        status = _read_frames(c, d, peer, call)
        if status < DONE and _has_arrived(c, peer, call):
            store_word(load_word(c, w.SENT), peer, _end_to_send(c, peer))
            return PENDING
        return GONE if status < DONE else status
    return status


@kernel
def exchange(c, d, idle):
    """Do one sweep over all peers.

    Returns DONE when every frame is sent or may be delayed, and every frame that the call needs has been received; else
    PENDING, PENDING - 1 (nothing moved), GONE or GARBLED. `idle` is the number of sweeps in which nothing moved. A
    waiting rank also reads headers that it does not need, so that the peers can go on.
    """
    rank, size, call = load_word(c, w.RANK), load_word(c, w.SIZE), load_word(c, w.CALLS)
    more = load_word(c, w.STREAK) >= _STREAK
    may_delay = idle < (SEEN_EVERY - 1 if more else 1)
    any_left, any_delayed, any_moved = False, False, False
    for step in range(1, size):
        peer = (rank + step) % size
        if may_delay and _may_piggyback(c, peer):
            any_delayed = True
            continue
        status = _send_or_drop(c, d, peer, call)
        if status > DONE:
            return status
        any_moved |= status == PENDING
        any_left |= _has_unsent(c, peer)
    for step in range(1, size):
        peer = (rank + size - step) % size
        reads_skipped = idle % SEEN_EVERY == SEEN_EVERY - 1 or 2 * (call - _next_call(c, peer)) >= AHEAD
        if _is_needed(c, d, peer) or reads_skipped:
            status = _read_frames(c, d, peer, call)
            if status > DONE:
                return status
            any_moved |= status == PENDING
            any_left |= _is_missing(c, d, peer)
            more |= _is_ahead(c, peer, call)
    if any_delayed and not more and not any_left:
        # Nothing indicates that another call is near: send the delayed headers now.
        for peer in range(size):
            if peer != rank:
                status = _send_or_drop(c, d, peer, call)
                if status > DONE:
                    return status
                any_left |= _has_unsent(c, peer)
    if not any_left:
        return DONE
    # With delayed headers, the sweep counts as one in which nothing moved. After some of these, the headers are sent.
    return PENDING if any_moved and not any_delayed else PENDING - 1


@inlined
def _agrees(c, peer):
    """Whether a peer's header has the same call word and shape as this rank's.

    In an early-return call, the headers of all ranks must have the same.
    """
    mine, theirs = _header(c, load_word(c, w.RANK)), _header(c, peer)
    return load_word(mine, w.HEAD_CALL) == load_word(theirs, w.HEAD_CALL) and load_word(
        mine, w.HEAD_SHAPE
    ) == load_word(theirs, w.HEAD_SHAPE)


@kernel
def compare(c, d):
    """Compare the headers that the call needs.

    Returns DONE, MISMATCH, GARBLED, or PENDING if the call has to wait for all headers because some differ.
    """
    size, rank, synchronising = load_word(c, w.SIZE), load_word(c, w.RANK), load_word(c, w.SYNCHRONISING) != 0
    for peer in range(size):
        if _is_needed(c, d, peer) or peer == rank:
            if load_word(_header(c, peer), w.NUMBER) != load_word(c, w.CALLS) or not _fits(c, peer):
                return _garbled(c, peer)
            if not synchronising and not _agrees(c, peer):
                store_word(c, w.SYNCHRONISING, 1)
                return PENDING
    if synchronising and not calls_match(load_word(c, w.INBOX), load_word(c, w.FRAME), size):
        return MISMATCH
    for peer in range(size):
        attached = load_word(_header(c, peer), w.HEAD_ATTACHED)
        if peer != rank and _is_needed(c, d, peer) and attached != load_word(load_word(d, w.ATTACHED), peer):
            return _garbled(c, peer)
    return DONE


@kernel
def finish(c):
    """Consume the frames of the call, which is complete.

    Returns DONE, GARBLED, or MISMATCH if an earlier call did not match and all its headers have arrived.
    """
    differs = load_word(c, w.DIFFERS)
    for peer in range(load_word(c, w.SIZE)):
        if peer == load_word(c, w.RANK) or load_word(c, w.MEETING) != 0:
            continue
        if _next_call(c, peer) == load_word(c, w.CALLS) and _has_frame(c, peer):
            if load_word(c, w.SYNCHRONISING) != 0:
                _consume_frame(c, peer)
            elif _check(c, peer) != DONE:
                return GARBLED
        if _next_call(c, peer) <= differs:
            differs = 0
    return MISMATCH if differs != 0 else DONE


@kernel
def skip_frames(c):
    """Consume the frames of a call that did not match."""
    for peer in range(load_word(c, w.SIZE)):
        if peer != load_word(c, w.RANK) and load_word(c, w.MEETING) == 0:
            _consume_frame(c, peer)


@kernel
def read_unread_headers(c):
    """Send delayed headers, and read the headers that calls have skipped.

    Lists the pollfds of the connections from which headers are missing. Returns DONE when there are none, else PENDING,
    GONE or GARBLED.
    """
    following = load_word(c, w.CALLS) + 1
    left, failed = 0, DONE
    for peer in range(load_word(c, w.SIZE)):
        if peer == load_word(c, w.RANK) or load_word(c, w.MEETING) != 0:
            continue
        status = _send_frames(c, peer)
        if status < DONE and _next_call(c, peer) < following:
            status = _read_frames(c, 0, peer, following)
        if status > DONE and (_has_unsent(c, peer) or _next_call(c, peer) < following):
            failed = status
        elif _next_call(c, peer) < following:
            store_word(load_word(c, w.POLLFDS), left, _socket(c, peer) | READABLE << 32)
            left += 1
    store_word(c, w.LISTED, left)
    if failed != DONE:
        return failed
    return PENDING if left else DONE


@kernel
def list_missing(c, d):
    """List the pollfds of the connections that the meeting waits for.

    Behind these, lists the connections of peers that may be waiting until this rank reads.
    """
    count = 0
    for needed in range(2):
        for peer in range(load_word(c, w.SIZE)):
            if peer == load_word(c, w.RANK):
                continue
            writes = _has_unsent(c, peer)
            if needed == 0:
                events = (WRITABLE if writes else 0) | (READABLE if _is_missing(c, d, peer) else 0)
            else:
                waits = writes or _is_missing(c, d, peer) or _has_arrived(c, peer, load_word(c, w.CALLS))
                events = 0 if waits else READABLE
            if events:
                store_word(load_word(c, w.POLLFDS), count, _socket(c, peer) | events << 32)
                count += 1
        if needed == 0:
            store_word(c, w.WAITING, count)
    store_word(c, w.LISTED, count)
