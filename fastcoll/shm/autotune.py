"""How a call's data goes through the slots: found out by trying, while the program runs.

What is fastest differs by a factor of ten between machines, sizes and operations, and on virtual machines from
minute to minute: to read lines that another core has just written takes 0.12 ns a byte where the two share a
last-level cache and 0.45 ns where they do not, to read them once they have moved to the shared cache 0.025 ns, and
through memory, past all caches, 0.06 ns (2 vCPUs of an AMD EPYC, family 25; docs/architecture.md, "Where the data
lies"). So each rank keeps, for each operation and class of sizes, how long the *ways* took it, uses the best one,
and tries the others now and then. It begins with what is known of the machine (tuning_table.py).

Trying others costs at most 1 / SHARE of a row's time: after a try a way rests for as many calls as make up for what
it takes longer than the best, times the number of ways that are tried. One that takes more than twice the best
rests for LONG calls at least; but one bad time alone, which may be somebody else's doing, is soon looked at again.
In a row of which nothing is known, each way is tried at the beginning, every LOOK-th call from call WARM on, and
once more two calls later, as its first time does not count: caches, pages and clocks that are cold make any way
look slow (all_gather of 4 MiB on 2 CPUs of an AMD EPYC, family 26: DIRECT takes 217 us in a row's second call and
157, 147, 126, 156, 97, 95, 87, 85 in the next ones).

Most ways concern only how and when a rank copies: results do not depend on them, and peers need not take the same one.
But they do: a call's time is that of the rank that it took longest, which all learn with the next call's lines, and
so all have the same rows (where ranks give different sizes, they may not).

    word of the table
    LAG, WAY               of the call under way: rounds that it writes ahead, and how its data goes
    ROW, NBYTES            of the call under way: address of the row to learn from it (0: none), and its size
    STARTED, SPENT         ticks: the clock's last start (0: it stands), and what it showed when it stopped
    TOOK                   ticks a MiB that the last call took here; 0: not measured
    LAST_ROW, LAST_ALGORITHM     of the last call, for when all ranks' TOOK are known
    ROWS ...               a row for each operation and class: calls so far, best way, ticks a MiB of each way (0: not
                           known), and for each way the number of the call from which on it may be tried again

DIRECT does concern the peers (single_copy.py), so a call's line tells of it, and where ranks differ, all make the call
anew, through the slots; who wanted it otherwise does not soon again.
"""

from __future__ import annotations

from .. import config
from ..compiler.jit import inlined, kernel
from ..errors import UsageError
from ..kernels.copy import copy_or_stream
from ..kernels.primitives import load_word, store_word, ticks

LAG, ALGORITHM, ROW, NBYTES, STARTED, SPENT, TOOK, LAST_ROW, LAST_ALGORITHM, ROWS = range(10)

# The ways. CLOSE: write a round, read a round. PAST: the same, past the caches. AHEAD: write some rounds ahead,
# so that what is read has left its writer's own cache. ..._OUT: and write the outputs past the caches. DIRECT: through
# no slots at all, each rank reads the others' arrays.
CLOSE, PAST, AHEAD, AHEAD_OUT, PAST_OUT, DIRECT = range(6)
ALGORITHMS = 6
NAMES = "close", "past", "ahead", "ahead_out", "past_out", "direct"
NEVER = 1 << 62  # bytes
CALLS, BEST, TIMES = range(3)  # words of a row
AGAIN = TIMES + ALGORITHMS
ROW_WORDS = AGAIN + ALGORITHMS
CLASSES = 8
SMALLEST = 8 << 10  # bytes; below, CLOSE. The classes begin here: 8K, 32K, 128K, 512K, 2M, 8M, 32M, 128M
LARGE = 8 << 20  # bytes; from here outputs may be larger than the last-level cache
ROUNDS_AHEAD = 4
# Bytes; the system call and a second meeting take some 2 us, to copy so much twice takes 3.
SMALLEST_DIRECT = 32 << 10
LOOK = 4  # calls between two looks for a way to try
WARM = 7  # calls of a row before the first look
SHARE = 50
SOON = 64  # calls that a way rests for at least
UNSURE = 128  # calls until a way that was slow once is tried again
LONG = 4096
HOPELESS = 1 << 40  # ticks a MiB


def table_words(operations: int) -> int:
    """Words of a table for so many operations."""
    return ROWS + ROW_WORDS * CLASSES * operations


def allowed_algorithms() -> int:
    """The ways that FASTCOLL_SHM_ALGORITHMS names, as bits; all of them where it is not set.

    Raises:
        UsageError: it names one that there is not.
    """
    named = [name for name in config.get("FASTCOLL_SHM_ALGORITHMS").split(",") if name] or NAMES
    if unknown := [name for name in named if name not in NAMES]:
        raise UsageError(f"FASTCOLL_SHM_ALGORITHMS names {unknown[0]!r}; there are {', '.join(NAMES)}")
    return sum(1 << NAMES.index(name) for name in set(named))


def direct_from(algorithms: int) -> int:
    """Bytes from which calls may go direct: all of them where they may go no other way."""
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
    """The ways through the slots that a call has, as bits; `moving`: it copies its outputs, and computes none."""
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
    """The call is too small to choose."""
    store_word(t, ALGORITHM, CLOSE)
    store_word(t, LAG, 0)
    store_word(t, ROW, 0)
    store_word(t, STARTED, 0)


