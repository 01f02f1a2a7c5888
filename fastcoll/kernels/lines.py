"""Headers in memory that processes share, and a wait for them in which the thread sleeps (futex.py).

A *line* is a place for one header. It has one writer. The header's first word is its number, which grows with each
header and is written last, with release semantics. So a reader that finds a number also finds that header. The writer
may post its next header once it knows, from words that the readers have published since, that all have read this one.

A thread that sleeps uses no processor time, and is woken at once. The writer wakes by a system call for each header, so
this is for waits that take longer than one.
"""

from __future__ import annotations

from ..compiler.jit import inlined, kernel
from .copy import copy
from .futex import sleep_on, wake_all
from .headers import NUMBER
from .primitives import load_acquire, load_word, pause, store_release
from .waiting import BUDGET, SPINS, YIELDS, nap_of, yield_core


@kernel
def post(line, header, nbytes):
    """Publish a header of `nbytes` in a line, and wake the threads that sleep until then."""
    copy(line + 8, header + 8, nbytes - 8)
    store_release(line, load_word(header, NUMBER))
    wake_all(line)


@kernel
def signal(line, number):
    """Publish a number in a line without a header, and wake the threads that sleep until then."""
    store_release(line, number)
    wake_all(line)


@inlined
def has(line, number):
    """Whether a line's number is at least `number`."""
    return load_acquire(line) >= number


@inlined
def take(line, number, target, nbytes):
    """Copy the header from a line if its number is at least `number`; return whether it is."""
    if not has(line, number):
        return False
    copy(target, line, nbytes)
    return True


@kernel
def sleep_until(backoff, line, number):
    """Wait until a line's number is at least `number`: spin and yield, as the back-off table says, then sleep.

    Returns:
        False if a signal has come or the budget is used up, so that the caller must return to Python.
    """
    spins = load_word(backoff, SPINS)
    for poll in range(spins + load_word(backoff, YIELDS)):
        if load_acquire(line) >= number:
            return True
        if poll < spins:
            pause()
        else:
            yield_core()
    seen = load_acquire(line)
    if seen < number:
        sleep_on(line, seen, nap_of(backoff, load_word(backoff, BUDGET)))
    return load_acquire(line) >= number
