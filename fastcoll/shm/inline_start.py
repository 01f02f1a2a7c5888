"""Inline start: an asynchronous call begins on its caller's thread if the progress thread has no core of its own.

A caller that computes leaves the progress thread no time on the core that they share. So the caller runs the call as
far as the peers allow at once. Mostly the call completes then, because ranks that run the same program reach it at
about the same time. A call that would have to wait longer is handed over to the progress thread, so a late peer does
not block the caller. A step of DistributedDataParallel (transformer of 3 MB, 2 ranks on 2 cores of an EPYC) takes 13.0
ms if calls begin on the progress thread, 10.8 ms with an inline start, and 9.5 ms without communication.

BUSY, a word of the group's context (context_layout.py), names the thread that runs the call: first the caller, then
HANDED_OVER for no thread, then the thread that takes the call over.

Invariants:

- A thread takes a call over only after its caller has released the call: the caller stores HANDED_OVER under the
  queue's lock, and the thread replaces HANDED_OVER under the same lock.
- No thread takes over a call whose caller was interrupted before it handed the call over, or whose group was closed:
  BUSY is 0 then, and a thread takes a call over only if BUSY is HANDED_OVER.
- A call is put into the progress queue only if the queue is empty; otherwise it gets a thread of its own. Another
  thread may have queued an operation since the call began. That operation waits for the context, which this call owns,
  so a call queued behind it would never run.

`tests/shm/test_inline_start_model.py` explores every schedule.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from ..arrays.tensors import headers_for, plain_types
from ..compiler.jit import Entry
from ..core.gate import Gate
from ..core.status import AGAIN, DONE, LATER, WORKED
from ..core.work import ProgressQueue, Work
from ..errors import AbortedError
from . import context_layout as words
from .context import HANDED_OVER, ShmContext, changed
from .rounds import RESUMED

# Nanoseconds that one wait of an inline start may take. With one core for each rank, the core idles during the wait, so
# the wait may take as long as a hand-over does. With fewer cores, peers compute on this core meanwhile, so it pays to
# wait for them.
_DEDICATED = 200_000
_OVERSUBSCRIBED = 20_000_000

# The caller's next step with its call. BROKEN: another thread changed an array during the call.
FINISHED, NOT_BEGUN, GO_ON, HAND_OVER, BROKEN = range(5)

_COMPLETE = Work()
_COMPLETE.complete()


def next_step(code: int, begun: bool, failed: bool) -> int:
    """Return the caller's next step after the call's entry returned `code`.

    Args:
        begun: the call owned the context before this run of the entry.
        failed: the group has failed; then the progress thread ends the call.
    """
    if code == DONE:
        return FINISHED
    if code == LATER:
        return BROKEN if begun else NOT_BEGUN
    return GO_ON if code == WORKED and not failed else HAND_OVER


def goes_aside(pending: int) -> bool:
    """Whether a call that is handed over gets a thread of its own; `pending`: operations queued or running."""
    return pending > 0


def may_take_over(busy: int, closed: bool) -> bool:
    """Whether a thread may take a call over: BUSY is HANDED_OVER (negative), and the group is open."""
    return busy < 0 and not closed


class InlineStart:
    """Begins a group's asynchronous calls on their callers' threads.

    Args:
        resume, torn: handle an entry that returned early, and one that an exception has left; see calls.py.
        share: number of cores for each rank of the job on this node.
    """

    def __init__(
        self,
        gate: Gate,
        context: ShmContext,
        resume: Callable[..., bool],
        torn: Callable[..., None],
        share: int,
    ) -> None:
        self._gate = gate
        self._context, self._c = context, context.address
        self._resume_entry, self._torn, self._share = resume, torn, share
        self._ahead = 0  # ns that a wait may take; 0: asynchronous calls begin on the progress thread
        self._handing: set[int] = set()  # threads that are handing a call over

    def begin_at_once(self) -> None:
        """See ProcessGroup."""
        if self._share < 2:
            self._ahead = _DEDICATED if self._share else _OVERSUBSCRIBED

    def is_handing_over(self) -> bool:
        """Whether this thread holds the queue's lock: a signal handler must not wait for the progress thread then."""
        return threading.get_ident() in self._handing

    def begin(self, entry: Entry, *args: Any, integers: Sequence[Any] = ()) -> Work | None:
        """Begin a call on this thread and return its Work; None: the general path must make the call.

        Args:
            integers: the arguments that an entry may reject.
        """
        if not self._ahead:
            return None
        given = args
        try:
            self._context.wait_no_longer_than(self._ahead)
            code = entry.call(self._c, *args)
            if code == LATER and plain_types:
                args = headers_for(args)
                code = entry.call(self._c, *args)
            step = next_step(code, False, False)
            while step == GO_ON:
                code = entry.call(self._c | RESUMED, *args)
                step = next_step(code, True, self._gate.failure is not None)
            if step == HAND_OVER:
                return self._gate.unobserved.note(self._hand_over(code, entry, args, given))
            if step == BROKEN:
                raise changed(entry.name)
        except BaseException as error:
            self._torn(entry, error, *integers)
            return None
        finally:
            self._context.wait_no_longer_than()
        return _COMPLETE if step == FINISHED else None

    def _hand_over(self, code: int, entry: Entry, args: tuple[Any, ...], given: tuple[Any, ...]) -> Work:
        """Hand this thread's call over to another thread; `given` keeps the memory of `args` alive."""
        aside: ProgressQueue | None = None

        def job(_: Any = given) -> None:
            try:
                self._resume(code, entry, args)
            finally:
                if aside is not None:
                    aside.close()

        thread = threading.get_ident()
        try:
            with self._gate.queue.changed:
                self._handing.add(thread)
                if self._gate.closed:
                    raise AbortedError(f"{entry.name}: the group {self._gate.name} was destroyed")
                if goes_aside(self._gate.queue.pending):
                    aside = ProgressQueue(f"{self._gate.name}-aside")
                work = (aside or self._gate.queue).submit(entry.name, job)
                self._context.words[words.BUSY] = HANDED_OVER
        finally:
            self._handing.discard(thread)
        return work

    def _resume(self, code: int, entry: Entry, args: tuple[Any, ...]) -> None:
        """Take over a call that was handed over. BUSY is not 0, so no other call can take the context meanwhile."""
        with self._gate.queue.changed:
            if not may_take_over(self._context[words.BUSY], self._gate.closed):
                self._gate.check_usable()
                raise AbortedError(f"{entry.name} was interrupted on the thread that began it")
            self._context.words[words.BUSY] = threading.get_ident()
        try:
            if code == AGAIN:
                code = entry.call(self._c | RESUMED, *args)
            if code != DONE and not self._resume_entry(code, entry, *args):
                raise changed(entry.name)
        except BaseException as error:
            self._torn(entry, error)
