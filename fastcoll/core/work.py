"""Work, the handle of an asynchronous operation, and the queue that runs operations in order.

A group has one ProgressQueue. Its thread starts with the first operation that is queued and ends after 5 s without one.
Compiled functions release the GIL while they run, so the caller can compute meanwhile.
"""

from __future__ import annotations

import logging
import math
import os
import threading
from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from concurrent.futures._base import FINISHED, PENDING, RUNNING
from contextlib import suppress
from datetime import timedelta
from numbers import Integral, Real
from typing import Any, Literal, TypeAlias, TypeVar

from ..errors import AbortedError, CollectiveTimeoutError, UsageError
from ..system.forks import at_fork
from . import future as futures

_log = logging.getLogger("fastcoll")


class _Here(threading.local):
    progress = False  # whether this thread runs operations; a class attribute, because getattr's default costs 0.4 us


_here = _Here()
has_progressing = False
"""Whether a thread was marked by `mark_progressing`; most programs have none, and reading `_here` takes 0.1 us."""

Timeout = float | timedelta | None
Sync: TypeAlias = Literal[False]  # `async_op` in overloads
Async: TypeAlias = Literal[True]

ENDLESS = threading.TIMEOUT_MAX
"""Seconds to wait if there is no limit. A wait without any timeout can ignore Ctrl-C: if a library (polars) installs a
SIGINT handler with SA_RESTART, Linux restarts that wait after the handler."""

_forks = 0  # the number of forks between this process and the one that imported this file


def _count_fork() -> None:
    global _forks
    _forks += 1


at_fork("works", _count_fork)


def forks() -> int:
    """Return the number of forks between this process and the one that imported this file."""
    return _forks


def seconds(timeout: Timeout, default: float) -> float:
    """Convert a timeout (a number of seconds, a timedelta, or None for the default) to seconds, at most ENDLESS.

    Raises:
        UsageError: `timeout` is none of these.
    """
    if timeout is None:
        return default
    if isinstance(timeout, timedelta):
        return min(timeout.total_seconds(), ENDLESS)
    if isinstance(timeout, Real) and not math.isnan(limit := float(min(timeout, ENDLESS))):
        return limit
    raise UsageError(f"timeout is {timeout!r}; give seconds as a number, or a timedelta")


def is_progressing() -> bool:
    """Whether the calling thread is a progress thread. User code on such a thread is always a Work's callback."""
    return has_progressing and _here.progress


def mark_progressing() -> None:
    """Mark this thread as one that runs operations."""
    global has_progressing
    has_progressing = _here.progress = True


def refuse_to_block(what: str) -> None:
    """Refuse to wait on a progress thread, which would wait for itself.

    Raises:
        UsageError: this is a progress thread, so the caller is a Work's callback.
    """
    if is_progressing():
        raise UsageError(
            f"{what}: a Work's callback may not wait; start asynchronous operations there instead"
        )


