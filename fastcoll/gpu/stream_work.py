"""StreamWork, the handle of what was queued on a GPU; Own, the stream where it is queued; Watcher, which ends it.

A StreamWork ends when its event is past; until then it keeps alive what the GPU uses. Everybody may ask the event, but
only the Watcher ends a StreamWork, which calls its callbacks, and asks whether the rest can still end: dead peers,
errors, the deadline. The thread starts with the first Work and ends some seconds after the last one.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

from ..core.work import ENDLESS, Timeout, Work, is_progressing, mark_progressing, refuse_to_block, seconds
from ..errors import AbortedError, CollectiveTimeoutError, FastcollError, GroupError
from .device_array import DeviceArray, current_stream

_ASK = 0.0005
"""Seconds between two questions of a thread that waits for the GPU."""
_NAP, _LONG_NAP = 0.0005, 0.01
"""Seconds between two looks at the events: while the oldest Work is younger than _YOUNG, and later."""
_YOUNG = 0.1
_LOOK = 0.05
"""Seconds between two looks at peers and errors, as elsewhere (core/monitor.py)."""
_MOST = 64
"""Works outstanding before a call waits: the driver's queue takes some 1024 launches, and whoever finds it full blocks
inside CUDA, where the watcher may block behind it. An estimate: a small call queues about ten."""
_IDLE = 5.0
_GIVE_UP = 5.0
"""Seconds that the GPU has to end what was broken off; then its memory is kept until the group is closed."""


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

    def end(self, failed: bool = False) -> None:
        """Give all back; the GPU ends what is queued first. One that `failed` gives nothing back."""
        with suppress(FastcollError) if failed else nullcontext(), self.runtime.on(self.device):
            for event in self._free:
                self.runtime.end_event(event)
            self._free.clear()
            self.runtime.end_stream(self.stream)


class StreamWork(Work):
    """A Work that ends on a GPU. `wait()` orders the arrays' libraries' current streams, and the host goes on.

    `judge` is called when the GPU is past it, before it says that it is over; it may fail the group.
    """

    def __init__(
        self, describe: str, own: Own, arrays: Sequence[DeviceArray], judge: Callable[[], None] | None = None
    ) -> None:
        super().__init__(describe)
        self.describe = describe
        self.began = time.monotonic()
        self._own = own
        self._arrays: Sequence[DeviceArray] = arrays
        self._kept: Any = None
        self.event: int | None = None
        self._users = 0  # of the event; the Work itself is one
        self._settled = False
        self._judge = judge
        self._result: Any = None

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
        if timeout is None:
            self._order()
        elif not self.is_completed():
            refuse_to_block(f"waiting for {self.describe}")
            limit = seconds(timeout, 0.0)
            end = time.monotonic() + limit
            while not self.is_completed():
                left = end - time.monotonic()
                if left <= 0:
                    raise CollectiveTimeoutError(f"{self.describe} is not complete after {limit:g} s")
                self.end_event.wait(min(_ASK, left))
        if self.error is not None:
            raise self.error.with_traceback(None)
        return True

    def _order(self) -> None:
        """Make the streams wait that must before the arrays' libraries use them again."""
        with self._event_in_use() as event:
            if event is not None:
                # A packed copy has two owners: its memory and the array. Of a library that is not known, the stream
                # that the array came with is the best that is.
                owners = [
                    (x.owner[1] if isinstance(x.owner, tuple) else x.owner, x.stream) for x in self._arrays
                ]
                for stream in {current_stream(owner, self._own.device, came) for owner, came in owners}:
                    self._own.runtime.order(stream, event)  # blocks while the stream's queue is full

    def is_completed(self) -> bool:
        """Whether the operation has ended, well or not. Asks the GPU; never blocks."""
        if self.ended:
            return True
        # An error of CUDA is the watcher's to tell.
        with suppress(FastcollError):
            return self.is_past()
        return False

    def is_success(self) -> bool:
        """Whether the operation has ended well. Asks the GPU; never blocks."""
        return self.is_completed() and self.error is None

    def queued(self, own: Own, event: int, kept: Any, error: BaseException | None) -> None:
        """The event stands for all of it, or for a part after an error; `kept` stays alive until it is past."""
        self._own, self.event, self._kept, self._users = own, event, kept, 1

    @contextmanager
    def _event_in_use(self) -> Iterator[int | None]:
        """The event, which no other Work gets meanwhile, and its GPU current; None: there is none yet, or no more.

        Calls of CUDA may block, and so are not under the lock, which the watcher needs.
        """
        with self._condition:
            event = self.event
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

    def is_past(self) -> bool:
        """Whether the GPU is past it."""
        with self._event_in_use() as event:
            past = event is None or bool(self._own.runtime.is_past(event))
        if past and self._judge is not None and not self.ended:
            self._judge()
        return past

    def let_go(self) -> None:
        """The GPU is past it: its memory and event are free."""
        with self._condition:
            event, self.event = self.event, None
        if event is not None:
            self._leave(event)
        self._arrays, self._kept = (), None

    def settle(self, error: BaseException | None = None) -> None:
        """End the Work, unless it has ended."""
        with self._condition:
            if self._settled:
                return
            # The error already now, for who sees the GPU past it before `complete` has run in this thread.
            self._settled, self.error = True, error
        self.complete(self._result, error)


