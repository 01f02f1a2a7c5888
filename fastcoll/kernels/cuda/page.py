"""The layout of the GPU memory that a rank shares with the ranks of its node.

A page of words comes first, then the slots for data (gpu/ipc). "This rank" is the rank whose memory it is.

    offset in the page       bytes   writer      reader
    LINES + 384 * r          128     rank r      this rank   r's line, for its calls with an even number
    LINES + 384 * r + 128    128     rank r      this rank   r's line, for its calls with an odd number
    LINES + 384 * r + 256    8       rank r      this rank   STEP: r's progress in its call
    LINES + 384 * r + 264    8       rank r      this rank   BYE: r no longer uses this memory
    DEAD                     8       this rank   this rank   a wait was given up, or a mismatch was found
    SIZE, RANK, CONTROL      8       the host    this rank   written once, before the first call
    PEERS + 8 * r            8       the host    this rank   address of r's page in this rank's mappings

A rank writes its own state into every rank's page, so that each rank waits on memory of its own GPU. A line describes
the call that a rank has begun:

    SEQUENCE  the call's number, written last        CALL, SHAPE  of core/signature.py
    BALANCE   a sum over what the rank gives minus a sum over what it expects; if what all ranks give and expect
              matches, the sum of their balances is 0

CONTROL is the address of pinned host memory, through which one rank's kernels and host communicate:

    STOP              host to kernels: end waiting
    STOPPED           kernels to host: the number of the call in which DEAD was set
    WHY               kernels to host, before STOPPED: GAVE_UP or MISMATCH
    ARRIVED + 8 * r   kernels to host: the last call that r has begun
    REPORTED + 32 * r kernels to host: r's line, if WHY is MISMATCH
"""

from __future__ import annotations

MOST_RANKS = 64

LINE = 128  # bytes; a cache line of a GPU
SEQUENCE, CALL, SHAPE, BALANCE = 0, 8, 16, 24
LINE_WORDS = 4

BALANCE_MASK = (1 << 48) - 1
"""Balances are compared modulo 2**48, so that their sum over all ranks fits into a word."""

# Offsets in the words of one rank.
STEP, BYE = 2 * LINE, 2 * LINE + 8
RANK_BYTES = 3 * LINE

# Offsets in the page.
DEAD, SIZE, RANK, CONTROL = 0, 8, 16, 24
PEERS = LINE
LINES = PEERS + 8 * MOST_RANKS
PAGE = 1 << 16
assert LINES + MOST_RANKS * RANK_BYTES <= PAGE

# Offsets in the control words.
STOP, STOPPED, WHY = 0, 8, 16
ARRIVED = LINE
REPORTED = ARRIVED + 8 * MOST_RANKS
CONTROL_BYTES = REPORTED + 8 * LINE_WORDS * MOST_RANKS
GAVE_UP, MISMATCH = 1, 2

STEP_BITS = 16
"""Bits of a STEP word that hold the step. The next 46 bits hold the call's number, enough for ten years."""
LAST_STEP = (1 << STEP_BITS) - 1
"""The step that a rank publishes when it takes no more steps in its call, although other ranks may take more."""


def rank_words(rank: int) -> int:
    """Return the offset of a rank's words in a page."""
    return LINES + RANK_BYTES * rank


def line(rank: int, number: int) -> int:
    """Return the offset of a rank's line of a call in a page."""
    return rank_words(rank) + LINE * (number % 2)
