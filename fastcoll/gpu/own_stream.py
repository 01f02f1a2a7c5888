"""OwnStream: a carrier's own stream on one GPU, with the events that order it and those that limit what is queued."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import nullcontext, suppress
from typing import Any

from ..errors import FastcollError

_PORTION, _PORTIONS = 128, 3
"""Launches between two marks on a stream, and how many marks may be outstanding.

The driver's queue holds some 1024 launches, which streams may share. A thread that finds it full blocks inside CUDA,
perhaps behind a kernel that waits for a peer, and other threads may block behind that thread.
"""
_NAP = 0.0001


class OwnStream:
    """The carrier's own stream on one GPU, and events that are reused."""

    def __init__(self, runtime: Any, device: int) -> None:
        self.runtime = runtime
        self.device = device
        self.stream: int = runtime.new_stream(device)
        self._free: list[int] = []
        self._launched = 0  # since the last mark
        self._marks: deque[int] = deque()  # events, the oldest first, with _PORTION launches between two

    def event(self) -> int:
        """Return an event; give it back with `put_back`."""
        try:
            return self._free.pop()  # list operations are thread-safe
        except IndexError:
            return int(self.runtime.new_event(self.device))

    def put_back(self, event: int) -> None:
        self._free.append(event)

    def follow(self, streams: Iterable[int]) -> None:
        """Make work queued here from now on wait for the work that is queued on `streams` now.

        The GPU must be current.
        """
        for stream in streams:
            event = self.event()
            self.runtime.record(event, stream)
            self.runtime.order(self.stream, event)
            self.put_back(event)  # can be recorded again at once: `order` waits for the last record before it

    def make_room(self, launches: int, check: Callable[[], None]) -> None:
        """Count launches that will be queued here, and block the host while too many are queued.

        Args:
            check: called during the wait; raises an error if it is useless to wait longer.
        """
        self._launched += launches
        if self._launched <= _PORTION:
            return
        self._launched, event = launches, self.event()
        self.runtime.record(event, self.stream)
        self._marks.append(event)
        while len(self._marks) > _PORTIONS:
            while not self.runtime.is_past(self._marks[0]):
                check()
                time.sleep(_NAP)
            self.put_back(self._marks.popleft())

    def end(self, failed: bool = False) -> None:
        """Destroy the stream and the events; the GPU completes queued work first.

        Args:
            failed: ignore errors.
        """
        with suppress(FastcollError) if failed else nullcontext(), self.runtime.on(self.device):
            for event in (*self._free, *self._marks):
                self.runtime.end_event(event)
            self._free.clear()
            self._marks.clear()
            self.runtime.end_stream(self.stream)
