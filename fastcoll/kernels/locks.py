"""A word as a lock: 0 when free, else the thread that holds it."""

from __future__ import annotations

from .atomics import load_acquire, store_release, swap_if_equal, this_thread
from .jit import entry, inlined
from .pyobjects import Index, integer

TAKEN, HELD = 1, 0


@entry
def seize(address: Index) -> int:
    """Take the lock at an address: TAKEN, or HELD by another."""
    return TAKEN if swap_if_equal(integer(address), 0, this_thread()) else HELD


@inlined
def seize_unless(lock, word):
    """Take the lock at an address, unless it is held or the word at another is set; whether it was taken."""
    if load_acquire(word) != 0 or not swap_if_equal(lock, 0, this_thread()):
        return False
    # Whoever held the lock may have set the word since, before letting go.
    if load_acquire(word) != 0:
        store_release(lock, 0)
        return False
    return True
