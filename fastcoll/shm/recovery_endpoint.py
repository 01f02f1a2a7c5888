"""Recovery endpoint of a group in shared memory: each survivor publishes the port of its store in its section."""

from __future__ import annotations

from ..core.backend import RecoveryEndpoint
from .layout import RECOVERY
from .segment import Segment


class ShmRecoveryEndpoint(RecoveryEndpoint):
    """Ports of the survivors' stores. Each rank writes its own; a reader polls while a port is 0 or outdated."""

    host = "127.0.0.1"

    def __init__(self, segment: Segment, rank: int) -> None:
        self._segment, self._rank = segment, rank

    def offer(self, port: int) -> None:
        self._segment.reach(self._rank)[RECOVERY] = port

    def seek(self, rank: int) -> tuple[str, int] | None:
        port = int(self._segment.reach(rank)[RECOVERY])
        return (self.host, port) if port else None
