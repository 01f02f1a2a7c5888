"""The tuner: it measures, while the program runs, which algorithm is fastest for a call's data.

Which algorithm is the fastest differs between machines, sizes and operations, and on virtual machines from minute to
minute; the choice matters by a factor of ten. To read cache lines that another core has just written takes 0.12 ns a
byte if the two cores share a last-level cache and 0.45 ns if they do not; after the lines have moved to the shared
cache, to read them takes 0.025 ns; through memory, past all caches, 0.06 ns (2 vCPUs of an AMD EPYC, family 25;
docs/architecture-shm.md, "Where the data lies"). So each rank keeps a table. It has a row for each operation and class
of sizes, with the time of each algorithm. The rank uses the fastest algorithm of a row, and tries the others now and
then. A group begins with the times in the machine's tuning cache (tuning_table.py).

To try other algorithms costs at most 1 / SHARE of the time of a row's calls. After a try an algorithm *backs off*: it
is not tried again until later calls have taken SHARE times the time lost in the try, times the number of algorithms
whose time is known. An algorithm that takes more than twice the time of the best backs off for at least LONG calls. But
a single such time may have another cause, so after the first one the algorithm is tried again after UNSURE calls. From
a row's call WARM on, every LOOK-th call tries an algorithm. If that was the algorithm's first time, the second call
after it tries the algorithm again, because the first time does not count: with cold caches, pages and clocks any
algorithm looks slow (all_gather of 4 MiB on 2 CPUs of an AMD EPYC, family 26: DIRECT takes 217 us in a row's second
call and 157, 147, 126, 156, 97, 95, 87, 85 in the next ones).

Most algorithms determine only how and when a rank copies; the results are the same, so ranks could use different ones.
But all ranks use the same one, because they have the same rows: a row gets the time of a call's slowest rank, which all
ranks find in the call lines of the next call. (Rows may differ if ranks contribute different sizes.) DIRECT works only
if all ranks use it (single_copy.py), so a call line has a bit that is set if its rank has chosen DIRECT. If ranks
differ in that bit, all of them repeat the call through the slots, and those that chose DIRECT avoid it for LONG calls.

    word of the table
    LAG, ALGORITHM         of the current call: how many rounds a rank writes ahead, and the algorithm
    ROW, NBYTES            of the current call: address of the row that gets its time (0: none), and its size
    STARTED, SPENT         ticks: when the clock was last started (0: it is stopped), and the time up to the last stop
    TOOK                   ticks a MiB of the last call on this rank; 0: not measured
    LAST_ROW, LAST_ALGORITHM   of the last call; used when the TOOK of all ranks is known
    ROWS ...               a row for each operation and class: number of calls, best algorithm, ticks a MiB of each
                           algorithm (0: not known), and for each the number of the call from which it may be tried
"""

from __future__ import annotations

from .. import config
from ..compiler.jit import inlined, kernel
from ..kernels.copy import copy_or_stream
from ..kernels.primitives import load_word, store_word, ticks

LAG, ALGORITHM, ROW, NBYTES, STARTED, SPENT, TOOK, LAST_ROW, LAST_ALGORITHM, ROWS = range(10)

# The algorithms. CLOSE: write a round, read a round. PAST: the same, but write the slots past the caches, with
# non-temporal stores. AHEAD: write some rounds ahead, so that data has left its writer's own cache when it is read.
# ..._OUT: also write the outputs past the caches. DIRECT: use no slots; each rank reads the other ranks' arrays.
CLOSE, PAST, AHEAD, AHEAD_OUT, PAST_OUT, DIRECT = range(6)
ALGORITHMS = 6
NAMES = config.SHM_ALGORITHMS
NEVER = 1 << 62  # bytes
CALLS, BEST, TIMES = range(3)  # words of a row
AGAIN = TIMES + ALGORITHMS
ROW_WORDS = AGAIN + ALGORITHMS
CLASSES = 8
# Bytes. Calls with less data use CLOSE. The classes of sizes begin at 8K, 32K, 128K, 512K, 2M, 8M, 32M and 128M.
SMALLEST = 8 << 10
LARGE = 8 << 20  # bytes; from here outputs may be larger than the last-level cache
ROUNDS_AHEAD = 4
# Bytes. DIRECT needs a system call and a second meeting, which take some 2 us; to copy this much twice takes 3.
SMALLEST_DIRECT = 32 << 10
LOOK = 4  # calls between two possible tries
NO_TRIES = -1
WARM = 7  # calls of a row before the first try
SHARE = 50  # tries may take 1 / SHARE of a row's time
SOON = 64  # an algorithm backs off for at least this number of calls
UNSURE = 128  # calls until an algorithm that was slow once is tried again
LONG = 4096  # smallest number of calls until an algorithm that was slow more than once is tried again
HOPELESS = 1 << 40  # ticks a MiB: recorded for DIRECT if other ranks do not choose it