class Work(Future[Any]):
    """The handle of an asynchronous operation.

    The program may not use the call's arrays until the operation is complete. Several threads may wait for a Work,
    and each may do so more than once. `concurrent.futures.wait` and `as_completed` accept Works. A Work cannot be
    cancelled, since the other ranks may have begun the operation.
    """

    needs_message = False
    """Whether the operation ends only when a message arrives, which may never be sent."""

    # Most operations end before a thread blocks for them, so the listeners (event, lock, callbacks) are made on first
    # use. A thread that makes one sets `has_listeners` before it checks `ended`; `complete` sets `ended` before it
    # checks `has_listeners`. So at least one of the two threads sees what the other has set.
    ended = has_listeners = _observed = False  # _observed: a thread has read how the operation ended
    returned: Any = None  # the value that the synchronous call returns
    error: BaseException | None = None
    _has_begun = False
    noted_by: UnobservedWorks | None = None
    outputs: Sequence[Any] = ()  # the arrays that the operation writes
    profiled: Any = None  # what profiler.py logs when a thread waits, if a profile is on

    def __init__(self, describe: str = "operation") -> None:
        self.describe = describe
        self.forks = _forks

    @property
    def _state(self) -> str:  # type: ignore[override]  # which concurrent.futures.wait and as_completed read
        return FINISHED if self.ended else RUNNING if self._has_begun else PENDING

    @property
    def end_event(self) -> threading.Event:
        """The event that is set when the operation has ended."""
        self.has_listeners = True
        event: threading.Event = self.__dict__.setdefault("_end", threading.Event())
        if self.ended:
            event.set()
        return event

    # `_condition` and `_waiters` are the private attributes that concurrent.futures.wait and as_completed use. No
    # thread waits on the condition, so a lock is enough.
    @property
    def _condition(self) -> Any:  # type: ignore[override]
        self.has_listeners = True
        return self.__dict__.setdefault("_lock", threading.RLock())

    @property
    def _waiters(self) -> list[Any]:  # type: ignore[override]
        self.has_listeners = True
        waiters: list[Any] = self.__dict__.setdefault("_listeners", [])
        return waiters

    def __repr__(self) -> str:
        if not self.is_completed():
            how = self._state.lower()
        elif (error := self.exception()) is None:
            how = "done"
        else:
            how = f"failed with {type(error).__name__}: {error}"
        return f"<Work {self.describe}: {how}>"

    def wait(self, timeout: Timeout = None) -> bool:
        """Block until the operation is complete, then return True, or raise the error that ended it.

        Args:
            timeout: seconds or timedelta; None: until the group's own timeout ends the operation.

        Raises:
            CollectiveTimeoutError: not complete within `timeout` (the operation goes on).
            UsageError: called from a Work's callback before this operation is complete, or `timeout` is invalid.
            AbortedError: the operation is under way in the process from which this one was forked.
            FastcollError: the error that ended the operation.
        """
        limit = ENDLESS if timeout is None else seconds(timeout, ENDLESS)
        if not self.ended:
            if self.forks != _forks:
                self.refuse_in_child()
            if is_progressing():
                refuse_to_block(f"waiting for {self.describe}")
            if not self.await_end(limit):
                raise CollectiveTimeoutError(f"{self.describe} is not complete after {limit:g} s")
        self._observed = True
        if self.error is not None:
            # Without the tracebacks of earlier waits, which would keep their frames and arrays alive.
            raise self.error.with_traceback(None)
        return True

    def await_end(self, limit: float) -> bool:
        """Block until the operation has ended, for at most `limit` seconds; return whether it has."""
        return self.end_event.wait(limit)

    def refuse_in_child(self) -> None:
        """In a child process made by fork: raise AbortedError if the operation has not ended.

        The child has none of the threads that would complete the operation.
        """
        if not self.ended and self.forks != _forks:
            raise AbortedError(
                f"{self.describe} is under way in the process from which process {os.getpid()} was forked; wait for "
                "it there"
            )

    def join(self) -> None:
        """Wait like `wait`, but without a timeout and on any thread.

        Only the package's own code calls this. For example, one group's progress thread may wait for an operation of
        another group.
        """
        if not self.ended:
            self.await_end(ENDLESS)
        self._observed = True
        if self.error is not None:
            raise self.error.with_traceback(None)

    def is_completed(self) -> bool:
        """Whether the operation has ended, with success or an error. Never blocks."""
        return self.ended

    def is_success(self) -> bool:
        """Whether the operation has ended without an error. Never blocks."""
        return self.is_completed() and self.exception() is None

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Return the error that ended the operation, or None. Never blocks; ignores `timeout`, unlike a Future's."""
        if not self.ended:
            return None
        self._observed = True
        return self.error

    def result(self, timeout: Timeout = None) -> Any:
        """Wait like `wait`, then return the value that the synchronous call returns.

        That is the sender's rank for a receive, a new array for an in-place operation on an immutable array (JAX's),
        and None for all other operations.
        """
        self.wait(timeout)
        return self.returned

    def done(self) -> bool:
        """Return `is_completed()`; futures have this name for it."""
        return self.is_completed()

    def running(self) -> bool:
        """Whether the operation has begun and not ended. Never blocks."""
        return self._has_begun and not self.is_completed()

    def cancelled(self) -> bool:
        """Return False: a Work cannot be cancelled."""
        return False

    def cancel(self) -> bool:
        """Return False without an effect, since the other ranks may have begun the operation."""
        return False

    def source_rank(self) -> int | Any:  # Any, so that callers of a receive need no check for None
        """Wait, then return the rank that a receive got its message from; None for all other operations."""
        result = self.result()
        return int(result) if isinstance(result, Integral) else None

    def add_done_callback(self, callback: Callable[[Any], object]) -> None:
        """Call `callback(work)` when the operation has ended, on the thread that ends it; or now if it already has.

        An exception that a callback raises is logged; SystemExit, too, except on the main thread. A callback may not
        wait for other operations.
        """
        if self.ended:
            self._call(callback)
            return
        self.has_listeners = True
        self.__dict__.setdefault("_callbacks", deque()).append(callback)
        if self.ended:
            self.dispatch_callbacks()

    def synchronize(self) -> None:
        """Call `wait()`; torch has both names."""
        self.wait()

    def get_future(self) -> WorkFuture:
        """Return a future of the arrays that the operation writes, with the methods of torch's futures.

        The future of a receive gives the sender's rank instead, in a list.
        """
        future = WorkFuture(self)

        def settle(_: Work) -> None:
            if (error := self.exception()) is not None:
                future.set_exception(error)
            elif (result := self.result()) is None:
                future.set_result(list(self.outputs))
            else:  # new arrays, of a gather without a list or in place of an immutable array
                future.set_result(result if type(result) is list else [result])

        self.add_done_callback(settle)
        return future

    def __await__(self) -> Generator[Any, None, Any]:
        self.refuse_in_child()
        yield from futures.until_done(self)
        return self.result()

    def complete(self, result: Any = None, error: BaseException | None = None) -> None:
        """Record that the operation has ended, with a result or an error. Called by the thread that runs it."""
        if result is not None:
            self.returned = result
        if error is not None:
            self.error = error
        self.ended = True
        if self.noted_by is not None:
            self.noted_by.ended(self)
        if self.has_listeners:
            self._notify(self.__dict__)

    def _notify(self, made: dict[str, Any]) -> None:
        """Wake the threads that wait for the end, and call the callbacks."""
        if "_end" in made:
            made["_end"].set()
        if "_lock" in made:
            with made["_lock"]:
                for waiter in made.get("_listeners", ()):
                    waiter.add_result(self) if self.error is None else waiter.add_exception(self)
        if "_callbacks" in made:
            self.dispatch_callbacks()

    def dispatch_callbacks(self) -> None:
        """Have `call_back` called: here and now, or, for messages, by the progress thread."""
        self.call_back()

    def call_back(self) -> None:
        """Call each callback once, even if two threads call this method."""
        callbacks = self.__dict__["_callbacks"]
        while callbacks:
            with suppress(IndexError):  # another thread was faster
                self._call(callbacks.popleft())

    def _call(self, callback: Callable[[Any], object]) -> None:
        try:
            callback(self)
        except BaseException as error:
            if futures.ends_program(error):
                raise
            _log.exception("a callback of %s raised", self.describe)


