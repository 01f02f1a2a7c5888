"""What Python calls to move messages over connections: compiled functions that run without the GIL.

`m` is the address of a mail's table (mail_words.py). `send` and `receive` carry one blocking call from begin to
end, and hold BUSY unless they are DONE. `begin`, `rest`, `accept` and `acknowledge` set things going that `advance`
then carries on for all peers at once. All come back within 0.1 s.
"""

from __future__ import annotations

from ...core.status import AGAIN, DONE, LATER, OTHER, REFUSED, UNMINDED, WORKED
from ...kernels.jit import entry, inlined, kernel
from ...kernels.primitives import load_word, store_release, store_word, word_at
from ...kernels.pyobjects import DATA, Index, PyObject, integer, object_at
from ...kernels.sockets import READABLE, WRITABLE
from ...kernels.waiting import seize_unless
from ...p2p.pipe import ANY, EVENTS, GO, NOTHING, TAKEN
from .mail_answers import defer, note_taken, note_turn, send_deferred, wants_minding
from .mail_frames import (
    EAGER,
    GARBLED,
    MESSAGE,
    REST,
    accept_payload,
    answer,
    begin_message,
    begin_rest,
    begin_with_answer,
    has_header,
    is_entering,
    pull,
    push,
    read_ack,
    read_header,
)
from .mail_sweep import PIECES_A_CALL, idle, row_of, sweep
from .mail_words import (
    ACK_AHEAD,
    ACK_NUMBER,
    ACK_VERDICT,
    ANSWERING,
    ASKING,
    AWAITING_REST,
    BEHIND,
    BUSY,
    DEFERRED,
    EVENT,
    IDLE,
    IN_ATTACHED,
    IN_FD,
    IN_GONE,
    IN_KIND,
    IN_LEFT,
    IN_NBYTES,
    IN_NUMBER,
    IN_STAGE,
    OUT_FD,
    OUT_GONE,
    RANK,
    REST_ARRIVING,
    REST_NBYTES,
    REST_NUMBER,
    SENDING,
    SENT,
    SOURCE,
    TAKING,
    TOLD,
)

_LOOK_ELSEWHERE = 16  # tries


@inlined
def _let_go(m, status):
    store_release(m + 8 * BUSY, 0)
    return status


# ---- blocking calls -----------------------------------------------------------------------------------


@entry
def send(mail: Index, dst: Index, tensor: PyObject, size: Index, word: Index) -> int:
    """Send a contiguous array of `size` bytes, and wait until it is taken: DONE, AGAIN, WORKED, REFUSED or LATER.

    Or UNMINDED. Only while no other message to this peer is entering or unacked.
    """
    m = integer(mail)
    # Whoever had them may have left a message half-way to the engine, which says so by BEHIND.
    if not seize_unless(m + 8 * BUSY, m + 8 * BEHIND):
        return LATER
    row = row_of(m, integer(dst))
    if load_word(row, OUT_FD) < 0:
        return _let_go(m, LATER)
    if load_word(m, DEFERRED) != integer(dst) + 1 and not send_deferred(m):
        return _let_go(m, LATER)
    status = _send(m, row, integer(dst), word_at(object_at(tensor) + DATA), integer(size), integer(word))
    if status != DONE:
        return status
    return _let_go(m, UNMINDED if wants_minding(m, row) else DONE)


@inlined
def _begin_send(m, row, peer, data, nbytes, kind, attached):
    note_turn(m, row, peer)
    if load_word(m, DEFERRED) == peer + 1:
        begin_with_answer(row, data, nbytes, kind, attached)
        store_word(m, DEFERRED, 0)
    else:
        begin_message(row, data, nbytes, kind, attached)
    store_word(row, SENDING, 1)


