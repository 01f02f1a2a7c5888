"""How every collective begins: each rank tells each other what it calls, and attaches what is small.

    word            a header
    NUMBER          how many calls the group has had
    HEAD_CALL       fingerprint of the call (core/signature.py)
    HEAD_SHAPE      bytes that this rank contributes
    HEAD_BALANCE    0 over all ranks if what they give is what the others expect (core/signature.py)
    HEAD_ATTACHED   bytes that follow this header
    HEAD_DIFFERS    not 0: a combination of headers that differ (combine.py, for more than 16 ranks)

A call is *strict* on a rank that goes on when it has the headers of all ranks. All of them compare in the same way,
and either all go on or all raise, with nothing under way. A small broadcast is *loose* on its root, and a small
reduction on those who only give to it: all is attached, so these have nothing to wait for. Others write what they
receive, and wait for all headers. (What is a part of a larger call is strict: where it raises, the rest is not made.)

A rank keeps a record of each loose call, reads the headers that it did not wait for when it comes by, and compares
them with the record. Of one that differs it is told at the end of the first later call that finds the headers of all
ranks for it; that call is carried out itself, so that all ranks have always made the same number of calls. Between two
ranks the other one is loose as well, which only says that it needs not send its header at once (below). Where it meets
one that differs it goes on as in a strict call.

How far ahead. A call ends only when less than AHEAD headers of each peer are unread, so there is a record of every
call whose headers are to come, and each such call is told before its record is used again. Each rank sends a header to
each other in every call. So what a rank has not read of a peer is, in the kernel, at most AHEAD headers that it did not
need, which are without data, and the data of frames that are yet to be used. Who sends more waits for the reader.

Why a waiting rank gets on. Take a rank in the lowest call. Those in later calls have handed all frames of its call to
the kernel. A rank that waits sends to all, and reads from each peer up to the frame of its own call, needed or not, so
frames to whoever waits are taken; and frames from whoever waits are sent as far as they are needed. All waits are the
engine's, with its deadline and its look at peers.

Headers that ride along. Of two ranks, the one that receives holds its own bare headers back, and sends them with those
of later calls, where it has a further call to make soon: the beginning of one is there behind the frame that it needed,
or many calls have followed each other at once. When it waits (after some 5 us), when HELD bytes are together, in a
strict call and in `settle` they are sent. So two ranks that broadcast in a row pay for one message a call, not two.
Where a streak ends, headers stay until the next call. Nobody waits for them but a peer that closes the group, for a
while: they say that the call matched, and where it does not the rank goes on strictly.

What ends while a rank is ahead. A peer that dies or leaves breaks the connection, which the next read or write on it
finds; where the headers that were read by then say that calls differed, that is what is raised. A rank that closes the
group first reads the headers that it did not wait for (`settle`): a connection that is closed with unread bytes loses
those on their way to the peer.

Where bytes belong. Frames of a peer come in the order of its calls, NEXT says the number of the first one that is not
used up, and HAVE how much there is from its beginning on. The raw bytes of a plan follow a header only once the peer
has the header of this rank's same call; so while a call of this rank has a plan to run, no more is received than
the headers up to its own, and otherwise as much as there is: several small frames at once.
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

PENDING = -1  # neither finished nor failed
_PUBLISHED = number_of("tcp.OPERATION.after_publish")
AHEAD = 64
"""Records of calls whose headers were not all waited for: enough for the time slice of a rank that shares its core."""
_SPARE = 1024  # bytes received beyond a frame, where the next ones may follow
PIGGYBACK_BYTES = 15 * HEADER_BYTES  # bytes of headers that a rank holds back for each peer, at most
SEEN_EVERY = 16  # sweeps in vain
SOON, _STREAK = (
    20_000,
    32,
)  # ns between the beginnings of two calls; and how many such calls in a row are a streak


@inlined
def gone(c, peer, error):
    """Note that the connection to a peer is over."""
    store_word(c, w.PEER, peer)
    store_word(c, w.ERROR, error)
    return GONE


@inlined
def _outbox(c, peer):
    return load_word(c, w.OUTBOX) + peer * (load_word(c, w.FRAME) + PIGGYBACK_BYTES)


@inlined
def _outgoing(c, peer):
    """The frame of the call under way in a peer's outbox, behind those that were held back."""
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
    """Of each rank, what it called and with which shape."""
    return load_word(c, w.RECORDS) + number % AHEAD * (16 * load_word(c, w.SIZE))


