"""How a kernel waits while it polls several words: one idle moment at a time, by the rules of waiting.py.

    turn = 0
    while not (something moved):
        if not rest(table, turn):
            return AGAIN
        turn += 1

The table is waiting.py's patience table and one word more.
"""

from __future__ import annotations

from numba import types

from .atomics import pause
from .jit import inlined, kernel
from .pointers import load_word, store_word
from .waiting import BUDGET, IDLE, PATIENCE_WORDS, SPINS, YIELDS, nap, now

END = PATIENCE_WORDS  # when the budget of the wait under way is spent
POLLING_WORDS = PATIENCE_WORDS + 1

_sched_yield = types.ExternalFunction("sched_yield", types.int32())


@kernel
def doze(table, first):
    """Sleep for a moment; False when the budget, which begins with the `first` sleep, is spent."""
    if first:
        store_word(table, END, now(table) + load_word(table, BUDGET))
    nap(table)
    if now(table) < load_word(table, END):
        return True
    store_word(table, IDLE, load_word(table, IDLE) + 1)
    return False


@inlined
def rest(table, turn):
    """The idle moment number `turn` since something moved; False: go back to Python."""
    awake = 0 if load_word(table, IDLE) else load_word(table, SPINS) + load_word(table, YIELDS)
    if turn >= awake:
        return doze(table, turn == awake)
    if turn < load_word(table, SPINS):
        pause()
    else:
        _sched_yield()
    return True


@inlined
def moved(table):
    """Something moved: the next wait spins again."""
    store_word(table, IDLE, 0)