def table_words(operations: int) -> int:
    """Return the number of words of a table for this many operations."""
    return ROWS + ROW_WORDS * CLASSES * operations


def allowed_algorithms() -> int:
    """Return the algorithms that FASTCOLL_SHM_ALGORITHMS names, as bits; all algorithms if it is not set."""
    named = [name for name in config.get("FASTCOLL_SHM_ALGORITHMS").split(",") if name] or NAMES
    return sum(1 << NAMES.index(name) for name in set(named))


def direct_from(algorithms: int) -> int:
    """Return the smallest size of a DIRECT call, in bytes; 1 if no other algorithm is allowed."""
    if not algorithms >> DIRECT & 1:
        return NEVER
    return SMALLEST_DIRECT if algorithms & ~(1 << DIRECT) else 1


@inlined
def _class_of(nbytes):
    size = SMALLEST * 4
    found = 0
    while found < CLASSES - 1 and nbytes >= size:
        size *= 4
        found += 1
    return found


@inlined
def staged_algorithms(nbytes, slot, moving):
    """Return the algorithms through the slots that a call may use, as bits.

    `moving`: whether the call only copies data, and reduces none.
    """
    both = 1 << CLOSE | 1 << PAST
    if nbytes <= slot:
        return both
    return (
        both | 1 << AHEAD | 1 << AHEAD_OUT | 1 << PAST_OUT
        if moving and nbytes >= LARGE
        else both | 1 << AHEAD
    )


@inlined
def choose_none(t):
    """Use CLOSE, and do not measure the call."""
    store_word(t, ALGORITHM, CLOSE)
    store_word(t, LAG, 0)
    store_word(t, ROW, 0)
    store_word(t, STARTED, 0)


@kernel
def choose(t, operation, nbytes, algorithms, first, phase):
    """Choose one of `algorithms`, given as bits, for a call, and start the clock.

    `first` is the algorithm of a row without times, if it is one of `algorithms`.

    `phase` is the call number modulo LOOK at which algorithms are tried; NO_TRIES: none is tried. A sender and a
    receiver choose independently; with different phases they never try an algorithm in the same call.
    """
    row = _row(t, operation, nbytes)
    number = load_word(row, CALLS)
    algorithm = _best_of(row, algorithms, first)
    if number >= WARM and phase != NO_TRIES:
        if number % LOOK == phase:
            algorithm = _to_try(row, algorithms, algorithm, number)
        elif number % LOOK == (phase + 2) % LOOK:  # the time of the try two calls ago is recorded by now
            algorithm = _to_try_again(row, algorithms, algorithm)
    store_word(t, ALGORITHM, algorithm)
    store_word(t, LAG, ROUNDS_AHEAD if algorithm in (AHEAD, AHEAD_OUT) else 0)
    store_word(t, ROW, row)
    store_word(t, NBYTES, nbytes)
    store_word(t, SPENT, 0)
    store_word(t, STARTED, ticks())


@inlined
def _row(t, operation, nbytes):
    return t + 8 * (ROWS + ROW_WORDS * (operation * CLASSES + _class_of(nbytes)))


@kernel
def _best_of(row, algorithms, first):
    """Return the fastest of `algorithms` by the times in the row; without times `first`, or else AHEAD or another one.

    DIRECT without hope counts as the slowest.
    """
    best = load_word(row, BEST)
    if algorithms >> best & 1 and 0 < load_word(row, TIMES + best) < HOPELESS:
        return best
    found = -1
    least = HOPELESS
    for algorithm in range(ALGORITHMS):
        time = load_word(row, TIMES + algorithm)
        if algorithms >> algorithm & 1 and 0 < time < least:
            found = algorithm
            least = time
    if found < 0:
        found = first
        if not algorithms >> first & 1 or load_word(row, TIMES + first) == HOPELESS:
            found = AHEAD if algorithms >> AHEAD & 1 else CLOSE
        while algorithms >> found & 1 == 0:
            found += 1
    return found


@kernel
def _to_try(row, algorithms, best, number):
    """Return the algorithm whose back-off ended first, or the best one if none may be tried."""
    found = best
    since = number + 1
    for turn in range(ALGORITHMS):
        algorithm = ALGORITHMS - 1 - turn  # DIRECT comes first, as it is often the best
        if algorithms >> algorithm & 1 and algorithm != best and load_word(row, AGAIN + algorithm) < since:
            found = algorithm
            since = load_word(row, AGAIN + algorithm)
    return found


@inlined
def _to_try_again(row, algorithms, best):
    """Return the algorithm whose first try, which does not count, was two calls ago; else the best one."""
    found = best
    for algorithm in range(ALGORITHMS):
        if (
            algorithms >> algorithm & 1
            and load_word(row, TIMES + algorithm) == 0
            and load_word(row, AGAIN + algorithm) == 1
        ):
            found = algorithm
    return found


@inlined
def is_direct(t):
    """Whether the current call uses DIRECT."""
    return load_word(t, ALGORITHM) == DIRECT


