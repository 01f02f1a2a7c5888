"""The gate of a group: which thread may run a collective call now.

Calls of one group run one at a time and in the order in which they were made. If no earlier call is queued, a
synchronous call runs on its caller's thread. All remaining calls run on the group's progress thread, except for the
asynchronous calls that shm/inline_start.py begins on their callers' threads. A thread holds `lock` while its call runs.

If a thread makes a call while it is inside another one, the caller is a signal handler that has interrupted that call.
The new call is refused, since it would wait for the interrupted one. Compiled calls do not take `lock`. The gate finds
them by two functions that their backend passes to `also`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from ..errors import GroupError, MismatchError, NotInitializedError
from .work import ProgressQueue, UnobservedWorks, Work, is_progressing


class Gate:
    """The gate of one group, and the group's state that its backend needs.

    Attributes:
        name, ranks, rank, timeout, failure: those of the group.
        closed: the group was destroyed in this process.
        lock: held by the thread whose call runs.
        refusal: the reason why this rank refused the current call, as a text that the peers show, too; "" if this rank
            did not refuse it.
        earlier: the error of an earlier call that did not match, from which this rank had returned early; set during a
            call, and raised at the end of the operation. An operation may have several parts, and the peers make all
            of them.
        operation: the calls of a thread in `with gate.operation` are parts of one operation.
        queue: the queue of asynchronous calls, and of synchronous calls made while it is not empty.
        unobserved: asynchronous operations that are under way, or have failed with an error that no thread has read.
    """

    def __init__(self, name: str, ranks: Sequence[int], rank: int, timeout: float) -> None:
        self.name = name
        self.ranks = tuple(ranks)
        self.rank = rank
        self.timeout = timeout
        self.failure: GroupError | None = None
        self.closed = False
        self.refusal = ""
        self.earlier: MismatchError | None = None
        self.lock = threading.Lock()
        self.queue = ProgressQueue(name)
        self.unobserved = UnobservedWorks()
        self._inside: set[int] = set()  # threads that hold the lock, or wait for it
        self.operation = _Parts(self)
        self.in_operation: set[int] = set()  # threads whose calls are parts of an operation
        self._also_inside: Callable[[], bool] = lambda: False
        self._also_busy: Callable[[], bool] = lambda: False

    @property
    def size(self) -> int:
        return len(self.ranks)

    def also(self, inside: Callable[[], bool], busy: Callable[[], bool]) -> None:
        """Add tests for compiled calls, which do not take `lock`.

        Args:
            inside: returns whether this thread is in a compiled call.
            busy: returns whether any thread is in a compiled call.
        """
        self._also_inside, self._also_busy = inside, busy

    def name_of(self, what: str, number: int) -> str:
        """Name a call by its kind and its number among the group's calls, for error texts."""
        return f"{what}, call {number} of group {self.name!r}"

    def check_usable(self) -> None:
        """Raise if the group has failed (GroupError), or was destroyed."""
        if self.failure is not None:
            # Without the tracebacks of earlier raises, which would keep their frames and arrays alive.
            raise self.failure.with_traceback(None)
        if self.closed:
            raise NotInitializedError(f"the group {self.name} was destroyed; make a new one")

    def is_inside(self) -> bool:
        """Whether this thread is inside a call. If so, the caller is a signal handler."""
        return threading.get_ident() in self._inside or self._also_inside()

    def has_others_inside(self) -> bool:
        """Whether another thread is inside a call, or waits for its turn."""
        return bool(self._inside - {threading.get_ident()})

    def is_busy(self) -> bool:
        return self.queue.pending > 0 or self.lock.locked() or self._also_busy()

    def may_wait(self) -> bool:
        """Whether this thread may wait for operations under way, because they progress without this thread."""
        return not (self.closed or self.is_inside() or is_progressing())

    def run_exclusively(self, call: Callable[..., Any], *args: Any) -> Any:
        """Run a call on this thread as soon as no other call runs, and return its result."""
        thread = threading.get_ident()
        try:
            self._inside.add(thread)  # in the `try`, because Ctrl-C may come right after it
            with self.lock:
                result = call(*args)
                if self.earlier is not None and thread not in self.in_operation:
                    self.raise_earlier()
                return result
        finally:
            self._inside.discard(thread)

    def raise_earlier(self) -> None:
        error, self.earlier = self.earlier, None
        if error is not None:
            raise error

    def is_clear(self) -> bool:
        """Whether a call of this thread may run now: no call is queued, and the thread is not inside one."""
        return not self.queue.pending and threading.get_ident() not in self._inside

    def submit(self, name: str, job: Callable[[], Any], observed: bool = False) -> Work:
        """Queue a job for the progress thread, behind all earlier jobs, and return its Work.

        Args:
            observed: if true, no thread needs to check the Work; its error is not reported when the rank leaves.
        """
        return self.unobserved.note(self.queue.submit(name, job), observed)


class _Parts:
    """Makes the calls of a thread in the `with` one operation: a gate's `earlier` is raised only at the end."""

    __slots__ = ("_gate",)  # a generator would take twice the time

    def __init__(self, gate: Gate) -> None:
        self._gate = gate

    def __enter__(self) -> None:
        self._gate.in_operation.add(threading.get_ident())

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        self._gate.in_operation.discard(threading.get_ident())
        if kind is None:
            self._gate.raise_earlier()