@inlined
def _read_answer(row, turn):
    """Read the answer if it is there, on the connection on which it is expected, now and then on the other one."""
    ahead = load_word(row, ACK_AHEAD) != 0
    if turn % _LOOK_ELSEWHERE == _LOOK_ELSEWHERE - 1:
        ahead = not ahead
    if not ahead:
        return read_ack(row)
    return load_word(row, IN_FD) >= 0 and load_word(row, IN_STAGE) == IDLE and read_header(row) == TAKEN


@inlined
def _ahead_fd(row):
    """The connection on which an answer may still come ahead of a message, or -1."""
    if load_word(row, IN_GONE) != 0 or load_word(row, IN_STAGE) != IDLE or has_header(row):
        return -1
    return load_word(row, IN_FD)


@kernel
def _send(m, row, peer, data, nbytes, kind):
    attached = min(nbytes, EAGER)
    _begin_send(m, row, peer, data, nbytes, kind, attached)
    turn = 0
    pieces = 0
    while pieces < PIECES_A_CALL:
        entering = is_entering(row)
        if entering:
            if push(row):
                turn = 0
                pieces += 1
                continue
        elif _read_answer(row, turn):
            verdict = load_word(row, ACK_VERDICT)
            asked = verdict == GO and load_word(row, SENDING) == 1 and attached < nbytes
            if load_word(row, ACK_NUMBER) != load_word(row, SENT) or (verdict == GO and not asked):
                store_word(row, OUT_GONE, GARBLED)
            elif asked:
                begin_rest(row, data, nbytes, load_word(row, SENT), attached)
                store_word(row, SENDING, 2)
                continue
            else:
                store_word(row, SENDING, 0)
                return DONE if verdict == TAKEN else REFUSED
        events = WRITABLE if entering else READABLE
        ahead = -1 if entering else _ahead_fd(row)
        if not idle(m, load_word(row, OUT_FD), events, load_word(row, OUT_GONE), turn, ahead):
            return AGAIN
        turn += 1
    return WORKED


