"""The inquiry after the ranks at fault, when a call of a group over several hosts times out.

A rank may wait for a rank that waits itself, for a third one. So a rank whose call has timed out tells all peers that
it waits, with the number of its call. Every rank that waits in this call, or in an earlier one, answers with the same
notice. A rank that is stopped, or has not made the call, sends none. A rank that waits for a silent rank, with which
it has a connection for notices, names that rank and fails the group. The others get its error.

Each rank reads notices every 50 ms while it waits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

ANSWER_SECONDS = 0.25
"""How long a rank waits for answers before it names the silent ranks."""
REASON_SECONDS = 1.0
"""How long a rank that waits for ranks that have answered, or cannot be asked, waits for another rank's error."""


class Notices(Protocol):
    """A monitor that sends and receives the notices of inquiries."""

    def tell_waiting(self, number: int) -> None:
        """Tell the peers that this rank waits in call `number` or an earlier one. Does not block.

        Does nothing if this rank has sent a notice with this number, or a higher one, before.
        """

    def told_waiting(self) -> Mapping[int, int]:
        """Return the highest number in the notices of each rank. Reads the notices that have come."""

    def hears(self, rank: int) -> bool:
        """Whether a rank sends its notices to this one."""


class Inquiry:
    """A rank's part in the inquiries of one group. `listen` adds the monitors that carry its notices."""

    def __init__(self) -> None:
        self._monitors: list[tuple[Notices, Sequence[int]]] = []

    def listen(self, monitor: Notices, ranks: Sequence[int]) -> None:
        """Use a monitor's notices. `ranks` has, for each of its ranks, the rank in this group."""
        self._monitors.append((monitor, ranks))

    def look(self, number: int) -> tuple[int, set[int]]:
        """Return the highest number in the peers' notices, and the ranks that have sent `number` or a higher one."""
        told = [
            (ranks[rank], n)
            for monitor, ranks in self._monitors
            for rank, n in monitor.told_waiting().items()
        ]
        return max((n for _, n in told), default=0), {rank for rank, n in told if n >= number}

    def tell(self, number: int) -> None:
        """Tell the peers that this rank waits in call `number` or an earlier one."""
        for monitor, _ in self._monitors:
            monitor.tell_waiting(number)

    def hears(self, rank: int) -> bool:
        """Whether a rank's answer reaches this rank."""
        return any(rank in ranks and monitor.hears(ranks.index(rank)) for monitor, ranks in self._monitors)


class Question:
    """The inquiry in one call in which this rank waits.

    Args:
        number: the call's.
    """

    def __init__(self, inquiry: Inquiry, number: int) -> None:
        self._inquiry, self._number = inquiry, number
        self._since: float | None = None  # when it began

    def answer(self) -> bool:
        """Tell the peers that this rank waits, if the call, or a later one, has timed out on a peer; return whether."""
        asked, _ = self._inquiry.look(self._number)
        if asked >= self._number:
            self._inquiry.tell(asked)
        return asked >= self._number

    def at_fault(self, late: Sequence[int], is_over: bool, now: float) -> Sequence[int] | None:
        """Return the ranks to name; None: not yet.

        Args:
            late: the ranks for which this rank waits.
            is_over: whether the call has timed out on this rank.
        """
        if not self.answer():
            if not is_over:
                return None
            self._inquiry.tell(self._number)
        self._since = now if self._since is None else self._since
        _, told = self._inquiry.look(self._number)
        silent = [rank for rank in late if self._inquiry.hears(rank) and rank not in told]
        if now - self._since < (ANSWER_SECONDS if silent else REASON_SECONDS):
            return None
        return silent or late
