"""StreamWork, the handle of what was queued on a GPU, and Own, the stream where it is queued.

A StreamWork ends when its event is past; until then it keeps alive what the GPU uses. Everybody may ask the event, but
only the watcher (stream_watch.py) ends a StreamWork, and so calls its callbacks.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any

from ..errors import CollectiveTimeoutError, FastcollError
from ..work import Timeout, Work, refuse_to_block, seconds
from .array import DeviceArray, current_stream

_NAP = 0.0005
"""Seconds between two questions of a thread that waits for the GPU."""


class Own:
    """The carrier's own stream on one GPU. Events are kept for the next Work."""

    def __init__(self, runtime: Any, device: int) -> None:
        self.runtime = runtime
        self.device = device
        self.lock = threading.Lock()
        self.stream: int = runtime.new_stream(device)
        self._free: list[int] = []

    def event(self) -> int:
        """An event; give it to `put_back`."""
        with self.lock:
            if self._free:
                return self._free.pop()
        return int(self.runtime.new_event(self.device))

    def put_back(self, event: int) -> None:
        with self.lock:
            self._free.append(event)

    def follow(self, streams: Iterable[int]) -> None:
        """What is queued here from now on waits for what the streams hold now; the GPU must be current."""
        for stream in streams:
            event = self.event()
            self.runtime.record(event, stream)
            self.runtime.order(self.stream, event)
            self.put_back(event)  # what waits for an event waits for its record of that moment

    def end(self) -> None:
        """Give the stream and the events back; the GPU ends what is queued first."""
        for event in self._free:
            self.runtime.end_event(event)
        self._free.clear()
        self.runtime.end_stream(self.stream)


class StreamWork(Work):
    """A Work that ends on a GPU. `wait()` orders the arrays' libraries' current streams, and the host goes on.

    Args:
        describe: the call, for messages.
        own: where it was queued.
        arrays: what it reads and writes.
        result: what `result()` returns.
    """

    def __init__(self, describe: str, own: Own, arrays: Sequence[DeviceArray], result: Any = None) -> None:
        super().__init__(describe)
        self.began = time.monotonic()
        self._own = own
        self._arrays: Sequence[DeviceArray] = arrays
        self._kept: Any = None
        self._event: int | None = None
        self._settled = False
        self._result = result

    def wait(self, timeout: Timeout = None) -> bool:
        """Make the libraries' current streams wait for the result; with a timeout, block until it is there.

        Args:
            timeout: seconds or timedelta; None: the host does not wait, and a failure that comes later is raised by
                the next call on the group.

        Raises:
            CollectiveTimeoutError: not complete within `timeout` (the operation goes on).
            UsageError: with a timeout, in a Work's callback before this operation is complete.
            FastcollError: whatever ended the operation.
        """
        self._queue_now()
        if timeout is None:
            self._order()
        elif not self._is_over():
            refuse_to_block(f"waiting for {self._describe}")
            self._block(seconds(timeout, 0.0))
        if self._done.is_set() and self._error is not None:
            raise self._error.with_traceback(None)
        return True

    def _order(self) -> None:
        with self._own.lock:
            if self._event is None:
                return
            runtime = self._own.runtime
            with runtime.on(self._own.device):
                for stream in waiting_streams(self._arrays, self._own.device):
                    runtime.order(stream, self._event)

    def _block(self, limit: float) -> None:
        end = time.monotonic() + limit
        while not self._is_over():
            left = end - time.monotonic()
            if left <= 0:
                raise CollectiveTimeoutError(f"{self._describe} is not complete after {limit:g} s")
            self._done.wait(min(_NAP, left))

    def is_completed(self) -> bool:
        """Whether the operation has ended, well or not. Asks the GPU; never blocks."""
        self._queue_now()
        return self._is_over()

    def is_success(self) -> bool:
        """Whether the operation has ended well. Asks the GPU; never blocks."""
        return self.is_completed() and self._error is None

    def add_done_callback(self, callback: Callable[[Work], None]) -> None:
        """Call `callback(work)` once complete, on the group's watching thread, or now if it already is."""
        self._queue_now()
        super().add_done_callback(callback)

    def _queue_now(self) -> None:
        """For Works that are queued together with others, later."""

    def _queued(self, event: int, kept: Any) -> None:
        """The event stands for all of it; `kept` stays alive until it is past."""
        self._event, self._kept = event, kept

    def _is_over(self) -> bool:
        if self._done.is_set():
            return True
        # An error of CUDA is the watcher's to tell.
        with suppress(FastcollError):
            return self._is_past()
        return False

    def _is_past(self) -> bool:
        """Whether the GPU is past it."""
        with self._own.lock:
            return self._event is None or bool(self._own.runtime.is_past(self._event))

    def _let_go(self) -> None:
        """The GPU is past it: its memory and event are free."""
        with self._own.lock:
            event, self._event = self._event, None
        if event is not None:
            self._own.put_back(event)
        self._arrays, self._kept = (), None

    def _settle(self, error: BaseException | None = None) -> None:
        """End the Work, unless it has ended."""
        with self._own.lock:
            if self._settled:
                return
            self._settled = True
        self._finish(self._result, error)


def waiting_streams(arrays: Sequence[DeviceArray], device: int) -> set[int]:
    """The streams that must wait before their libraries use the arrays again."""
    return {_waiting_stream(x, device) for x in arrays}


def _waiting_stream(x: DeviceArray, device: int) -> int:
    owner = (
        x.owner[1] if isinstance(x.owner, tuple) else x.owner
    )  # of a packed copy: its memory and the array
    # Of other libraries the stream that the array came with is the best that is known.
    known = type(owner).__module__.partition(".")[0] in ("torch", "cupy")
    return current_stream(owner, device) if known else x.stream
