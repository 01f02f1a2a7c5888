"""Calls that are divided among lanes (lanes.py): what entries do about it, without the GIL.

In the group's own context a divided call only meets, by the call line that an undivided one would have: so ranks whose
calls do not match find that before any lane hears of the call. Then Python runs the same entry with the same
arguments in every lane's context, where it takes the lane's part of every block for the whole, and the group's own
context waits until all lanes are done.

Lanes write where the group's slots are. They begin after the meeting, when all earlier calls are complete on all ranks.
The next call must not write there before all lanes of all ranks are done, so a divided call counts as SLOTS rounds, all
of them read when it is complete: the next round waits for that.
"""

from __future__ import annotations

from ..core.status import AGAIN, DIVIDED, DONE
from ..kernels.jit import inlined, kernel
from ..kernels.primitives import load_word, store_word
from ..kernels.twins import start_of
from ..kernels.waiting import wait_for
from . import context_layout as at
from . import rounds as r
from . import validate as v
from .autotune import take_way
from .layout import SLOTS

UNIT = 64  # elements; parts are multiples of so many, so that no two lanes write one cache line


@inlined
def part_of(c, what, nbytes):
    """Where in a block of nbytes this lane's part begins, and its bytes; all of it in the group's own context."""
    if load_word(c, at.LANE) == 0:
        return 0, nbytes
    unit = UNIT * load_word(what, v.ITEMSIZE)
    lane, lanes = load_word(c, at.LANE) - 1, load_word(c, at.LANES)
    start = start_of(nbytes, lanes, lane, unit)
    return start, start_of(nbytes, lanes, lane + 1, unit) - start


@kernel
def _narrow(c, which, what):
    blocks, sizes = r.table(c, which), r.table(c, which + 1)
    for peer in range(load_word(c, at.SIZE)):
        if load_word(sizes, peer) != v.NO_MESSAGE:
            start, nbytes = part_of(c, what, load_word(sizes, peer))
            store_word(blocks, peer, load_word(blocks, peer) + start)
            store_word(sizes, peer, nbytes)


@inlined
def narrow(c, which, what):
    """Have the tables `which` and `which + 1` hold this lane's parts of the blocks."""
    if load_word(c, at.LANE) != 0:
        _narrow(c, which, what)


@inlined
def _lane(c, lane):
    """Address of a lane's context."""
    return load_word(c, at.LANE_CONTEXTS + lane)


@inlined
def _hand_over(c, what):
    store_word(c, at.CALLS_DIVIDED, load_word(c, at.CALLS_DIVIDED) + 1)
    for k in range(load_word(c, at.LANES)):
        lane = _lane(c, k)
        store_word(lane, at.GIVEN, what)
        store_word(lane, at.ONE_SHOT, load_word(c, at.ONE_SHOT))
        take_way(r.ways_at(lane), r.ways_at(c))


@kernel
def divide(c, what, call, shape, balance):
    """Meet, and return DIVIDED; resumed after that, wait for the lanes."""
    if load_word(c, at.WROTE) == 0:
        r.publish(c, call, shape, balance)
    if load_word(c, at.MET) == 0:
        waited = r.meet(c, call, shape, balance)
        if waited != DONE:
            return waited
        _hand_over(c, what)
        return DIVIDED
    for k in range(load_word(c, at.LANES)):
        lane = _lane(c, k)
        if not wait_for(c + 8 * at.PATIENCE, lane + 8 * at.FINISHED, load_word(c, at.CALLS_DIVIDED)):
            late = load_word(lane, at.LATE)
            store_word(c, at.LATE, load_word(c, at.RANK) if late < 0 else late)
            return AGAIN
    store_word(c, at.READ, SLOTS)
    return r.finish(c)
