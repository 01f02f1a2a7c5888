"""A head start: an asynchronous call begins on its caller's thread, where the progress thread has no core of its own.

A caller that computes leaves no progress thread time on the core that they share. So the call goes as far as the peers
let it at once, mostly to its end, since ranks that do the same come to it at about the same time. What has to wait for
longer is handed over to the progress thread, so no caller is held up by a late peer. Steps of DistributedDataParallel
(transformer of 3 MB, 2 ranks on 2 cores of an EPYC): 13.0 ms on the progress thread, 10.8 ms with a head start, 9.5 ms
without communication.

BUSY says who goes on with the call: its caller, then nobody (handed over), then the thread that took it over. Both
changes are made under the queue's lock, so nobody goes on with a call before its caller has let go of it, or after the
caller was interrupted or the group was closed. A call is queued only where nothing else is: what another thread has
queued since it began waits for the context, and in front of it would hold up the very call that it waits for. Beside
such a one the call goes on on a thread of its own. `tests/shm/test_head_start_model.py` explores every schedule.
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
from .context import HANDED_OVER, Context, changed
from .rounds import RESUMED

# Nanoseconds that one wait of a head start may take. With a core for each rank, that core idles meanwhile: as long as
# handing over takes. With fewer, the peers compute on it, and it pays to wait until they come.
_DEDICATED = 200_000
_OVERSUBSCRIBED = 20_000_000

# What a caller does next with its call. BROKEN: an array was changed in the middle of it.
FINISHED, NOT_BEGUN, GO_ON, HAND_OVER, BROKEN = range(5)

_COMPLETE = Work()
_COMPLETE.complete()


def next_step(code: int, begun: bool, failed: bool) -> int:
    """What its caller does with a call whose entry returned `code`.

    Args:
        begun: the call had the context already when the entry was called.
        failed: the group has; then the progress thread ends the call.
    """
    if code == DONE:
        return FINISHED
    if code == LATER:
        return BROKEN if begun else NOT_BEGUN
    return GO_ON if code == WORKED and not failed else HAND_OVER


def goes_aside(pending: int) -> bool:
    """Whether a call that is handed over gets a thread of its own; `pending`: operations queued or under way."""
    return pending > 0


def may_take_over(busy: int, closed: bool) -> bool:
    """Whether a call can be gone on with: it was handed over (BUSY is no thread's number), and the group is open."""
    return busy < 0 and not closed


class HeadStart:
    """Begins a group's asynchronous calls on their callers' threads.

    Args:
        resume, torn: what follows an entry that comes back early, or is left by an exception; see ShmBackend.
        share: cores for each rank of the job on this node.
    """

    def __init__(
        self, gate: Gate, context: Context, resume: Callable[..., bool], torn: Callable[..., None], share: int
    ) -> None:
        self._gate = gate
        self._context, self._c = context, context.address
        self._resume_entry, self._torn, self._share = resume, torn, share
        self._ahead = 0  # ns that a wait may take; 0: asynchronous calls begin on the progress thread
        self._handing: set[int] = set()  # threads that hand a call over right now

    def begin_at_once(self) -> None:
        """See ProcessGroup."""
        if self._share < 2:
            self._ahead = _DEDICATED if self._share else _OVERSUBSCRIBED

    def is_handing_over(self) -> bool:
        """Whether this thread has the queue's lock: a signal handler that waited for the progress thread would hang."""
        return threading.get_ident() in self._handing

    def begin(self, entry: Entry, *args: Any, integers: Sequence[Any] = ()) -> Work | None:
        """Begin a call on this thread; None: leave it to the general path.

        Args:
            integers: those arguments that an entry may refuse.
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
                return self._gate.unheard.note(self._hand_over(code, entry, args, given))
            if step == BROKEN:
                raise changed(entry.name)
        except BaseException as error:
            self._torn(entry, error, *integers)
            return None
        finally:
            self._context.wait_no_longer_than()
        return _COMPLETE if step == FINISHED else None

    def _hand_over(self, code: int, entry: Entry, args: tuple[Any, ...], given: tuple[Any, ...]) -> Work:
        """Leave this thread's call to another one; `given`: what keeps the memory of `args` alive."""
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
        """Go on with a call that was handed over; nobody else can take the context, so this needs no turn."""
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
