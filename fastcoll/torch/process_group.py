"""The adapter for torch up to 2.13, where Python can subclass no backend, only ProcessGroup.

Such a group takes the place of all the backends that were asked for together, so that none of them serves CUDA tensors
beside it. The naming methods must be there: DeviceMesh, functional collectives and FSDP2 find groups by name.
"""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

from ..group import ProcessGroup
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

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """A barrier that names every missing rank on every rank, whatever `wait_all_ranks` is.

        torch.distributed.monitored_barrier calls it for Gloo's groups alone; call it on the group.
        """
        self.fastcoll.monitored_barrier(None if timeout is None else timeout.total_seconds())

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

    supports_splitting = supports_coalescing = supports_time_estimate = False

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def _get_backend(self, device: torch.device) -> FastcollProcessGroup:
        if torch.device(device).type != "cpu":
            refuse_gpus(self.fastcoll)
        return self

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        return False
