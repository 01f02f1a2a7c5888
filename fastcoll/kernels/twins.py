"""Pure functions of core/signature.py and core/partition.py, compiled."""

from __future__ import annotations

import numpy as np

from ..core import signature
from .jit import inlined
from .primitives import load_word

_STEP, _FIRST, _SECOND = map(np.uint64, (signature.STEP, signature.FIRST, signature.SECOND))
_30, _27, _31, _32 = map(np.uint64, (30, 27, 31, 32))


@inlined
def weigh(src, dst, nbytes):
    """A pseudo-random number for "rank src gives rank dst so many bytes"."""
    mixed = np.uint64(nbytes + 1) * _STEP + (np.uint64(src) << _32) + np.uint64(dst)
    mixed = (mixed ^ (mixed >> _30)) * _FIRST
    mixed = (mixed ^ (mixed >> _27)) * _SECOND
    return np.int64(mixed ^ (mixed >> _31))


@inlined
def balance(rank, size, gives, takes):
    """The balance of tables of `size` words, at addresses, of what this rank gives and what it expects."""
    total = np.int64(0)
    for peer in range(size):
        given = load_word(gives, peer)
        taken = load_word(takes, peer)
        if peer != rank and given >= 0:
            total += weigh(rank, peer, given)
        if peer != rank and taken >= 0:
            total -= weigh(peer, rank, taken)
    return total


@inlined
def shape_of(sizes, size):
    """One number that tells a table of `size` words from others: their sum when all are equal, else negative."""
    first = load_word(sizes, 0)
    even = True
    total = np.int64(0)
    mixed = np.int64(0)
    for peer in range(size):
        nbytes = load_word(sizes, peer)
        even &= nbytes == first
        total += nbytes
        mixed += weigh(peer, peer, nbytes)
    return total if even else -1 - (mixed & 0x3FFFFFFFFFFFFFFF)


@inlined
def start_of(total, parts, k, unit):
    """Where part k of `total` begins if all are equally long, in whole units, but for the last ones."""
    return min(total, k * -(-total // (parts * unit)) * unit)
