"""The choice of the carrier that executes a group's operations on GPU arrays."""

from __future__ import annotations

import logging

from ..core.backend import DeviceCarrier
from ..core.group import ProcessGroup
from ..store.encryption import check_nodes
from .auto import AutoCarrier
from .cuda_aware_mpi import MpiCarrier, TakesGpus
from .staged import StagedCarrier

_log = logging.getLogger("fastcoll")


def carrier_for(backend: str, group: ProcessGroup) -> DeviceCarrier:
    """Return the carrier of a group's GPU arrays.

    Args:
        backend: the backend that the program has chosen for "cuda"; if it has chosen none, the backend for "cpu".

    Raises:
        UsageError: NCCL is to connect several nodes, and FASTCOLL_ENCRYPT=1.
    """
    if backend == "nccl":
        check_nodes("NCCL", group.monitor.members)
        from .nccl.backend import NcclCarrier  # loads NCCL

        return NcclCarrier(group)
    if backend in ("shm", "auto"):
        return AutoCarrier(group)
    if backend != "mpi":
        return StagedCarrier(group)
    aware = isinstance(group.backend, TakesGpus) and group.backend.cuda_aware
    carrier = MpiCarrier(group) if aware else StagedCarrier(group)
    _log.info("arrays on GPUs of group %r: %s", group.name, type(carrier).__name__)
    return carrier


def carrier_name(group: ProcessGroup) -> str:
    """Return the class name of the carrier that has moved a group's arrays on GPUs, for tests and benchmarks."""
    carrier = group.devices()
    return type(getattr(carrier, "chosen", None) or carrier).__name__
