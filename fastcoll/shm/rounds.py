"""The one protocol under all collectives of a segment: rounds over parity slots.

A collective is a sequence of *rounds*, the same number on every rank, numbered through the life of the
group. In round t a rank may write its slot t % SLOTS, then publishes t, then reads slots of its peers.

    word                  writer    readers   meaning of a value v
    call line s % 2       rank      all       word 0 = s: call s has begun here, its first round is published
    PROGRESS              rank      all       v: rounds below v are published, rounds below v - 1 are read

Why a slot may be written again. Round t reuses the slot of round t - SLOTS, so every peer must have
read that round: PROGRESS of every peer is at least t - SLOTS + 2, or the peer has begun a later call.
`seen` is the highest such bound already known, so that the check is free in the common case: a first
round waits for everybody (`meet`), after which all earlier rounds are known to be read.
Why a call line may be written again. Call s + 2 overwrites the line of call s; it begins only after the
meeting of call s + 1, which no rank attends before it has compared the lines of call s.
`tests/shm/test_rounds_model.py` explores the schedules of this protocol.

Every kernel is resumable: STEP and PHASE say where it stopped, and waiting again is harmless.
"""

from __future__ import annotations

from ..calls import UNEVEN
from ..kernels.atomics import store_release
from ..kernels.jit import inlined, kernel
from ..kernels.pointers import load_word, store_word
from ..kernels.waiting import BUDGET, IDLE, PATIENCE_WORDS, now, wait_for
from .layout import BALANCE, CALL, INLINE, LINE, PAYLOAD, PROGRESS, SEQUENCE, SHAPE, SLOTS

# What a kernel returns.
DONE, AGAIN, MISMATCH = range(3)

# Words of a group's private context (int64, one table per process and group).
RANK = 0
SIZE = 1
SECTIONS = 2  # address of rank 0's section
STRIDE = 3  # bytes from one section to the next
SLOTS_AT = 4  # offset of slot 0 in a section
SLOT = 5  # bytes of a slot
CALLS = 6  # number of the last call begun
ROUND = 7  # number of the current round
SEEN = 8  # every peer has read all rounds below SEEN - 1 (see above)
STEP = 9  # rounds of the call under way that are behind us
PHASE = 10  # where in the round: OPEN, PUBLISHED, MET
LARGEST = 11  # largest SHAPE of the meeting, for calls whose ranks may differ in size
ONE_SHOT = 12  # all_reduce: up to this many bytes every rank reduces everything itself
LATE = 13  # the rank that the last wait was for
SINCE = 14  # when this run of the kernel closed its first round, in ns; 0 before
PATIENCE = 16  # the table of kernels/waiting.py
SOURCES = PATIENCE + PATIENCE_WORDS  # `size` addresses, scratch for reducers
CONTEXT_WORDS = SOURCES  # plus one word a rank

OPEN, PUBLISHED, MET = range(3)


@inlined
def section(c, rank):
    """Address of a rank's section."""
    return load_word(c, SECTIONS) + rank * load_word(c, STRIDE)


@inlined
def slot_of(c, rank):
    """Address of a rank's slot of the current round."""
    parity = load_word(c, ROUND) % SLOTS
    return section(c, rank) + load_word(c, SLOTS_AT) + parity * load_word(c, SLOT)


@inlined
def line_of(c, rank):
    """Address of a rank's line of the current call."""
    return section(c, rank) + LINE * (load_word(c, CALLS) % 2)


@inlined
def place_of(c, rank, inline):
    """Where the payload of the first round lies: in the call line itself when it fits."""
    return line_of(c, rank) + 8 * PAYLOAD if inline else slot_of(c, rank)


@inlined
def fits_inline(nbytes):
    """Whether a whole payload travels in the call line."""
    return nbytes <= INLINE


@inlined
def begin(c):
    """Number the call, unless it resumes."""
    store_word(c, SINCE, 0)
    if load_word(c, STEP) == 0 and load_word(c, PHASE) == OPEN and load_word(c, LATE) < 0:
        store_word(c, CALLS, load_word(c, CALLS) + 1)
        store_word(c, PATIENCE + IDLE, 0)
        store_word(c, LATE, load_word(c, RANK))


