"""The protocol of all collectives in a segment: rounds over a ring of slots.

A collective is a sequence of *rounds*. All ranks run the same number of rounds, and the numbering continues through the
life of the group. In round t a rank writes its slot t % SLOTS, a buffer in its section, publishes t, and reads the
slots of its peers. It may write up to LAG rounds (autotune.py) ahead of the round that it reads. A *call line*
describes a rank's current call: its number, its operation and sizes, and the payload if it is small (layout.py).

    word                  writer    readers   meaning of a value v
    call line s % 2       rank      all       word 0 = s: the rank has begun call s and published its first round
    PUBLISHED             rank      all       v: all rounds below v are published (a call's first round is published by
                                              the call line instead)
    CONSUMED              rank      all       v: the rank has read all rounds below v
    combined line s % 2   group     all       word 0 = s: all ranks of the group have begun call s
    EVENT                 all       all       a thread may be asleep until the rank writes one of the words above; a
                                              combined line has the EVENT of its group's first rank (kernels/futex.py)

The *meeting* of a call ends when all ranks have begun it. Each rank then compares the lines of all ranks.

Invariants:

- A rank overwrites a slot after every peer has read it. Round t reuses the slot of round t - SLOTS, so the rank first
  waits until every peer's CONSUMED is at least t - SLOTS + 1. The context's word SEEN caches the highest bound that
  held. A meeting raises SEEN to the call's first round, because a peer that has begun a call has read all rounds of
  earlier calls. So the check costs nothing in the common case.
- When a rank overwrites its line of call s for call s + 2, every peer has compared that line, because the rank begins
  call s + 2 after the meeting of call s + 1, and every peer began call s + 1 after it had compared the lines of call s.
- No rank waits for ever. Take the rank that has read the fewest rounds. Since LAG <= SLOTS - 1, the slot that it writes
  next is free, and so are the slots that its peers have to write before it can read its next round.

More than layout.FLAT ranks meet in groups. A rank waits for the lines of its own group, then for the combined lines of
all groups. A combined line has the values of one line that stands for all ranks of the group. The first rank that has
read all lines of its group writes the combined line. A fixed leader would be slower where ranks share cores, because
all ranks would wait until the leader is scheduled. Several ranks may write the line at the same time: they store the
same words, which depend only on the group's lines. A chain of release stores and acquire loads makes a rank's earlier
writes visible to every rank that has completed the meeting. The second invariant holds for these lines as well. When a
rank has completed the meeting of call s + 1, every rank has begun that call and so has finished call s. No rank reads a
line of call s, or writes a combined line of call s, after that.

`tests/shm/test_rounds_model.py` explores the schedules of this protocol.

An *entry* is a compiled function that Python calls for a collective; the *context* is the group's private table on this
rank (context_layout.py). Every entry can be resumed: the context's WROTE, READ and MET record how far the call got, and
a wait can be repeated. One call at a time owns the context: BUSY holds the number of the call's thread from `take`
until the call is complete.
"""

from __future__ import annotations

from ..compiler.jit import inlined, kernel
from ..core import signature
from ..core.operations import OPERATIONS
from ..core.signature import UNEVEN
from ..core.status import AGAIN, DONE, LATER, MISMATCH, MIXED, UNALLOCATED
from ..failpoints import number_of
from ..kernels.failing import failing, reached
from ..kernels.futex import wake
from ..kernels.primitives import (
    load_acquire,
    load_word,
    store_release,
    store_word,
    swap_if_equal,
    this_thread,
)
from ..kernels.recording import record_call, record_end
from ..kernels.waiting import BUDGET, IDLE, SPINS, TIMED, YIELDS, now, wait_for
from . import autotune, layout
from . import context_layout as at

# An entry's handle is the context's address with these tags in the lowest bits.
RESUMED = 1  # the entry returned early before, and the call owns the context
PREPARED = 2  # Python has validated the arrays, and GIVEN has the address of the call's spec
HELD = 4  # this thread still owns the context, from the previous call; this call must go through the slots
BRIEF = 8  # the entry may wait only as long as the context's BRIEF_WAIT allows
TAGS = 15

# The group's record (kernels/recording.py) has the times of one call in TIMED_EVERY, of every call of at least
# TIMED_FROM bytes, and of every call that waits longer than a few spins. The two clock reads of a timed call take 50
# ns: on average 1 ns of a call of 8 bytes, and 1 % of a call of 64 KiB.
TIMED_EVERY, TIMED_FROM = 64, 64 << 10

