"""Where the survivors of a group in shared memory meet: each says in its section at which port it serves a store."""

from __future__ import annotations

from ..core.backend import RecoveryEndpoint
from .layout import RECOVERY
from .segment import Segment


class ShmRecoveryEndpoint(RecoveryEndpoint):
    """The ports are written by their ranks and read by all others; a port that is 0, or old, is looked at again."""

    host = "127.0.0.1"

    def __init__(self, segment: Segment, rank: int) -> None:
        self._segment, self._rank = segment, rank

    def offer(self, port: int) -> None:
        self._segment.reach(self._rank)[RECOVERY] = port

    def seek(self, rank: int) -> tuple[str, int] | None:
        port = int(self._segment.reach(rank)[RECOVERY])
        return (self.host, port) if port else None