@kernel
def _wait_progress(c, want):
    """Wait until every peer's PROGRESS is at least `want`."""
    size = load_word(c, SIZE)
    for peer in range(size):
        if peer != load_word(c, RANK) and not wait_for(c + 8 * PATIENCE, section(c, peer) + PROGRESS, want):
            store_word(c, LATE, peer)
            return AGAIN
    store_word(c, SEEN, max(want, load_word(c, SEEN)))
    return DONE


@inlined
def open_slot(c):
    """Wait until the slot of this round may be written."""
    want = load_word(c, ROUND) - SLOTS + 2
    if load_word(c, SEEN) >= want:
        return DONE
    return _wait_progress(c, want)


@inlined
def publish(c, call, shape, balance):
    """Make what was written in this round visible to the peers."""
    if load_word(c, STEP) == 0:
        line = line_of(c, load_word(c, RANK))
        store_word(line, CALL, call)
        store_word(line, SHAPE, shape)
        store_word(line, BALANCE, balance)
        store_release(line + 8 * SEQUENCE, load_word(c, CALLS))
    else:
        store_release(section(c, load_word(c, RANK)) + PROGRESS, load_word(c, ROUND) + 1)
    store_word(c, PHASE, PUBLISHED)


@kernel
def _meet(c, call, shape, balance):
    """Wait until every rank has begun this call, and compare the calls."""
    same = True
    largest = shape
    for peer in range(load_word(c, SIZE)):
        if peer == load_word(c, RANK):
            continue
        line = line_of(c, peer)
        if not wait_for(c + 8 * PATIENCE, line + 8 * SEQUENCE, load_word(c, CALLS)):
            store_word(c, LATE, peer)
            return AGAIN
        theirs = load_word(line, SHAPE)
        same &= load_word(line, CALL) == call and (theirs == shape or call & UNEVEN != 0)
        balance += load_word(line, BALANCE)
        largest = max(largest, theirs)
    store_word(c, SEEN, load_word(c, ROUND) + 1)
    store_word(c, LARGEST, largest)
    if same and balance == 0:
        store_word(c, PHASE, MET)
        return DONE
    close_round(c)
    _end(c)
    return MISMATCH


@inlined
def await_all(c, call, shape, balance):
    """Wait until every rank has published this round; the first round also compares the calls."""
    if load_word(c, PHASE) == MET:
        return DONE
    if load_word(c, STEP) == 0:
        return _meet(c, call, shape, balance)
    return _wait_progress(c, load_word(c, ROUND) + 1)


@inlined
def await_met(c, call, shape, balance):
    """In the first round wait as `await_all` does; later rounds wait for single peers (`await_peer`)."""
    if load_word(c, STEP) == 0 and load_word(c, PHASE) != MET:
        return _meet(c, call, shape, balance)
    return DONE


@inlined
def await_peer(c, peer):
    """Wait until one peer has published this round."""
    if load_word(c, STEP) == 0:
        return DONE
    if wait_for(c + 8 * PATIENCE, section(c, peer) + PROGRESS, load_word(c, ROUND) + 1):
        return DONE
    store_word(c, LATE, peer)
    return AGAIN


@inlined
def close_round(c):
    """This round is read; go on to the next."""
    store_word(c, ROUND, load_word(c, ROUND) + 1)
    store_word(c, STEP, load_word(c, STEP) + 1)
    store_word(c, PHASE, OPEN)


@inlined
def time_is_up(c):
    """Whether the kernel has worked long enough and should return AGAIN between two rounds.

    Python then sees signals, the deadline and an abort, though no wait was long.
    """
    if load_word(c, SINCE) == 0:
        store_word(c, SINCE, now(c + 8 * PATIENCE))
        return False
    return now(c + 8 * PATIENCE) > load_word(c, SINCE) + load_word(c, PATIENCE + BUDGET)


@inlined
def _end(c):
    store_word(c, STEP, 0)
    store_word(c, PHASE, OPEN)
    store_word(c, LATE, -1)


@inlined
def finish(c):
    """The call is complete on this rank: say so to whoever waits to reuse a slot."""
    if load_word(c, STEP) > 1:
        store_release(section(c, load_word(c, RANK)) + PROGRESS, load_word(c, ROUND) + 1)
    _end(c)
    return DONE
