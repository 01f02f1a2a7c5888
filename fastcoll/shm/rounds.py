"""The one protocol under all collectives of a segment: rounds over a ring of slots.

A collective is a sequence of *rounds*, the same number on every rank, numbered through the life of the
group. For round t a rank writes its slot t % SLOTS, publishes t, and reads slots of its peers. It may
write some rounds ahead of what it reads (LAG).

    word                  writer    readers   meaning of a value v
    call line s % 2       rank      all       word 0 = s: call s has begun here, its first round is published
    PUBLISHED             rank      all       v: of a call's later rounds, those below v are published
    CONSUMED              rank      all       v: rounds below v are read
    combined line s % 2   group     all       word 0 = s: all ranks of the group have begun call s

Why a slot may be written again. Round t reuses the slot of round t - SLOTS, so every peer must have
read that round: its CONSUMED is at least t - SLOTS + 1, or it has begun a later call. `seen` is the highest
such bound already known, so that the check is free in the common case: a call's first round waits for
everybody (`meet`), after which the rounds of all earlier calls are known to be read.
Why a call line may be written again. Call s + 2 overwrites the line of call s; it begins only after the
meeting of call s + 1, which no rank attends before it has compared the lines of call s.
More than layout.FLAT ranks meet in groups. A rank waits for its group's lines; the group's combined line says of all of
them what one rank's line would say; and a rank waits for the combined lines of all groups. Whoever has read its group's
lines writes the combined one, unless it is there: a fixed leader would have to be scheduled first where ranks share
cores. Several may write at once, since they write the same words: these depend on the group's lines only. What a rank
wrote before its line is visible to all that have met, as one acquire and release follows the other.
Why all these lines may be written again. Whoever has met for call s + 1 knows that every rank has begun it, and so has
finished call s: nobody reads a line of call s any more, neither a rank's nor a group's, or is about to write a group's.
Only then does a rank begin call s + 2, which uses these lines next.
Why nobody waits for ever. A rank writes at most LAG <= SLOTS - 1 rounds ahead, so whoever has read least
finds every slot that it and its peers need next free.
`tests/shm/test_rounds_model.py` explores the schedules of this protocol.

Every entry is resumable: WROTE, READ and MET say where it stopped, and waiting again is harmless. The context
belongs to one call at a time, whose thread is named in BUSY from `take` until the call is complete.
"""

from __future__ import annotations

from ..compiler.jit import inlined, kernel
from ..core import signature
from ..core.operations import OPERATIONS
from ..core.signature import UNEVEN
from ..core.status import AGAIN, DONE, LATER, MISMATCH, MIXED
from ..failpoints import number_of
from ..kernels.failing import failing, reached
from ..kernels.primitives import (
    load_acquire,
    load_word,
    store_release,
    store_word,
    swap_if_equal,
    this_thread,
)
from ..kernels.recording import record_call, record_end
from ..kernels.waiting import BUDGET, IDLE, TIMED, now, wait_for
from . import autotune, layout
from . import context_layout as at

# An entry takes the context's address with what Python knows about the call in the lowest bits.
RESUMED = 1  # the call came back with AGAIN before and holds the context
PREPARED = 2  # the arrays have been adopted, and GIVEN is the call's description
HELD = 4  # this thread has the context from the call before; and the call is to go through the slots
TAGS = 7

# Which calls are timed for the record, besides those that wait longer than a few spins: two looks at the clock take
# 50 ns, which is 1 ns a call of 8 bytes so, and 1 % of one of 64 KiB.
TIMED_EVERY, TIMED_FROM = 64, 64 << 10

# How a call can go direct: with arrays anywhere in its ranks' memory, or all in arenas that the others can map.
ORDINARY, SHARED = 1, 2
_OPERATIONS = len(OPERATIONS)

# Failpoints of every operation, by its number behind the first one's.
_ENTER, _PUBLISHED = number_of("shm.OPERATION.enter"), number_of("shm.OPERATION.after_publish")
_MID_CHUNK, _MET = number_of("shm.OPERATION.mid_chunk"), number_of("shm.OPERATION.after_meeting")
_BEFORE_DONE, _AFTER_DONE = number_of("shm.OPERATION.before_done"), number_of("shm.OPERATION.after_done")
_BARRIER = signature.code_of("barrier")

# The bits of a line's TIME that are no time: whether the call is direct, and the sign, where ranks of a group differ.
_BESIDE_TIME = -(1 << 63) | 1


@inlined
def ways_at(c):
    """Address of the table of autotune.py."""
    return c + 8 * at.CHOOSING


