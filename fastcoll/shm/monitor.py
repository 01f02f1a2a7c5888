"""State of a group's ranks in their segment: each rank writes its own state word and reason, and all ranks read them.

A line before the reason names the global ranks at fault: `late 2` after a timeout, `other 1 3` after any other failure.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..core.monitor import Monitor
from ..errors import CollectiveTimeoutError
from ..system.processes import Member, dead_among
from .layout import REASON, REASON_BYTES, STATE
from .segment import Segment

_LATE, _OTHER = "late", "other"
_MOST_RANKS = 32
"""Ranks at fault in a reason: up to 200 of its REASON_BYTES in a world of 10,000."""


class ShmMonitor(Monitor):
    """Monitor of the ranks of one node."""

    def __init__(self, segment: Segment, members: Sequence[Member], rank: int) -> None:
        super().__init__(members, rank)
        self._segment, self._here = segment, rank

    def _states(self) -> list[int]:
        return [self._segment.acquire(rank, STATE) for rank in range(len(self.members))]

    def _dead(self, working: Sequence[Member]) -> list[Member]:
        return dead_among(working)

    def _reason(self, rank: int) -> str:
        return self._read_reason(rank).partition("\n")[2]

    def _blamed(self, rank: int) -> tuple[Sequence[int], bool]:
        how, *ranks = self._read_reason(rank).partition("\n")[0].split()
        return [int(blamed) for blamed in ranks], how == _LATE

    def _read_reason(self, rank: int) -> str:
        length = int(self._segment.words[self._segment.word(rank, STATE) + 1])
        return self._segment.read(rank, REASON, min(length, REASON_BYTES)).decode(errors="replace")

    def _publish(self, state: int, reason: str) -> None:
        how = _LATE if isinstance(self.failure, CollectiveTimeoutError) else _OTHER
        ranks = self.failure.ranks[:_MOST_RANKS] if self.failure is not None else ()
        data = f"{' '.join([how, *map(str, ranks)])}\n{reason}".encode()[:REASON_BYTES]
        self._segment.write(self._here, REASON, data)
        self._segment.words[self._segment.word(self._here, STATE) + 1] = len(data)
        self._segment.publish(self._here, STATE, state)
