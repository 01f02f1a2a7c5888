"""Ctrl-C for a rank while it waits in a call."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import fastcoll as dist

AFTER, AGAIN = 0.2, 0.05  # seconds until the first poll, and between polls


@contextmanager
def interrupted(group: dist.ProcessGroup) -> Iterator[None]:
    """In this block the main thread gets a KeyboardInterrupt during a call or message of the group.

    A plain timer could interrupt it before the call, if it had no core for so long.
    """

    def look(*_: Any) -> None:
        if group.gate.is_inside() or group.messages.is_entered():
            signal.setitimer(signal.ITIMER_REAL, 0)
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, look)
    signal.setitimer(signal.ITIMER_REAL, AFTER, AGAIN)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
