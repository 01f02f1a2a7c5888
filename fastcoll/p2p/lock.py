"""The lock of a rank's messages, held by the thread that moves messages.

Rules:

- A rank has one or two pipes (pipe.py), each with a word BUSY. A thread holds the lock when it has set BUSY of every
  pipe. A compiled short cut sets BUSY of one pipe, for one call. Setting BUSY never blocks. If another thread has set
  it, a thread that posts an operation leaves the operation in the inbox (progress.py), and a thread that waits for an
  operation adds an event to `waiters` and sleeps.
- The holder drives the pipes (moves bytes) and changes the Exchange (exchange.py). A thread whose short cut has kept
  its pipe also changes the Exchange: it records the short cut's message, in the state of one peer and in single entries
  of `Exchange.live`. If the message must be matched, a second lock prevents another thread from doing the same for
  the other pipe at the same time (`Engine._hand_over`).
- Any thread may append to the inbox and to `waiters`.
- No post is lost. The poster appends to the inbox before it tries to take the lock; the holder releases the lock before
  it checks the inbox. So at least one of the two sees the other and begins the operation.
- No short cut overtakes a posted operation, because short cuts return without effect while the word BEHIND is set. The
  poster sets BEHIND after it appends to the inbox. The holder clears BEHIND before it checks the inbox for the last
  time, and sets it again if it finds a post.
- A signal handler may run, and raise, between any two bytecodes of the holder. Mostly it runs when a pipe's
  `advance` returns. `is_consistent` is True then: no event is half-handled, the pipe will return the same event again,
  and the handler may itself wait for messages. An exception while `is_consistent` is False leaves the Exchange
  inconsistent, so it fails the group. An exception in `acquire` or `release` leaves BUSY set; the functions that take
  the lock release it then (`returns_lock` in progress.py).
"""

from __future__ import annotations

import threading
import time
from collections import deque

from .pipe import Pipe

NAP = 1e-3  # seconds that a thread waits for the lock before it tries again


class ProgressLock:
    """The lock over all pipes of a rank.

    Attributes:
        pipes: one or two.
        waiters: an event for each thread that waits for the lock.
        is_driven: whether a thread holds the lock; False while a short cut holds a pipe.
        is_consistent: whether no event is half-handled.
        nested: how many times a signal handler has driven the pipes while its own thread held the lock.
        completing: the thread that has last called `Pipe.complete`, until the call has returned; else 0.
        is_closed: whether the lock is closed: only the thread that closes the pipes may still take it.
    """

    def __init__(self, pipes: list[Pipe]) -> None:
        self.pipes = pipes
        self.waiters: deque[threading.Event] = deque()
        self.is_driven = False
        self.is_consistent = True
        self.nested = self.completing = 0
        self.is_closed = False

    def acquire(self) -> bool:
        """Take the lock unless another thread holds it or a pipe. Never blocks."""
        first = self.pipes[0]
        if not first.seize():
            return False
        if len(self.pipes) == 2 and not self.pipes[1].seize():
            first.let_go()
            return False
        self.is_driven, self.is_consistent = True, False
        return True

    def release(self) -> None:
        """Release the lock. The caller checks the inbox afterwards."""
        self.is_driven, self.is_consistent = False, True
        for pipe in self.pipes:
            pipe.let_go()

    def recover(self) -> None:
        """Release the pipes that the calling thread holds, because an exception has ended `acquire` or `release`."""
        mine = [pipe for pipe in self.pipes if pipe.is_mine()]
        if mine:
            self.is_driven, self.is_consistent = False, True
        for pipe in mine:
            pipe.let_go()

    def is_mine(self) -> bool:
        """Whether the calling thread holds a pipe. If so, the caller is a signal handler or an array's callback."""
        pipes = self.pipes
        return pipes[0].is_mine() or (len(pipes) == 2 and pipes[1].is_mine())

    def may_nest(self) -> bool:
        """Whether a signal handler may drive the pipes, although its own thread holds a pipe.

        It may not if the handler has interrupted the handling of an event, or a short cut: the message of a short cut
        is not in the Exchange, so the handler would take the short cut's message, or its ack.
        """
        return self.is_consistent and (self.is_driven or self.completing == threading.get_ident())

    def wait(self, end: float | None) -> None:
        """Wait until the lock may be free, but not beyond `end` (time.monotonic), and at most a millisecond."""
        waiter = threading.Event()
        try:
            self.waiters.append(waiter)
            self.ring_bells()
            waiter.wait(NAP if end is None else max(0.0, min(NAP, end - time.monotonic())))
        finally:
            if waiter in self.waiters:
                self.waiters.remove(waiter)

    def wake_one(self) -> None:
        """Wake the thread that has waited longest, if any."""
        for waiter in list(self.waiters)[:1]:
            waiter.set()

    def wake_all(self) -> None:
        """Wake every thread that waits for the lock."""
        for waiter in list(self.waiters):
            waiter.set()

    def ring_bells(self) -> None:
        """Have the thread that drives the pipes return from `Pipe.advance` at once."""
        for pipe in self.pipes:
            pipe.ring_bell()

    def set_behind(self, behind: bool) -> None:
        """Forbid or allow short cuts on every pipe."""
        for pipe in self.pipes:
            pipe.set_behind(behind)
