"""Lanes: several threads of a rank that share its large calls, where there are cores for them.

A lane is a context of its own, with control words and slots of its own in every section. A divided call is one ordinary
call in every lane, each with its part of every block; lanes never wait for one another, so the protocol is that of
rounds.py, and results are the same bits. Lane 0 is driven by the thread that makes the call, the others by threads that
sleep between two calls. Whether dividing pays is found out while the program runs (autotune.py).

In the group's own context a divided call only meets, by the call line that an undivided one would have: so ranks whose
calls do not match find that before any lane hears of the call. Then Python runs the same entry with the same
arguments in every lane's context, where it takes the lane's part of every block for the whole, and the group's own
context waits until all lanes are done.

Lanes write where the group's slots are. They begin after the meeting, when all earlier calls are complete on all ranks.
The next call must not write there before all lanes of all ranks are done, so a divided call counts as SLOTS rounds, all
of them read when it is complete: the next round waits for that.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from typing import Any

from ..compiler.jit import Entry, inlined, kernel
from ..core.monitor import Monitor
from ..core.status import AGAIN, DIVIDED, DONE, WORKED
from ..errors import AbortedError, GroupError
from ..kernels.primitives import load_word, start_of, store_word
from ..kernels.waiting import wait_for
from . import context_layout as at
from . import rounds as r
from . import validate as v
from .autotune import take_way
from .context import Context, changed, kept
from .layout import LANE_CONTROL, LANES, SLOTS
from .segment import Segment

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
def narrow(c, which, what):
    """Have the tables `which` and `which + 1` hold this lane's parts of the blocks."""
    if load_word(c, at.LANE) == 0:
        return
    blocks, sizes = r.table(c, which), r.table(c, which + 1)
    for peer in range(load_word(c, at.SIZE)):
        if load_word(sizes, peer) != v.NO_MESSAGE:
            start, nbytes = part_of(c, what, load_word(sizes, peer))
            store_word(blocks, peer, load_word(blocks, peer) + start)
            store_word(sizes, peer, nbytes)


@kernel
def divide(c, what, call, shape, balance):
    """Meet, and return DIVIDED; resumed after that, wait for the lanes."""
    if load_word(c, at.WROTE) == 0:
        r.publish(c, call, shape, balance)
    if load_word(c, at.MET) == 0:
        waited = r.meet(c, call, shape, balance)
        if waited != DONE:
            return waited
        store_word(c, at.CALLS_DIVIDED, load_word(c, at.CALLS_DIVIDED) + 1)
        for k in range(load_word(c, at.LANES)):
            lane = load_word(c, at.LANE_CONTEXTS + k)
            store_word(lane, at.GIVEN, what)
            store_word(lane, at.ONE_SHOT, load_word(c, at.ONE_SHOT))
            take_way(r.ways_at(lane), r.ways_at(c))
        return DIVIDED
    for k in range(load_word(c, at.LANES)):
        lane = load_word(c, at.LANE_CONTEXTS + k)
        if not wait_for(c + 8 * at.PATIENCE, lane + 8 * at.FINISHED, load_word(c, at.CALLS_DIVIDED)):
            late = load_word(lane, at.LATE)
            store_word(c, at.LATE, load_word(c, at.RANK) if late < 0 else late)
            return AGAIN
    store_word(c, at.READ, SLOTS)
    return r.finish(c)


# ---- the threads -------------------------------------------------------------------------------------------

_POLL_SECONDS = 1e-4

Look = Callable[[int, Context], None]
"""`look(code, context)`: an entry came back early; raises when going on is hopeless."""


class Lanes:
    """The lanes of one rank of a group: `number` of them, or none where that is 1; the group's own context is told."""

    def __init__(
        self,
        name: str,
        context: Context,
        segment: Segment,
        cores: int,
        number: int,
        vigil: Monitor,
        fail: Callable[[GroupError], None],
    ) -> None:
        layout = segment.layout
        self._contexts: list[Context] = []
        context.words[at.LANES] = number
        for lane in range(number if number > 1 else 0):
            own = Context(segment.address, layout, context[at.RANK], cores // number)
            control = LANES + lane * LANE_CONTROL
            own.words[at.SECTIONS] += control
            own.words[at.COMBINED] = 0  # divided calls are large
            own.words[at.SLOTS_AT] = layout.lane_slots_at(lane, number) - control
            own.words[at.SLOT] = layout.lane_slot(number)
            own.words[at.LANE], own.words[at.LANES] = lane + 1, number
            context.words[at.LANE_CONTEXTS + lane] = own.address
            self._contexts.append(own)

        def look(code: int, context: Context) -> None:
            # The thread of the call looks at peers and the clock, and fails the group if it must.
            if vigil.failure is not None:
                raise vigil.failure.with_traceback(None)

        self._helpers = [
            _Helper(f"fastcoll-{name}-lane-{k}", lane, look, fail)
            for k, lane in enumerate(self._contexts[1:], 1)
        ]

    def run(self, entry: Entry, args: tuple[Any, ...], look: Look) -> None:
        """Run a divided call on all lanes; returns when this thread's own has done its part.

        Raises:
            GroupError: whatever `look` raises; the others still use the arrays then, until `settle`.
        """
        what = self._contexts[0][at.GIVEN]
        args = kept(entry.name, args, ctypes.c_int64.from_address(what + 8 * v.ITEMSIZE).value)
        for helper in self._helpers:
            helper.start(entry, args)
        drive(entry, self._contexts[0], args, look)

    def settle(self, timeout: float = 5.0) -> bool:
        """The group has failed: wait until no lane touches the arrays of the call any more; whether that is so."""
        deadline = time.monotonic() + timeout
        while (busy := any(helper.is_busy() for helper in self._helpers)) and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
        return not busy

    def close(self, timeout: float = 5.0) -> bool:
        """End the threads, after the last call; whether they have ended. Closing twice is fine."""
        return all([helper.close(timeout) for helper in self._helpers])


def drive(entry: Entry, context: Context, args: tuple[Any, ...], look: Look) -> None:
    """Run a lane's part of a call to its end, on this thread."""
    code = entry.call(context.address | r.PREPARED, *args)
    while code in (AGAIN, WORKED):
        look(code, context)
        code = entry.call(context.address | r.PREPARED | r.RESUMED, *args)
    if code != DONE:
        raise changed(entry.name)


class _Helper:
    """The thread of one lane; it starts with the first call and sleeps between two."""

    def __init__(self, name: str, context: Context, look: Look, fail: Callable[[GroupError], None]) -> None:
        self._name, self._context, self._look, self._fail = name, context, look, fail
        self._jobs: SimpleQueue[tuple[Entry, tuple[Any, ...]] | None] = SimpleQueue()
        self._started = self._ended = 0
        self._thread: threading.Thread | None = None

    def start(self, entry: Entry, args: tuple[Any, ...]) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()  # Ctrl-C may come as it returns
        self._started += 1
        self._jobs.put((entry, args))

    def is_busy(self) -> bool:
        return self._ended < self._started

    def close(self, timeout: float) -> bool:
        if self._thread is None:
            return True
        self._jobs.put(None)
        with suppress(RuntimeError):  # Ctrl-C came before it was started
            self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                drive(job[0], self._context, job[1], self._look)
            except GroupError as error:
                self._fail(error)
            except BaseException as error:
                self._fail(AbortedError(f"the thread {self._name} ended: {error!r}"))
            del job
            self._ended += 1