@kernel
def choose(t, operation, nbytes, algorithms, phase):
    """Choose one of the ways, given as bits, for a call, and start the clock.

    `phase`: of LOOK; two sides that choose by themselves, and have different ones, try nothing in the same call.
    """
    row = _row(t, operation, nbytes)
    number = load_word(row, CALLS)
    algorithm = _best_of(row, algorithms)
    if number >= WARM:
        if number % LOOK == phase:
            algorithm = _to_try(row, algorithms, algorithm, number)
        elif number % LOOK == (phase + 2) % LOOK:  # by now it is known how the try went
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
def _best_of(row, algorithms):
    """The best of these ways, as far as is known."""
    best = load_word(row, BEST)
    if algorithms >> best & 1 and load_word(row, TIMES + best) != 0:
        return best
    found = -1
    for algorithm in range(ALGORITHMS):
        time = load_word(row, TIMES + algorithm)
        if algorithms >> algorithm & 1 and time != 0 and (found < 0 or time < load_word(row, TIMES + found)):
            found = algorithm
    if found < 0:
        # Nothing is known: to write ahead is seldom much worse than the best.
        found = AHEAD if algorithms >> AHEAD & 1 else CLOSE
        while algorithms >> found & 1 == 0:
            found += 1
    return found


@kernel
def _to_try(row, algorithms, best, number):
    """The way that may be tried for the longest time, else the best one."""
    found = best
    since = number + 1
    for turn in range(ALGORITHMS):
        algorithm = ALGORITHMS - 1 - turn  # of several DIRECT first, which often is the best
        if algorithms >> algorithm & 1 and algorithm != best and load_word(row, AGAIN + algorithm) < since:
            found = algorithm
            since = load_word(row, AGAIN + algorithm)
    return found


@inlined
def _to_try_again(row, algorithms, best):
    """The way that was tried for the first time two calls ago, which did not count; else the best one."""
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
    """Whether the ranks of the call under way read one another's arrays."""
    return load_word(t, ALGORITHM) == DIRECT


@inlined
def stop_clock(t):
    """The call waits for the others to begin theirs, which says nothing of its way."""
    if load_word(t, STARTED):
        store_word(t, SPENT, load_word(t, SPENT) + ticks() - load_word(t, STARTED))
        store_word(t, STARTED, 0)


@inlined
def start_clock(t):
    """All have begun the call."""
    row = load_word(t, ROW)
    if row:
        store_word(row, CALLS, load_word(row, CALLS) + 1)
        store_word(t, STARTED, ticks())


@inlined
def measure(t):
    """The call is complete here: its time goes to the others with the next call."""
    took = 0
    if load_word(t, STARTED):
        stop_clock(t)
        # A row's first call touches its arrays and the slots for the first time, and says nothing.
        if load_word(load_word(t, ROW), CALLS) > 1:
            took = max(1, (load_word(t, SPENT) << 20) // load_word(t, NBYTES))
    store_word(t, TOOK, took)


@kernel
def learn(t, took):
    """The rank that the last call took longest needed `took` ticks a MiB; 0: it was not measured."""
    row = load_word(t, LAST_ROW)
    if row != 0 and took != 0:
        _remember(row, load_word(t, LAST_ALGORITHM), took)
    store_word(t, LAST_ROW, load_word(t, ROW))
    store_word(t, LAST_ALGORITHM, load_word(t, ALGORITHM))


@inlined
def give_up(t):
    """The others go another way than this one, which concerns them: leave it alone for long."""
    row, algorithm = load_word(t, ROW), load_word(t, ALGORITHM)
    if row and algorithm == DIRECT:
        store_word(row, TIMES + algorithm, HOPELESS)
        store_word(row, AGAIN + algorithm, load_word(row, CALLS) + LONG)
        _take_best(row, algorithm)


@inlined
def conclude(t):
    """The call is complete, and concerned this rank only: learn from it at once."""
    row = load_word(t, ROW)
    if row:
        store_word(row, CALLS, load_word(row, CALLS) + 1)
    measure(t)
    if load_word(t, TOOK):
        _remember(load_word(t, ROW), load_word(t, ALGORITHM), load_word(t, TOOK))


@inlined
def best_algorithm(t, operation, nbytes, algorithms):
    """The best of these ways, for a call that is not measured."""
    return _best_of(_row(t, operation, nbytes), algorithms)


@kernel
def _remember(row, algorithm, took):
    """A call took so many ticks a MiB: which way is best, and when may this one be tried again?"""
    before = load_word(row, TIMES + algorithm)
    if load_word(row, AGAIN + algorithm) == 0:
        store_word(row, AGAIN + algorithm, 1)
        return
    # Quick to believe good news, slow to believe bad ones: what a call takes longer is often somebody else's doing.
    time = took if before == 0 or took < before else before + (min(took, 2 * before) - before) // 8
    store_word(row, TIMES + algorithm, time)
    known = _take_best(row, algorithm)
    best = load_word(row, BEST)
    if algorithm != best:
        rest = rest_of(before, time, load_word(row, TIMES + best), known)
        store_word(row, AGAIN + algorithm, load_word(row, CALLS) + rest)


@inlined
def rest_of(before, time, best, known):
    """For how many calls a way rests; its times before the try (0: none) and after, and that of the best of `known`."""
    if time > 2 * best and before <= 2 * best:
        return UNSURE
    return max(LONG if time > 2 * best else SOON, SHARE * known * (time - best) // best)


@inlined
def _take_best(row, algorithm):
    """Now that a way's time is known: the best one, which is better than the last one by a sixteenth at least.

    Returns of how many ways times are known.
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
def stage(t, place, src, left, most):
    """Write the next `most` of `left` bytes to a slot."""
    copy_or_stream(load_word(t, ALGORITHM) in (PAST, PAST_OUT), place, src, min(left, most))


@inlined
def hand_out(t, dst, place, nbytes):
    """Copy bytes of a slot to where they are wanted."""
    copy_or_stream(load_word(t, ALGORITHM) >= AHEAD_OUT, dst, place, nbytes)
