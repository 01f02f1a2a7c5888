"""Sleep until another thread wakes this one: futex(2), and events.

A thread that sleeps uses no processor time and is woken at once, but its waker makes a system call for it. For words
that change more often than threads sleep there are events. An *event* is a shared word that is odd while a thread may
be asleep on it. Its writer calls `wake` after every store for which a thread may wait, and that makes a system call
only if the event is odd.

Invariant: no wake-up is lost. A thread makes the event odd, then reads the word for which it waits, and then sleeps;
the writer writes the word, then reads the event. A full fence lies between the two steps of each, so if the thread has
read the old word, the writer finds the event odd. The writer makes it even before it wakes the threads, and the kernel
puts no thread to sleep if the event is not the one that the thread has seen.

`tests/kernels/test_futex_model.py` explores the schedules of events.
"""

from __future__ import annotations

from ..compiler.jit import external, kernel
from ..compiler.processor import FUTEX
from .primitives import full_fence, load_acquire, swap_if_equal

_syscall = external("syscall", "int64(int64, int64, int64, int64, int64, int64, int64)")
_WAIT, _WAKE = 0, 1
_ALL = 1 << 30  # sleepers


@kernel
def sleep_on(word, seen, timeout):
    """Sleep until `wake_all(word)`; return at once if the low half of the word is not that of `seen`.

    Args:
        timeout: address of the seconds and nanoseconds after which the thread wakes anyway.
    """
    _syscall(FUTEX, word, _WAIT, seen & 0xFFFFFFFF, timeout, 0, 0)


@kernel
def wake_all(word):
    """Wake all threads that sleep on a word."""
    _syscall(FUTEX, word, _WAKE, _ALL, 0, 0, 0)


@kernel
def announce(event):
    """Make an event odd; return its value, with which the thread may sleep on it if its word is still the old one."""
    seen = load_acquire(event)
    if seen & 1 == 0:
        # If this fails, another thread has made it odd, or the writer has come.
        swap_if_equal(event, seen, seen + 1)
    full_fence()
    return seen | 1


@kernel
def wake(event):
    """Wake the threads that sleep on an event, after a store for which they may wait."""
    full_fence()
    seen = load_acquire(event)
    if seen & 1 and swap_if_equal(event, seen, seen + 1):
        wake_all(event)
