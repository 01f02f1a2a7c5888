"""Deadlines: the thread that fails calls at their deadlines, and looks for hosts that vanished."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from ..core.work import ENDLESS

_LOOK_SECONDS = 1.0  # the time between two checks for hosts that vanished


class Deadlines:
    """A thread that sleeps until the earliest deadline.

    Args:
        fail_late: called with the time; fails the calls whose deadline has passed, and returns the earliest deadline of
            the other calls.
        look: called at least once a second, to look for hosts that vanished; None: there is nothing to look for.
    """

    def __init__(self, fail_late: Callable[[float], float], look: Callable[[], None] | None) -> None:
        self._fail_late, self._look = fail_late, look
        self._due = ENDLESS
        self._is_closed = False
        self._changed = threading.Condition()
        threading.Thread(target=self._run, name="fastcoll-rpc-clock", daemon=True).start()

    def watch(self, deadline: float) -> None:
        """Wake the thread at the deadline of a call, which the caller has already put into a table of pending calls.

        `_due` is the time at which the thread wakes. The thread resets it to ENDLESS before it reads the tables. So if
        the thread read them too early to find this call, `_due` is reset before the comparison here. This method then
        wakes the thread, unless an earlier deadline was set meanwhile.
        """
        if deadline < self._due:
            self._wake(deadline)

    def close(self) -> None:
        """End the thread."""
        self._is_closed = True
        self._wake(0.0)

    def _wake(self, due: float) -> None:
        with self._changed:
            self._due = min(self._due, due)
            self._changed.notify()

    def _run(self) -> None:
        while not self._is_closed:
            if self._look is not None:
                self._look()
            with self._changed:
                left = self._due - time.monotonic()
                if left > 0:
                    self._changed.wait(left if self._look is None else min(left, _LOOK_SECONDS))
                    continue
                self._due = ENDLESS
            due = self._fail_late(time.monotonic())
            with self._changed:
                self._due = min(self._due, due)
