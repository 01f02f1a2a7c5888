"""Inline start: an asynchronous call begins on its caller's thread, and the thread that waits for it carries it on.

Ranks that run the same program make a call at about the same time. So most calls complete while they begin, and a call
whose peers are late is mostly completed by the thread that waits for its Work. Neither wakes another thread, which
would take 30 us. Until a thread waits, the call is *open* (open_calls.py): any thread may take it over. These threads
do:

- a thread that waits for the call's Work, briefly if the wait has a timeout, or asks whether it is complete;
- a thread that makes the group's next call, since calls run in order;
- the group's watcher, a thread that takes over calls which stay open for 0.1 to 0.2 ms, because their owner computes;
  where ranks share cores, for 1 to 2 ms, because then an owner that does not compute often has no core for longer.

A call of more than 1 MiB begins on the progress thread, so that it overlaps with what its caller does. The exception is
a caller that computes on the only core of its rank (`begin_at_once`), since moving the data takes the time of that core
in any case. A step of DistributedDataParallel (transformer of 3 MB, 2 ranks on 2 cores of an EPYC) takes 13.0 ms if
calls begin on the progress thread, 10.8 ms with an inline start, and 9.5 ms without communication.

Invariants:

- A call that is under way belongs to one thread, whose number is in BUSY, or it is open and `_open` is its Work. The
  thread that leaves a call open sets `_open` before it stores OPEN in BUSY. A thread that takes the call over reads
  `_open` afterwards.
- Every open call is taken over. The watcher goes to sleep only after it has cleared `_awake` and then found no open
  call. A thread that leaves a call open reads `_awake` afterwards, and wakes the watcher. The GIL orders these steps.
- No call is open in a closed group. The group is closed before `close` fails the open call. A thread that leaves a call
  open checks afterwards whether the group is closed, and calls `close` as well.

`tests/shm/test_inline_start_model.py` runs this code under many schedules.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import cached_property
from typing import Any

import numpy as np

from ..arrays.arrays import import_array
from ..arrays.tensors import header_of, headers_for, plain_types
from ..compiler.jit import Entry
from ..core.gate import Gate
from ..core.status import AGAIN, DONE, LATER, UNALLOCATED, WORKED
from ..core.work import ENDLESS, Work, is_progressing, mark_progressing
from ..errors import AbortedError, FastcollError, UsageError
from ..kernels import waiting
from ..kernels.primitives import address_of, cells_of
from . import context_layout as words
from .context import ShmContext, changed
from .open_calls import OPEN, take_over, watch
from .rounds import BRIEF, RESUMED

# For a caller that computes, with less than two cores a rank: nanoseconds that a wait may take, before the call stays
# open. With one core for each rank, the core idles during the wait. With fewer cores, peers compute on this core
# meanwhile, so it pays to wait for them.
_DEDICATED = 200_000
_OVERSUBSCRIBED = 20_000_000

_LONGEST = 1 << 20  # bytes; to move more takes longer than to wake the progress thread

# Nanoseconds between two looks of the watcher. On shared cores (8 ranks, 2 cores), an all_reduce of 8 bytes with its
# wait takes 122 us with 0.1 ms, and 76 us with 1 ms.
_WATCH_NS, _WATCH_NS_ON_SHARED_CORES = 100_000, 1_000_000
_WATCH_POLLS = 20  # looks without an open call before the watcher sleeps
_IDLE_SECONDS = 5.0  # without an open call before the watcher's thread ends

# The caller's next step with its call. BROKEN: another thread changed an array during the call.
FINISHED, NOT_BEGUN, GO_ON, LEAVE_OPEN, BROKEN = range(5)


def next_step(code: int, begun: bool, failed: bool) -> int:
    """Return the next step of a thread that may wait only briefly, after the call's entry returned `code`.

    Args:
        begun: the call owned the context before this run of the entry.
        failed: the group has failed; then a thread that may wait ends the call.
    """
    if code == DONE:
        return FINISHED
    if code == LATER:
        return BROKEN if begun else NOT_BEGUN
    return GO_ON if code == WORKED and not failed else LEAVE_OPEN


class _InlineWork(Work):
    """The Work of a call that began on its caller's thread; `_given` are the arguments of its entry."""

    _given: tuple[Any, ...]

    @cached_property
    def outputs(self) -> list[Any]:  # type: ignore[override]
        first = self._given[0]
        outs = first if type(first) is tuple else () if first is None or type(first) is int else (first,)
        return [x for out in outs for x in import_array(out, writable=False, what="tensor").arrays]


class CompleteCall(_InlineWork):
    """The Work of a call that was complete when it returned to its caller."""

    ended, _state = True, "FINISHED"

    def __init__(self, describe: str, given: tuple[Any, ...]) -> None:
        self.describe, self._given = describe, given


