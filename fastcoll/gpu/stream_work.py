"""StreamWork, the handle of work on a GPU; OwnStream, a stream; Watcher, a thread.

A StreamWork ends when its event is complete. Until then it keeps alive the memory that the GPU uses. Any thread may
query the event, but only the Watcher's thread completes a StreamWork and runs its callbacks. There is one exception: if
the group fails, the thread that fails the group does this. The Watcher's second thread, the guard, checks whether the
outstanding Works can still end: it looks for dead peers, errors and a passed deadline. It calls nothing of CUDA, where
the first thread may block: behind a thread of the program that loads a kernel, for example, while that waits for a
collective. The threads start with the first Work and end some seconds after the last one.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from ..core.work import ENDLESS, Timeout, Work, is_progressing, mark_progressing, refuse_to_block, seconds
from ..errors import AbortedError, CollectiveTimeoutError, FastcollError, GroupError
from . import idle
from .device_array import DeviceArray, current_stream
from .own_stream import OwnStream

_ASK = 0.0005
"""Seconds between two polls by a thread that waits for the GPU."""
_NAP, _LONG_NAP = 0.0005, 0.01
"""Seconds between two polls of the events: _NAP until the oldest Work is _YOUNG seconds old, then _LONG_NAP."""
_YOUNG = 0.1
_LOOK = 0.05
"""Seconds between two checks for dead peers and errors, as in core/monitor.py."""
_MOST = 64
"""While this many Works are outstanding, a new call waits. An estimate; see also own_stream.py."""
_IDLE = 5.0
_GIVE_UP = 5.0
"""Seconds for the GPU to end cancelled work.

After that, the memory of this work is kept until the group is closed.
"""


class StreamWork(Work):
    """A Work that ends on a GPU.

    `wait()` makes the current streams of the arrays' libraries wait for the result; the host does not wait.

    Args:
        judge: is called when the GPU has finished the work, before the Work reports completion; it may fail the group.
    """

    def __init__(
        self,
        describe: str,
        own: OwnStream,
        arrays: Sequence[DeviceArray],
        judge: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(describe)
        self.describe = describe
        self.began = time.monotonic()
        self._own = own
        self._arrays: Sequence[DeviceArray] = arrays
        self._kept: Any = None
        self.event: int | None = None
        self._users = 0  # the number of users of the event, including the Work
        self._settled = False
        self._event_lock = threading.RLock()  # of the event and its users; reentrant, for signal handlers
        self._judge = judge

    def wait(self, timeout: Timeout = None) -> bool:
        """Make the current streams of the arrays' libraries wait for the result; with a timeout, block the host.

        Args:
            timeout: seconds or timedelta; None: the host does not wait. If the operation fails later, the next call on
                the group raises the error.

        Raises:
            CollectiveTimeoutError: not complete within `timeout` (the operation goes on).
            UsageError: called with a timeout in a Work's callback, before this operation is complete.
            FastcollError: the error that ended the operation.
        """
        if timeout is None:
            self.order_streams()
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

    def order_streams(self) -> None:
        """Make the streams wait on which the arrays' libraries are expected to use the arrays next."""
        with self._event_in_use() as event:
            if event is not None:
                # A packed copy's owner is a tuple: the copy's memory and the caller's array. If the library is unknown,
                # the best guess is the stream that the array was passed with.
                owners = [
                    (x.owner[1] if isinstance(x.owner, tuple) else x.owner, x.stream) for x in self._arrays
                ]
                for stream in {current_stream(owner, self._own.device, passed) for owner, passed in owners}:
                    self._own.runtime.order(stream, event)  # blocks while the stream's queue is full

    def is_completed(self) -> bool:
        """Return whether the operation has ended, also with an error. Queries the GPU; never blocks."""
        if self.ended:
            return True
        # The watcher reports an error of CUDA.
        with suppress(FastcollError):
            return self.is_past()
        return False

    def is_success(self) -> bool:
        """Return whether the operation has ended without an error. Queries the GPU; never blocks."""
        return self.is_completed() and self.error is None

    def queued(self, own: OwnStream, event: int, kept: Any, error: BaseException | None) -> None:
        """Store the event that was recorded behind the queued work; after an error, behind the part that was queued.

        `kept` stays alive until the event is complete.
        """
        self._own, self.event, self._kept, self._users = own, event, kept, 1

    @contextmanager
    def _event_in_use(self) -> Iterator[int | None]:
        """Yield the event, with its GPU as the current one, and keep it from being reused during the `with` block.

        Yields None if the event is not recorded yet, or has been given back. Calls of CUDA may block, so they run
        without the lock, which the watcher needs.
        """
        with self._event_lock:
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
        """Stop using an event; its last user gives it back."""
        with self._event_lock:
            self._users -= 1
            unused = not self._users
        if unused:
            self._own.put_back(event)

    def is_past(self) -> bool:
        """Return whether the GPU has finished the work."""
        with self._event_in_use() as event:
            past = event is None or bool(self._own.runtime.is_past(event))
        if past and self._judge is not None and not self.ended:
            self._judge()
        return past

    def let_go(self) -> None:
        """Release the memory and the event, after the GPU has finished the work or the Work was given up."""
        with self._event_lock:
            event, self.event = self.event, None
        if event is not None:
            self._leave(event)
        self._arrays, self._kept = (), None

    def settle(self, error: BaseException | None = None) -> None:
        """Complete the Work if it is not complete yet."""
        with self._event_lock:
            if self._settled:
                return
            # Set the error first, because another thread may find the event complete before `complete` has run in this
            # one.
            self._settled, self.error = True, error
        self.complete(self.returned, error)