@kernel
def write_headers(c, d, returns_early):
    """Write this rank's header for each peer, and what is attached to it; and where calls may be loose the record."""
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
        if keeps:
            store_word(record, 2 * peer, load_word(d, w.CALL))
            store_word(record, 2 * peer + 1, load_word(d, w.SHAPE))
    for row in range(load_word(d, w.PAYLOADS)):
        at = load_word(d, w.TABLE) + 8 * t.COLUMNS * row
        peer = load_word(at, t.PEER)
        frame = _outgoing(c, peer)
        store_word(load_word(c, w.ENDS), peer, _end_to_send(c, peer) + load_word(at, t.NBYTES))
        source = load_word(load_word(c, w.BUFFERS), load_word(at, t.BUFFER)) + load_word(at, t.OFFSET)
        store_word(frame, w.HEAD_ATTACHED, load_word(at, t.NBYTES))
        copy(frame + HEADER_BYTES, source, load_word(at, t.NBYTES))
    copy(_header(c, rank), _outgoing(c, rank), HEADER_BYTES)
    store_word(c, w.SYNCHRONISING, 0 if returns_early else 1)


# ---- frames of a peer ----------------------------------------------------------------------------------


@inlined
def _next_call(c, peer):
    return load_word(load_word(c, w.NEXT), peer)


@inlined
def _fits(c, peer):
    """Whether what a peer's header announces has room."""
    attached = load_word(_header(c, peer), w.HEAD_ATTACHED)
    return attached >= 0 and attached <= load_word(c, w.FRAME) - HEADER_BYTES


@inlined
def _length_to_come(c, peer):
    """How long the frame of a peer is, as far as is known; a length that cannot be is for whoever uses it to find."""
    if load_word(load_word(c, w.HAVE), peer) < HEADER_BYTES or not _fits(c, peer):
        return HEADER_BYTES
    return HEADER_BYTES + load_word(_header(c, peer), w.HEAD_ATTACHED)


@inlined
def _has_frame(c, peer):
    return load_word(load_word(c, w.HAVE), peer) >= _length_to_come(c, peer)


@inlined
def _has_arrived(c, peer, number):
    """Whether the frame of a call has come from a peer."""
    following = _next_call(c, peer)
    return following > number or (following == number and _has_frame(c, peer))


@kernel
def _consume_frame(c, peer):
    """Go on to the next frame of a peer, of which the beginning may be here."""
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
    """Compare the frame of a peer that is here with the record of its call, and use it up: DONE or GARBLED."""
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
    """Up to where frames of a peer may be received now, from the beginning of its inbox on."""
    end, before = _length_to_come(c, peer), call - _next_call(c, peer)
    if d != 0 and before == 0:
        end = max(end, HEADER_BYTES + load_word(load_word(d, w.ATTACHED), peer))
    spare = before * HEADER_BYTES if d != 0 and load_word(d, w.MOVES) else _SPARE
    return min(end + spare, load_word(c, w.FRAME))


@kernel
def _read_frames(c, d, peer, call):
    """Receive frames of a peer up to that of a call, and use those before it up: GOES_ON if something
    moved, GOES_ON - 1 if not, GONE or GARBLED."""
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
    """Whether the call waits for a frame of a peer: its own, or one so old that its record is about to be used."""
    call = load_word(c, w.CALLS)
    if _is_needed(c, d, peer):
        return not _has_arrived(c, peer, call)
    return call - _next_call(c, peer) >= AHEAD - 1