class OpenCall(_InlineWork):
    """The Work of a call that was left open.

    Args:
        args: the arguments with which the entry is called again; `given` keeps their memory alive.
        code: the last status that the entry returned.
        number: of the call, among the group's calls.
    """

    def __init__(
        self,
        calls: InlineStart,
        entry: Entry,
        args: tuple[Any, ...],
        given: tuple[Any, ...],
        code: int,
        number: int,
    ) -> None:
        super().__init__(entry.name)
        self._calls, self.entry, self.args, self._given = calls, entry, args, given
        self.code, self.number = code, number

    def is_completed(self) -> bool:
        if not self.ended and self._calls.is_open(self):
            self._calls.carry_on(briefly=True)
        return self.ended

    def await_end(self, limit: float) -> bool:
        if self._calls.is_open(self):
            self._calls.carry_on(briefly=limit < ENDLESS)
        if not self.ended:
            self._calls.refuse_inside(self.describe)
        return self.ended or self.end_event.wait(limit)


class InlineStart:
    """Begins a group's asynchronous calls on their callers' threads, and completes those that are left open.

    Args:
        resume, torn: handle an entry that returned early, and one that an exception has left; see calls.py.
        allocate: allocates the memory of this rank's slots, which an entry asks for once, by UNALLOCATED.
        share: number of cores for each rank of the job on this node.
        unawaited: called with the number of a call that a thread other than its caller takes over, before that thread
            waits in it.
    """

    def __init__(
        self,
        gate: Gate,
        context: ShmContext,
        resume: Callable[..., bool],
        torn: Callable[..., None],
        allocate: Callable[[], None],
        share: int,
        unawaited: Callable[[int], object],
    ) -> None:
        self._gate = gate
        self._context, self._c = context, context.address
        self._brief = self._c | BRIEF
        self._busy = cells_of(context.words[words.BUSY : words.BUSY + 1])
        self._resume, self._torn, self._allocate, self._share = resume, torn, allocate, share
        self._unawaited = unawaited
        self._watch_nanoseconds = _WATCH_NS_ON_SHARED_CORES if context[words.CROWDED] else _WATCH_NS
        self._open: OpenCall | None = None
        self._longest = _LONGEST
        self._changed = threading.Condition()
        self._watcher: threading.Thread | None = None
        self._awake = False  # whether the watcher polls

    def begin_at_once(self) -> None:
        """See ProcessGroup."""
        if self._share < 2:
            spins, yields, _ = self._context.words[words.PENDING_WAIT :][: words.WAIT_WORDS]
            budget = _DEDICATED if self._share else _OVERSUBSCRIBED
            self._context.wait_briefly(int(spins), int(yields), budget)
            self._longest = sys.maxsize

    # ---- the caller --------------------------------------------------------------------------------

    def begin(self, entry: Entry, *args: Any, integers: tuple[Any, ...] = ()) -> Work | None:
        """Begin a call on this thread and return its Work; None: the general path must make the call.

        Args:
            integers: the arguments that an entry may reject.
        """
        x, given = args[0], args
        if type(x) in plain_types:
            x = header_of(x)
            args = x, *args[1:]
        if (x.nbytes if type(x) is np.ndarray else _bytes_of(x)) > self._longest:
            return None
        try:
            code = entry.call(self._brief, *args)
            if code == DONE:
                return CompleteCall(entry.name, given)
            return self._go_on(code, entry, args, given)
        except BaseException as error:
            self._look_after_open_call()
            self._torn(entry, error, *integers)
            return None

    def _go_on(self, code: int, entry: Entry, args: tuple[Any, ...], given: tuple[Any, ...]) -> Work | None:
        """Go on with a call that is not complete after its entry's first run.

        Args:
            args: the entry's arguments, with a header in place of a tensor.
            given: the caller's arguments, which keep the memory of the arrays alive.
        """
        if code == LATER and plain_types:
            args = headers_for(args)
            code = entry.call(self._brief, *args)
        if code == LATER and self.carry_on(briefly=True):
            code = entry.call(self._brief, *args)
        step = next_step(code, False, False)
        while step == GO_ON or code == UNALLOCATED:
            if code == UNALLOCATED:
                self._allocate()
            code = entry.call(self._brief | RESUMED, *args)
            step = next_step(code, True, self._gate.failure is not None)
        if step == BROKEN:
            raise changed(entry.name)
        if step == NOT_BEGUN:
            return None
        if step == FINISHED:
            return CompleteCall(entry.name, given)
        if self._watcher is None:
            self._wake()  # before the call is open, because this may fail
        work = OpenCall(self, entry, args, given, code, self._context[words.CALLS])
        self._open = work
        self._busy[0] = OPEN
        self._look_after_open_call()
        return self._gate.unobserved.note(work)

    def _look_after_open_call(self) -> None:
        """Do what the thread that has left a call open must do (see the invariants), if a call is open."""
        if self._busy[0] != OPEN:
            return
        if self._gate.closed:
            self.close()
        elif not self._awake:
            self._wake()

    # ---- the thread that carries a call on -----------------------------------------------------------

    def is_open(self, work: OpenCall) -> bool:
        return self._open is work

    def refuse_inside(self, what: str) -> None:
        """Refuse to wait on a thread that carries a call on, and which a signal handler has interrupted.

        Raises:
            UsageError: this is such a thread.
        """
        if self._context.is_mine():
            raise UsageError(f"{what}: a signal handler may not wait for the call that it interrupted")

    def carry_on(self, briefly: bool = False) -> bool:
        """Take the open call over and complete it, and return True; if no call is open, return False.

        An error of the call is in its Work. An exception that a signal handler raises leaves the call open.

        Args:
            briefly: leave the call open again, and return False, if it is not complete after a brief wait.
        """
        work: OpenCall | None = None
        try:
            if take_over.call(self._c) != DONE:
                return False
            work, self._open = self._open, None
            assert work is not None
            code, work.code = work.code, AGAIN
            if not briefly and is_progressing():
                self._unawaited(work.number)
            if code in (AGAIN, WORKED):
                handle = self._c | (RESUMED | BRIEF if briefly else RESUMED)
                code = work.entry.call(handle, *work.args)
                if code == UNALLOCATED:
                    self._allocate()
                    code = work.entry.call(handle, *work.args)
                if briefly and code in (AGAIN, WORKED):
                    self._open, work = work, None
                    self._busy[0] = OPEN
                    self._look_after_open_call()
                    return False
            if code != DONE and not self._resume(code, work.entry, *work.args):
                raise changed(work.entry.name)
        except BaseException as error:
            self._end(work, error)
            return True
        work.complete()
        return True

    def _end(self, work: OpenCall | None, error: BaseException) -> None:
        """Handle an exception in `carry_on`: leave the call open, or complete its Work, with this error or without.

        Raises an exception that does not come from the call, but from a signal handler.
        """
        mine = self._context.is_mine()
        if work is None and mine:
            work, self._open = self._open, None
        if work is None:
            self._look_after_open_call()
            raise error
        by_call = isinstance(error, FastcollError)
        number, late, finished = (self._context[at] for at in (words.CALLS, words.LATE, words.FINISHED))
        if not by_call and mine and number == work.number and late >= 0:
            self._open = work
            self._busy[0] = OPEN
            self._look_after_open_call()
            raise error
        if not by_call and not mine and finished == work.number:
            work.complete()
            raise error
        try:
            self._torn(work.entry, error)
        except BaseException as reason:
            work.complete(error=reason)
        if not by_call:
            raise error

    def close(self) -> None:
        """Fail the open call, if any, and let the watcher end; the group is closed."""
        if take_over.call(self._c) == DONE:
            work, self._open = self._open, None
            self._context.let_go()
            if work is not None:
                destroyed = AbortedError(f"{work.describe}: the group {self._gate.name} was destroyed")
                work.complete(error=self._gate.failure or destroyed)
        with self._changed:
            self._changed.notify_all()

    # ---- the watcher -------------------------------------------------------------------------------

    def _wake(self) -> None:
        """Let the watcher poll; start its thread if there is none."""
        with self._changed:
            self._awake = True
            if self._watcher is None:
                name = f"fastcoll-watch-{self._gate.name}"
                watcher = threading.Thread(target=self._watch, name=name, daemon=True)
                watcher.start()
                self._watcher = watcher
            self._changed.notify_all()

    def _watch(self) -> None:
        """Take over calls that stay open, until the group is closed or there was no call for a while."""
        mark_progressing()
        table = np.zeros(waiting.POLLING_WORDS, np.int64)
        while not self._gate.closed:
            if watch.call(self._c, address_of(table), self._watch_nanoseconds, _WATCH_POLLS) == DONE:
                with suppress(BaseException):  # it is in the Work
                    self.carry_on()
                continue
            with self._changed:  # sleep until a call is left open
                self._awake = False
                if self._busy[0] != OPEN and not self._gate.closed:
                    self._changed.wait_for(lambda: self._awake or self._gate.closed, _IDLE_SECONDS)
                self._awake = self._awake or self._busy[0] == OPEN
                if not self._awake:
                    self._watcher = None
                    return


def _bytes_of(x: Any) -> int:
    """Return the size of an array, or of a tuple of arrays; 0 for other arguments."""
    return sum(map(_bytes_of, x)) if type(x) is tuple else getattr(x, "nbytes", 0)
