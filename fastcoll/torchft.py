"""A process group of torchft on fastcoll, for CPU tensors; each quorum aborts the old group and makes a new one.

>>> pg = fastcoll.torchft.ProcessGroupFastcoll(timeout=timedelta(seconds=30))
>>> manager = torchft.Manager(pg=pg, min_replica_size=1, ...)
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from .errors import UnavailableError

if find_spec("torchft") is None:
    raise UnavailableError("fastcoll.torchft needs torchft, which is not installed: pip install torchft")

from torchft.process_group import ProcessGroupWrapper

from .torch.jobs import make_group
from .torch.process_group import FastcollProcessGroup


class ProcessGroupFastcoll(ProcessGroupWrapper):  # type: ignore[misc]
    """A replacement of torchft's ProcessGroupGloo; `timeout` is for joining a group, and for every call.

    `configure` (torchft 0.2) and `reconfigure` (later releases) abort the old group, so that running calls raise
    AbortedError, and block until the members of the new group have met in the store at the given address. When a rank
    dies, the calls of the others raise PeerDiedError at once; `errored()` returns the error until the next quorum.
    """

    _pg: Any

    def _create_pg(self, store: Any, rank: int, world_size: int) -> FastcollProcessGroup:
        timeout = self._timeout.total_seconds()
        return FastcollProcessGroup(
            make_group(store, "torchft", rank, world_size, timeout, (), world_size), store
        )

    def getBackendName(self) -> str:
        return "torchft-fastcoll"

    def abort(self, errored: bool = True) -> None:
        """Abort the group, and all running calls, on this rank and on the others."""
        group = self._pg
        super().abort(errored)
        if group is not None:
            group.shutdown()

    def shutdown(self) -> None:
        """Leave the group; a second call does nothing."""
        group, self._pg = self._pg, None
        if group is not None:
            group.shutdown()

    def errored(self) -> Exception | None:
        """Return the error that has ended the group, or None."""
        failure: Exception | None = None if self._pg is None else self._pg.fastcoll.failure
        return failure
