"""Work, the handle of an asynchronous operation, and the queue that carries operations out in order.

A group has one ProgressQueue. Its thread starts with the first asynchronous call and ends after the
last one has been idle for a while; kernels release the GIL, so the caller computes meanwhile.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Generator
from datetime import timedelta
from typing import Any

from .errors import AbortedError, CollectiveTimeoutError

Timeout = float | timedelta | None


def seconds(timeout: Timeout, default: float) -> float:
    """A timeout as seconds: a number of seconds, a timedelta, or None for the default."""
    if timeout is None:
        return default
    return timeout.total_seconds() if isinstance(timeout, timedelta) else float(timeout)


class Work:
    """The handle of an asynchronous operation.

    The arrays that were given belong to the operation until it is complete. A Work may be waited for
    by several threads and more than once.
    """

    def __init__(self, describe: str = "operation") -> None:
        self._done = threading.Event()
        self._callbacks: list[Callable[[Work], None]] = []
        self._lock = threading.Lock()
        self._result: Any = None
        self._error: BaseException | None = None
        self._describe = describe

    def wait(self, timeout: Timeout = None) -> bool:
        """Block until the operation is complete; True when it succeeded.

        Args:
            timeout: seconds or timedelta; None waits as long as the group's own timeout allows.

        Raises:
            CollectiveTimeoutError: not complete within `timeout` (the operation goes on).
            FastcollError: whatever ended the operation.
        """
        limit = None if timeout is None else seconds(timeout, 0.0)
        if not self._done.wait(limit):
            raise CollectiveTimeoutError(f"{self._describe} is not complete after {limit:g} s")
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self) -> bool:
        """Whether the operation has ended, well or not. Never blocks."""
        return self._done.is_set()

    def is_success(self) -> bool:
        """Whether the operation has ended well. Never blocks."""
        return self._done.is_set() and self._error is None

    def exception(self) -> BaseException | None:
        """What ended the operation, or None. Never blocks."""
        return self._error if self._done.is_set() else None

    def result(self) -> Any:
        """Wait, then return what the synchronous call would have returned.

        That is the sender's rank for a receive and None for operations that write into arrays.
        """
        self.wait()
        return self._result

    def source_rank(self) -> int:
        """Wait, then return the rank that a receive got its message from."""
        return int(self.result())

    def add_done_callback(self, callback: Callable[[Work], None]) -> None:
        """Call `callback(work)` once complete, on the progress thread, or now if it already is."""
        with self._lock:
            if not self._done.is_set():
                self._callbacks.append(callback)
                return
        callback(self)

    def __await__(self) -> Generator[Any, None, Any]:
        import asyncio  # a quarter of the time of importing this package, and few await

        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()

        def settle() -> None:
            if not future.done():  # the task may have been cancelled meanwhile
                future.set_result(None)

        def wake(_: Work) -> None:
            loop.call_soon_threadsafe(settle)

        self.add_done_callback(wake)
        yield from future
        return self.result()

    def _finish(self, result: Any = None, error: BaseException | None = None) -> None:
        with self._lock:
            self._result, self._error = result, error
            self._done.set()
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback(self)


class ProgressQueue:
    """Carries operations out one after the other on a thread of its own.

    `pending` counts the operations queued or under way: a plain attribute, so that the synchronous
    path learns in one look that nothing is ahead of it.
    """

    IDLE_SECONDS = 5.0

    def __init__(self, name: str) -> None:
        self.name = name
        self.pending = 0
        self._jobs: deque[tuple[Work, Callable[[], Any]]] = deque()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = False

    def submit(self, describe: str, job: Callable[[], Any]) -> Work:
        """Queue `job` behind all earlier ones; its result or exception becomes the Work's.

        Raises:
            AbortedError: the queue is closed.
        """
        work = Work(describe)
        with self._changed:
            if self._closed:
                raise AbortedError(f"{describe}: the group {self.name} was destroyed")
            self.pending += 1
            self._jobs.append((work, job))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=f"fastcoll-{self.name}", daemon=True)
                self._thread.start()
            self._changed.notify_all()
        return work

    def close(self, timeout: float = 5.0) -> None:
        """Fail what is still queued, and end the thread. Closing twice is fine."""
        with self._changed:
            self._closed = True
            left, self._jobs = self._jobs, deque()
            self._changed.notify_all()
            thread = self._thread
        for work, _ in left:
            self._end(work, None, AbortedError(f"{work._describe}: the group {self.name} was destroyed"))
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout)

    def _run(self) -> None:
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
        with self._changed:
            self._changed.wait_for(lambda: self._jobs or self._closed, self.IDLE_SECONDS)
            if self._jobs:
                return self._jobs.popleft()
            self._thread = None
            return None

    def _end(self, work: Work, result: Any, error: BaseException | None) -> None:
        with self._changed:
            self.pending -= 1
        work._finish(result, error)
