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
from ..kernels.waiting import wait_for
from .border import ITEMSIZE, NO_MESSAGE
from .choosing import take_way
from .layout import SLOTS
from .rounds import finish, meet, publish, table, ways_at
from .words import (
    CALLS_DIVIDED,
    FINISHED,
    GIVEN,
    LANE,
    LANE_CONTEXTS,
    LANES,
    LATE,
    MET,
    ONE_SHOT,
    PATIENCE,
    RANK,
    READ,
    SIZE,
    WROTE,
)

UNIT = 64  # elements; parts are multiples of so many, so that no two lanes write one cache line


@inlined
def part_of(c, what, nbytes):
    """Where in a block of nbytes this lane's part begins, and its bytes; all of it in the group's own context."""
    if load_word(c, LANE) == 0:
        return 0, nbytes
    unit = UNIT * load_word(what, ITEMSIZE)
    each = -(-nbytes // (unit * load_word(c, LANES))) * unit
    start = min(nbytes, (load_word(c, LANE) - 1) * each)
    return start, min(each, nbytes - start)


@kernel
def _narrow(c, which, what):
    blocks, sizes = table(c, which), table(c, which + 1)
    for peer in range(load_word(c, SIZE)):
        if load_word(sizes, peer) != NO_MESSAGE:
            start, nbytes = part_of(c, what, load_word(sizes, peer))
            store_word(blocks, peer, load_word(blocks, peer) + start)
            store_word(sizes, peer, nbytes)


@inlined
def narrow(c, which, what):
    """Have the tables `which` and `which + 1` hold this lane's parts of the blocks."""
    if load_word(c, LANE) != 0:
        _narrow(c, which, what)


@inlined
def _lane(c, lane):
    """Address of a lane's context."""
    return load_word(c, LANE_CONTEXTS + lane)


@inlined
def _hand_over(c, what):
    store_word(c, CALLS_DIVIDED, load_word(c, CALLS_DIVIDED) + 1)
    for k in range(load_word(c, LANES)):
        lane = _lane(c, k)
        store_word(lane, GIVEN, what)
        store_word(lane, ONE_SHOT, load_word(c, ONE_SHOT))
        take_way(ways_at(lane), ways_at(c))


@kernel
def divide(c, what, call, shape, balance):
    """Meet, and return DIVIDED; resumed after that, wait for the lanes."""
    if load_word(c, WROTE) == 0:
        publish(c, call, shape, balance)
    if load_word(c, MET) == 0:
        waited = meet(c, call, shape, balance)
        if waited != DONE:
            return waited
        _hand_over(c, what)
        return DIVIDED
    for k in range(load_word(c, LANES)):
        lane = _lane(c, k)
        if not wait_for(c + 8 * PATIENCE, lane + 8 * FINISHED, load_word(c, CALLS_DIVIDED)):
            late = load_word(lane, LATE)
            store_word(c, LATE, load_word(c, RANK) if late < 0 else late)
            return AGAIN
    store_word(c, READ, SLOTS)
    return finish(c)
