"""A word as a lock: 0 when free, else the thread that holds it."""

from __future__ import annotations

from ..core.status import DONE, LATER
from .atomics import load_acquire, store_release, swap_if_equal, this_thread
from .jit import entry, inlined
from .pyobjects import Index, integer


@entry
def seize(address: Index) -> int:
    """Take the lock at an address: DONE, or LATER if another thread holds it."""
    return DONE if swap_if_equal(integer(address), 0, this_thread()) else LATER


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
