"""The gate of a group: who may run a call now.

Calls of one group run one at a time and in the order in which they were made, on the caller's thread when nothing is
ahead of them and on the group's progress thread otherwise. `turn` is held by whoever runs one. A thread that comes back
while it is inside is a signal handler in the middle of its own call, and is refused: it would wait for itself. Backends
with compiled calls that take no turn add their own marks (`also`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from ..errors import GroupError, NotInitializedError
from .work import ProgressQueue, UnobservedWorks, Work, is_progressing


class Gate:
    """One group's, with what its backend must know of it.

    `name`, `ranks`, `rank`, `timeout`, `failure` are the group's; `closed`: it was destroyed here. `turn` is held by
    the thread whose call runs, `refusal` is what peers are told if that was refused. `queue` has asynchronous calls
    and those behind them, `unobserved` those that nobody has waited for.
    """

    def __init__(self, name: str, ranks: Sequence[int], rank: int, timeout: float) -> None:
        self.name = name
        self.ranks = tuple(ranks)
        self.rank = rank
        self.timeout = timeout
        self.failure: GroupError | None = None
        self.closed = False
        self.refusal = ""
        self.turn = threading.Lock()
        self.queue = ProgressQueue(name)
        self.unobserved = UnobservedWorks()
        self._inside: set[int] = set()  # threads that have the turn, or wait for it
        self._also_inside: Callable[[], bool] = lambda: False
        self._also_busy: Callable[[], bool] = lambda: False

    @property
    def size(self) -> int:
        return len(self.ranks)

    def also(self, inside: Callable[[], bool], busy: Callable[[], bool]) -> None:
        """Count compiled calls in, which take no turn: whether this thread is in one, and whether any thread is."""
        self._also_inside, self._also_busy = inside, busy

    def name_of(self, what: str, number: int) -> str:
        """The call `what`, by its number among the group's calls, for messages."""
        return f"{what}, call {number} of group {self.name!r}"

    def check_usable(self) -> None:
        """Raise if the group has failed (GroupError), or was destroyed."""
        if self.failure is not None:
            # Without the tracebacks of earlier raises, which would keep their frames and arrays alive.
            raise self.failure.with_traceback(None)
        if self.closed:
            raise NotInitializedError(f"the group {self.name} was destroyed; make a new one")

    def is_inside(self) -> bool:
        """Whether this thread is in the middle of a call: then this is a signal handler."""
        return threading.get_ident() in self._inside or self._also_inside()

    def is_busy(self) -> bool:
        return self.queue.pending > 0 or self.turn.locked() or self._also_busy()

    def may_wait(self) -> bool:
        """Whether this thread may wait for what is under way, which does not get on by this thread alone."""
        return not (self.closed or self.is_inside() or is_progressing())

    def in_turn(self, call: Callable[..., Any], *args: Any) -> Any:
        """Carry a call out on this thread, when nobody else's is under way; what it returns."""
        thread = threading.get_ident()
        self._inside.add(thread)
        try:
            with self.turn:
                return call(*args)
        finally:
            self._inside.discard(thread)

    def is_clear(self) -> bool:
        """Whether nothing is ahead of a call of this thread, so that `in_turn` may carry it out at once."""
        return not self.queue.pending and threading.get_ident() not in self._inside

    def submit(self, name: str, job: Callable[[], Any], heard: bool = False) -> Work:
        """The Work of a job, behind all earlier ones on the progress thread; `heard`: its end cannot be lost."""
        return self.unobserved.note(self.queue.submit(name, job), heard)