class Watcher:
    """Watches the Works of one carrier, oldest first, because the stream completes them in order.

    Args:
        timeout: returns the seconds that a Work may take after the Works before it have ended.
        look: gets the oldest Work's description, and returns the error that makes waiting useless, or None. Neither
            this error nor a passed deadline counts before a second check, because the Work may end in between.
        fail: fails the group, and completes all outstanding Works with the error (`break_off`).
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
        self._guarding: threading.Thread | None = None
        self._closed = False
        self._broken_at: float | None = None
        idle.watch(self)

    @property
    def outstanding(self) -> int:
        """The number of Works that the GPU has not finished."""
        return len(self._works)

    def add(self, work: StreamWork) -> None:
        """Watch a Work from now on."""
        with self._changed:
            was_idle = not self._works
            self._works.append(work)
            if self._thread is None:
                name = f"fastcoll-gpu-{self._name}"
                over = (threading.Event(),)
                self._thread = threading.Thread(target=self._run, args=over, name=name, daemon=True)
                self._guarding = threading.Thread(
                    target=self._guard, args=over, name=f"{name}-guard", daemon=True
                )
                self._thread.start()
                self._guarding.start()
            elif was_idle:
                self._changed.notify_all()

    def await_room(self) -> None:
        """Block while too many Works are outstanding and the group has not failed.

        Never blocks a progress thread or a watcher's thread.
        """
        if len(self._works) >= _MOST and not is_progressing():
            with self._changed:
                self._changed.wait_for(
                    lambda: len(self._works) < _MOST or self._thread is None or self._broken_at is not None,
                    ENDLESS,
                )

    def break_off(self, error: GroupError) -> None:
        """Complete all outstanding Works with `error`.

        Their memory stays until the GPU has finished them.
        """
        with self._changed:
            self._broken_at = self._broken_at or time.monotonic()
            works = list(self._works)
            self._changed.notify_all()
        for work in works:
            work.settle(error)

    def drain(self) -> None:
        """Block until no Work is outstanding; a Work that hangs ends at its timeout."""
        if threading.current_thread() is self._thread:
            return
        with self._changed:
            # Not only until the thread has ended, because it may be blocked inside CUDA.
            while self._works and self._thread is not None and not self._has_given_up():
                self._changed.wait(_LOOK)

    def close(self) -> None:
        """End the thread, and release the Works that were given up. Closing twice is fine."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            thread, guard = self._thread, self._guarding
        for each in (thread, guard):
            if each is not None and each is not threading.current_thread():
                each.join(_GIVE_UP)
        while self._works:
            self._works.popleft().let_go()

    def _run(self, over: threading.Event) -> None:
        mark_progressing()
        try:
            while (oldest := self._oldest()) is not None:
                try:
                    if oldest.is_past():
                        self._end(oldest)
                        continue
                    if self._has_given_up():
                        return
                except FastcollError as error:  # an error of CUDA is final
                    self._fail(AbortedError(f"{oldest.describe}: {error}"))
                    return
                time.sleep(_NAP if time.monotonic() - oldest.began < _YOUNG else _LONG_NAP)
        finally:
            over.set()
            with self._changed:
                if self._thread is threading.current_thread():
                    self._thread = None
                self._changed.notify_all()

    def _has_given_up(self) -> bool:
        return self._broken_at is not None and time.monotonic() > self._broken_at + _GIVE_UP

    def _guard(self, over: threading.Event) -> None:
        """Judge the oldest Work every _LOOK seconds, until the other thread has ended or the group has failed."""
        mark_progressing()
        suspect = None
        while not over.wait(_LOOK) and self._broken_at is None:
            with self._changed:
                oldest = self._works[0] if self._works else None
            try:
                suspect = None if oldest is None else self._judge(oldest, time.monotonic(), suspect)
            except FastcollError as error:
                self._fail(AbortedError(f"watching group {self._name}: {error}"))

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
        """Fail the group if the oldest Work cannot end.

        Returns:
            the Work, if something is wrong for the first time: the next check fails the group if it still is. Otherwise
            None.
        """
        found = self._look(work.describe)
        if found is None and now - work.began >= (limit := self._timeout()):
            found = CollectiveTimeoutError(
                f"{work.describe} is not complete after {limit:g} s: a rank has not called it or has called "
                "something else, or a GPU is busy"
            )
        if found is not None and suspect is work:
            self._fail(found)
            return None
        return None if found is None else work
