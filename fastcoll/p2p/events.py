"""Class Events takes the events of a rank's pipes (pipe.py), and lets the Exchange (exchange.py) handle them.

A rank has one pipe, or two: one to the ranks of its node and one to all others. Two pipes are polled in turn, so that
neither starves. Only the holder of the lock (lock.py) calls these methods.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from .exchange import Exchange
from .lock import ProgressLock
from .pipe import EVENTS, NOTHING, Pipe
from .transfers import Transfer

BUDGET = 0.05
"""Seconds that a pipe waits before it returns, so that signals, deadlines and peers are checked."""
POLL = 5e-5
"""Seconds between two polls, where a thread cannot wait for an event."""

_CHECK_EVERY = 64  # the number of events between two checks if `advance` always finds an event


class Events:
    """Takes events from the pipes and has the Exchange handle them.

    Args:
        routes: as for the Engine.
        check: raises when the group has failed or a deadline has passed.
        is_wanted: returns whether another thread needs this thread to return from waiting.

    Attributes:
        handled: for each pipe, how many of its events were handled.
    """

    def __init__(
        self,
        lock: ProgressLock,
        exchange: Exchange,
        routes: list[tuple[Pipe, int]],
        check: Callable[[], None],
        is_wanted: Callable[[], bool],
    ) -> None:
        self.handled = [0] * len(lock.pipes)
        self._lock, self._exchange, self._routes = lock, exchange, routes
        self._check, self._is_wanted = check, is_wanted
        self._ranks = [{n: r for r, (p, n) in enumerate(routes) if p is pipe} for pipe in lock.pipes]
        self._first = 0  # of two pipes, the one to poll first
        self._until_check = _CHECK_EVERY

    def rank_of(self, pipe: Pipe, number: int) -> int:
        """Return the group rank of a pipe's peer."""
        return self._ranks[self._lock.pipes.index(pipe)][number]

    def advance(self, wait: bool) -> bool:
        """Move bytes and handle the next event; return False if there is none.

        If `wait` is true, wait for an event for up to BUDGET seconds.
        """
        if len(self.handled) == 1:
            return self._advance_one(0, wait)
        return self._advance_both() if wait else self._poll_both()

    def _advance_one(self, index: int, wait: bool) -> bool:
        lock = self._lock
        nested = lock.nested
        event = lock.pipes[index].advance(self.handled[index], wait)
        return self.handle(index, event, nested)

    def handle(self, index: int, event: int, nested: int) -> bool:
        """Handle the event that a pipe's `advance` has returned; return False if there was none.

        Args:
            nested: `lock.nested` from before `advance`. If it has changed, a signal handler has moved messages
                meanwhile and handled this event, so the event is ignored here.
        """
        lock = self._lock
        lock.is_consistent = False
        if event == NOTHING and lock.nested == nested:
            lock.pipes[index].silence_bell()
            lock.is_consistent = True
            return False
        if lock.nested == nested and not lock.is_closed:
            self._exchange.on_event[event % EVENTS](self._ranks[index][event // EVENTS])
            self.handled[index] += 1
            self._until_check -= 1
        lock.is_consistent = True
        if self._until_check <= 0:
            self._until_check = _CHECK_EVERY
            self._check()
        return True

    def _poll_both(self) -> bool:
        for index in (self._first, 1 - self._first):
            if self._advance_one(index, False):
                self._first = 1 - index
                return True
        return False

    def _advance_both(self) -> bool:
        """If operations need only one pipe, wait in that pipe; else poll both pipes, and sleep in between."""
        awaited = [any(self._needs(t, pipe) for t in self._exchange.live) for pipe in self._lock.pipes]
        if sum(awaited) == 1:
            return self._advance_one(awaited.index(True), True)
        start = now = time.monotonic()
        while now - start < BUDGET:
            if self._poll_both():
                return True
            if self._is_wanted():
                return False
            # As in kernels/waiting.py: yield to other threads first, sleep later.
            time.sleep(0 if now - start < POLL else POLL)
            now = time.monotonic()
        return False

    def _needs(self, transfer: Transfer, pipe: Pipe) -> bool:
        peer = transfer.peer
        return peer is None or (peer != self._exchange.rank and self._routes[peer][0] is pipe)
