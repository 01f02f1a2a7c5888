"""The meeting of a large group: headers are combined on their way, so each rank sends and receives few bytes.

A *combination* of several ranks' headers is itself a header. It has the call word and shape of one of these ranks, the
sum of their balances (core/signature.py), whether any two of their headers differ, and the size of their blocks. The
plan of the exchange is in plans/circulant.py: in each of ceil(log2 n) rounds, a rank sends one header. Then every rank
has a combination of all headers, whose balance is 0 if all sizes match. If it shows that the calls do not match, the
ranks exchange all headers unchanged, so that each rank's error can name the calls of all ranks. Every call waits for
all ranks, and nothing is attached to headers, but they may carry data (plans/node_meeting.py).

A group is large if it has more than MEET_RANKS ranks, or meets by nodes.
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
    """Combine two headers, whose addresses are at `sources`, into `target`.

    Each of the two may itself be a combination.
    """
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
    block = load_word(first, w.HEAD_BLOCK)
    store_word(target, w.HEAD_BLOCK, block if load_word(second, w.HEAD_BLOCK) == block else -1)


@inlined
def _combined(c):
    return load_word(load_word(c, w.BUFFERS), t.SCRATCH) + COMBINED


@inlined
def block_of_all(c):
    """Return the size of every block in the calls of all ranks; -1 if blocks differ in size."""
    return load_word(_combined(c), w.HEAD_BLOCK)


@inlined
def all_agree(c):
    """Whether the combined headers show that the calls of all ranks match."""
    head = _combined(c)
    return load_word(head, w.HEAD_DIFFERS) == 0 and load_word(head, w.HEAD_BALANCE) == 0
