"""The headers of a call, which ranks of a network backend publish and compare.

A header is a table of int64 words. Each rank publishes one.
"""

from __future__ import annotations

from ..compiler.jit import kernel
from ..core.signature import UNEVEN
from .primitives import load_word

NUMBER = 0  # number of the call
HEAD_CALL, HEAD_SHAPE = 1, 2  # the fingerprint (core/signature.py)
# A sum over the rank's sizes; if all sizes match, the sum over all ranks is 0 (core/signature.py).
HEAD_BALANCE = 3


@kernel
def calls_match(first, stride, size):
    """Return whether the headers of all ranks match; they are `stride` bytes apart."""
    call, shape, balance = load_word(first, HEAD_CALL), load_word(first, HEAD_SHAPE), 0
    for rank in range(size):
        head = first + stride * rank
        if load_word(head, HEAD_CALL) != call:
            return False
        if load_word(head, HEAD_SHAPE) != shape and call & UNEVEN == 0:
            return False
        balance += load_word(head, HEAD_BALANCE)
    return balance == 0
