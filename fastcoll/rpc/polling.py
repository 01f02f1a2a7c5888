"""Poller: the epoll on which all threads of an agent wait, with an eventfd that wakes a thread, and a timer.

Every registration is one-shot: for an event, the kernel wakes one thread and disarms the descriptor. A disarmed
descriptor reports no event until it is armed again. `link.armed` holds the events for which a link (one connection) is
armed: READ, HANG_UP, or 0. The thread that gets an event first sets `link.armed` to 0, and then reads the link. If
another thread arms the link between the event and that reset, the kernel is armed for more events than `link.armed`
holds, which costs one extra event. Between the event and the reset, and at no other time, the kernel can be armed for
fewer events than `link.armed` holds. No data stays unread then, because the thread that got the event, or the thread
that holds `link.reading`, reads the link next.
"""

from __future__ import annotations

import ctypes
import os
import select
import threading
from contextlib import suppress
from enum import Enum

from .link import Link

HANG_UP = select.EPOLLRDHUP | select.EPOLLONESHOT
READ = select.EPOLLIN | HANG_UP
_libc = ctypes.CDLL(None, use_errno=True)


class Signal(Enum):
    """The events that do not come from a link."""

    WAKE = 1
    TIMER = 2


class Poller:
    """Report events of links; each event goes to one thread.

    `timer_nanoseconds`: the time from `start_timer` to the timer's event.
    """

    def __init__(self, timer_nanoseconds: int) -> None:
        self._epoll = select.epoll()
        self._links: dict[int, Link] = {}
        self._arming = threading.Lock()
        self._timer_runs = False
        self._after = (ctypes.c_long * 4)(0, 0, 0, timer_nanoseconds)  # struct itimerspec: fires once
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._timer: int = _libc.timerfd_create(1, os.O_NONBLOCK | os.O_CLOEXEC)
        for descriptor in (self._wake, self._timer):
            self._epoll.register(descriptor, READ)

    def watch(self, link: Link, events: int) -> None:
        """Add a link. With `events` READ, report messages and the peer's disconnect; with HANG_UP, only the latter."""
        self._links[link.fileno()] = link
        link.armed = events
        self._epoll.register(link.fileno(), events)

    def arm(self, link: Link, events: int) -> None:
        """Arm a link for `events` unless it is armed for them already."""
        with self._arming:
            if link.armed < events:
                self._modify(link, events)

    def disarm(self, link: Link) -> None:
        """Report only the peer's disconnect from now on, because the calling thread reads the link itself."""
        with self._arming:
            if link.armed == READ:
                self._modify(link, HANG_UP)

    def _modify(self, link: Link, events: int) -> None:
        descriptor = link.fileno()
        if self._links.get(descriptor) is link:  # else another link may have this descriptor number by now
            with suppress(OSError, ValueError):  # the link was closed meanwhile
                link.armed = events
                self._epoll.modify(descriptor, events)

    def forget(self, link: Link) -> None:
        """Remove a link, before it is closed."""
        descriptor = link.fileno()
        with self._arming:
            if self._links.get(descriptor) is link:
                del self._links[descriptor]
                with suppress(OSError, ValueError):
                    self._epoll.unregister(descriptor)

    def wake(self) -> None:
        """Wake one thread."""
        os.eventfd_write(self._wake, 1)

    def start_timer(self) -> None:
        """Start the timer unless it runs."""
        if not self._timer_runs:
            self._timer_runs = True
            _libc.timerfd_settime(self._timer, 0, self._after, None)

    def wait(self) -> Link | Signal | None:
        """Block until there is an event, and return its source; None: a link that was removed."""
        ((descriptor, _),) = self._epoll.poll(maxevents=1)
        if descriptor == self._wake:
            self.clear(self._wake)
            return Signal.WAKE
        if descriptor == self._timer:
            # Reset the flag last: after that another thread may start the timer, whose event must not be cleared here.
            self.clear(self._timer)
            self._timer_runs = False
            return Signal.TIMER
        return self._links.get(descriptor)

    def clear(self, descriptor: int) -> None:
        """Reset the eventfd or the timer, and arm it again."""
        with suppress(BlockingIOError):
            os.read(descriptor, 8)
        with suppress(OSError, ValueError):
            self._epoll.modify(descriptor, READ)

    def close(self) -> None:
        self._epoll.close()
        os.close(self._wake)
        os.close(self._timer)
