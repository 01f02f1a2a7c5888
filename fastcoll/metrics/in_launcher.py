"""The metrics of a job of fastcoll's launcher or `fastcoll.run`: that process serves them until the job is over."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from .. import config

if TYPE_CHECKING:
    from .http_server import MetricsServer


def serving() -> AbstractContextManager[MetricsServer | None]:
    """Serve the metrics of this node's ranks during the `with`, if FASTCOLL_METRICS is set; else the value is None.

    Raises:
        UsageError: the variable's text cannot be parsed.
        UnavailableError: prometheus_client is not installed.
        ResourceError: the port is taken or not allowed.
    """
    at = config.get("FASTCOLL_METRICS")
    if not at:
        return nullcontext()
    from .http_server import MetricsServer  # imports sockets

    return MetricsServer(at)
