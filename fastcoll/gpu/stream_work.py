"""StreamWork, the handle of what was queued on a GPU, and Own, the stream where it is queued.

A StreamWork ends when its event is past; until then it keeps alive what the GPU uses. Everybody may ask the event, but
only the watcher (stream_watch.py) ends a StreamWork, and so calls its callbacks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from ..core.work import Timeout, Work, refuse_to_block, seconds
from ..errors import CollectiveTimeoutError, FastcollError
from .array import DeviceArray, current_stream

_NAP = 0.0005
"""Seconds between two questions of a thread that waits for the GPU."""


class Own:
    """The carrier's own stream on one GPU. Events are kept for the next Work."""

    def __init__(self, runtime: Any, device: int) -> None:
        self.runtime = runtime
        self.device = device
        self.stream: int = runtime.new_stream(device)
        self._free: list[int] = []

    def event(self) -> int:
        """An event; give it to `put_back`."""
        try:
            return self._free.pop()  # lists are safe for threads
        except IndexError:
            return int(self.runtime.new_event(self.device))

    def put_back(self, event: int) -> None:
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
        with self.runtime.on(self.device):
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
        self._users = 0  # of the event; the Work itself is one
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
        if self._error is not None:
            raise self._error.with_traceback(None)
        return True

    def _order(self) -> None:
        runtime = self._own.runtime
        with self._event_in_use() as event:
            if event is not None:
                for stream in waiting_streams(self._arrays, self._own.device):
                    runtime.order(stream, event)  # blocks while the stream's queue is full

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

    def add_done_callback(self, callback: Callable[[Any], object]) -> None:
        """Call `callback(work)` once complete, on the group's watching thread, or now if it already is."""
        self._queue_now()
        super().add_done_callback(callback)

    def _queue_now(self) -> None:
        """For Works that are queued together with others, later."""

    def _queued(self, event: int, kept: Any) -> None:
        """The event stands for all of it; `kept` stays alive until it is past."""
        self._event, self._kept, self._users = event, kept, 1

    @contextmanager
    def _event_in_use(self) -> Iterator[int | None]:
        """The event, which no other Work gets meanwhile, and its GPU current; None: there is none yet, or no more.

        Calls of CUDA may block, and so are not under the lock, which the watcher needs.
        """
        with self._condition:
            event = self._event
            self._users += event is not None
        if event is None:
            yield None
            return
        try:
            with self._own.runtime.on(self._own.device):
                yield event
        finally:
            self._leave(event)

    def _leave(self, event: int) -> None:
        """The last user of an event gives it back."""
        with self._condition:
            self._users -= 1
            unused = not self._users
        if unused:
            self._own.put_back(event)

    def _is_over(self) -> bool:
        if self._done.is_set():
            return True
        # An error of CUDA is the watcher's to tell.
        with suppress(FastcollError):
            return self._is_past()
        return False

    def _is_past(self) -> bool:
        """Whether the GPU is past it."""
        with self._event_in_use() as event:
            return event is None or bool(self._own.runtime.is_past(event))

    def _let_go(self) -> None:
        """The GPU is past it: its memory and event are free."""
        with self._condition:
            event, self._event = self._event, None
        if event is not None:
            self._leave(event)
        self._arrays, self._kept = (), None

    def _settle(self, error: BaseException | None = None) -> None:
        """End the Work, unless it has ended."""
        with self._condition:
            if self._settled:
                return
            # The error already now, for who sees the GPU past it before `_finish` has run in this thread.
            self._settled, self._error = True, error
        self._finish(self._result, error)


def waiting_streams(arrays: Sequence[DeviceArray], device: int) -> set[int]:
    """The streams that must wait before their libraries use the arrays again."""
    return {_waiting_stream(x, device) for x in arrays}


def _waiting_stream(x: DeviceArray, device: int) -> int:
    owner = (
        x.owner[1] if isinstance(x.owner, tuple) else x.owner
    )  # of a packed copy: its memory and the array
    # Of other libraries the stream that the array came with is the best that is known.
    return current_stream(owner, device, x.stream)