@inlined
def table(c, which):
    """Address of a table of a word a rank: addresses and bytes of what this rank gives and takes, and SOURCES."""
    return c + 8 * (at.TABLES + which * load_word(c, at.SIZE))


@inlined
def section(c, rank):
    """Address of a rank's section."""
    return load_word(c, at.SECTIONS) + rank * load_word(c, at.STRIDE)


@inlined
def slot_of(c, rank, step):
    """Address of a rank's slot of round `step` of the call."""
    place = (load_word(c, at.ROUND) + step) % layout.SLOTS
    return section(c, rank) + layout.CONTROL + place * load_word(c, at.SLOT)


@inlined
def line_of(c, rank):
    """Address of a rank's line of the current call."""
    return section(c, rank) + layout.LINE * (load_word(c, at.CALLS) % 2)


@inlined
def combined_of(c, rank):
    """Address of the combined line of a rank's group for the current call."""
    return load_word(c, at.COMBINED) + layout.LINE * (rank // layout.GROUP * 2 + load_word(c, at.CALLS) % 2)


@inlined
def place_of(c, rank, step, nbytes, room=layout.INLINE):
    """Where a round of a payload of nbytes lies: in the call line itself when all of it fits into the room there.

    A peer's payload of a word is in its group's combined line, too, which is in the cache already.
    """
    if nbytes > room:
        return slot_of(c, rank, step)
    if nbytes <= 8 and load_word(c, at.COMBINED) != 0 and rank != load_word(c, at.RANK):
        return combined_of(c, rank) + 8 * (layout.PAYLOAD + rank % layout.GROUP)
    return line_of(c, rank) + 8 * layout.PAYLOAD


@inlined
def take(handle):
    """The context's address, taken for a call unless the call has it already; 0: that can't be now."""
    c = handle & ~TAGS
    if handle & (RESUMED | HELD):
        return c
    if handle & PREPARED == 0 and load_word(c, at.SHUT) | load_word(c, at.PENDING) != 0:
        return 0
    return c if swap_if_equal(c + 8 * at.BUSY, 0, this_thread()) else 0


@inlined
def give_up(handle):
    """Leave the call to Python, as if it had never been seen."""
    if handle & (RESUMED | HELD) == 0:
        store_release((handle & ~TAGS) + 8 * at.BUSY, 0)
    return LATER


@failing
def _enters(operation):
    reached(_ENTER + (operation if operation else _BARRIER))


@failing
def _comes_by(c, place):
    """The call under way, whose line is written, comes by a place of its operation."""
    reached(place + (load_word(line_of(c, load_word(c, at.RANK)), layout.CALL) & 0xFF))


@inlined
def begin(handle, operation, nbytes, moving, direct):
    """The call has the context and its arguments are in order: number it, unless it resumes.

    The rest is for choosing the way of its data (autotune.py): how much there is, whether it is only moved, and
    whether the call can go direct: 0, ORDINARY or SHARED, by where its arrays are.
    """
    c = handle & ~TAGS
    store_word(c, at.SINCE, 0)
    if handle & RESUMED == 0:
        _enters(operation)
        store_word(c, at.CALLS, load_word(c, at.CALLS) + 1)
        store_word(c, at.PATIENCE + IDLE, 0)
        store_word(c, at.PATIENCE + TIMED, 0)
        store_word(c, at.LATE, load_word(c, at.RANK))
        autotune.choose_none(ways_at(c))
        if nbytes >= min(autotune.SMALLEST, load_word(c, at.DIRECT_FROM)):
            ways = load_word(c, at.WAYS)
            ways &= autotune.staged_ways(nbytes, load_word(c, at.SLOT), moving)
            reachable = handle & HELD == 0 and direct > load_word(c, at.ONLY_SHARED)
            if reachable and nbytes >= load_word(c, at.DIRECT_FROM):
                ways |= 1 << autotune.DIRECT
            if ways:
                row = operation + _OPERATIONS if direct == SHARED else operation
                autotune.choose(ways_at(c), row, nbytes, ways, 3)


@inlined
def _await(c, peer, address, want):
    """Wait until a peer's word is at least `want`: DONE, or AGAIN and the peer is LATE."""
    if wait_for(c + 8 * at.PATIENCE, address, want):
        return DONE
    store_word(c, at.LATE, peer)
    return AGAIN


@kernel
def _await_all(c, offset, want):
    """The same for every peer's word at this offset of its section."""
    for peer in range(load_word(c, at.SIZE)):
        if peer != load_word(c, at.RANK) and _await(c, peer, section(c, peer) + offset, want) != DONE:
            return AGAIN
    return DONE


@inlined
def open_slot(c):
    """Wait until the slot of the round to be written next is free."""
    want = load_word(c, at.ROUND) + load_word(c, at.WROTE) - layout.SLOTS + 1
    if load_word(c, at.SEEN) >= want:
        return DONE
    if _await_all(c, layout.CONSUMED, want) != DONE:
        return AGAIN
    store_word(c, at.SEEN, want)
    return DONE


@inlined
def publish(c, call, shape, balance):
    """Make what was written for this round visible to the peers."""
    wrote = load_word(c, at.WROTE)
    if wrote == 0:
        line = line_of(c, load_word(c, at.RANK))
        store_word(line, layout.CALL, call)
        store_word(line, layout.SHAPE, shape)
        store_word(line, layout.BALANCE, balance)
        store_word(line, layout.TIME, _time_word(c))
        store_release(line + 8 * layout.SEQUENCE, load_word(c, at.CALLS))
        _record(c, call, shape)
        _comes_by(c, _PUBLISHED)
    else:
        _comes_by(c, _MID_CHUNK)
        word = section(c, load_word(c, at.RANK)) + layout.PUBLISHED
        store_release(word, load_word(c, at.ROUND) + wrote + 1)
    store_word(c, at.WROTE, wrote + 1)


@inlined
def _record(c, call, shape):
    """Write the call into the group's record; after it is published, since the peers wait for that."""
    ring, number = load_word(c, at.RING), load_word(c, at.CALLS)
    if ring != 0:
        record_call(ring, number, call, shape, 0)
        if number & (TIMED_EVERY - 1) == 0 or shape >= TIMED_FROM:
            _time(c)


@kernel
def _time(c):
    """Have the call timed, unless it is already, as it has waited."""
    if load_word(c, at.PATIENCE + TIMED) == 0:
        store_word(c, at.PATIENCE + TIMED, now(c + 8 * at.PATIENCE))


@kernel
def _record_times(c):
    if load_word(c, at.RING) != 0:
        ended = now(c + 8 * at.PATIENCE)
        record_end(load_word(c, at.RING), load_word(c, at.CALLS), load_word(c, at.PATIENCE + TIMED), ended)


@inlined
def _time_word(c):
    """What a call line says of time: how long the last call took; bit 0: this one is direct."""
    t = ways_at(c)
    return load_word(t, autotune.TOOK) << 1 | autotune.is_direct(t)


@inlined
def _compare(c, lines, stride, first, end, each, own, call, shape, balance):
    """Wait for the lines first..end-1 of `each` ranks, but not for `own`, and compare them with this rank's call.

    Returns whether all are there; whether the calls are the same; what their balances and `balance` add up to; the
    largest shape and time; and a number that is not 0 where ranks differ in the bits beside the time.
    """
    mine = _time_word(c)
    same, largest, time, mixed = True, shape, mine, 0
    for k in range(first, end):
        if k == own:
            continue
        line = lines + k * stride
        if _await(c, k * each, line + 8 * layout.SEQUENCE, load_word(c, at.CALLS)) != DONE:
            return False, same, balance, largest, time, mixed
        theirs = load_word(line, layout.SHAPE)
        same &= load_word(line, layout.CALL) == call and (theirs == shape or call & UNEVEN != 0)
        balance += load_word(line, layout.BALANCE)
        largest = max(largest, theirs)
        time = max(time, load_word(line, layout.TIME))
        mixed |= load_word(line, layout.TIME) ^ mine
    return True, same, balance, largest, time, mixed & _BESIDE_TIME


@kernel
def _combine(c, call, shape, balance):
    """Wait until this rank's group has begun this call, and tell that as if the group were one rank."""
    combined = combined_of(c, load_word(c, at.RANK))
    if load_acquire(combined) >= load_word(c, at.CALLS):
        return DONE
    first = load_word(c, at.RANK) // layout.GROUP * layout.GROUP
    end = min(first + layout.GROUP, load_word(c, at.SIZE))
    arrived, same, balance, largest, time, mixed = _compare(
        c, line_of(c, 0), load_word(c, at.STRIDE), first, end, 1, load_word(c, at.RANK), call, shape, balance
    )
    if not arrived:
        return AGAIN
    if load_acquire(combined) < load_word(c, at.CALLS):  # else another one of the group was faster
        # Where the group's ranks differ, words that no rank's line has, and so differ from each.
        store_word(combined, layout.CALL, call if same else -1)
        store_word(combined, layout.SHAPE, largest)
        store_word(combined, layout.BALANCE, balance)
        store_word(combined, layout.TIME, -1 if mixed else time)
        for peer in range(first, end):
            store_word(combined, layout.PAYLOAD + peer - first, load_word(line_of(c, peer), layout.PAYLOAD))
        store_release(combined + 8 * layout.SEQUENCE, load_word(c, at.CALLS))
    return DONE


@kernel
def _meet(c, call, shape, balance):
    """Wait until every rank has begun this call, and compare the calls."""
    autotune.stop_clock(ways_at(c))
    size = load_word(c, at.SIZE)
    if load_word(c, at.COMBINED) == 0:
        lines, stride, rank = line_of(c, 0), load_word(c, at.STRIDE), load_word(c, at.RANK)
        found = _compare(c, lines, stride, 0, size, 1, rank, call, shape, balance)
    else:
        if _combine(c, call, shape, balance) != DONE:
            return AGAIN
        lines, groups = combined_of(c, 0), -(-size // layout.GROUP)
        found = _compare(c, lines, 2 * layout.LINE, 0, groups, layout.GROUP, -1, call, shape, 0)
    arrived, same, balance, largest, time, mixed = found
    if not arrived:
        return AGAIN
    store_word(c, at.SEEN, max(load_word(c, at.SEEN), load_word(c, at.ROUND)))
    store_word(c, at.LARGEST, largest)
    same &= balance == 0
    if same and mixed == 0:
        store_word(c, at.MET, 1)
        autotune.learn(ways_at(c), time >> 1)
        autotune.start_clock(ways_at(c))
        _comes_by(c, _MET)
        return DONE
    store_word(c, at.READ, layout.SLOTS)  # more rounds than anybody wrote: none is taken for a later call's
    if same:
        autotune.give_up(ways_at(c))
    autotune.choose_none(ways_at(c))
    _wind_up(c)
    # The context stays taken: what Python does next about it belongs to this call.
    return MIXED if same else MISMATCH


@inlined
def meet(c, call, shape, balance):
    """Wait until every rank has begun this call, and compare the calls, once."""
    if load_word(c, at.MET):
        return DONE
    return _meet(c, call, shape, balance)


@inlined
def may_write(c, total):
    """Whether the next thing to do is to write a round, of `total`; else one is to be read."""
    wrote = load_word(c, at.WROTE)
    return wrote < total and wrote <= load_word(c, at.READ) + load_word(ways_at(c), autotune.LAG)


@inlined
def await_all(c):
    """Wait until every peer has published the round to be read next."""
    read = load_word(c, at.READ)
    return DONE if read == 0 else _await_all(c, layout.PUBLISHED, load_word(c, at.ROUND) + read + 1)


@inlined
def await_peer(c, peer, step):
    """Wait until one peer has published round `step` of the call."""
    word = section(c, peer) + layout.PUBLISHED
    return DONE if step == 0 else _await(c, peer, word, load_word(c, at.ROUND) + step + 1)


@inlined
def close_round(c, total):
    """A round, of `total`, is read: go on to the next; whether that was the last one."""
    read = load_word(c, at.READ) + 1
    store_word(c, at.READ, read)
    if read < total:
        store_release(section(c, load_word(c, at.RANK)) + layout.CONSUMED, load_word(c, at.ROUND) + read)
    return read == total


@inlined
def finish(c):
    """The call is complete on this rank."""
    _comes_by(c, _BEFORE_DONE)
    autotune.measure(ways_at(c))
    if load_word(c, at.PATIENCE + TIMED) != 0:
        _record_times(c)
    _wind_up(c)
    store_release(c + 8 * at.FINISHED, load_word(c, at.CALLS))
    store_release(c + 8 * at.BUSY, 0)
    _comes_by(c, _AFTER_DONE)
    return DONE


@inlined
def _wind_up(c):
    """Make the context ready for the next call."""
    store_word(c, at.ROUND, load_word(c, at.ROUND) + load_word(c, at.READ))
    store_release(section(c, load_word(c, at.RANK)) + layout.CONSUMED, load_word(c, at.ROUND))
    store_word(c, at.WROTE, 0)
    store_word(c, at.READ, 0)
    store_word(c, at.MET, 0)
    store_word(c, at.LATE, -1)


@inlined
def rounds_of(nbytes, chunk):
    """How many rounds `nbytes` take at `chunk` bytes each: one at least."""
    return max(1, -(-nbytes // max(1, chunk)))


@inlined
def time_is_up(c):
    """Whether the kernel has worked long enough and should return WORKED between two rounds.

    Python then sees signals, the deadline and an abort, though no wait was long.
    """
    if load_word(c, at.SINCE) == 0:
        store_word(c, at.SINCE, now(c + 8 * at.PATIENCE))
        return False
    if now(c + 8 * at.PATIENCE) <= load_word(c, at.SINCE) + load_word(c, at.PATIENCE + BUDGET):
        return False
    store_word(c, at.LATE, load_word(c, at.RANK))
    return True