@inlined
def _has_unsent(c, peer):
    return load_word(load_word(c, w.SENT), peer) < _end_to_send(c, peer)


@inlined
def _may_piggyback(c, peer):
    """Whether what is to be sent to a peer is headers only that a loose call has no need to send, and few of them."""
    if load_word(c, w.SYNCHRONISING) != 0 or load_word(c, w.SIZE) != 2:
        return False
    if load_word(_outgoing(c, peer), w.HEAD_ATTACHED) != 0:
        return False
    return _end_to_send(c, peer) <= PIGGYBACK_BYTES


@inlined
def _is_ahead(c, peer, call):
    """Whether a peer has begun its next call."""
    return _next_call(c, peer) == call and load_word(load_word(c, w.HAVE), peer) > _length_to_come(c, peer)


@failing
def _hit_published(c, peer, moved):
    reached_by(_PUBLISHED + (load_word(_outgoing(c, peer), w.HEAD_CALL) & 0xFF), moved)


@kernel
def _send_frames(c, peer):
    """Send what is to be sent to a peer: GOES_ON if something moved, GOES_ON - 1 if not, or GONE."""
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
def exchange(c, d, idle):
    """One sweep over all peers: DONE when every frame is sent, and received if the call needs it; GOES_ON, GOES_ON - 1
    (nothing moved), GONE or GARBLED.

    `idle`: how many sweeps were in vain. Who waits reads what it does not need, too, so that the peers get on.
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
        status = _send_frames(c, peer)
        if status > DONE:
            return status
        any_moved |= status == PENDING
        any_left |= _has_unsent(c, peer)
    for step in range(1, size):
        peer = (rank + size - step) % size
        looks = idle % SEEN_EVERY == SEEN_EVERY - 1 or 2 * (call - _next_call(c, peer)) >= AHEAD
        if _is_needed(c, d, peer) or looks:
            status = _read_frames(c, d, peer, call)
            if status > DONE:
                return status
            any_moved |= status == PENDING
            any_left |= _is_missing(c, d, peer)
            more |= _is_ahead(c, peer, call)
    if any_delayed and not more and not any_left:
        # Nothing says that the next call is near: what was held back goes now.
        for peer in range(size):
            if peer != rank:
                status = _send_frames(c, peer)
                if status > DONE:
                    return status
                any_left |= _has_unsent(c, peer)
    if not any_left:
        return DONE
    # What was held back goes in the next sweep.
    return PENDING if any_moved and not any_delayed else PENDING - 1


@inlined
def _agrees(c, peer):
    """Whether a peer's header is that of the same call as this rank's, if it is a loose one."""
    mine, theirs = _header(c, load_word(c, w.RANK)), _header(c, peer)
    return load_word(mine, w.HEAD_CALL) == load_word(theirs, w.HEAD_CALL) and load_word(
        mine, w.HEAD_SHAPE
    ) == load_word(theirs, w.HEAD_SHAPE)


@kernel
def compare(c, d):
    """Compare the headers that the call needs: DONE, MISMATCH, GARBLED, or GOES_ON if it needs all of them now."""
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
    """The call was made: use its frames up. DONE, MISMATCH if an earlier call is to be told, or GARBLED."""
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
    """The calls did not match: go on to the frames of the next one."""
    for peer in range(load_word(c, w.SIZE)):
        if peer != load_word(c, w.RANK) and load_word(c, w.MEETING) == 0:
            _consume_frame(c, peer)


@kernel
def read_unread_headers(c):
    """Send what was held back, read the headers that no call has waited for, and list where more are to come: DONE when
    none are, GOES_ON, GONE or GARBLED."""
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
    """Write the pollfds of the connections that the meeting waits for, and behind them of those on which a peer may
    wait for this rank."""
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
