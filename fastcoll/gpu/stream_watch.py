"""Watcher: the thread that looks after what is outstanding on a carrier's stream.

It ends Works, which calls their callbacks, and asks whether the rest can still end: dead peers, errors, the deadline.
The thread starts with the first Work and ends some seconds after the last one.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

from ..core.work import ENDLESS, _here
from ..errors import AbortedError, CollectiveTimeoutError, FastcollError, GroupError
from .stream_work import StreamWork

_NAP, _LONG_NAP = 0.0005, 0.01
"""Seconds between two looks at the events: while the oldest Work is younger than _YOUNG, and later."""
_YOUNG = 0.1
_LOOK = 0.05
"""Seconds between two looks at peers and errors, as elsewhere (watch.py)."""
_MOST = 64
"""Works outstanding before a call waits: the driver's queue takes some 1024 launches, and whoever finds it full blocks
inside CUDA, where the watcher may block behind it. An estimate: a small call queues about ten."""
_IDLE = 5.0
_GIVE_UP = 5.0
"""Seconds that the GPU has to end what was broken off; then its memory is kept until the group is closed."""


class Watcher:
    """Looks after the Works of one carrier, oldest first, as their stream ends them.

    Args:
        name: of the group.
        timeout: seconds that a Work may take once those before it have ended.
        look: why waiting is in vain, or None; gets the oldest Work's description. An error that a Work may still
            outrun counts when it is seen twice.
        fail: fails the group, and with it all outstanding Works by `break_off`.
    """

    def __init__(
        self,
        name: str,
        timeout: float,
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
        if len(self._works) >= _MOST and not getattr(_here, "progress", False):
            with self._changed:
                self._changed.wait_for(self._has_room, ENDLESS)

    def _has_room(self) -> bool:
        return len(self._works) < _MOST or self._thread is None or self._broken_at is not None

    def break_off(self, error: GroupError) -> None:
        """All outstanding Works end with `error`; their memory stays until the GPU is past them."""
        with self._changed:
            self._broken_at = self._broken_at or time.monotonic()
            works = list(self._works)
            self._changed.notify_all()
        for work in works:
            work._settle(error)

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
            self._works.popleft()._let_go()

    def _run(self) -> None:
        _here.progress = True
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
                if oldest._is_past():
                    self._end(oldest)
                    continue
                now = time.monotonic()
                if self._broken_at is not None and now > self._broken_at + _GIVE_UP:
                    return
                if now >= next_look and self._broken_at is None:
                    next_look = now + _LOOK
                    suspect = self._judge(oldest, now, suspect)
            except FastcollError as error:  # of CUDA, which has no way back
                self._fail(AbortedError(f"{oldest._describe}: {error}"))
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
        work._let_go()
        with self._changed:
            self._works.popleft()
            if self._works:
                self._works[0].began = time.monotonic()
            self._changed.notify_all()
        work._settle()

    def _judge(self, work: StreamWork, now: float, suspect: StreamWork | None) -> StreamWork | None:
        """Fail the group if the Work cannot end; the Work if it is to be seen so once more."""
        found = self._look(work._describe)
        if found is None and now - work.began >= self._timeout:
            found = CollectiveTimeoutError(
                f"{work._describe} is not complete after {self._timeout:g} s: a rank has not called it or has called "
                "something else, or a GPU is busy"
            )
        elif found is not None and suspect is not work:
            return work
        if found is not None:
            self._fail(found)
        return None
