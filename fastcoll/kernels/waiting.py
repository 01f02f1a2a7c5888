"""How a kernel waits for shared words; and a lock.

A wait spins, then yields, then sleeps, and returns to Python when its budget is used up. It sleeps briefly again and
again, or until the writer of its word wakes it, if the writer has an event (futex.py). A back-off table (`backoff`)
belongs to one group, because it has the numbers of spins and yields for one of two cases: each rank of the group has a
core, or there are more ranks than cores. A wait that has used up its budget returns False, and the compiled entry that
waits returns AGAIN. Then Python checks signals, deadlines and dead peers, and calls the entry again, which resumes
where it stopped.

`wait_for` waits for one word. Code that polls several words needs a table with one more word (POLLING_WORDS), and calls
`rest` between two polls:

    polls = 0
    while not (something moved):
        if not rest(table, polls):
            return AGAIN
        polls += 1
"""

from __future__ import annotations

from ..compiler.jit import external, inlined, kernel, locked_entry
from ..core.status import DONE, LATER
from .futex import announce, sleep_on
from .primitives import load_acquire, load_word, pause, store_release, store_word, swap_if_equal, this_thread
from .pyobjects import Index, integer

# Words of the back-off table.
SPINS = 0  # polls with `pause` before the first yield
YIELDS = 1  # sched_yields before the first sleep; NEVER: the wait returns to Python instead of yielding
IDLE = 2  # budgets used up since a wait last succeeded; if not 0, a wait sleeps at once
BUDGET = 3  # nanoseconds of sleep before the wait returns to Python
CLOCK = 4  # 4: seconds, 5: nanoseconds, as clock_gettime writes them
NAP = 6  # 6: seconds, 7: nanoseconds, as nanosleep reads them
# If the current call is timed, the time at which it began; else the time of its first sleep, 0 before that.
TIMED = 8
SLEEPY = 9  # the next waits, as many as this number, for a word whose writer has an event sleep without yielding first
BACKOFF_WORDS = 10

NEVER = -1
_CLOCK_MONOTONIC = 1
_SHORT_NAP = 50_000  # ns; Linux adds its timer slack of 50 us, so a late word costs about 0.1 ms
_LONG_NAP = 1_000_000  # ns; after 20 budgets (1 s): a waiting rank then uses about 2 % of a core

# A yield takes 0.3 us on an idle core, but some 50 ms on a core that 15 busy processes share, each of which runs for
# its full time slice. There, a thousand yields took a minute, in which no rank noticed that a peer had died. So after
# one yield in four the wait checks the clock, which takes 30 ns.
_CLOCK_EVERY = 3

# Where yields are of no use, waits sleep at once for a while. A yield to a busy process gives it a whole time slice,
# some 3 ms, while a thread that is woken gets the core at once. And a yield passes the core on only within the session,
# if Linux gives each session a share (sched_autogroup_enabled). 4 ranks, two on each core, beside a busy process take
# 43 us for an all_reduce of 8 bytes, 55 us without this rule; without such shares 82 us, and 2,000 us without the rule.
# After 400 waits instead of 100, ranks with nothing beside them take up to twice as long, as a peer that computes also
# keeps the core for long.
_LONG_YIELD = 1_000_000  # ns
_AFTER_LONG_YIELD, _AFTER_SLEEP = 100, 4

yield_core = external("sched_yield", "int32()")
nanosleep = external("nanosleep", "int32(int64, int64)")
_clock_gettime = external("clock_gettime", "int32(int32, int64)")


@inlined
def now(backoff):
    """Return CLOCK_MONOTONIC in nanoseconds; `backoff` is the address of the back-off table."""
    _clock_gettime(_CLOCK_MONOTONIC, backoff + 8 * CLOCK)
    return load_word(backoff, CLOCK) * 1_000_000_000 + load_word(backoff, CLOCK + 1)


@inlined
def nap_of(backoff, nanoseconds):
    """Write a time of less than a second into the back-off table; return its address, for nanosleep and futex."""
    store_word(backoff, NAP, 0)
    store_word(backoff, NAP + 1, nanoseconds)
    return backoff + 8 * NAP


@inlined
def nap(backoff):
    """Sleep briefly; longer once the wait has lasted a second."""
    nanosleep(nap_of(backoff, _SHORT_NAP if load_word(backoff, IDLE) < 20 else _LONG_NAP), 0)


