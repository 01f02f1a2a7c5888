"""The header of a call: how a rank of a network backend says what it calls, in int64 words, and how all compare it."""

from __future__ import annotations

from ..compiler.jit import kernel
from ..core.signature import UNEVEN
from .primitives import load_word

NUMBER = 0  # of the call
HEAD_CALL, HEAD_SHAPE = 1, 2  # the fingerprint (core/signature.py)
HEAD_BALANCE = 3  # of the sizes


@kernel
def calls_match(first, stride, size):
    """Whether the headers of all ranks, `stride` bytes from one to the next, are of calls that match."""
    call, shape, balance = load_word(first, HEAD_CALL), load_word(first, HEAD_SHAPE), 0
    for rank in range(size):
        head = first + stride * rank
        if load_word(head, HEAD_CALL) != call:
            return False
        if load_word(head, HEAD_SHAPE) != shape and call & UNEVEN == 0:
            return False
        balance += load_word(head, HEAD_BALANCE)
    return balance == 0
