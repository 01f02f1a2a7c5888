"""IpcCarrier: GPU arrays of ranks on one node, by kernels over shared memory (CUDA IPC).

All ranks map each other's memory. They may share a GPU, or have GPUs that can reach each other. The work of a call is
queued according to the call's schedule (schedules.py): copies into this rank's slots (buffers that the peers read),
kernels that publish progress and wait for the peers (kernels/cuda/steps.py), and reductions that read the peers' slots
directly, in rank order. The host does not wait for the peers. So the kernels may find that the ranks' calls do not
match after the call has returned on the host. This then fails the group.

A peer publishes its progress by a word in this rank's memory. On a GPU that ranks share, only one of their processes
runs at a time, and a kernel that polls a word uses up its process's time slice. So on a shared GPU, if the driver
supports it, the stream waits for the word before the kernel starts. During this wait no kernel of this process runs,
and the GPU can switch to another process. The kernel then finds the word at its first poll. The kernel is still needed,
because only its acquire load orders memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from ...arrays.dtypes import is_structured
from ...core import signature
from ...core.backend import DeviceCarrier
from ...core.group import ProcessGroup
from ...core.operands import scaled
from ...core.operation import Call, Operation
from ...core.operations import KINDS
from ...errors import AbortedError, ArrayError, CollectiveTimeoutError, GroupError, UnavailableError
from ...kernels.cuda import page as at
from ...kernels.cuda.reducers import cuda_reducer
from ..device_array import DeviceArray
from ..own_stream import OwnStream
from ..stream_work import StreamWork
from ..streams import Compared, QueuedCall, StreamCarrier, StreamScope, sizes_of
from . import schedules
from .regions import SharedRegions

Arrays = Sequence[DeviceArray]

HAND_OVER_ABOVE = 8 << 20
"""Bytes above which a call is handed to NCCL if each rank has a GPU of its own.

This is vLLM's default (max_size of CustomAllreduce, vllm/distributed/device_communicators/custom_all_reduce.py).
"""

SLOT = 16 << 20
"""Bytes of a slot; each rank has four in a group.

Each filled slot costs an exchange. By estimate, an exchange takes some 10 us if each rank has a GPU of its own. If
ranks share a GPU, an exchange takes a switch between processes, from 50 us up to a time slice of about 2 ms.
"""

_PORTION = 8
"""Items of a schedule that are queued together. A large call has thousands, more than the driver's queue holds."""

_HANDED_OVER = ("all_reduce", "reduce", "reduce_scatter", "broadcast", "all_gather")


class _Facts:
    """The values that determine a schedule: the bytes of an operation's arrays, rank, size, root."""

    def __init__(self, operation: Operation, rank: int, size: int) -> None:
        self.kind = KINDS[operation.kind].made_of or operation.kind
        self.rank, self.size, self.root = rank, size, operation.root
        self.itemsize: int = (operation.outputs or operation.inputs)[0].dtype.itemsize
        self.given, self.taken = sizes_of(operation.inputs), sizes_of(operation.outputs)
        self.nbytes = sum(self.given)
        if self.kind == "all_gather":
            self.taken = tuple(sum(self.taken[r::size]) for r in range(size))
        self.one_shot = self.kind != "all_reduce" or schedules.is_one_shot(size, self.nbytes)

    @property
    def parts(self) -> int:
        """The number of blocks that a slot is divided into for a reduction; 0 if nothing is reduced.

        Each block must hold at least one element.
        """
        if self.kind in ("reduce", "scan", "exscan") or (self.kind == "all_reduce" and self.one_shot):
            return 1
        return self.size if self.kind in ("all_reduce", "reduce_scatter") else 0


_SCHEDULES: dict[str, Callable[[_Facts, int], schedules.Schedule]] = {
    "all_reduce": lambda f, slot: (schedules.one_shot if f.one_shot else schedules.two_shot)(
        f.rank, f.size, f.nbytes, f.itemsize, slot
    ),
    "reduce": lambda f, slot: schedules.one_shot(f.rank, f.size, f.nbytes, f.itemsize, slot, (f.root,)),
    "scan": lambda f, slot: schedules.scan(f.rank, f.size, f.nbytes, f.itemsize, slot, False),
    "exscan": lambda f, slot: schedules.scan(f.rank, f.size, f.nbytes, f.itemsize, slot, True),
    "reduce_scatter": lambda f, slot: schedules.reduce_scatter(f.rank, f.size, f.given, f.itemsize, slot),
    "broadcast": lambda f, slot: schedules.broadcast(f.rank, f.size, f.nbytes, slot, f.root),
    "all_gather": lambda f, slot: schedules.all_gather(f.rank, f.size, f.taken, slot),
    "gather": lambda f, slot: schedules.gather(f.rank, f.size, f.taken or f.given, slot, f.root),
    "scatter": lambda f, slot: schedules.scatter(f.rank, f.size, f.given or f.taken, slot, f.root),
    "all_to_all": lambda f, slot: schedules.all_to_all(f.rank, f.size, f.given, f.taken, slot),
}
"""For each kind, a function that returns the schedule for slots of a given size in bytes."""


