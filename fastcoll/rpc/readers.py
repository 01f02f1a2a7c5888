"""Readers: the threads of an agent. All wait for one epoll, of which the kernel wakes one thread for each event.

A connection is armed for one event. The thread that gets it has a *turn*: it reads what has come, and handles one call
after the other, while the connection stays unarmed; so calls that come fast need no wake-up and no switch of threads.
When its handlers are through it looks for more for SPIN_SECONDS, arms the connection and waits with the others.

A handler may block, and so may a callback of a future that a thread completes. Before it waits for a future the turn
ends by itself (`before_blocking`): the connection is armed, and another thread takes the tasks that are left. Of any
other one that takes long a timer tells: it goes off a millisecond after a turn has begun, and while tasks are left. It
ends turns in which no call was handled since, and if no task was begun since, others take those that are left. A thread
that finds nobody else waiting starts another one first, so any number may block.
"""

from __future__ import annotations

import ctypes
import logging
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from time import perf_counter
from typing import Protocol

_log = logging.getLogger("fastcoll")
Task = Callable[[], object]
HANG_UP = select.EPOLLRDHUP | select.EPOLLONESHOT
READ = select.EPOLLIN | HANG_UP
# A wake-up takes 15 us here, a round of this loop 0.6 (virtual machine on an AMD EPYC of family 26).
SPIN_SECONDS = 50e-6
_TURN_NANOSECONDS = 1_000_000
_libc = ctypes.CDLL(None, use_errno=True)
_AFTER = (ctypes.c_long * 4)(0, 0, 0, _TURN_NANOSECONDS)  # struct itimerspec: once


class Source(Protocol):
    """What is read: a connection."""

    reading: threading.Lock  # held by who reads
    armed: (
        int  # READ, HANG_UP, or 0 where the kernel has told of it; the kernel may know of more, never of less
    )
    dialed: bool  # only answers come

    def fileno(self) -> int: ...

    def poll(self) -> bool:
        """Whether there is something to read; only with `reading`."""

    def take(self) -> list[Task] | None:
        """Read without waiting, with `reading`: the calls to handle; None: it has ended."""

    def look_after(self) -> None:
        """Unless somebody reads, arm it: to be read if answers are expected, else to see its end."""

    def ended(self) -> None:
        """It has ended; called without `reading`."""


class Turn:
    """One thread at one source. `is_over`: the source belongs to others again; changed with `source.reading`."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.handled, self.seen = 0, -1
        self.is_over = False


_here = threading.local()
_late: set[Source] = set()


def arm_late(but: object = None) -> None:
    """Call `look_after` on all sources that `arm_later` has added, except one."""
    for source in list(_late):  # other threads may add to it meanwhile; they start the timer for that
        if source is not but:
            _late.discard(source)
            source.look_after()


def reads(source: Source) -> None:
    """Drop a source from the late ones: this thread holds `reading`, and calls `look_after` after releasing it."""
    _late.discard(source)


def before_blocking(reading: object = None) -> None:
    """End this thread's turn, or hand its tasks on, before it waits for a future; it reads the source `reading`."""
    if _late:
        arm_late(reading)
    readers: Readers | None = getattr(_here, "readers", None)
    if readers is not None:
        turn: Turn | None = getattr(_here, "turn", None)
        if turn is None or turn.is_over:
            readers.spread()
        else:
            readers.end(turn)


