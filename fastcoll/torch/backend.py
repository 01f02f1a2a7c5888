"""The adapter for torch from 2.14 on, where Python can subclass Backend.

Calls come through torch's dispatcher, so other backends of the group serve other devices (cpu:fastcoll,cuda:nccl), and
torch's own checks and recorders see them. What C++ hands to Python in a Work's place knows `wait` and `get_future`
alone, so there `is_completed` and the source of a receive from any rank cannot be asked for.
"""

from __future__ import annotations

from typing import Any

from torch._C._distributed_c10d import Backend

from ..group import ProcessGroup
from .calls import TorchCalls, limit_of


class BackendCalls(TorchCalls):
    """What Backend has besides the operations; apart from it, so that it can be tested where it has no constructor."""

    options: Any
    """torch's Backend.Options: the name and the timeout."""

    def getBackendName(self) -> str:
        return "fastcoll"

    def monitored_barrier(self, opts: Any, wait_all_ranks: bool = False) -> None:
        """A barrier that names every missing rank on every rank, whatever `wait_all_ranks` is."""
        self.fastcoll.monitored_barrier(limit_of(opts))


class FastcollBackend(BackendCalls, Backend):  # type: ignore[misc]
    """A backend of torch on a group of fastcoll."""

    def __init__(self, group: ProcessGroup) -> None:
        super().__init__(group.rank, group.size)
        self.fastcoll = group
        self.options = Backend.Options("fastcoll")
