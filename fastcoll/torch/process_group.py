"""The adapter: a process group of torch, all of whose operations are those of a group of fastcoll.

It subclasses torch's ProcessGroup, not its Backend. Up to 2.13 Python can subclass no Backend; from then on C++ hides
the Works of a Backend in Python behind its own, which are never `is_completed` and know no source of a message. Such a
group takes the place of all the backends that were asked for together, so that none of them serves CUDA tensors beside
it. The naming methods must be there: DeviceMesh, functional collectives and FSDP2 find groups by name.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Backend

from ..core.group import ProcessGroup
from .calls import TorchCalls
from .groups import refuse_gpus


class FastcollProcessGroup(TorchCalls, dist.ProcessGroup):  # type: ignore[misc]
    """A process group of torch on a group of fastcoll."""

    def __init__(self, group: ProcessGroup) -> None:
        super().__init__(group.rank, group.size)
        self.fastcoll = group
        self._name = self._description = ""

    # The names that torch had before 2.13.
    _allgather_base = TorchCalls.all_gather_single
    allgather_into_tensor_coalesced = TorchCalls.all_gather_single_coalesced
    _reduce_scatter_base = TorchCalls.reduce_scatter_single
    reduce_scatter_tensor_coalesced = TorchCalls.reduce_scatter_single_coalesced
    alltoall_base = TorchCalls.all_to_all_single
    gather_into_tensor = TorchCalls.gather_single
    recvAnysource = TorchCalls.recv_anysource  # what C++ looks for

    # ---- names ------------------------------------------------------------------------------------

    def getBackendName(self) -> str:
        return "fastcoll"

    def setGroupName(self, name: str) -> None:
        self._name = name

    def getGroupName(self) -> str:
        return self._name

    def setGroupDesc(self, description: str) -> None:
        self._description = description

    def getGroupDesc(self) -> str:
        return self._description

    # ---- what torch asks of the backend of a device -----------------------------------------------

    @property
    def _device_types(self) -> list[torch.device]:
        # From 2.15 on a group that has devices while torch makes it gets a flight recorder, which needs C++ backends.
        return [torch.device("cpu")] if self in dist.distributed_c10d._world.pg_map else []

    def _get_backend(self, device: torch.device) -> FastcollProcessGroup:
        if torch.device(device).type != "cpu":
            refuse_gpus(self.fastcoll)
        return self

    @property
    def options(self) -> Any:
        """torch's Backend.Options: the name and the timeout."""
        return Backend.Options("fastcoll", timedelta(seconds=self.fastcoll.timeout))
