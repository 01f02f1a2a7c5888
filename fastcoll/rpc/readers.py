"""Readers: the threads of an agent. All wait for one epoll, of which the kernel wakes one thread for each event.

A connection is armed for one event. The thread that gets it reads what has come, arms the connection again, and then
runs the handlers of the calls that it has read; other threads read meanwhile. A thread that finds nobody else waiting
starts another one before it runs anything, so handlers may block in any number.
"""

from __future__ import annotations

import os
import select
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress

Task = Callable[[], object]
_ONCE = select.EPOLLONESHOT
_READ = select.EPOLLIN | select.EPOLLRDHUP | _ONCE


class Readers:
    """Threads that call `watch`'s callables when a descriptor has something to read, and run tasks.

    `spare`: so many threads stay when they have nothing to do.
    """

    def __init__(self, spare: int) -> None:
        self._epoll = select.epoll()
        self._tasks: deque[Task] = deque()
        self._watched: dict[int, Callable[[], None]] = {}
        self._spare = spare
        self._lock = threading.Lock()
        self._threads: set[threading.Thread] = set()
        self._idle = 0
        self._is_closed = False
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll.register(self._wake, _READ)
        for _ in range(min(2, spare)):
            self._start()

    def watch(self, descriptor: int, ready: Callable[[], None]) -> None:
        """Call `ready` once when there is something to read, on one of the threads; `again` watches on."""
        self._watched[descriptor] = ready
        self._epoll.register(descriptor, _READ)

    def again(self, descriptor: int) -> None:
        with suppress(OSError, ValueError):  # closed meanwhile
            self._epoll.modify(descriptor, _READ)

    def forget(self, descriptor: int) -> None:
        self._watched.pop(descriptor, None)
        with suppress(OSError, ValueError):
            self._epoll.unregister(descriptor)

    def run(self, *tasks: Task) -> None:
        """Have the threads run tasks, in any order."""
        self._tasks.extend(tasks)
        with self._lock:
            if tasks and not self._is_closed:
                self._wake_one()

    def is_own_thread(self) -> bool:
        return threading.current_thread() in self._threads

    def close(self) -> None:
        """End the threads, when they have done what they do; does not wait for those that are in a handler."""
        with self._lock:
            self._is_closed = True
            if self._threads:
                self._wake_one()

    def join(self, timeout: float) -> None:
        """Wait for the threads to end; the last one closes what is open."""
        for thread in list(self._threads):
            if thread is not threading.current_thread():
                thread.join(timeout)

    def _wake_one(self) -> None:
        with suppress(OSError):
            os.eventfd_write(self._wake, 1)

    def _start(self) -> None:
        thread = threading.Thread(target=self._run, name="fastcoll-rpc", daemon=True)
        with self._lock:
            if self._is_closed:
                return
            self._threads.add(thread)
        thread.start()

    def _run(self) -> None:
        try:
            while not self._is_closed and self._turn():
                pass
        finally:
            with self._lock:
                self._threads.discard(threading.current_thread())
                if self._threads or not self._is_closed:
                    self._wake_one()  # the next one ends, too, if all shall
                else:
                    self._epoll.close()
                    os.close(self._wake)

    def _turn(self) -> bool:
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
                with suppress(BlockingIOError):
                    os.eventfd_read(self._wake)
                self._epoll.modify(self._wake, _READ)
            elif ready := self._watched.get(descriptor):
                ready()
        self._work_off()
        return True

    def _work_off(self) -> None:
        while True:
            try:
                task = self._tasks.popleft()
            except IndexError:
                return
            if self._tasks:
                self._wake_one()
            task()
