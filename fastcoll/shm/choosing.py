"""How a call's data goes through the slots: found out by trying, while the program runs.

What is fastest differs by a factor of ten between machines, sizes and operations, and on virtual machines from
minute to minute: to read lines that another core has just written takes 0.12 ns a byte where the two share a
last-level cache and 0.45 ns where they do not, to read them once they have moved to the shared cache 0.025 ns, and
through memory, past all caches, 0.06 ns (2 vCPUs of an AMD EPYC, family 25; docs/architecture.md, "Where the data
lies"). So each rank keeps, for each operation and class of sizes, how long the *ways* took it, uses the best one,
and tries the others now and then.

A way concerns only how and when a rank copies: results do not depend on it, and peers need not take the same one.
But they do: a call's time is that of the rank that it took longest, which all learn with the next call's lines, and
so all have the same rows (where ranks give different sizes, they may not).

    row of a class: word 0 calls so far, word 1 best way, word 2 + w ticks a KiB of way w (0: not tried)
"""

from __future__ import annotations

from ..kernels.clock import ticks
from ..kernels.copy import copy, stream
from ..kernels.jit import inlined, kernel
from ..kernels.pointers import load_word, store_word
from .words import (
    CHOICES,
    CLASSES,
    LAG,
    LAST_ROW,
    LAST_WAY,
    NBYTES,
    ROW,
    ROW_WORDS,
    SLOT,
    SPENT,
    STARTED,
    TOOK,
    WAY,
)

# The ways. CLOSE: write a round, read a round. PAST: the same, past the caches. AHEAD: write some rounds ahead,
# so that what is read has left its writer's own cache. AHEAD_PAST: and write the outputs past the caches.
CLOSE, PAST, AHEAD, AHEAD_PAST = range(4)
WAYS = 4
assert ROW_WORDS == 2 + WAYS
SMALLEST = 8 << 10  # bytes; below, CLOSE. The classes begin here: 8K, 32K, 128K, 512K, 2M, 8M, 32M, 128M
LARGE = 8 << 20  # bytes; from here outputs may be larger than the last-level cache
ROUNDS_AHEAD = 4
TRIES = 2  # of each way at the beginning
OFTEN, RARELY = 16, 64  # calls between two tries of another way: at first, and later


@inlined
def _class_of(nbytes):
    size = SMALLEST * 4
    found = 0
    while found < CLASSES - 1 and nbytes >= size:
        size *= 4
        found += 1
    return found


@kernel
def choose(c, operation, nbytes, moving):
    """Choose the way of a call; `moving`: it copies its outputs and does not compute them."""
    row = c + 8 * (CHOICES + ROW_WORDS * (operation * CLASSES + _class_of(nbytes)))
    ways = 2 if nbytes <= load_word(c, SLOT) else 4 if moving and nbytes >= LARGE else 3
    number = load_word(row, 0)
    store_word(row, 0, number + 1)
    way = load_word(row, 1)
    period = OFTEN if number < 16 * OFTEN else RARELY
    if number <= TRIES * ways:
        way = number % ways
    elif number % period == 0:
        way = number // period % ways
    store_word(c, ROW, 0 if number == 0 else row)  # the first call touches its arrays for the first time
    store_word(c, WAY, way)
    store_word(c, LAG, ROUNDS_AHEAD if way >= AHEAD else 0)
    store_word(c, NBYTES, nbytes)
    store_word(c, SPENT, 0)
    store_word(c, STARTED, ticks())


@inlined
def stop_clock(c):
    """The call waits for the others to begin theirs, which says nothing of its way."""
    if load_word(c, ROW):
        store_word(c, SPENT, load_word(c, SPENT) + ticks() - load_word(c, STARTED))


@inlined
def start_clock(c):
    """All have begun the call."""
    if load_word(c, ROW):
        store_word(c, STARTED, ticks())


@inlined
def measure(c):
    """The call is complete here: its time goes to the others with the next call."""
    took = 0
    if load_word(c, ROW):
        spent = load_word(c, SPENT) + ticks() - load_word(c, STARTED)
        took = max(1, spent * 1024 // load_word(c, NBYTES))
    store_word(c, TOOK, took)


@kernel
def learn(c, took):
    """The rank that the last call took longest needed `took` ticks a KiB; 0: it was not measured."""
    row = load_word(c, LAST_ROW)
    if row != 0 and took != 0:
        _remember(row, load_word(c, LAST_WAY), took)
    store_word(c, LAST_ROW, load_word(c, ROW))
    store_word(c, LAST_WAY, load_word(c, WAY))


@inlined
def _remember(row, way, took):
    known = load_word(row, 2 + way)
    # Quick to believe good news, slow to believe bad ones: what a call takes longer is often somebody else's doing.
    store_word(row, 2 + way, took if known == 0 or took < known else known + (took - known) // 8)
    best = load_word(row, 1)
    for other in range(WAYS):
        time = load_word(row, 2 + other)
        if time != 0 and time * 16 < load_word(row, 2 + best) * 15:
            best = other
    store_word(row, 1, best)


@inlined
def stage(c, place, src, left, most):
    """Write the next `most` of `left` bytes to a slot."""
    part = min(left, most)
    if load_word(c, WAY) == PAST:
        stream(place, src, part)
    else:
        copy(place, src, part)


@inlined
def hand_out(c, dst, place, nbytes):
    """Copy bytes of a slot to where they are wanted."""
    if load_word(c, WAY) == AHEAD_PAST:
        stream(dst, place, nbytes)
    else:
        copy(dst, place, nbytes)
