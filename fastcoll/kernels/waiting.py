"""How a kernel waits for a shared word: spin, then yield, then sleep, and back to Python in time.

The table `Patience` lives in a group's private context, so that the mode (dedicated cores or
oversubscribed) is the same for all ranks of the group. A wait that runs out of budget returns False;
the kernel then returns AGAIN, Python looks at signals, deadlines and dead peers, and calls the kernel
again, which resumes where it stopped.
"""

from __future__ import annotations

from numba import types

from .atomics import load_acquire, pause
from .jit import inlined, kernel
from .pointers import load_word, store_word

# Words of the patience table.
SPINS = 0  # polls with `pause` before the first yield
YIELDS = 1  # sched_yields before the first sleep
IDLE = 2  # budgets that ran out since the last success; sleep at once when it is not 0
BUDGET = 3  # nanoseconds of sleeping before the wait comes back to Python
CLOCK = 4  # 4: seconds, 5: nanoseconds, as clock_gettime writes them
NAP = 6  # 6: seconds, 7: nanoseconds, as nanosleep reads them
PATIENCE_WORDS = 8

_CLOCK_MONOTONIC = 1
_SHORT_NAP = 50_000  # ns; Linux adds its timer slack of 50 us, so a late word costs about 0.1 ms
_LONG_NAP = 1_000_000  # ns; after 20 budgets (1 s): a waiting rank then uses about 2 % of a core

_sched_yield = types.ExternalFunction("sched_yield", types.int32())
_nanosleep = types.ExternalFunction("nanosleep", types.int32(types.int64, types.int64))
_clock_gettime = types.ExternalFunction("clock_gettime", types.int32(types.int32, types.int64))


@inlined
def now(patience):
    """CLOCK_MONOTONIC in nanoseconds; `patience` is the table's address."""
    _clock_gettime(_CLOCK_MONOTONIC, patience + 8 * CLOCK)
    return load_word(patience, CLOCK) * 1_000_000_000 + load_word(patience, CLOCK + 1)


@inlined
def nap(patience):
    """Sleep for a moment: short at first, longer when the wait has lasted a second."""
    store_word(patience, NAP, 0)
    store_word(patience, NAP + 1, _SHORT_NAP if load_word(patience, IDLE) < 20 else _LONG_NAP)
    _nanosleep(patience + 8 * NAP, 0)


@kernel
def wait_slowly(patience, word, want):
    """The part of `wait_for` after spinning; a function of its own so that spinning is inlined."""
    if load_word(patience, IDLE) == 0:
        for _ in range(load_word(patience, YIELDS)):
            _sched_yield()
            if load_acquire(word) >= want:
                return True
    end = now(patience) + load_word(patience, BUDGET)
    while now(patience) < end:
        nap(patience)
        if load_acquire(word) >= want:
            store_word(patience, IDLE, 0)
            return True
    store_word(patience, IDLE, load_word(patience, IDLE) + 1)
    return False


@inlined
def wait_for(patience, word, want):
    """Wait until the shared word at address `word` is at least `want`; False: call again."""
    if load_acquire(word) >= want:
        return True
    if load_word(patience, IDLE) == 0:
        for _ in range(load_word(patience, SPINS)):
            pause()
            if load_acquire(word) >= want:
                return True
    return wait_slowly(patience, word, want)