class Watcher:
    """Looks after the Works of one carrier, oldest first, as their stream ends them.

    Args:
        timeout: tells how many seconds a Work may take once those before it have ended.
        look: why waiting is in vain, or None; gets the oldest Work's description. An error that a Work may still
            outrun counts when it is seen twice.
        fail: fails the group, and with it all outstanding Works by `break_off`.
    """

    def __init__(
        self,
        name: str,
        timeout: Callable[[], float],
        look: Callable[[str], GroupError | None],
        fail: Callable[[GroupError], None],
    ) -> None:
        self._name, self._timeout, self._look, self._fail = name, timeout, look, fail
        self._works: deque[StreamWork] = deque()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = False
        self._broken_at: float | None = None

    @property
    def outstanding(self) -> int:
        """How many Works have not ended on the GPU."""
        return len(self._works)

    def add(self, work: StreamWork) -> None:
        """Look after a Work from now on."""
        with self._changed:
            idle = not self._works
            self._works.append(work)
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name=f"fastcoll-gpu-{self._name}", daemon=True
                )
                self._thread.start()
            elif idle:
                self._changed.notify_all()

    def await_room(self) -> None:
        """Block while too much is outstanding, and not broken off; never on a thread that carries operations out."""
        if len(self._works) >= _MOST and not is_progressing():
            with self._changed:
                self._changed.wait_for(
                    lambda: len(self._works) < _MOST or self._thread is None or self._broken_at is not None,
                    ENDLESS,
                )

    def break_off(self, error: GroupError) -> None:
        """All outstanding Works end with `error`; their memory stays until the GPU is past them."""
        with self._changed:
            self._broken_at = self._broken_at or time.monotonic()
            works = list(self._works)
            self._changed.notify_all()
        for work in works:
            work.settle(error)

    def drain(self) -> None:
        """Block until nothing is outstanding; what hangs is ended by its timeout."""
        if threading.current_thread() is not self._thread:
            with self._changed:
                self._changed.wait_for(lambda: not self._works or self._thread is None, ENDLESS)

    def close(self) -> None:
        """End the thread, and let go of what was given up. Closing twice is fine."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(_GIVE_UP)
        while self._works:
            self._works.popleft().let_go()

    def _run(self) -> None:
        mark_progressing()
        try:
            self._watch()
        finally:
            with self._changed:
                if self._thread is threading.current_thread():
                    self._thread = None
                self._changed.notify_all()

    def _watch(self) -> None:
        next_look, suspect = 0.0, None
        while (oldest := self._oldest()) is not None:
            try:
                if oldest.is_past():
                    self._end(oldest)
                    continue
                now = time.monotonic()
                if self._broken_at is not None and now > self._broken_at + _GIVE_UP:
                    return
                if now >= next_look and self._broken_at is None:
                    next_look = now + _LOOK
                    suspect = self._judge(oldest, now, suspect)
            except FastcollError as error:  # of CUDA, which has no way back
                self._fail(AbortedError(f"{oldest.describe}: {error}"))
                return
            time.sleep(_NAP if time.monotonic() - oldest.began < _YOUNG else _LONG_NAP)

    def _oldest(self) -> StreamWork | None:
        with self._changed:
            self._changed.wait_for(lambda: self._works or self._closed, _IDLE)
            if self._works:
                return self._works[0]
            self._thread = None
            return None

    def _end(self, work: StreamWork) -> None:
        work.let_go()
        with self._changed:
            self._works.popleft()
            if self._works:
                self._works[0].began = time.monotonic()
            self._changed.notify_all()
        work.settle()

    def _judge(self, work: StreamWork, now: float, suspect: StreamWork | None) -> StreamWork | None:
        """Fail the group if the Work cannot end; the Work if it is to be seen so once more."""
        found = self._look(work.describe)
        if found is None and now - work.began >= (limit := self._timeout()):
            found = CollectiveTimeoutError(
                f"{work.describe} is not complete after {limit:g} s: a rank has not called it or has called "
                "something else, or a GPU is busy"
            )
        elif found is not None and suspect is not work:
            return work
        if found is not None:
            self._fail(found)
        return None
