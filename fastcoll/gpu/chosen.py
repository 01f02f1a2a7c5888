"""ChosenCarrier: the carrier of the backends shm and auto, which finds the best one for the GPUs that the ranks have.

Only ranks that have an array know their GPU, so the first collective call on arrays of GPUs begins with an agreement
over the CPU backend (choice.py). It and what is called before it has ended block the host until the result is on the
GPU; later calls are the chosen carrier's own. Messages always go through the host: they are no calls of all ranks, so
nobody could know whether the peer has chosen already.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

from ..core.carrier import DeviceCarrier, StreamCall
from ..core.group import ProcessGroup
from ..core.operation import Call
from ..core.reduce_op import ReduceOp
from ..core.work import Work
from ..errors import GroupError, MismatchError
from ..interop.arrays import Adopted
from . import border
from .array import DeviceArray
from .choice import IPC, NCCL, agree, choose, on_one_node, suits_nccl
from .staging import StagedCarrier

_log = logging.getLogger("fastcoll")


class ChosenCarrier(DeviceCarrier):
    """See this module's docstring."""

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group
        self._staged = StagedCarrier(group)
        self._carriers: list[DeviceCarrier] = [self._staged]
        self._chosen: DeviceCarrier | None = None
        self._lock = threading.Lock()

    def adopt(self, x: Any, *, writable: bool, what: str) -> Adopted:
        return border.adopt(x, writable=writable, what=what)

    # ---- the choice ----------------------------------------------------------------------------------

    def _plan(self, name: str, arrays: Sequence[DeviceArray], plan: Callable[[DeviceCarrier], Call]) -> Call:
        """The chosen carrier's plan, or one that chooses first.

        Args:
            arrays: of the call.
            plan: asks a carrier for it.
        """
        # What is queued began before the choice, and must stay ahead.
        if self._chosen is not None and not self._group.gate.queue.pending:
            return plan(self._chosen)
        marks = self._staged.mark(arrays)

        def call() -> None:
            with self._staged.whole(name, arrays):
                chosen = self._chosen or self._choose(name, next((x.device for x in arrays if x.size), 0))
                self._staged.await_marks(marks, name)
                planned = plan(chosen)
                if isinstance(planned, StreamCall):
                    planned.start(name, ())._join()  # may be on the progress thread
                else:
                    planned()

        return call

    def _choose(self, name: str, device: int) -> DeviceCarrier:
        """Agree with all ranks; collective, inside a call of the group."""
        try:
            facts = agree(self._group, device)
        except MismatchError as error:
            text = f"{error} (an all_gather of uint8 begins the group's first call with arrays on GPUs, here {name})"
            raise MismatchError(text) from None
        name = choose(facts, on_one_node(self._group))
        chosen: DeviceCarrier = self._staged
        if name == NCCL or (name == IPC and suits_nccl(facts)):
            from .nccl.carrier import NcclCarrier

            chosen = self._add(NcclCarrier(self._group))
        if name == IPC:
            chosen = self._ipc(device, chosen)
        _log.info("arrays on GPUs of group %r: %s", self._group.name, type(chosen).__name__)
        self._chosen = chosen
        return chosen

    def _ipc(self, device: int, fallback: DeviceCarrier) -> DeviceCarrier:
        """IPC's carrier, or the other one where memory cannot be mapped after all; on all ranks alike."""
        from .ipc.carrier import IpcCarrier

        carrier = IpcCarrier(self._group, fallback)
        if reason := carrier.meet(device):
            carrier._close(None)
            _log.info("arrays on GPUs of group %r cannot be shared: %s", self._group.name, reason)
            return fallback
        return self._add(carrier)

    def _add(self, carrier: DeviceCarrier) -> DeviceCarrier:
        with self._lock:
            self._carriers.insert(0, carrier)
        if self._group.failure is not None:
            carrier.abort()
        return carrier

    # ---- collectives ---------------------------------------------------------------------------------

    def _plan_all_reduce(self, x: DeviceArray, op: ReduceOp, parts: Sequence[int] = ()) -> Call:
        return self._plan("all_reduce", [x], lambda carrier: carrier._plan_all_reduce(x, op, parts))

    def _plan_reduce(self, out: DeviceArray, x: DeviceArray, op: ReduceOp, root: int) -> Call:
        return self._plan("reduce", [x, out], lambda carrier: carrier._plan_reduce(out, x, op, root))

    def _plan_scan(self, out: DeviceArray, x: DeviceArray, op: ReduceOp, exclusive: bool) -> Call:
        return self._plan("scan", [x, out], lambda carrier: carrier._plan_scan(out, x, op, exclusive))

    def _plan_reduce_scatter(self, out: DeviceArray, blocks: Sequence[DeviceArray], op: ReduceOp) -> Call:
        arrays = [*blocks, out]
        return self._plan(
            "reduce_scatter", arrays, lambda carrier: carrier._plan_reduce_scatter(out, blocks, op)
        )

    def _plan_broadcast(self, x: DeviceArray, root: int, parts: Sequence[int] = ()) -> Call:
        return self._plan("broadcast", [x], lambda carrier: carrier._plan_broadcast(x, root, parts))

    def _plan_all_gather(
        self, outs: Sequence[DeviceArray], x: DeviceArray, parts: Sequence[int] = ()
    ) -> Call:
        return self._plan("all_gather", [x, *outs], lambda carrier: carrier._plan_all_gather(outs, x, parts))

    def _plan_gather(self, outs: Sequence[DeviceArray] | None, x: DeviceArray, root: int) -> Call:
        return self._plan("gather", [x, *(outs or ())], lambda carrier: carrier._plan_gather(outs, x, root))

    def _plan_scatter(self, out: DeviceArray, blocks: Sequence[DeviceArray] | None, root: int) -> Call:
        return self._plan(
            "scatter", [out, *(blocks or ())], lambda carrier: carrier._plan_scatter(out, blocks, root)
        )

    def _plan_all_to_all(self, outs: Sequence[DeviceArray], blocks: Sequence[DeviceArray]) -> Call:
        return self._plan(
            "all_to_all", [*blocks, *outs], lambda carrier: carrier._plan_all_to_all(outs, blocks)
        )

    def _plan_all_reduce_coalesced(
        self, xs: Sequence[Adopted], op: ReduceOp, parts: Sequence[int] = ()
    ) -> Call:
        arrays: list[Any] = [x.array for x in xs]
        return self._plan(
            "all_reduce_coalesced", arrays, lambda carrier: carrier._plan_all_reduce_coalesced(xs, op, parts)
        )

    def _plan_all_gather_coalesced(self, lists: Sequence[Sequence[Adopted]], xs: Sequence[Adopted]) -> Call:
        arrays: list[Any] = [x.array for items in (xs, *lists) for x in items]
        return self._plan(
            "all_gather_coalesced", arrays, lambda carrier: carrier._plan_all_gather_coalesced(lists, xs)
        )

    # ---- point to point ------------------------------------------------------------------------------

    def _send(self, x: Adopted, dst: int, tag: int) -> None:
        self._staged._send(x, dst, tag)

    def _isend(self, x: Adopted, dst: int, tag: int) -> Work:
        return self._staged._isend(x, dst, tag)

    def _recv(self, x: Adopted, src: int | None, tag: int) -> int:
        return self._staged._recv(x, src, tag)

    def _irecv(self, x: Adopted, src: int | None, tag: int) -> Work:
        return self._staged._irecv(x, src, tag)

    # ---- the end -------------------------------------------------------------------------------------

    def abort(self) -> None:
        for carrier in self._all():
            carrier.abort()

    def _close(self, reason: GroupError | None) -> None:
        for carrier in self._all():
            carrier._close(reason)

    def _all(self) -> list[DeviceCarrier]:
        """All carriers, what builds on others first."""
        with self._lock:
            return list(self._carriers)
