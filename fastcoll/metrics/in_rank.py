"""The metrics of a job without fastcoll's launcher: the lowest rank of each node serves them while it is in the job."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from .. import config
from ..record.record import open_record
from ..system.forks import at_fork
from ..system.processes import Member, in_sight, status_of

if TYPE_CHECKING:
    from .http_server import MetricsServer


class _Peers:
    """The ranks of this node, whose records are found in /proc."""

    def __init__(self, members: Sequence[Member]) -> None:
        self.members = list(members)
        self._found: set[int] = set()

    def find(self) -> list[tuple[int, int]]:
        """Return the records that were not found before, each as the pid of the process and the file."""
        found = []
        for member in [member for member in self.members if member.pid not in self._found]:
            with suppress(OSError):  # it has ended
                if int(status_of(member.pid)[19]) != member.start_time:
                    continue
                if (opened := open_record(member.pid)) is not None:
                    found.append((member.pid, opened.detach()))
                    self._found.add(member.pid)
        return found


_server: MetricsServer | None = None
_peers = _Peers(())


def follow(members: Sequence[Member], rank: int) -> None:
    """Serve the metrics of a job if FASTCOLL_METRICS is set and this rank is the lowest of its node.

    Does nothing in ranks of fastcoll's launcher, which serves itself. If this process serves already, it goes on with
    the new members.

    Raises:
        UnavailableError: prometheus_client is not installed.
        ResourceError: the port is taken or not allowed.
    """
    global _server, _peers
    at = config.get("FASTCOLL_METRICS")
    if not at or config.get("FASTCOLL_METRICS_SOCKET"):
        return
    here = [member for member in members if in_sight(member)]
    if _server is not None:
        _peers.members = here
    elif here[0].rank == rank:
        from .http_server import MetricsServer  # imports sockets

        _peers = _Peers(here)
        _server = MetricsServer(at, _peers.find)


def stop() -> None:
    """Close the port, if this process serves metrics."""
    global _server
    server, _server = _server, None
    if server is not None:
        server.close()


def _after_fork() -> None:
    global _server
    server, _server = _server, None
    if server is not None:
        server.let_go()


at_fork("metrics", _after_fork)