@kernel
def _sleep(backoff, word, want, event):
    """Sleep until an event, but at most 1 ms; `event` 0: sleep briefly."""
    if event == 0:
        nap(backoff)
        return
    seen = announce(event)
    if load_acquire(word) < want:
        sleep_on(event, seen, nap_of(backoff, _LONG_NAP))


@kernel
def wait_slowly(backoff, word, want, event):
    """Do the part of `wait_for` after spinning.

    It is a separate function so that only spinning is inlined.
    """
    if load_word(backoff, YIELDS) == NEVER:
        return False
    begun = now(backoff)
    if event != 0 and load_word(backoff, SLEEPY) > 0:
        store_word(backoff, SLEEPY, load_word(backoff, SLEEPY) - 1)
    elif load_word(backoff, IDLE) == 0:
        for polls in range(load_word(backoff, YIELDS)):
            yield_core()
            if polls == 0 and now(backoff) - begun > _LONG_YIELD:
                store_word(backoff, SLEEPY, _AFTER_LONG_YIELD)
            if load_acquire(word) >= want:
                return True
            if polls & _CLOCK_EVERY == 0 and now(backoff) - begun > load_word(backoff, BUDGET):
                break  # other processes have the core
        begun = now(backoff)
        store_word(backoff, SLEEPY, max(load_word(backoff, SLEEPY), _AFTER_SLEEP))
    if load_word(backoff, TIMED) == 0:
        store_word(backoff, TIMED, begun)
    end = begun + load_word(backoff, BUDGET)
    while now(backoff) < end:
        _sleep(backoff, word, want, event)
        if load_acquire(word) >= want:
            store_word(backoff, IDLE, 0)
            return True
    store_word(backoff, IDLE, load_word(backoff, IDLE) + 1)
    return False


@inlined
def wait_for(backoff, word, want, event=0):
    """Wait until the shared word at address `word` is at least `want`.

    Args:
        event: address of the event for which the word's writer calls `wake`; 0: there is none.

    Returns:
        False if the budget is used up, so that the caller must call again.
    """
    if load_acquire(word) >= want:
        return True
    if load_word(backoff, IDLE) == 0:
        for _ in range(load_word(backoff, SPINS)):
            pause()
            if load_acquire(word) >= want:
                return True
    return wait_slowly(backoff, word, want, event)


# ---- polling -------------------------------------------------------------------------------------------

END = BACKOFF_WORDS  # the time at which the current wait's budget is used up
POLLING_WORDS = BACKOFF_WORDS + 1


@kernel
def doze(table, first):
    """Sleep briefly; return False if the budget is used up.

    Args:
        first: whether this is the wait's first sleep, with which the budget begins.
    """
    if first:
        store_word(table, END, now(table) + load_word(table, BUDGET))
    nap(table)
    if now(table) < load_word(table, END):
        return True
    store_word(table, IDLE, load_word(table, IDLE) + 1)
    return False


@kernel
def _is_early(table, polls):
    """Return whether a wait that yields still has budget.

    The budget begins with the first yields.
    """
    if polls <= load_word(table, SPINS) + _CLOCK_EVERY:
        store_word(table, END, now(table) + load_word(table, BUDGET))
    if now(table) < load_word(table, END):
        return True
    store_word(table, IDLE, load_word(table, IDLE) + 1)
    return False


@inlined
def rest(table, polls):
    """Wait briefly, for the `polls`-th time since something moved.

    Returns:
        False if the budget is used up, so that the kernel must return to Python.
    """
    awake = 0 if load_word(table, IDLE) else load_word(table, SPINS) + load_word(table, YIELDS)
    if polls >= awake:
        return doze(table, polls == awake)
    if polls < load_word(table, SPINS):
        pause()
        return True
    yield_core()
    return (polls & _CLOCK_EVERY) != 0 or _is_early(table, polls)


@inlined
def moved(table):
    """Record that something moved, so that the next wait spins again."""
    store_word(table, IDLE, 0)


# ---- a lock: 0 when free, else the thread that holds it --------------------------------------------------


@locked_entry
def seize(address: Index) -> int:
    """Take the lock at an address; return DONE, or LATER if another thread holds it."""
    return DONE if swap_if_equal(integer(address), 0, this_thread()) else LATER


@inlined
def seize_unless(lock, word):
    """Take the lock, unless it is held or the word is set; return whether it was taken.

    Args:
        lock, word: their addresses.
    """
    if load_acquire(word) != 0 or not swap_if_equal(lock, 0, this_thread()):
        return False
    # The previous holder of the lock may have set the word after the first check and before it released the lock.
    if load_acquire(word) != 0:
        store_release(lock, 0)
        return False
    return True