# For a call that may read peers' arrays: a rank's arrays are anywhere in its memory, or all of them in its arena.
ORDINARY, SHARED = 1, 2
_OPERATIONS = len(OPERATIONS)

SMALLEST_PART = 4 << 10  # bytes; smaller rounds always use the beginning of a slot
_ONE_WAY_ROUND, _ONE_WAY_ROUNDS = 32 << 10, 4

# Each is the number of a failpoint of the first operation; those of the other operations have the next numbers.
_ENTER, _PUBLISHED = number_of("shm.OPERATION.enter"), number_of("shm.OPERATION.after_publish")
_MID_CHUNK, _MET = number_of("shm.OPERATION.mid_chunk"), number_of("shm.OPERATION.after_meeting")
_BEFORE_DONE, _AFTER_DONE = number_of("shm.OPERATION.before_done"), number_of("shm.OPERATION.after_done")
_BARRIER = signature.code_of("barrier")

# The bits of a line's TIME that are not part of the time: bit 0 is set for a direct call (single_copy.py), the sign bit
# of a combined line if the group's ranks differ in bit 0.
_BESIDE_TIME = -(1 << 63) | 1


@inlined
def tuning_at(c):
    """Return the address of the table of autotune.py."""
    return c + 8 * at.CHOOSING


@inlined
def table(c, which):
    """Return the address of one of the context's tables that have a word for each rank."""
    return c + 8 * (at.TABLES + which * load_word(c, at.SIZE))


@inlined
def section(c, rank):
    """Return the address of a rank's section."""
    return load_word(c, at.SECTIONS) + rank * load_word(c, at.STRIDE)


@inlined
def slot_of(c, rank, step):
    """Return the address of a rank's slot of round `step` of the call."""
    slot = (load_word(c, at.ROUND) + step) % layout.SLOTS
    return section(c, rank) + layout.CONTROL + slot * load_word(c, at.SLOT)


@inlined
def part_of_slot(c, rank, step, nbytes):
    """Address of nbytes in a rank's slot of round `step` of the call; ranks with the same nbytes get the same part.

    Rounds of at most half a slot use equal parts of it in turn, one for each time around the ring. So a group's rounds
    spread over more memory than a core's own caches hold, and a part has left them when it is written again. If both
    cores still have a part's lines, moving them between these caches takes twice as long: all_reduce of 64 KiB takes
    3.8 us with parts and 7.4 us without, of 8 KiB 0.73 and 1.40, of 1 KiB 0.38 and 0.37 (2 ranks on two cores of an AMD
    EPYC, family 25, that share a last-level cache; on two cores that share none, parts make no difference).
    """
    part, parts = load_word(c, at.SLOT), 1
    while nbytes >= SMALLEST_PART and part >= 2 * nbytes:
        part //= 2
        parts *= 2
    lap = (load_word(c, at.ROUND) + step) // layout.SLOTS % parts
    return slot_of(c, rank, step) + lap * part


@inlined
def one_way_chunk(c, nbytes, itemsize):
    """Return the most bytes of a round, for a call in which a rank writes what others read, but reads nothing itself.

    The others read a round while it writes the next ones, so a call has several rounds. This may not depend on the
    algorithm, which can be another one on each rank.
    """
    chunk, least = load_word(c, at.SLOT), max(_ONE_WAY_ROUND, itemsize)
    while chunk >= 2 * least and chunk * _ONE_WAY_ROUNDS >= 2 * nbytes:
        chunk //= 2
    return chunk


@inlined
def line_of(c, rank):
    """Return the address of a rank's line of the current call."""
    return section(c, rank) + layout.LINE * (load_word(c, at.CALLS) % 2)