class IpcCarrier(StreamCarrier):
    """The carrier that the module docstring describes, for at most MOST_RANKS ranks on one node.

    The slot size is the smallest `slot` of any rank. `fallback` carries all messages. If it is a StreamCarrier (NCCL),
    it also carries large calls (_HANDED_OVER, HAND_OVER_ABOVE).
    """

    def __init__(self, group: ProcessGroup, fallback: DeviceCarrier, slot: int = SLOT) -> None:
        super().__init__(group)
        self._fallback, self.messages = fallback, fallback.messages
        self._hand_over_above = HAND_OVER_ABOVE if isinstance(fallback, StreamCarrier) else None
        self._slot_wanted = slot
        self.shared: SharedRegions | None = None  # None until the ranks have met
        self.calls = 0  # the number of calls that were queued

    def meet(self, device: int) -> str:
        """Map the peers' memory; collective. If nothing has called `meet` before, the group's first call does.

        Returns:
            an empty text; if this failed, the reason, which is the same on all ranks.
        """
        if self.group.size > at.MOST_RANKS:
            return f"{self.group.size} ranks are more than {at.MOST_RANKS}"
        self.shared, reason = SharedRegions.meet(self.group, self.runtime, device, self._slot_wanted)
        if self.shared is not None:
            self.own_stream = self.own_stream or OwnStream(self.runtime, device)
        return reason

    # ---- collectives ---------------------------------------------------------------------------------

    def plan(self, operation: Operation, timeout: float | None = None) -> Call:
        facts = _Facts(operation, self.group.rank, self.group.size)
        volume = sum(facts.taken) if facts.kind == "all_gather" else facts.nbytes
        above = self._hand_over_above
        if above is not None and facts.kind in _HANDED_OVER and volume > above:
            return self._fallback.plan(operation, timeout)
        if facts.parts:
            slot = self._slot_wanted if self.shared is None else self.shared.slot
            if facts.itemsize > slot // facts.parts:
                raise ArrayError(
                    f"an element has {facts.itemsize} bytes; reductions on GPUs take at most {slot // facts.parts} here"
                )
        return IpcCall(self, operation, facts)

    def slot(self, arrays: Arrays) -> int:
        """Return the bytes of a slot; map the peers' memory if that was not done yet."""
        if self.shared is not None:
            return self.shared.slot
        with self.failing("mapping the memory of the peers' GPUs"):
            reason = self.meet(self.own(arrays).device)
        if self.shared is None:
            raise UnavailableError(
                f"the ranks cannot map the memory of each other's GPUs: {reason}; containers must share their IPC "
                "namespace, and GPUs reach each other; or use the backend tcp, which stages through the host"
            )
        return self.shared.slot

    # ---- when things go wrong, and the end -----------------------------------------------------------

    def judge(self, number: int) -> None:
        """Fail the group if the result of a call that the GPU has finished may be wrong.

        A rank that fails the group notifies its peers before `abort` lets its streams continue. So if a failed rank has
        overwritten a slot that this call read, this rank sees the failure here.
        """
        monitor = self.group.monitor
        error = self.group.failure or self._stopped(number)
        if error is None and monitor.has_failed():
            error = monitor.decide([], f"call {number} of the group {self.group.name!r} on a GPU")
        if error is not None:
            self.fail(error)

    def _stopped(self, number: int) -> GroupError | None:
        """Return why the kernels stopped publishing in or before call `number`, or None."""
        if self.shared is None:
            return None
        words = self.shared.control
        stopped = int(words[at.STOPPED // 8])
        if not 0 < stopped <= number:
            return None
        group = self.group
        if words[at.WHY // 8] != at.MISMATCH:
            return AbortedError(f"call {stopped} of the group {group.name!r} on a GPU was cancelled")
        lines = words[at.REPORTED // 8 :][: at.LINE_WORDS * group.size].reshape(group.size, at.LINE_WORDS)
        compared = [(int(line[at.CALL // 8]), int(line[at.SHAPE // 8])) for line in lines]
        text = signature.describe_mismatch(compared, group.ranks)
        return AbortedError(f"on a GPU {signature.mismatch(text, stopped, group.name)}")

    def trouble(self) -> GroupError | None:
        return self._stopped(self.calls)

    def check_intact(self) -> None:
        """Raise the group's failure, if it has failed."""
        if self.group.failure is not None:
            raise self.group.failure.with_traceback(None)

    def fail(self, error: GroupError) -> None:
        if isinstance(error, CollectiveTimeoutError) and self.shared is not None:
            ranks = self.group.ranks
            arrived = self.shared.control[at.ARRIVED // 8 :][: len(ranks)].tolist()
            here = arrived[self.group.rank]
            if late := [rank for rank, last in zip(ranks, arrived, strict=True) if last < here]:
                names = ", ".join(map(str, late))
                error = CollectiveTimeoutError(f"{error}; not begun on rank {names}", late)
        super().fail(error)

    def break_off(self) -> None:
        if self.shared is not None:
            self.shared.stop(lambda: self.watcher.outstanding == 0)

    def release(self) -> None:
        if self.shared is None or self.own_stream is None:
            return
        if self.broken or self.group.failure is not None:
            self.shared.abandon()
        else:
            monitor = self.group.monitor
            self.shared.publish_bye(self.own_stream.stream)
            self.shared.close(lambda: monitor.decide([], "leaving") is not None)
        self.shared = None


class IpcCall(QueuedCall):
    """A collective call.

    Raises:
        ArrayError: its arrays cannot be reduced.
    """

    def __init__(self, carrier: IpcCarrier, operation: Operation, facts: _Facts) -> None:
        super().__init__(carrier, [*operation.inputs, *operation.outputs])
        self._ipc, self._facts, self._operation, op = carrier, facts, operation, operation.op
        dtype: np.dtype[Any] = self.arrays[0].dtype
        plain = None if op is None else scaled(np.empty(0, dtype), op)[1]
        compared = Compared.of(operation._replace(op=plain), facts.size)
        balance = signature.balance(facts.rank, compared.gives, compared.takes) & at.BALANCE_MASK
        self._signature = signature.Signature(compared.call, compared.shape, balance)
        self._reducer = None if plain is None else cuda_reducer(plain, dtype)
        for x in self.arrays if plain is not None and not is_structured(dtype) else ():
            if x.size and x.address % dtype.alignment:
                raise ArrayError(
                    f"a {x} lies at {x.address:#x}, which is not aligned to {dtype.alignment} bytes; give a copy of it"
                )
        self._schedule: schedules.Schedule = ()
        self._number = 0

    def prepare(self, name: str) -> None:
        self._schedule = _SCHEDULES[self._facts.kind](self._facts, self._ipc.slot(self.arrays))
        # Compile before anything is queued, so that all ranks raise an error here if a user's function cannot be
        # compiled.
        if self._reducer is not None:
            sources = {len(item.srcs) for item in self._schedule if isinstance(item, schedules.ReduceStep)}
            with self._ipc.runtime.on(self._ipc.own(self.arrays).device):
                for n in sources or {self._facts.size}:
                    self._reducer.prepare(n)
        self._ipc.calls += 1
        self._number = self._ipc.calls

    def handle(self, describe: str, own: OwnStream) -> StreamWork:
        return StreamWork(describe, own, self.arrays, partial(self._ipc.judge, self._number))

    def work(self, scope: StreamScope) -> None:
        shared, finish = self._ipc.shared, None
        assert shared is not None
        _, outs, ins, op, _, _, _ = operation = self._operation
        if KINDS[operation.kind].made_of:
            (_, outs, ins, *_), finish = scope.as_one(operation, self._facts.size)
        else:
            ins = tuple(scope.apart([scope.scaled(x, op) for x in ins], outs, self._facts.rank))
        own = self._ipc.own(self.arrays)
        for start in range(0, len(self._schedule), _PORTION):
            part = self._schedule[start : start + _PORTION]
            own.make_room(shared.launches(part), self._ipc.check_intact)
            shared.run(scope.stream, self._number, part, self._signature, ins, outs, self._reducer)
        if finish is not None:
            finish()
