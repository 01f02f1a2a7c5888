"""AutoCarrier, and the rules by which it chooses the carrier of GPU arrays.

A carrier executes a group's operations on GPU arrays; `gpu/__init__.py` lists the carriers. The choice depends on the
group's backend and on what is true of its ranks:

| backend       | the ranks                                                      | carrier |
|---------------|----------------------------------------------------------------|---------|
| nccl          | any                                                            | NCCL    |
| shm, auto     | all on one node; each can map the memory of all others' GPUs   | IPC     |
| shm, auto     | otherwise: each has a GPU of its own, and can use NCCL; with   | NCCL    |
|               | FASTCOLL_ENCRYPT=1 all are on one node                         |         |
| shm, auto     | otherwise                                                      | staging |
| mpi           | each has an MPI library that is CUDA-aware                     | MPI     |
| mpi           | otherwise                                                      | staging |
| others        | any                                                            | staging |

A rank knows its GPU only when it has an array. So with shm and auto the first collective call on GPU arrays begins with
an exchange over the CPU backend. This first call, and every call made before it has ended, blocks the host until the
result of the call is on the GPU. Later calls behave as the chosen carrier's calls do. With these backends, messages are
always staged through the host: a message does not involve all ranks, so a sender cannot know whether its peer has
chosen a carrier.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import numpy as np

from ..compiler.undisturbed import undisturbed
from ..core.backend import DeviceCarrier, StreamCall
from ..core.group import ProcessGroup
from ..core.operation import Call, Operation
from ..errors import GroupError, MismatchError, UnavailableError
from ..store.encryption import encrypts
from .device_array import import_array
from .runtime import runtime
from .staged import StagedCarrier

_log = logging.getLogger("fastcoll")

IPC, NCCL, STAGED = "ipc", "nccl", "staged"


class Facts(NamedTuple):
    """The facts about its GPU that a rank sends to all others."""

    gpu: bytes  # UUID of the GPU, or of an instance of it (MIG); equal for ranks that share it
    board: bytes  # of the whole GPU; NCCL refuses two ranks on one board
    nccl: bool  # the rank can use NCCL
    kernels: bool  # the rank can use fastcoll's kernels
    reaches_all: bool = False  # the rank can map the memory of every other rank's GPU


def choose(facts: Sequence[Facts], one_node: bool) -> str:
    """Return the carrier for the backends shm and auto: IPC, NCCL or STAGED.

    The result is the same on all ranks.
    """
    if one_node and all(rank.kernels and rank.reaches_all for rank in facts):
        return IPC
    return NCCL if suits_nccl(facts) and (one_node or not encrypts()) else STAGED


def suits_nccl(facts: Sequence[Facts]) -> bool:
    """Return whether all ranks can use NCCL: each rank needs a GPU of its own, and an instance of one is not enough."""
    return all(rank.nccl for rank in facts) and len({rank.board for rank in facts}) == len(facts)


# ---- the agreement of all ranks --------------------------------------------------------------------------


def agree(group: ProcessGroup, device: int) -> list[Facts]:
    """Exchange the Facts of all ranks; those of this rank are about GPU `device`.

    Collective; runs inside a call of the group.
    """
    from .nccl.bindings import why_unavailable

    names = [*runtime().uuid(device), *runtime().board(device)]
    rows = group.rows_of_all(np.array([why_unavailable() is None, has_kernels(), *names], np.uint8))
    facts = [Facts(row[2:18].tobytes(), row[18:].tobytes(), bool(row[0]), bool(row[1])) for row in rows]
    # A GPU that CUDA_VISIBLE_DEVICES hides is not among these, and this rank cannot reach it.
    visible = {runtime().uuid(number): number for number in range(runtime().count())}
    reaches = all(f.gpu in visible and runtime().can_reach(device, visible[f.gpu]) for f in facts)
    answers = group.rows_of_all(np.array([reaches], np.uint8))
    return [rank._replace(reaches_all=bool(row[0])) for rank, row in zip(facts, answers, strict=True)]


def on_one_node(group: ProcessGroup) -> bool:
    """Return whether all ranks of a group share a node."""
    members = group.monitor.members
    return all(member.same_node(members[0]) for member in members)


@cache
def has_kernels() -> bool:
    """Return whether fastcoll's kernels can be used; log the reason once if not."""

    def load() -> None:
        from ..kernels.cuda import kernel  # noqa: F401

    try:
        undisturbed(load)
    except (UnavailableError, ImportError) as error:  # ImportError if another thread's import failed before
        _log.info("no kernels for arrays on GPUs: %s", error)
        return False
    return True


class AutoCarrier(DeviceCarrier):
    """The carrier that chooses another carrier at the first call; see the module docstring."""

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group
        self._staged = StagedCarrier(group)
        # They are closed in this order. Each carrier comes before the carriers that it uses.
        self._carriers: list[DeviceCarrier] = [self._staged]
        self.messages = self._staged.messages
        self.chosen: DeviceCarrier | None = None
        self._lock = threading.Lock()

    import_array = staticmethod(import_array)

    def plan(self, operation: Operation, timeout: float | None = None) -> Call:
        # Calls that are still in the queue were made before the choice, and must run before this call.
        if self.chosen is not None and not self._group.gate.queue.pending:
            return self.chosen.plan(operation, timeout)
        name, arrays = operation.kind, [*operation.inputs, *operation.outputs]
        marks = self._staged.staging.mark(arrays)

        def call() -> None:
            with self._staged.all_or_nothing(name, arrays):
                device = next((x.device for x in arrays if x.size), arrays[0].device)
                chosen = self.chosen or self._choose(name, device)
                self._staged.staging.await_marks(marks, name)
                planned = chosen.plan(operation, timeout)
                if isinstance(planned, StreamCall):
                    planned.start(name, ()).join()  # blocks: this may run on the progress thread
                else:
                    planned()

        return call

    def _choose(self, name: str, device: int) -> DeviceCarrier:
        """Choose the carrier with all ranks; collective, inside a call of the group."""
        group = self._group
        try:
            facts = agree(group, device)
        except MismatchError as error:
            text = f"{error} (an all_gather of uint8 begins the group's first call with arrays on GPUs, here {name})"
            raise MismatchError(text) from None
        kind = choose(facts, on_one_node(group))
        chosen: DeviceCarrier = self._staged
        if kind == NCCL or (kind == IPC and suits_nccl(facts)):
            from .nccl.backend import NcclCarrier

            chosen = self._add(NcclCarrier(group))
        if kind == IPC:
            from .ipc.backend import IpcCarrier

            carrier = IpcCarrier(group, chosen)
            if reason := carrier.meet(device):  # `meet` returns the same reason on all ranks
                carrier.close(None)
                _log.info("arrays on GPUs of group %r cannot be shared: %s", group.name, reason)
            else:
                chosen = self._add(carrier)
        _log.info("arrays on GPUs of group %r: %s", group.name, type(chosen).__name__)
        self.chosen = chosen
        return chosen

    def _add(self, carrier: DeviceCarrier) -> DeviceCarrier:
        with self._lock:
            self._carriers.insert(0, carrier)
        if self._group.failure is not None:
            carrier.abort()
        return carrier

    def _all(self) -> list[DeviceCarrier]:
        with self._lock:
            return list(self._carriers)

    def abort(self) -> None:
        for carrier in self._all():
            carrier.abort()

    def close(self, reason: GroupError | None) -> None:
        for carrier in self._all():
            carrier.close(reason)
