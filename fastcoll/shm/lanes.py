"""Lanes: several threads of a rank that share its large calls, where there are cores for them.

A lane is a context of its own, with control words and slots of its own in every section. A divided call
(lane_kernels.py) is one ordinary call in every lane, each with its part of every block; lanes never wait for one
another, so the protocol is that of rounds.py, and results are the same bits. Lane 0 is driven by the thread that makes
the call, the others by threads that sleep between two calls. Whether dividing pays is found out while the program runs
(autotune.py).
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any

from ..core.monitor import Monitor
from ..core.status import AGAIN, DONE, WORKED
from ..errors import AbortedError, GroupError
from ..kernels.jit import Entry
from . import context_layout as at
from . import rounds
from .context import Context, kept
from .layout import LANE_CONTROL, LANES, MAX_LANES, Layout
from .segment import Segment
from .validate import ITEMSIZE

# Bytes that a round has for each rank: a round's waits take as long as copying them.
_SMALLEST_PIECE = 4 << 10
_POLL_SECONDS = 1e-4
_EARLY = (AGAIN, WORKED)

Look = Callable[[int, Context], None]
"""`look(code, context)`: an entry came back early; raises when going on is hopeless."""


def lanes_for(layout: Layout, masks: Sequence[int], wanted: Sequence[int], share: int) -> int:
    """How many lanes a group has, from what all its ranks know of one another.

    Args:
        masks: the CPUs that each rank may use, as bits.
        wanted: what FASTCOLL_LANES says on each rank, 0 for nothing.
        share: cores for each rank of the job, wherever that is.
    """
    # As many ranks as have no other CPUs than a rank compete for its own.
    crowds = [mask.bit_count() // sum(other & ~mask == 0 for other in masks) for mask in masks]
    cores = min(share, *crowds) if layout.size > 1 else 1
    lanes = min(MAX_LANES, *(number or cores for number in wanted))
    return lanes if lanes > 1 and layout.lane_slot(lanes) // layout.size >= _SMALLEST_PIECE else 1


class Lanes:
    """The lanes of one rank of a group.

    Args:
        context: the group's own, which is told of them.
        contexts: one a lane; none: the group has no lanes.
        fail: makes the group fail.
    """

    def __init__(
        self,
        name: str,
        context: Context,
        contexts: Sequence[Context],
        vigil: Monitor,
        fail: Callable[[GroupError], None],
    ) -> None:
        self._vigil = vigil
        self._contexts = list(contexts)
        self._helpers = [
            _Helper(f"fastcoll-{name}-lane-{k}", lane, self._see, fail)
            for k, lane in enumerate(contexts)
            if k > 0
        ]
        context.words[at.LANES] = max(1, len(contexts))
        for k, lane in enumerate(contexts):
            context.words[at.LANE_CONTEXTS + k] = lane.address

    @classmethod
    def of(
        cls,
        name: str,
        context: Context,
        segment: Segment,
        rank: int,
        cores: int,
        number: int,
        vigil: Monitor,
        fail: Callable[[GroupError], None],
    ) -> Lanes:
        """So many lanes in a segment; 1: none."""
        lanes = range(number if number > 1 else 0)
        contexts = [_context(segment, rank, cores, lane, number) for lane in lanes]
        return cls(name, context, contexts, vigil, fail)

    def run(self, entry: Entry, args: tuple[Any, ...], look: Look) -> None:
        """Run a divided call on all lanes; returns when this thread's own has done its part.

        Raises:
            GroupError: whatever `look` raises; the others still use the arrays then, until `settle`.
        """
        what = self._contexts[0][at.GIVEN]
        args = kept(entry.name, args, ctypes.c_int64.from_address(what + 8 * ITEMSIZE).value)
        for helper in self._helpers:
            helper.start(entry, args)
        drive(entry, self._contexts[0], args, look)

    def settle(self, timeout: float = 5.0) -> bool:
        """The group has failed: wait until no lane touches the arrays of the call any more; whether that is so."""
        deadline = time.monotonic() + timeout
        while busy := any(helper.is_busy() for helper in self._helpers):
            if time.monotonic() > deadline:
                break
            time.sleep(_POLL_SECONDS)
        return not busy

    def close(self, timeout: float = 5.0) -> bool:
        """End the threads, after the last call; whether they have ended. Closing twice is fine."""
        return all([helper.close(timeout) for helper in self._helpers])

    def _see(self, code: int, context: Context) -> None:
        """A helper's look: the thread of the call looks at peers and the clock, and fails the group if it must."""
        if self._vigil.failure is not None:
            raise self._vigil.failure.with_traceback(None)


def _context(segment: Segment, rank: int, cores: int, lane: int, lanes: int) -> Context:
    """The context of lane number `lane` of `lanes`, from 0."""
    layout = segment.layout
    context = Context(segment.address, layout, rank, cores // lanes)
    control = LANES + lane * LANE_CONTROL
    context.words[at.SECTIONS] += control
    context.words[at.SLOTS_AT] = layout.lane_slots_at(lane, lanes) - control
    context.words[at.SLOT] = layout.lane_slot(lanes)
    context.words[at.LANE] = lane + 1
    context.words[at.LANES] = lanes
    return context


def drive(entry: Entry, context: Context, args: tuple[Any, ...], look: Look) -> None:
    """Run a lane's part of a call to its end, on this thread."""
    code = entry.call(context.address | rounds.PREPARED, *args)
    while code in _EARLY:
        look(code, context)
        code = entry.call(context.address | rounds.PREPARED | rounds.RESUMED, *args)
    if code != DONE:
        raise AbortedError(f"{entry.name}: an array was changed meanwhile")


class _Helper:
    """The thread of one lane; it starts with the first call and sleeps between two."""

    def __init__(self, name: str, context: Context, look: Look, fail: Callable[[GroupError], None]) -> None:
        self._name, self._context, self._look, self._fail = name, context, look, fail
        self._jobs: SimpleQueue[tuple[Entry, tuple[Any, ...]] | None] = SimpleQueue()
        self._started = self._ended = 0
        self._thread: threading.Thread | None = None

    def start(self, entry: Entry, args: tuple[Any, ...]) -> None:
        if self._thread is None:
            thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            thread.start()
            self._thread = thread
        self._started += 1
        self._jobs.put((entry, args))

    def is_busy(self) -> bool:
        return self._ended < self._started

    def close(self, timeout: float) -> bool:
        if self._thread is None:
            return True
        self._jobs.put(None)
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
