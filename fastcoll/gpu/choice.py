"""Which carrier serves the GPU arrays of a group: what each rank knows of its GPU, and what follows from it.

| backend       | the ranks                                                      | carrier |
|---------------|----------------------------------------------------------------|---------|
| nccl          | any                                                            | NCCL    |
| shm, auto     | on one node, each can map the memory of all the others' GPUs   | IPC     |
| shm, auto     | otherwise, each with a GPU of its own, and all with NCCL       | NCCL    |
| shm, auto     | otherwise                                                      | staging |
| mpi           | each with an MPI library that is CUDA-aware                    | MPI     |
| mpi, others   | otherwise                                                      | staging |
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from ..core.carrier import DeviceCarrier
from ..core.group import ProcessGroup
from ..core.members import Member
from ..errors import UnavailableError
from ..interop.arrays import Array
from .runtime import runtime

_log = logging.getLogger("fastcoll")

UUID_BYTES = 16
IPC, NCCL, STAGED = "ipc", "nccl", "staged"


@dataclass(frozen=True)
class Facts:
    """What a rank knows of its GPU.

    Attributes:
        gpu: its UUID; equal for ranks that share a GPU.
        nccl: whether NCCL can be used.
        kernels: whether our kernels can be used.
        reaches_all: whether it can map the memory of every other rank's GPU.
    """

    gpu: bytes
    nccl: bool
    kernels: bool
    reaches_all: bool = False


def choose(facts: Sequence[Facts], one_node: bool) -> str:
    """The carrier for the backends shm and auto: IPC, NCCL or STAGED; the same on all ranks.

    Args:
        facts: of each rank.
        one_node: whether the ranks share a node.
    """
    if one_node and all(rank.kernels and rank.reaches_all for rank in facts):
        return IPC
    return NCCL if suits_nccl(facts) else STAGED


def suits_nccl(facts: Sequence[Facts]) -> bool:
    """Whether each rank has a GPU of its own, as NCCL wants it, and NCCL."""
    return all(rank.nccl for rank in facts) and len({rank.gpu for rank in facts}) == len(facts)


def carrier_for(backend: str, group: ProcessGroup) -> DeviceCarrier:
    """The carrier of GPU arrays for a group and the backend that was asked for: that of "cuda", or else of "cpu".

    Raises:
        UnavailableError: the backend is nccl, which is not there.
    """
    if backend == "nccl":
        from .nccl.carrier import NcclCarrier

        return NcclCarrier(group)
    if backend in ("shm", "auto"):
        from .chosen import ChosenCarrier

        return ChosenCarrier(group)
    if backend == "mpi":
        return _over_mpi(group)
    from .staging import StagedCarrier

    return StagedCarrier(group)


def _over_mpi(group: ProcessGroup) -> DeviceCarrier:
    from .cuda_aware_mpi import MpiCarrier, TakesGpus
    from .staging import StagedCarrier

    aware = isinstance(group, TakesGpus) and group.cuda_aware
    carrier = MpiCarrier(group) if aware else StagedCarrier(group)
    _log.info("arrays on GPUs of group %r: %s", group.name, type(carrier).__name__)
    return carrier


# ---- the agreement of all ranks --------------------------------------------------------------------------


def agree(group: ProcessGroup, device: int) -> list[Facts]:
    """What every rank knows of the GPU that its first array is on; collective, inside a call of the group."""
    own = _facts(device)
    facts = [Facts(row[2:].tobytes(), bool(row[0]), bool(row[1])) for row in _all(group, _row(own))]
    reaches = _reaches(device, [rank.gpu for rank in facts])
    answers = _all(group, np.array([reaches], np.uint8))
    return [replace(rank, reaches_all=bool(row[0])) for rank, row in zip(facts, answers, strict=True)]


def on_one_node(group: ProcessGroup) -> bool:
    """Whether all ranks of a group share a node."""
    members: list[Member] = group.monitor.members
    return all(member.same_node(members[0]) for member in members)


def _facts(device: int) -> Facts:
    from .nccl.library import why_unavailable

    return Facts(runtime().uuid(device), why_unavailable() is None, has_kernels())


@cache
def has_kernels() -> bool:
    """Whether our kernels can be used; if not, the log says why, once."""
    try:
        from ..kernels.cuda import toolkit  # noqa: F401
    except (UnavailableError, ImportError) as error:  # the second: another thread was told why
        _log.info("no kernels for arrays on GPUs: %s", error)
        return False
    return True


def _row(own: Facts) -> Array:
    return np.array([own.nccl, own.kernels, *own.gpu], np.uint8)


def _all(group: ProcessGroup, own: Array) -> list[Array]:
    """Every rank's row."""
    return list(group.rows_of_all(own))


def _reaches(device: int, gpus: Sequence[bytes]) -> bool:
    """Whether a GPU of this process reaches all of some; not if CUDA_VISIBLE_DEVICES hides one of them."""
    visible = {runtime().uuid(number): number for number in range(runtime().count())}
    return all(gpu in visible and runtime().can_reach(device, visible[gpu]) for gpu in gpus)
