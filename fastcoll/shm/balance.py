"""Whether what ranks give agrees with what others expect, found out in one word a rank.

Each pair of ranks and its number of bytes is one pseudo-random number. A rank's *balance* is the sum of those
for what it gives, minus the sum for what it expects: over all ranks these add up to 0 when all sizes agree, and
otherwise hardly ever (1 in 2**64). Sums are modulo 2**64.
"""

from __future__ import annotations

import numpy as np

from ..kernels.jit import inlined
from ..kernels.pointers import load_word
from .rounds import table
from .words import GIVES, RANK, SIZE, TAKES

# Steele, Lea, Flood: Fast splittable pseudorandom number generators, OOPSLA 2014 (splitmix64).
_STEP = np.uint64(0x9E3779B97F4A7C15)
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)
_30, _27, _31, _32 = map(np.uint64, (30, 27, 31, 32))


@inlined
def pair(src, dst, nbytes):
    """A number for "rank src gives rank dst so many bytes"."""
    mixed = np.uint64(nbytes + 1) * _STEP + (np.uint64(src) << _32) + np.uint64(dst)
    mixed = (mixed ^ (mixed >> _30)) * _FIRST
    mixed = (mixed ^ (mixed >> _27)) * _SECOND
    return np.int64(mixed ^ (mixed >> _31))


@inlined
def balance_of(c):
    """The balance of this rank's tables."""
    rank = load_word(c, RANK)
    total = np.int64(0)
    for peer in range(load_word(c, SIZE)):
        given = load_word(table(c, GIVES + 1), peer)
        taken = load_word(table(c, TAKES + 1), peer)
        if peer != rank and given >= 0:
            total += pair(rank, peer, given)
        if peer != rank and taken >= 0:
            total -= pair(peer, rank, taken)
    return total


@inlined
def shape_of(c, which):
    """One number that tells the sizes of a table from others: their sum when all are equal, else negative."""
    sizes = table(c, which + 1)
    first = load_word(sizes, 0)
    even = True
    total = np.int64(0)
    mixed = np.int64(0)
    for peer in range(load_word(c, SIZE)):
        nbytes = load_word(sizes, peer)
        even &= nbytes == first
        total += nbytes
        mixed += pair(peer, peer, nbytes)
    return total if even else -1 - (mixed & 0x3FFFFFFFFFFFFFFF)