class WorkFuture(futures.Future[Any]):
    """The result of `Work.get_future`, with the methods of torch.futures.Future.

    The value is the list of the operation's output arrays in host memory, as NumPy arrays. For a receive, it is a list
    with one item, the sender's rank.
    """

    __slots__ = ("_work",)

    def __init__(self, work: Work) -> None:
        super().__init__()
        self._work = work

    def __str__(self) -> str:
        return f"the future of {self._work!r}"

    def await_end(self, timeout: Timeout) -> None:
        """Wait for the operation, and then until this future is set, which another thread may do a little later."""
        refuse_to_block("waiting for a Work's future")
        try:
            self._work.wait(timeout)
        except Exception:
            if not self._work.is_completed():
                raise
        # A callback of `then` may determine what this future returns or raises.
        self.block(ENDLESS)

    def new_future(self) -> WorkFuture:
        return WorkFuture(self._work)


_W = TypeVar("_W", bound=Work)


class UnobservedWorks:
    """The asynchronous operations of a group that are under way, or failed with an error that no thread has read.

    When a rank leaves the group, job/leaving.py waits for those under way, and reports the errors of those that failed.
    """

    _MOST_FAILED = 16  # a limit, because each failed operation keeps its arrays alive

    def __init__(self) -> None:
        self._works: dict[Work, None] = {}

    def note(self, work: _W, observed: bool = False) -> _W:
        """Add an operation and return it. `observed`: do not report its error, even if no thread reads it."""
        self._works[work] = None
        work.noted_by = self
        if observed:
            work._observed = True
        if work.ended:  # it may have ended before it was added
            self.ended(work)
        return work

    def under_way(self) -> list[Work]:
        """Return the operations that have not ended, oldest first."""
        return [work for work in list(self._works) if not work.is_completed()]

    def lost(self) -> list[tuple[str, BaseException]]:
        """Return the operations that failed with errors that no thread has read, and these errors."""
        return [
            (work.describe, work.error)
            for work in list(self._works)
            if work.error is not None and not work._observed
        ]

    def ended(self, work: Work) -> None:
        """Update the record when an operation has ended. Calling twice is fine.

        An operation without an error is removed. A failed operation stays, except if 16 other failed ones are kept.
        Failed operations whose errors a thread has read are removed.
        """
        if work.error is None:
            self._works.pop(work, None)
            return
        failed = [other for other in list(self._works) if other.error is not None]
        for other in failed:
            if other._observed or (other is work and len(failed) > self._MOST_FAILED):
                self._works.pop(other, None)


