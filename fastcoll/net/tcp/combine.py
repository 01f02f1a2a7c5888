"""How a collective of more than 16 ranks begins: headers are combined on their way, so each rank passes on few bytes.

A combination is a header: call and shape of one of the ranks, the sum of their balances, and whether any two differ.
plans/circulant.py has who gives whom what, in ceil(log2 n) rounds of one header each; so every rank comes to
the same result. Where it says that the calls do not match, headers are passed on whole, and each rank finds in them
what all have called. Calls of so many ranks are strict, and nothing is attached to their headers.
"""

from __future__ import annotations

from ...compiler.jit import inlined, kernel
from ...core.signature import UNEVEN
from ...kernels.primitives import load_word, store_word
from . import engine_layout as w
from .plans import plan as t
from .plans.circulant import COMBINED


@kernel
def combine(target, sources):
    """Combine the two headers whose addresses are at `sources`, each perhaps a combination."""
    first, second = load_word(sources, 0), load_word(sources, 1)
    call, shape = load_word(first, w.HEAD_CALL), load_word(first, w.HEAD_SHAPE)
    differs = load_word(first, w.HEAD_DIFFERS) | load_word(second, w.HEAD_DIFFERS)
    if load_word(second, w.HEAD_CALL) != call or load_word(second, w.NUMBER) != load_word(first, w.NUMBER):
        differs = 1
    if load_word(second, w.HEAD_SHAPE) != shape and call & UNEVEN == 0:
        differs = 1
    balance = load_word(first, w.HEAD_BALANCE) + load_word(second, w.HEAD_BALANCE)
    store_word(target, w.NUMBER, load_word(first, w.NUMBER))
    store_word(target, w.HEAD_CALL, call)
    store_word(target, w.HEAD_SHAPE, shape)
    store_word(target, w.HEAD_BALANCE, balance)
    store_word(target, w.HEAD_DIFFERS, differs)


@inlined
def all_agree(c):
    """Whether the combined headers say that the calls of all ranks match."""
    head = load_word(load_word(c, w.BUFFERS), t.SCRATCH) + COMBINED
    return load_word(head, w.HEAD_DIFFERS) == 0 and load_word(head, w.HEAD_BALANCE) == 0
