"""A word as a lock that compiled calls hold, seen from Python: 0 when free, else the holder's thread."""

from __future__ import annotations

from .atomics import swap_if_equal, this_thread
from .jit import entry
from .pyobjects import Index, integer

TAKEN, HELD = 1, 0


@entry
def seize(address: Index) -> int:
    """Take the lock at an address: TAKEN, or HELD by another."""
    return TAKEN if swap_if_equal(integer(address), 0, this_thread()) else HELD
