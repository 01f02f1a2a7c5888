"""A process group of torchft on fastcoll, for CPU tensors: made anew for each quorum, and aborted between two.

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
    """In the place of torchft's ProcessGroupGloo; `timeout` is for meeting, and for every call.

    `configure` (torchft 0.2) and `reconfigure` (later ones) abort the group that there is, so that calls under way
    raise AbortedError, and block until the members of the new one have met in the store at the given address. A rank
    that dies makes the others' calls raise PeerDiedError at once; `errored()` has it until the next quorum.
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
        """End the group, and all calls under way, here and on the other ranks."""
        group = self._pg
        super().abort(errored)
        if group is not None:
            group.shutdown()

    def shutdown(self) -> None:
        """Leave the group. Leaving twice is fine."""
        group, self._pg = self._pg, None
        if group is not None:
            group.shutdown()

    def errored(self) -> Exception | None:
        """What has ended the group, if anything has."""
        failure: Exception | None = None if self._pg is None else self._pg.fastcoll.failure
        return failure