@inlined
def combined_of(c, rank):
    """Return the address of the combined line of a rank's group for the current call."""
    return load_word(c, at.COMBINED) + layout.LINE * (rank // layout.GROUP * 2 + load_word(c, at.CALLS) % 2)


@inlined
def payload_of(c, rank, step, nbytes, chunk, room=layout.INLINE):
    """Return the address of a rank's data of a round: in its call line if the call's nbytes fit there, else in a slot.

    A round has at most `chunk` bytes.

    If ranks meet in groups, a peer's payload of one word is read from the group's combined line, which is in the cache
    already.
    """
    if nbytes > room:
        return part_of_slot(c, rank, step, min(nbytes, chunk))
    if nbytes <= 8 and load_word(c, at.COMBINED) != 0 and rank != load_word(c, at.RANK):
        return combined_of(c, rank) + 8 * (layout.PAYLOAD + rank % layout.GROUP)
    return line_of(c, rank) + 8 * layout.PAYLOAD


@inlined
def take(handle):
    """Take the context for a call that does not own it yet; return its address, or 0 if it cannot be taken now."""
    c = handle & ~TAGS
    if handle & (RESUMED | HELD) == 0:
        if handle & PREPARED == 0 and load_word(c, at.SHUT) | load_word(c, at.PENDING) != 0:
            return 0
        if not swap_if_equal(c + 8 * at.BUSY, 0, this_thread()):
            return 0
    full = at.FULL_WAIT if load_word(c, at.PENDING) == 0 else at.PENDING_WAIT
    limits = c + 8 * (at.BRIEF_WAIT if handle & BRIEF else full)
    store_word(c, at.BACKOFF + SPINS, load_word(limits, 0))
    store_word(c, at.BACKOFF + YIELDS, load_word(limits, 1))
    store_word(c, at.BACKOFF + BUDGET, load_word(limits, 2))
    return c


@inlined
def give_up(handle):
    """Release the context and leave the call to Python."""
    if handle & (RESUMED | HELD) == 0:
        store_release((handle & ~TAGS) + 8 * at.BUSY, 0)
    return LATER


@failing
def _enters(operation):
    reached(_ENTER + (operation if operation else _BARRIER))


@failing
def _hit_failpoint(c, first):
    """Hit a failpoint of the current call's operation; the call's line is written by now."""
    reached(first + (load_word(line_of(c, load_word(c, at.RANK)), layout.CALL) & 0xFF))


@inlined
def begin(handle, operation, nbytes, moving, direct, staged):
    """Begin a run of an entry. Give a new call its number and its algorithm; a resumed call keeps these.

    The call owns the context, and its arguments are valid.

    Args:
        nbytes: size of the call's data, by which the algorithm is chosen (autotune.py).
        moving: True if the call copies data and does not reduce.
        direct: ORDINARY or SHARED if ranks may read one another's arrays in this call, else 0.
        staged: bytes that a rank writes into its slots, if DIRECT is to come first where they do not fit; else 0.
    """
    c = handle & ~TAGS
    store_word(c, at.SINCE, 0)
    if handle & RESUMED == 0:
        _enters(operation)
        store_word(c, at.CALLS, load_word(c, at.CALLS) + 1)
        store_word(c, at.BACKOFF + IDLE, 0)
        store_word(c, at.BACKOFF + TIMED, 0)
        store_word(c, at.LATE, load_word(c, at.RANK))
        autotune.choose_none(tuning_at(c))
        if nbytes >= min(autotune.SMALLEST, load_word(c, at.DIRECT_FROM)):
            algorithms = load_word(c, at.ALGORITHMS)
            algorithms &= autotune.staged_algorithms(nbytes, load_word(c, at.SLOT), moving)
            reachable = handle & HELD == 0 and direct > load_word(c, at.ONLY_SHARED)
            if reachable and nbytes >= load_word(c, at.DIRECT_FROM):
                algorithms |= 1 << autotune.DIRECT
            if algorithms:
                row = operation + _OPERATIONS if direct == SHARED else operation
                # AHEAD is seldom much slower than the best. But if ranks share cores, every rank needs a core for each
                # round, and DIRECT has no rounds. Up to 16 ranks, reductions take longer by it. With more, a try of
                # another algorithm takes up to 40 times as long (scatter of 16 MiB, 64 ranks on 2 cores).
                has_rounds = load_word(c, at.CROWDED) and staged > load_word(c, at.SLOT)
                many = has_rounds and load_word(c, at.COMBINED)
                first = autotune.DIRECT if many or (has_rounds and moving) else autotune.AHEAD
                phase = autotune.NO_TRIES if many and algorithms >> autotune.DIRECT & 1 else 3
                autotune.choose(tuning_at(c), row, nbytes, algorithms, first, phase)


@inlined
def _show(c, word, value, rank=-1):
    """Write a shared word for which peers may wait.

    Args:
        rank: the rank for which they wait; -1: this rank.
    """
    store_release(word, value)
    if load_word(c, at.CROWDED):
        wake(section(c, load_word(c, at.RANK) if rank < 0 else rank) + layout.EVENT)


@inlined
def _await(c, peer, address, want):
    """Wait until a peer's word is at least `want`: return DONE, or AGAIN with the peer in LATE."""
    event = section(c, peer) + layout.EVENT if load_word(c, at.CROWDED) else 0
    if wait_for(c + 8 * at.BACKOFF, address, want, event):
        return DONE
    store_word(c, at.LATE, peer)
    return AGAIN


@kernel
def _await_all(c, offset, want):
    """Wait until every peer's word at this offset of its section is at least `want`."""
    for peer in range(load_word(c, at.SIZE)):
        if peer != load_word(c, at.RANK) and _await(c, peer, section(c, peer) + offset, want) != DONE:
            return AGAIN
    return DONE


@inlined
def open_slot(c, nbytes, room=layout.INLINE):
    """Wait until every peer has read the old content of the slot that this rank writes next.

    Args:
        nbytes: size of the data of each round; more than `room` bytes go into the slot, fewer into the call line.
    """
    if nbytes > room and load_word(c, at.ALLOCATED) == 0:
        return UNALLOCATED
    want = load_word(c, at.ROUND) + load_word(c, at.WROTE) - layout.SLOTS + 1
    if load_word(c, at.SEEN) >= want:
        return DONE
    if _await_all(c, layout.CONSUMED, want) != DONE:
        return AGAIN
    least = load_word(c, at.ROUND) + load_word(c, at.WROTE)
    for peer in range(load_word(c, at.SIZE)):
        if peer != load_word(c, at.RANK):
            least = min(least, load_acquire(section(c, peer) + layout.CONSUMED))
    store_word(c, at.SEEN, least)
    return DONE


@inlined
def publish(c, call, shape, balance):
    """Publish the round that this rank has written."""
    wrote = load_word(c, at.WROTE)
    if wrote == 0:
        line = line_of(c, load_word(c, at.RANK))
        store_word(line, layout.CALL, call)
        store_word(line, layout.SHAPE, shape)
        store_word(line, layout.BALANCE, balance)
        store_word(line, layout.TIME, _time_word(c))
        _show(c, line + 8 * layout.SEQUENCE, load_word(c, at.CALLS))
        _record(c, call, shape)
        _hit_failpoint(c, _PUBLISHED)
    else:
        _hit_failpoint(c, _MID_CHUNK)
        word = section(c, load_word(c, at.RANK)) + layout.PUBLISHED
        _show(c, word, load_word(c, at.ROUND) + wrote + 1)
    store_word(c, at.WROTE, wrote + 1)


@inlined
def _record(c, call, shape):
    """Write the call into the group's record. The call is published before, because peers wait for it."""
    ring, number = load_word(c, at.RING), load_word(c, at.CALLS)
    if ring != 0:
        record_call(ring, number, call, shape, 0)
        if number & (TIMED_EVERY - 1) == 0 or shape >= TIMED_FROM:
            _time(c)


@kernel
def _time(c):
    """Start timing the call for the record, if no wait of the call has started it."""
    if load_word(c, at.BACKOFF + TIMED) == 0:
        store_word(c, at.BACKOFF + TIMED, now(c + 8 * at.BACKOFF))


@kernel
def _record_times(c):
    if load_word(c, at.RING) != 0:
        ended = now(c + 8 * at.BACKOFF)
        record_end(load_word(c, at.RING), load_word(c, at.CALLS), load_word(c, at.BACKOFF + TIMED), ended)


@inlined
def _time_word(c):
    """Return the value of a call line's TIME: how long the previous call took; bit 0: whether this call is direct."""
    t = tuning_at(c)
    return load_word(t, autotune.TOOK) << 1 | autotune.is_direct(t)


@inlined
def _compare(c, lines, stride, first, end, each, own, call, shape, balance):
    """Wait for the lines first..end-1 except `own`, and compare them with this rank's call.

    Each line is the line of one rank or, with `each` > 1, the combined line of `each` ranks. A call's balance
    (core/signature.py) shows whether sizes agree: if they do, the balances of all ranks add up to 0.

    Returns:
        Whether all lines have arrived; whether all calls match; the sum of all balances; the largest shape; the largest
        time; and the bits of _BESIDE_TIME in which ranks differ.
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
    """Wait until all ranks of this rank's group have begun this call, and publish the group's combined line."""
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
    if load_acquire(combined) < load_word(c, at.CALLS):  # else another rank of the group has written it
        # If the group's ranks differ, CALL and TIME get values that no single rank's line can have.
        store_word(combined, layout.CALL, call if same else -1)
        store_word(combined, layout.SHAPE, largest)
        store_word(combined, layout.BALANCE, balance)
        store_word(combined, layout.TIME, -1 if mixed else time)
        for peer in range(first, end):
            store_word(combined, layout.PAYLOAD + peer - first, load_word(line_of(c, peer), layout.PAYLOAD))
        _show(c, combined + 8 * layout.SEQUENCE, load_word(c, at.CALLS), first)
    return DONE


@kernel
def _meet(c, call, shape, balance):
    """Wait until every rank has begun this call, and compare the calls; see `meet`."""
    autotune.stop_clock(tuning_at(c))
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
        autotune.learn(tuning_at(c), time >> 1)
        autotune.start_clock(tuning_at(c))
        _hit_failpoint(c, _MET)
        return DONE
    # Skip more rounds than any rank has written for this call, so that none of them counts for a later call.
    store_word(c, at.READ, layout.SLOTS)
    if same:
        autotune.give_up(tuning_at(c))
    autotune.choose_none(tuning_at(c))
    _wind_up(c)
    # The call still owns the context: Python reports the mismatch, or repeats the call through the slots.
    return MIXED if same else MISMATCH


@inlined
def meet(c, call, shape, balance):
    """Wait until every rank has begun this call, and compare the calls; if MET is set, this is done already.

    Return DONE, AGAIN, MISMATCH, or MIXED if the calls match but only some ranks chose the direct algorithm.
    """
    if load_word(c, at.MET):
        return DONE
    return _meet(c, call, shape, balance)


@inlined
def may_write(c, total):
    """Whether this rank's next step is to write one of the call's `total` rounds, not to read one."""
    wrote = load_word(c, at.WROTE)
    return wrote < total and wrote <= load_word(c, at.READ) + load_word(tuning_at(c), autotune.LAG)


@inlined
def await_all(c):
    """Wait until every peer has published the round that this rank reads next."""
    read = load_word(c, at.READ)
    return DONE if read == 0 else _await_all(c, layout.PUBLISHED, load_word(c, at.ROUND) + read + 1)


@inlined
def await_peer(c, peer, step):
    """Wait until one peer has published round `step` of the call."""
    word = section(c, peer) + layout.PUBLISHED
    return DONE if step == 0 else _await(c, peer, word, load_word(c, at.ROUND) + step + 1)


@inlined
def close_round(c, total):
    """Count one of the call's `total` rounds as read; return whether it was the last one."""
    read = load_word(c, at.READ) + 1
    store_word(c, at.READ, read)
    if read < total:
        _show(c, section(c, load_word(c, at.RANK)) + layout.CONSUMED, load_word(c, at.ROUND) + read)
    return read == total


@inlined
def finish(c):
    """Complete the call on this rank and release the context."""
    _hit_failpoint(c, _BEFORE_DONE)
    autotune.measure(tuning_at(c))
    if load_word(c, at.BACKOFF + TIMED) != 0:
        _record_times(c)
    _wind_up(c)
    store_release(c + 8 * at.FINISHED, load_word(c, at.CALLS))
    store_release(c + 8 * at.BUSY, 0)
    _hit_failpoint(c, _AFTER_DONE)
    return DONE


@inlined
def _wind_up(c):
    """Prepare the context for the next call."""
    store_word(c, at.ROUND, load_word(c, at.ROUND) + load_word(c, at.READ))
    _show(c, section(c, load_word(c, at.RANK)) + layout.CONSUMED, load_word(c, at.ROUND))
    store_word(c, at.WROTE, 0)
    store_word(c, at.READ, 0)
    store_word(c, at.MET, 0)
    store_word(c, at.LATE, -1)


@inlined
def rounds_of(nbytes, chunk):
    """Return the number of rounds, at least one, that move nbytes in chunks of `chunk` bytes."""
    return max(1, -(-nbytes // max(1, chunk)))


@inlined
def time_is_up(c):
    """Whether this run of the entry has used up its time, so that it must return WORKED before the next round.

    Python then checks signals, the deadline and aborts. Without this, an entry that never waits long would not return
    to Python for these checks.
    """
    if load_word(c, at.SINCE) == 0:
        store_word(c, at.SINCE, now(c + 8 * at.BACKOFF))
        return False
    if now(c + 8 * at.BACKOFF) <= load_word(c, at.SINCE) + load_word(c, at.BACKOFF + BUDGET):
        return False
    store_word(c, at.LATE, load_word(c, at.RANK))
    return True