@entry
def receive(mail: Index, src: Index, tensor: PyObject, size: Index, word: Index) -> int:
    """Receive the next message of a rank (or of ANY) into a contiguous array of `size` bytes, and answer it.

    -1 - rank when done, AGAIN, WORKED, OTHER or LATER. Only while no other message of that rank is
    arriving. If it is not done, word SOURCE holds the rank that was chosen, plus 1.
    """
    m, source = integer(mail), integer(src)
    if not seize_unless(m + 8 * BUSY, m + 8 * BEHIND):
        return LATER
    if source == load_word(m, RANK):
        return _let_go(m, LATER)
    if not send_deferred(m):
        return _let_go(m, LATER)
    if source == ANY:
        event = sweep(m, True, True)
        if event == NOTHING:
            return AGAIN
        store_word(m, SOURCE, event // EVENTS + 1)
    peer = load_word(m, SOURCE) - 1 if source == ANY else source
    status = _receive(
        m, row_of(m, peer), peer, word_at(object_at(tensor) + DATA), integer(size), integer(word)
    )
    if status != DONE:
        return status
    store_word(m, SOURCE, 0)
    note_taken(m, peer)
    return _let_go(m, -1 - peer)


@inlined
def _begin_receive(row, data, nbytes, kind):
    """Let the message whose header was read arrive, if it is the one that is wanted."""
    attached = load_word(row, IN_ATTACHED)
    if load_word(row, IN_KIND) != kind or load_word(row, IN_NBYTES) != nbytes:
        return False
    if attached != min(nbytes, EAGER):
        return False
    accept_payload(row, data, attached)
    store_word(row, TAKING, load_word(row, IN_NUMBER))
    store_word(row, ASKING, 1 if attached < nbytes else 0)
    return True


@inlined
def _begin_rest(row, data, nbytes):
    """Let the rest that was asked for arrive, if it is that."""
    if load_word(row, REST_NUMBER) != load_word(row, TAKING) or load_word(row, REST_NBYTES) != nbytes - EAGER:
        return False
    accept_payload(row, data + EAGER, nbytes - EAGER)
    store_word(row, IN_STAGE, REST_ARRIVING)
    return True


@inlined
def _read_frame(row):
    """As `read_header`, where no answer is waited for."""
    header = read_header(row)
    if header != TAKEN:
        return header
    store_word(row, IN_GONE, GARBLED)
    return 0


@kernel
def _receive(m, row, peer, data, nbytes, kind):
    turn = 0
    pieces = 0
    while pieces < PIECES_A_CALL:
        events = READABLE
        if load_word(row, ASKING) != 0:
            if answer(row, load_word(row, TAKING), GO, nbytes, kind):
                store_word(row, ASKING, 0)
            else:
                events |= WRITABLE
        stage = load_word(row, IN_STAGE)
        if stage == IDLE:
            header = _read_frame(row)
            if header != 0:
                if header != MESSAGE or not _begin_receive(row, data, nbytes, kind):
                    store_word(m, SOURCE, 0)
                    return OTHER
                continue
        elif stage == AWAITING_REST:
            header = _read_frame(row)
            if header != 0:
                # Other messages may come before it.
                if header != REST or not _begin_rest(row, data, nbytes):
                    return OTHER
                continue
        elif stage == ANSWERING:
            if (nbytes <= EAGER and defer(m, row, peer)) or answer(
                row, load_word(row, TAKING), TAKEN, nbytes, kind
            ):
                store_word(row, IN_STAGE, IDLE)
                return DONE
            events = WRITABLE
        elif load_word(row, IN_LEFT) == 0:
            whole = stage == REST_ARRIVING or nbytes <= EAGER
            store_word(row, IN_STAGE, ANSWERING if whole else AWAITING_REST)
            continue
        elif pull(row):
            turn = 0
            pieces += 1
            continue
        if not idle(m, load_word(row, IN_FD), events, load_word(row, IN_GONE), turn, -1):
            return AGAIN
        turn += 1
    return WORKED


# ---- the courier's steps ------------------------------------------------------------------------------


@entry
def begin(mail: Index, peer: Index, address: Index, nbytes: Index, kind: Index, attached: Index) -> int:
    """Make a message the one that enters, with its first `attached` bytes; `advance` moves the rest of it."""
    row = row_of(integer(mail), integer(peer))
    begin_message(row, integer(address), integer(nbytes), integer(kind), integer(attached))
    push(row)
    return DONE


@entry
def rest(mail: Index, peer: Index, address: Index, nbytes: Index, number: Index, attached: Index) -> int:
    """Make all but the first `attached` bytes of a message what enters."""
    row = row_of(integer(mail), integer(peer))
    begin_rest(row, integer(address), integer(nbytes), integer(number), integer(attached))
    return DONE


@entry
def accept(mail: Index, peer: Index, address: Index, nbytes: Index) -> int:
    """Let the bytes behind the header that `advance` has read arrive at `address` (0: drop them)."""
    accept_payload(row_of(integer(mail), integer(peer)), integer(address), integer(nbytes))
    return DONE


@entry
def acknowledge(mail: Index, peer: Index, number: Index, verdict: Index, nbytes: Index, kind: Index) -> int:
    """Answer a message of `peer`, with what the receive asked for; AGAIN: not all of it could be sent."""
    row = row_of(integer(mail), integer(peer))
    sent = answer(row, integer(number), integer(verdict), integer(nbytes), integer(kind))
    return DONE if sent else AGAIN


@entry
def advance(mail: Index, handled: Index, wait: Index) -> int:
    """Move all messages under way until one of them needs a decision, as p2p/pipe.py has it."""
    m = integer(mail)
    if load_word(m, TOLD) > integer(handled):
        return load_word(m, EVENT)
    event = sweep(m, False, integer(wait) != 0)
    if event != NOTHING:
        store_word(m, EVENT, event)
        store_word(m, TOLD, load_word(m, TOLD) + 1)
    return event
