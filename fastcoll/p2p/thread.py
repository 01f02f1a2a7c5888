"""The progress thread of a rank's messages: it moves messages when no other thread does, and calls the callbacks.

The thread starts with the first operation that is not complete at once. While operations are under way, it checks
every millisecond whether another thread has driven (moved messages) since the last check. If none has, the progress
thread drives until another thread wants the lock. It carries requests (`Pipe.request`) on in compiled code, without the
GIL (`Pipe.attend`), and has the engine take them over if that is needed, or if nothing has moved for 50 ms: then the
engine checks deadlines and peers. After 50 ms without operations and requests it sleeps until it is woken.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import Protocol

from ..core.work import ENDLESS
from .lock import NAP, ProgressLock
from .pipe import FINISHED, STILL, STUCK
from .transfers import Transfer

_NAPS = 50  # naps without operations before the thread sleeps


class Unattended(Protocol):
    """The part of Progress (progress.py) that the thread uses. To *drive* is to move the bytes of messages.

    Attributes:
        drives: counts how often a thread has begun to drive.
    """

    drives: int

    def has_operations(self) -> bool:
        """Whether operations are under way or posted, or received messages must be copied to the callers' arrays."""

    def connect_posts(self) -> None:
        """Connect to the peer that the first posted send needs, if it is not connected yet; blocks."""

    def drive_unattended(self) -> bool:
        """Drive until another thread wants the lock or no operation is left; False: another thread holds the lock."""

    def collect(self) -> None:
        """Complete the requests of Python that have ended and for which no thread has waited."""


class ProgressThread:
    """The thread, and the callbacks that it has to call.

    Attributes:
        is_asleep: whether the thread must be woken before it sees new operations.
        callbacks: transfers that have ended, and whose callbacks have not been called yet.
    """

    def __init__(self, lock: ProgressLock, unattended: Unattended) -> None:
        self.is_asleep = True
        self.callbacks: deque[Transfer] = deque()
        self._lock, self._unattended = lock, unattended
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def is_current(self) -> bool:
        """Whether the calling thread is the progress thread, on which user code is always a callback."""
        return self._thread is not None and threading.get_ident() == self._thread.ident

    def wake(self, anyway: bool = False) -> None:
        """Have the thread look for new operations.

        If the thread does not exist, start it if there are operations or callbacks, or if `anyway` is set.
        """
        with self._changed:
            if self._thread is None and not self._lock.is_closed:
                if not (anyway or self.callbacks or self._unattended.has_operations()):
                    return
                thread = threading.Thread(target=self._run, name="fastcoll-messages", daemon=True)
                thread.start()  # may fail, or be interrupted after the thread has begun
                self._thread = thread
            self.is_asleep = False
            self._changed.notify_all()
        for pipe in self._lock.pipes:
            pipe.recall()

    def call_back(self, transfer: Transfer) -> None:
        """Have the progress thread call the callbacks of a transfer that has ended."""
        self.callbacks.append(transfer)
        self.wake()

    def run_callbacks(self) -> None:
        """Call the callbacks of all transfers that have ended."""
        while self.callbacks:
            try:
                transfer = self.callbacks.popleft()
            except IndexError:  # another thread was faster
                return
            transfer.call_back()

    def close(self) -> bool:
        """Close the lock, so that no progress thread starts; return False if it was closed before."""
        with self._changed:
            if self._lock.is_closed:
                return False
            self._lock.is_closed = True
            self._lock.set_behind(True)
        return True

    def join(self, seconds: float) -> None:
        """Wait until the thread has ended, unless the caller is this thread."""
        if self._thread is not None and not self.is_current():
            self._thread.join(seconds)

    def _run(self) -> None:
        idle, still, drives, touched, pipes = 0, 0, -1, 0, self._lock.pipes
        attended = next((pipe for pipe in pipes if pipe.attends), None)
        with self._changed:
            if not self.is_current():  # the thread that started this one was interrupted
                return
        self._stay_awake()
        while not self._lock.is_closed:
            self.run_callbacks()
            self._unattended.connect_posts()
            before, touched = touched, sum(pipe.touched() for pipe in pipes)
            attends = attended is not None and not self._unattended.has_operations()
            if touched != before:  # another thread progresses its requests itself
                idle = 0
            elif not (self._unattended.has_operations() or any(pipe.has_posted() for pipe in pipes)):
                idle += 1
            else:
                idle = 0
                unattended = drives == self._unattended.drives and (not attends or still > _NAPS)
                if unattended and self._unattended.drive_unattended():
                    still = 0
                    continue
            drives = self._unattended.drives
            with self._changed:
                if self._lock.is_closed or self.callbacks:
                    continue
                if idle > _NAPS and all([pipe.may_sleep() for pipe in pipes]):
                    self._sleep()
                    idle = 0
                    continue
                if attended is None or not attends:
                    self._changed.wait(NAP)
                    continue
            found = attended.attend()
            still = still + 1 if found == STILL else _NAPS + 1 if found == STUCK else 0
            if found == FINISHED:
                self._unattended.collect()

    def _sleep(self) -> None:
        """Sleep until woken, unless an operation was posted before `is_asleep` was set."""
        self.is_asleep = True
        if not self._unattended.has_operations():
            self._changed.wait(ENDLESS)
        self.is_asleep = False
        self._stay_awake()

    def _stay_awake(self) -> None:
        for pipe in self._lock.pipes:
            pipe.stay_awake()
