"""The carriers of GPU arrays for a group: which one it is, and AutoCarrier, which finds out with the first call.

| backend       | the ranks                                                      | carrier |
|---------------|----------------------------------------------------------------|---------|
| nccl          | any                                                            | NCCL    |
| shm, auto     | on one node, each can map the memory of all the others' GPUs   | IPC     |
| shm, auto     | otherwise, each with a GPU of its own, and all with NCCL       | NCCL    |
| shm, auto     | otherwise                                                      | staging |
| mpi           | each with an MPI library that is CUDA-aware                    | MPI     |
| mpi, others   | otherwise                                                      | staging |

Only ranks that have an array know their GPU, so with shm and auto the first collective call on arrays of GPUs begins
with an agreement over the CPU backend. It and what is called before it has ended block the host until the result is on
the GPU; later calls are the chosen carrier's own. Messages always go through the host: they are no calls of all ranks,
so nobody could know whether the peer has chosen already.
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
from .device_array import adopt
from .runtime import runtime
from .staged import StagedCarrier

_log = logging.getLogger("fastcoll")

IPC, NCCL, STAGED = "ipc", "nccl", "staged"


class Facts(NamedTuple):
    """What a rank knows of its GPU."""

    gpu: bytes  # its UUID; equal for ranks that share a GPU
    nccl: bool  # whether NCCL can be used
    kernels: bool  # whether our kernels can be used
    reaches_all: bool = False  # whether it can map the memory of every other rank's GPU


def choose(facts: Sequence[Facts], one_node: bool) -> str:
    """The carrier for the backends shm and auto: IPC, NCCL or STAGED; the same on all ranks."""
    if one_node and all(rank.kernels and rank.reaches_all for rank in facts):
        return IPC
    return NCCL if suits_nccl(facts) else STAGED


def suits_nccl(facts: Sequence[Facts]) -> bool:
    """Whether each rank has a GPU of its own, as NCCL wants it, and NCCL."""
    return all(rank.nccl for rank in facts) and len({rank.gpu for rank in facts}) == len(facts)


# ---- the agreement of all ranks --------------------------------------------------------------------------


def agree(group: ProcessGroup, device: int) -> list[Facts]:
    """What every rank knows of the GPU that its first array is on; collective, inside a call of the group."""
    from .nccl.bindings import why_unavailable

    uuid = runtime().uuid(device)
    rows = group.rows_of_all(np.array([why_unavailable() is None, has_kernels(), *uuid], np.uint8))
    facts = [Facts(row[2:].tobytes(), bool(row[0]), bool(row[1])) for row in rows]
    # A GPU that CUDA_VISIBLE_DEVICES hides is not reached.
    visible = {runtime().uuid(number): number for number in range(runtime().count())}
    reaches = all(f.gpu in visible and runtime().can_reach(device, visible[f.gpu]) for f in facts)
    answers = group.rows_of_all(np.array([reaches], np.uint8))
    return [rank._replace(reaches_all=bool(row[0])) for rank, row in zip(facts, answers, strict=True)]


def on_one_node(group: ProcessGroup) -> bool:
    """Whether all ranks of a group share a node."""
    members = group.monitor.members
    return all(member.same_node(members[0]) for member in members)


@cache
def has_kernels() -> bool:
    """Whether our kernels can be used; if not, the log says why, once."""

    def load() -> None:
        from ..kernels.cuda import kernel  # noqa: F401

    try:
        undisturbed(load)
    except (UnavailableError, ImportError) as error:  # the second: another thread was told why
        _log.info("no kernels for arrays on GPUs: %s", error)
        return False
    return True


class AutoCarrier(DeviceCarrier):
    """See this module's docstring."""

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group
        self._staged = StagedCarrier(group)
        self._carriers: list[DeviceCarrier] = [self._staged]  # what builds on others first
        self.messages = self._staged.messages
        self.chosen: DeviceCarrier | None = None
        self._lock = threading.Lock()

    adopt = staticmethod(adopt)

    def plan(self, operation: Operation, timeout: float | None = None) -> Call:
        # What is queued began before the choice, and must stay ahead.
        if self.chosen is not None and not self._group.gate.queue.pending:
            return self.chosen.plan(operation, timeout)
        name, arrays = operation.kind, [*operation.inputs, *operation.outputs]
        marks = self._staged.transit.mark(arrays)

        def call() -> None:
            with self._staged.whole(name, arrays):
                chosen = self.chosen or self._choose(name, next((x.device for x in arrays if x.size), 0))
                self._staged.transit.await_marks(marks, name)
                planned = chosen.plan(operation, timeout)
                if isinstance(planned, StreamCall):
                    planned.start(name, ()).join()  # may be on the progress thread
                else:
                    planned()

        return call

    def _choose(self, name: str, device: int) -> DeviceCarrier:
        """Agree with all ranks; collective, inside a call of the group."""
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
            if reason := carrier.meet(device):  # on all ranks alike
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
