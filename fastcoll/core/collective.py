"""The collective call that a backend is carrying out: its name in error texts, its wait, and its mismatch error.

The *engine*, the backend's compiled function that carries out the call, returns early with AGAIN if it could not
progress for 50 ms, and with WORKED if it has moved data for that long. Python then checks signals, the deadline and the
peers, and calls the engine again. For a call that is complete earlier, Python does none of this.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..errors import MismatchError
from ..record import dump
from . import signature
from .gate import Gate
from .monitor import Monitor, Wait
from .status import AGAIN, WORKED


class CallWait:
    """The wait of one call. It begins when the engine first returns early."""

    def __init__(self, begin: Callable[[], Wait]) -> None:
        self._begin = begin
        self._wait: Wait | None = None

    def look(self, code: int = AGAIN) -> None:
        """Raise GroupError if the call cannot be completed; else return, so that the engine is called again."""
        if self._wait is None:
            self._wait = self._begin()
        self._wait.look() if code == AGAIN else self._wait.worked()

    def resume(self, code: int, again: Callable[[], int]) -> int:
        """Call the engine, by `again`, until it returns neither AGAIN nor WORKED; return that status.

        `code` is the status that the engine has returned before.
        """
        while code in (AGAIN, WORKED):
            self.look(code)
            code = again()
        return code


class Collective:
    """The call in progress of one backend.

    Args:
        gate: the group's gate.
        monitor: the group's monitor.
        head: returns the number of the call in progress, and this rank's call word and shape (core/signature.py). A
            call word of 0 means that this rank has not published them.
        late: returns the group ranks that the call waits for.
        gather: does an all_gather among all ranks. It is called only after all ranks have found the same mismatch.
    """

    def __init__(
        self,
        gate: Gate,
        monitor: Monitor,
        head: Callable[[], tuple[int, int, int]],
        late: Callable[[], list[int]],
        gather: signature.Gather,
    ) -> None:
        self._gate, self._monitor, self._head, self._late, self._gather = gate, monitor, head, late, gather

    def doing(self) -> str:
        """Return the name of the call in progress, for error texts.

        For example, `all_reduce(float32, 4 elements, op=SUM), call 12 of group 'world'`.
        """
        number, call, shape = self._head()
        return self._gate.name_of(signature.describe(call, shape, self._gate.ranks), number)

    def wait(self, timeout: float | None, started: float | None = None) -> CallWait:
        """Return the wait of a call.

        Args:
            timeout: seconds; None for the group's timeout.
            started: when the call started, by time.monotonic; None: when it first waits.
        """
        limit = self._gate.timeout if timeout is None else timeout
        return CallWait(
            lambda: Wait(self._monitor, self.doing(), self._late, limit, started, number=self._head()[0])
        )

    def mismatch(
        self,
        number: int,
        heads: Sequence[signature.Head],
        sizes: signature.Sizes = ((), ()),
        also: str = "",
        notes: Sequence[str] | None = None,
    ) -> MismatchError:
        """Return the error for call `number`, in which the ranks' calls differ.

        All ranks must call this, since it may do an all_gather. The arguments are those of `signature.difference`.
        """
        gate, gather = self._gate, self._gather
        return dump.after(signature.difference(heads, gate, number, gather, sizes, also=also, notes=notes))