class ProgressQueue:
    """Runs operations one after the other on its own thread."""

    IDLE_SECONDS = 5.0

    def __init__(self, name: str) -> None:
        self.name = name
        self._count: Any = [0]
        self._jobs: deque[tuple[Work, Callable[[], Any]]] = deque()
        self.changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = False

    @property
    def pending(self) -> int:
        """The number of operations that are queued or under way."""
        return int(self._count[0])

    def count_in(self, word: Any) -> None:
        """Keep `pending` in element 0 of an array that compiled code reads. Called before the first operation."""
        self._count = word

    def submit(self, describe: str, job: Callable[[], Any]) -> Work:
        """Queue `job` behind all earlier jobs, and return a Work that gets its result or exception.

        Raises:
            AbortedError: the queue is closed.
        """
        work = Work(describe)
        with self.changed:
            if self._closed:
                raise AbortedError(f"{describe}: the group {self.name} was destroyed")
            if self._thread is None:
                thread = threading.Thread(target=self._run, name=f"fastcoll-{self.name}", daemon=True)
                thread.start()  # may fail, or be interrupted after the thread has begun
                self._thread = thread
            self._count[0] += 1
            self._jobs.append((work, job))
            self.changed.notify_all()
        return work

    def close(self, timeout: float = 5.0) -> None:
        """Fail the queued operations, and end the thread. A second call has no effect."""
        with self.changed:
            self._closed = True
            left, self._jobs = self._jobs, deque()
            self.changed.notify_all()
            thread = self._thread
        for work, _ in left:
            self._end(work, None, AbortedError(f"{work.describe}: the group {self.name} was destroyed"))
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout)

    def _run(self) -> None:
        mark_progressing()
        while (item := self._next()) is not None:
            work, job = item
            try:
                result = job()
            except BaseException as error:
                self._end(work, None, error)
            else:
                self._end(work, result, None)
            del item, work, job

    def _next(self) -> tuple[Work, Callable[[], Any]] | None:
        with self.changed:
            # The thread that started this one may have been interrupted, and not have recorded it.
            if threading.current_thread() is not self._thread:
                return None
            self.changed.wait_for(lambda: self._jobs or self._closed, self.IDLE_SECONDS)
            if self._jobs:
                item = self._jobs.popleft()
                item[0]._has_begun = True
                return item
            self._thread = None
            return None

    def _end(self, work: Work, result: Any, error: BaseException | None) -> None:
        with self.changed:
            self._count[0] -= 1
        work.complete(result, error)