@inlined
def stop_clock(t):
    """Stop the clock, because the wait until other ranks begin the call is not part of the algorithm's time."""
    if load_word(t, STARTED):
        store_word(t, SPENT, load_word(t, SPENT) + ticks() - load_word(t, STARTED))
        store_word(t, STARTED, 0)


@inlined
def start_clock(t):
    """Start the clock again after all ranks have begun the call, and count the call in its row."""
    row = load_word(t, ROW)
    if row:
        store_word(row, CALLS, load_word(row, CALLS) + 1)
        store_word(t, STARTED, ticks())


@inlined
def measure(t):
    """Set TOOK at the end of a call on this rank; the line of the next call publishes it."""
    took = 0
    if load_word(t, STARTED):
        stop_clock(t)
        # The first call of a row touches its arrays and the slots for the first time, so its time does not count.
        if load_word(load_word(t, ROW), CALLS) > 1:
            took = max(1, (load_word(t, SPENT) << 20) // load_word(t, NBYTES))
    store_word(t, TOOK, took)


@kernel
def learn(t, took):
    """Record the time of the last call: `took` ticks a MiB on its slowest rank; 0: it was not measured.

    The current call becomes the last call.
    """
    row = load_word(t, LAST_ROW)
    if row != 0 and took != 0:
        _remember(row, load_word(t, LAST_ALGORITHM), took)
    store_word(t, LAST_ROW, load_word(t, ROW))
    store_word(t, LAST_ALGORITHM, load_word(t, ALGORITHM))


@inlined
def give_up(t):
    """Avoid DIRECT for LONG calls if this rank chose it. Called when some ranks chose DIRECT and others did not."""
    row, algorithm = load_word(t, ROW), load_word(t, ALGORITHM)
    if row and algorithm == DIRECT:
        store_word(row, TIMES + algorithm, HOPELESS)
        store_word(row, AGAIN + algorithm, load_word(row, CALLS) + LONG)
        _take_best(row, algorithm)


@inlined
def conclude(t):
    """Record the time of a completed send or receive, whose algorithm this rank chose alone."""
    row = load_word(t, ROW)
    if row:
        store_word(row, CALLS, load_word(row, CALLS) + 1)
    measure(t)
    if load_word(t, TOOK):
        _remember(load_word(t, ROW), load_word(t, ALGORITHM), load_word(t, TOOK))


@inlined
def best_algorithm(t, operation, nbytes, algorithms):
    """Return the fastest of `algorithms` for an operation that is not measured."""
    return _best_of(_row(t, operation, nbytes), algorithms, AHEAD)


@kernel
def _remember(row, algorithm, took):
    """Record the time of a call with `algorithm`; update the row's best algorithm, and this algorithm's back-off."""
    before = load_word(row, TIMES + algorithm)
    if load_word(row, AGAIN + algorithm) == 0:  # the first time, which does not count
        store_word(row, AGAIN + algorithm, 1)
        return
    # A shorter time replaces the recorded one. A longer time, which other programs often cause, counts by an eighth.
    time = took if before == 0 or took < before else before + (min(took, 2 * before) - before) // 8
    store_word(row, TIMES + algorithm, time)
    known = _take_best(row, algorithm)
    best = load_word(row, BEST)
    if algorithm != best:
        rest = rest_of(before, time, load_word(row, TIMES + best), known)
        store_word(row, AGAIN + algorithm, load_word(row, CALLS) + rest)


@inlined
def rest_of(before, time, best, known):
    """Return the number of calls for which an algorithm backs off after a try.

    Args:
        before, time: the algorithm's recorded time before the try (0: none) and after it.
        best: the time of the best algorithm.
        known: number of algorithms with a time.
    """
    if time > 2 * best and before <= 2 * best:
        return UNSURE
    return max(LONG if time > 2 * best else SOON, SHARE * known * (time - best) // best)


@inlined
def _take_best(row, algorithm):
    """Update the best algorithm of a row; return the number of algorithms with a time.

    Another algorithm replaces the best one if it is at least a sixteenth faster.
    """
    best = load_word(row, BEST)
    if load_word(row, TIMES + best) == 0:
        best = algorithm
    known = 0
    for other in range(ALGORITHMS):
        time = load_word(row, TIMES + other)
        known += time != 0
        if time != 0 and time * 16 < load_word(row, TIMES + best) * 15:
            best = other
    store_word(row, BEST, best)
    return known


@inlined
def stage(t, dst, src, left, most):
    """Write the next bytes to a slot: `left` or `most` bytes, whichever is less."""
    copy_or_stream(load_word(t, ALGORITHM) in (PAST, PAST_OUT), dst, src, min(left, most))


@inlined
def copy_out(t, dst, src, nbytes):
    """Copy bytes from a slot to an output."""
    copy_or_stream(load_word(t, ALGORITHM) >= AHEAD_OUT, dst, src, nbytes)
