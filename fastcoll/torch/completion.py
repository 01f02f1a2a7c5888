"""Threads that complete futures.

A future's callbacks run where it is completed, and may wait for other operations of the same group (PowerSGD's do).
On the progress thread, which carries these out, they would wait for ever; so each completion goes to a thread that is
idle, or to a new one.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable

_log = logging.getLogger("fastcoll")
_IDLE_SECONDS = 5.0

Job = Callable[[], None]


class Completions:
    """As many threads as there are completions at one time; they end when they have been idle for a while."""

    def __init__(self) -> None:
        self.start_anew()

    def start_anew(self) -> None:
        """In a child of fork, which has none of the threads."""
        self._jobs: deque[Job] = deque()
        self._changed = threading.Condition()
        self._idle = 0
        self._threads = 0

    def submit(self, job: Job) -> None:
        """Run `job` on another thread. Never blocks.

        Where Python starts no more threads, as at its end, this one runs it: what waits there for the group whose
        progress thread this is, raises.
        """
        with self._changed:
            self._jobs.append(job)
            if self._idle >= len(self._jobs):
                self._changed.notify()
                return
            self._threads += 1
        try:
            threading.Thread(target=self._run, name="fastcoll-torch", daemon=True).start()
        except RuntimeError:
            with self._changed:
                here = self._jobs.pop() if self._jobs else None
            if here is not None:
                _do(here)
            with self._changed:
                self._threads -= 1
                self._changed.notify_all()

    def settle(self, timeout: float) -> bool:
        """Wait until nothing is under way, `timeout` seconds at most; whether that was reached."""
        with self._changed:
            return self._changed.wait_for(self._is_settled, timeout)

    def _is_settled(self) -> bool:
        return not self._jobs and self._idle == self._threads

    def _run(self) -> None:
        while (job := self._next()) is not None:
            _do(job)
            del job

    def _next(self) -> Job | None:
        with self._changed:
            self._idle += 1
            if self._is_settled():
                self._changed.notify_all()
            self._changed.wait_for(lambda: self._jobs, _IDLE_SECONDS)
            self._idle -= 1
            if self._jobs:
                return self._jobs.popleft()
            self._threads -= 1
            return None


def _do(job: Job) -> None:
    try:
        job()
    except Exception:
        _log.exception("a future could not be completed")


completions = Completions()