class Readers:
    """Threads that read sources and handle their calls.

    `spare`: so many threads stay when they have nothing to do. `spins`: whether they may look a while before they wait.
    """

    def __init__(self, spare: int, spins: bool) -> None:
        self.spin_seconds = SPIN_SECONDS if spins else 0.0
        self._epoll = select.epoll()
        self._tasks: deque[Task] = deque()
        self._left: deque[Task] = deque()  # of threads in `complete`
        self._sources: dict[int, Source] = {}
        self._turns: set[Turn] = set()
        self._spare = max(spare, 2)
        self._lock, self._arming = threading.Lock(), threading.Lock()
        self._threads: set[threading.Thread] = set()
        self._idle = 0
        self._begun = self._seen = 0  # tasks; as the timer has seen it
        self._is_closed = self._is_eager = self._timer_runs = False
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._timer: int = _libc.timerfd_create(1, os.O_NONBLOCK | os.O_CLOEXEC)
        for descriptor in (self._wake, self._timer):
            self._epoll.register(descriptor, READ)
        for _ in range(2):
            self._start()

    def watch(self, source: Source, events: int) -> None:
        """Take a source over: READ what comes, or see only that it ends, with a HANG_UP."""
        self._sources[source.fileno()] = source
        source.armed = events
        self._epoll.register(source.fileno(), events)

    def arm(self, source: Source, events: int = READ) -> None:
        """Have the threads read what comes, or at least see that it ends."""
        with self._arming:
            if source.armed < events:
                self._modify(source, events)

    def disarm(self, source: Source) -> None:
        """This thread reads, and looks after the source then; have the others see only that it ends."""
        with self._arming:
            if source.armed == READ:
                self._modify(source, HANG_UP)

    def _modify(self, source: Source, events: int) -> None:
        descriptor = source.fileno()
        if self._sources.get(descriptor) is source:  # else its number may be another one's by now
            with suppress(OSError, ValueError):  # closed meanwhile
                source.armed = events
                self._epoll.modify(descriptor, events)

    def forget(self, source: Source) -> None:
        """See no more of a source, which is closed after that."""
        descriptor = source.fileno()
        with self._arming:
            if self._sources.get(descriptor) is source:
                del self._sources[descriptor]
                with suppress(OSError, ValueError):
                    self._epoll.unregister(descriptor)

    def run(self, task: Task) -> None:
        """Have a thread run a task."""
        self._tasks.append(task)
        if not self._wake_one() or self._is_closed:  # those that are left may all be in handlers
            self._work_off(None)

    def complete(self, tasks: Sequence[Task]) -> None:
        """Run tasks on this thread, which is not one of these; when one of them blocks, these take those left."""
        if len(tasks) == 1:
            tasks[0]()
            return
        before, _here.readers = getattr(_here, "readers", None), self
        self._left.extend(tasks)
        self._start_timer()
        try:
            while self._left:
                with suppress(IndexError):  # another thread has taken it
                    self._left.popleft()()
        finally:
            _here.readers = before

    def spread(self) -> None:
        """Have other threads take the tasks that are left, at the same time."""
        while self._left:
            with suppress(IndexError):
                self._tasks.append(self._left.popleft())
        if self._tasks:
            self._is_eager = True
            self._wake_one()

    def arm_later(self, source: Source) -> None:
        """Look after a source when this thread waits or has done its task, or in a moment."""
        _late.add(source)
        self._start_timer()

    def close(self, timeout: float) -> None:
        """End the threads, when they have done what they do; waits for them at most `timeout` seconds.

        The last one closes what is open. A thread of its own does what was left to them: all of them may be in
        handlers. Who leaves a task sees the end behind that (`run`), or the task is seen here.
        """
        with self._lock:
            self._is_closed = True
        self._wake_one()
        until = time.monotonic() + timeout
        for thread in list(self._threads):
            if thread is not threading.current_thread() and thread.is_alive():
                thread.join(max(until - time.monotonic(), 0.0))
        if self._tasks:
            threading.Thread(target=self._work_off, args=(None,), name="fastcoll-rpc", daemon=True).start()

    def close_inherited(self) -> None:
        """In a child of fork, which has none of the threads."""
        self._epoll.close()
        os.close(self._wake)
        os.close(self._timer)

    # ---- the threads ---------------------------------------------------------------------------------------

    def _wake_one(self) -> bool:
        with self._lock:
            if self._threads:
                os.eventfd_write(self._wake, 1)
            return bool(self._threads)

    def _start(self) -> None:
        thread = threading.Thread(target=self._run, name="fastcoll-rpc", daemon=True)
        with self._lock:
            if self._is_closed:
                return
            self._threads.add(thread)
        thread.start()

    def _run(self) -> None:
        _here.readers = self
        try:
            while not self._is_closed and self._wait():
                pass
        finally:
            with self._lock:
                self._threads.discard(threading.current_thread())
                is_last = self._is_closed and not self._threads
            if is_last:
                self.close_inherited()
                self._work_off(None)  # what came since
            elif self._is_closed:
                self._wake_one()  # the next one ends, too

    def _wait(self) -> bool:
        """Wait for an event and do what it asks for; False: this thread is one too many."""
        with self._lock:
            if self._idle >= self._spare:
                return False
            self._idle += 1
        try:
            events = self._epoll.poll(maxevents=1)
        finally:
            with self._lock:
                self._idle -= 1
                needed = not self._idle and not self._is_closed
        if needed:
            self._start()
        for descriptor, _ in events:
            if descriptor == self._wake:
                self._clear(descriptor)
            elif descriptor == self._timer:
                self._look_at_turns()
            elif source := self._sources.get(descriptor):
                self._read(source)
        self._work_off(None)
        return True

    def _clear(self, descriptor: int) -> None:
        with suppress(BlockingIOError):
            os.read(descriptor, 8)
        with suppress(OSError, ValueError):
            self._epoll.modify(descriptor, READ)

    def _read(self, source: Source) -> None:
        """A turn at a source."""
        source.armed = 0
        if source.dialed:
            self._read_answers(source)
            return
        turn = _here.turn = Turn(source)
        self._turns.add(turn)
        self._start_timer()
        try:
            while self._take(turn):
                self._work_off(turn)
        finally:
            self._turns.discard(turn)
            _here.turn = None

    def _read_answers(self, source: Source) -> None:
        if not source.reading.acquire(blocking=False):
            return  # who waits for an answer reads, and looks after the source then
        try:
            tasks = source.take()
        finally:
            source.reading.release()
        if tasks is None:
            source.ended()
            return
        source.look_after()
        self._tasks.extend(tasks)

    def _start_timer(self) -> None:
        if not self._timer_runs:
            self._timer_runs = True
            _libc.timerfd_settime(self._timer, 0, _AFTER, None)

    def _take(self, turn: Turn) -> bool:
        """Read what is there, or comes within a moment; False: the turn is over."""
        source = turn.source
        if turn.is_over:
            return False
        source.reading.acquire()
        try:
            if turn.is_over or self._is_closed:
                return False
            until = perf_counter() + self.spin_seconds if turn.handled else 0.0
            while not source.poll():
                if perf_counter() >= until:
                    turn.is_over = True
                    self.arm(source)
                    return False
            tasks = source.take()
            turn.handled += 1
        finally:
            source.reading.release()
        if tasks is None:
            source.ended()
            return False
        self._tasks.extend(tasks)
        return True

    def end(self, turn: Turn) -> None:
        """Give a source back to all, and what it has brought."""
        if turn.source.reading.acquire(blocking=False):  # else its thread reads, and is not stuck
            try:
                if turn.is_over:
                    return
                turn.is_over = True
                self.arm(turn.source)
            finally:
                turn.source.reading.release()
            self.spread()

    def _look_at_turns(self) -> None:
        """The timer has gone off. It is cleared first: what is started afterwards must go off."""
        self._clear(self._timer)
        self._timer_runs = False
        arm_late()
        for turn in list(self._turns):
            if turn.seen == turn.handled:
                self.end(turn)
            turn.seen = turn.handled
        if self._seen == self._begun:
            self.spread()
        self._seen = self._begun
        if self._turns or self._tasks or self._left:
            self._start_timer()

    def _work_off(self, turn: Turn | None) -> None:
        """Run the tasks that are there; if a turn has been stuck, many threads do so at the same time."""
        while True:
            try:
                task = self._tasks.popleft()
            except IndexError:
                self._is_eager = False
                return
            if self._tasks:
                if self._is_eager:
                    self._wake_one()
                else:
                    self._start_timer()
            self._begun += 1
            try:
                task()
            except Exception:
                _log.exception("a call could not be handled")
            if _late:
                arm_late()
            if turn is not None:
                turn.handled += 1
