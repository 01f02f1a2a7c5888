"""The collective that a backend is carrying out: its name in messages, its waits, its error where calls differ.

A backend's engine returns early with AGAIN (it could not go on for 50 ms) or WORKED (it moved data for as long).
Python then looks at signals, the deadline and the peers, and calls the engine again. A call that is not delayed never
gets here.
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
    """The wait of one call. It begins when the engine first comes back early."""

    def __init__(self, begin: Callable[[], Wait]) -> None:
        self._begin = begin
        self._wait: Wait | None = None

    def look(self, code: int = AGAIN) -> None:
        """Raise GroupError if the call cannot go on.

        If it returns, call the engine again.
        """
        if self._wait is None:
            self._wait = self._begin()
        self._wait.look() if code == AGAIN else self._wait.worked()

    def resume(self, code: int, again: Callable[[], int]) -> int:
        """Call the engine until it returns neither AGAIN nor WORKED.

        `again` calls it. Returns that status.
        """
        while code in (AGAIN, WORKED):
            self.look(code)
            code = again()
        return code


class Collective:
    """The call in progress of one backend.

    Args:
        head: returns the number of the call in progress, and this rank's call word and shape (core/signature.py); a
            call word of 0 means that this rank has not published them.
        late: returns the group ranks that the call waits for.
        gather: does an all_gather among all ranks, for details of a mismatch that all of them have seen.
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
        """Return the name of the call in progress.

        For example, `all_reduce(float32, 4 elements, op=SUM), call 12 of group 'world'`.
        """
        number, call, shape = self._head()
        return self._gate.name_of(signature.describe(call, shape), number)

    def wait(self, timeout: float | None) -> CallWait:
        """Return the wait of the call that begins now.

        `timeout` in seconds, None for the group's.
        """
        limit = self._gate.timeout if timeout is None else timeout
        return CallWait(lambda: Wait(self._monitor, self.doing(), self._late, limit))

    def mismatch(
        self,
        number: int,
        heads: Sequence[signature.Head],
        sizes: signature.Sizes = ((), ()),
        also: str = "",
        notes: Sequence[str] | None = None,
    ) -> MismatchError:
        """Return the error of call `number`, which differs between ranks.

        All ranks call this, and it may gather. The arguments are those of `signature.difference`.
        """
        gate, gather = self._gate, self._gather
        return dump.after(signature.difference(heads, gate, number, gather, sizes, also=also, notes=notes))
