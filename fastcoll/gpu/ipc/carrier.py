"""IpcCarrier: GPU arrays of ranks on one node, by kernels over memory that all of them map (CUDA IPC).

Ranks may share a GPU, or have GPUs that reach each other. A call is queued as its plan says (ipc_plans.py): copies into
this rank's slots, kernels that say so and wait for the peers (kernels/cuda/ipc.py), reductions straight from the peers'
slots, in rank order. The host waits for nobody. So a mismatch is found when the host has gone on, and fails the group.

Where ranks share a GPU, only one of their processes runs there at a time, and a kernel that polls uses up its
process's time slice. So there, if the driver can, the stream waits for the word before the kernel does: nothing runs
then, and the GPU can turn to another process. The kernel finds the word there; it alone orders memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, cast

from ...core import signature
from ...core.carrier import DeviceCarrier
from ...core.group import ProcessGroup
from ...core.monitor import FAILED
from ...core.operation import Call
from ...core.reduce_op import PREMUL_SUM, ReduceOp
from ...core.work import Work
from ...errors import AbortedError, ArrayError, CollectiveTimeoutError, GroupError, UnavailableError
from ...interop.arrays import Adopted
from ...kernels.cuda import ipc_page as at
from ..array import DeviceArray
from ..stream_work import Own
from ..streams import StreamCarrier
from . import plans
from .calls import Arrays, Coalesced, IpcCall, MakePlan
from .limits import HAND_OVER_ABOVE, SLOT, is_one_shot
from .memory import Shared
from .queue import Queue, ready


class IpcCarrier(StreamCarrier):
    """See this module's docstring.

    Args:
        group: whose ranks are on one node, at most MOST_RANKS.
        fallback: carries messages; and large calls, if it queues on streams too (NCCL).
        slot: bytes of a slot; ranks that differ take the smallest.
    """

    def __init__(self, group: ProcessGroup, fallback: DeviceCarrier, slot: int = SLOT) -> None:
        super().__init__(group)
        self._fallback = fallback
        self._hand_over_above = HAND_OVER_ABOVE if isinstance(fallback, StreamCarrier) else None
        self._slot_wanted = slot
        self._shared: Shared | None = None
        self._line: Queue | None = None
        self._calls = 0

    def meet(self, device: int) -> str:
        """Map the peers' memory; collective, inside a call of the group. Without it the first call does so.

        Returns:
            Why this cannot be done, on all ranks alike; nothing if it is.
        """
        if self._group.size > at.MOST_RANKS:
            return f"{self._group.size} ranks are more than {at.MOST_RANKS}"
        wait, lacking = ready(device)
        shared, reason = Shared.meet(self._group, self._runtime, device, self._slot_wanted, lacking)
        if shared is not None:
            wait = wait if shared.shares_gpu else None
            self._line = Queue(shared, self._runtime, device, self._group.rank, self._group.size, wait)
            self._lane = self._lane or Own(self._runtime, device)
            self._shared = shared
        return reason

    def _slot(self, arrays: Arrays) -> int:
        """Bytes of a slot; the first call meets the peers here."""
        if self._shared is not None:
            return self._shared.slot
        with self._failing("mapping the memory of the peers' GPUs"):
            reason = self.meet(self._own(arrays).device)
        if self._shared is None:
            raise UnavailableError(
                f"the ranks cannot map the memory of each other's GPUs: {reason}; containers must share their IPC "
                "namespace, and GPUs reach each other; or use the backend tcp, which stages through the host"
            )
        return self._shared.slot

    def _current(self) -> AbstractContextManager[None]:
        """The GPU is this thread's current one."""
        assert self._lane is not None
        on: AbstractContextManager[None] = self._runtime.on(self._lane.device)
        return on

    def _next(self) -> int:
        self._calls += 1
        return self._calls

    # ---- reductions ----------------------------------------------------------------------------------

    def _plan_all_reduce(self, x: DeviceArray, op: ReduceOp, parts: Sequence[int] = ()) -> Call:
        if self._is_for_fallback(x.nbytes):
            return self._fallback._plan_all_reduce(x, op, parts)
        said = self._said("all_reduce", x, shape=x.nbytes, op=op, parts=parts)
        return IpcCall(self, said, self._all_reduce_plan(x.nbytes, x.dtype.itemsize), [x], [x], op)

    def _all_reduce_plan(self, nbytes: int, itemsize: int) -> MakePlan:
        one = is_one_shot(self._group.size, nbytes)
        self._check_element(itemsize, 1 if one else self._group.size)
        if one:
            return partial(plans.one_shot, self._group.rank, self._group.size, nbytes, itemsize)
        return partial(plans.two_shot, self._group.rank, self._group.size, nbytes, itemsize)

    def _plan_reduce(self, out: DeviceArray, x: DeviceArray, op: ReduceOp, root: int) -> Call:
        if self._is_for_fallback(x.nbytes):
            return self._fallback._plan_reduce(out, x, op, root)
        self._check_element(x.dtype.itemsize, 1)
        said = self._said("reduce", x, shape=x.nbytes, op=op, root=root)
        make = partial(self._made, plans.one_shot, x.nbytes, x.dtype.itemsize, readers=(root,))
        return IpcCall(self, said, make, [x], [out], op)

    def _plan_scan(self, out: DeviceArray, x: DeviceArray, op: ReduceOp, exclusive: bool) -> Call:
        self._check_element(x.dtype.itemsize, 1)
        said = self._said("exscan" if exclusive else "scan", x, shape=x.nbytes, op=op)
        make = partial(self._made, plans.scan, x.nbytes, x.dtype.itemsize, exclusive=exclusive)
        return IpcCall(self, said, make, [x], [out], op)

    def _plan_reduce_scatter(self, out: DeviceArray, blocks: Arrays, op: ReduceOp) -> Call:
        sizes = _sizes(blocks)
        if self._is_for_fallback(sum(sizes)):
            return self._fallback._plan_reduce_scatter(out, blocks, op)
        self._check_element(out.dtype.itemsize, self._group.size)
        said = self._said("reduce_scatter", out, shape=signature.shape_of(sizes), op=op)
        make = partial(self._made, plans.reduce_scatter, sizes, out.dtype.itemsize)
        return IpcCall(self, said, make, blocks, [out], op)

    def _plan_all_reduce_coalesced(
        self, xs: Sequence[Adopted], op: ReduceOp, parts: Sequence[int] = ()
    ) -> Call:
        arrays: Arrays = [cast(Any, x.array) for x in xs]
        nbytes = sum(_sizes(arrays))
        if self._is_for_fallback(nbytes):
            return self._fallback._plan_all_reduce_coalesced(xs, op, parts)
        sizes = [x.size for x in arrays]
        said = self._said("all_reduce", arrays[0], shape=nbytes, op=op, parts=parts or sizes)
        make = self._all_reduce_plan(nbytes, arrays[0].dtype.itemsize)
        return Coalesced(self, said, make, arrays, [arrays], op)

    # ---- moves ---------------------------------------------------------------------------------------

    def _plan_broadcast(self, x: DeviceArray, root: int, parts: Sequence[int] = ()) -> Call:
        if self._is_for_fallback(x.nbytes):
            return self._fallback._plan_broadcast(x, root, parts)
        said = self._said("broadcast", x, shape=x.nbytes, root=root, parts=parts)
        return IpcCall(self, said, partial(self._made, plans.broadcast, x.nbytes, root=root), [x], [x])

    def _plan_all_gather(self, outs: Arrays, x: DeviceArray, parts: Sequence[int] = ()) -> Call:
        sizes = _sizes(outs)
        if self._is_for_fallback(sum(sizes)):
            return self._fallback._plan_all_gather(outs, x, parts)
        said = self._said("all_gather", x, parts=parts, gives=[x.nbytes] * self._group.size, takes=sizes)
        return IpcCall(self, said, partial(self._made, plans.all_gather, sizes), [x], outs)

    def _plan_all_gather_coalesced(self, lists: Sequence[Sequence[Adopted]], xs: Sequence[Adopted]) -> Call:
        arrays: Arrays = [cast(Any, x.array) for x in xs]
        outs = [[cast(Any, out[rank].array) for out in lists] for rank in range(self._group.size)]
        sizes = tuple(sum(_sizes(each)) for each in outs)
        if self._is_for_fallback(sum(sizes)):
            return self._fallback._plan_all_gather_coalesced(lists, xs)
        gives = [sum(_sizes(arrays))] * self._group.size
        said = self._said("all_gather", arrays[0], parts=[x.size for x in arrays], gives=gives, takes=sizes)
        return Coalesced(self, said, partial(self._made, plans.all_gather, sizes), arrays, outs)

    def _plan_gather(self, outs: Arrays | None, x: DeviceArray, root: int) -> Call:
        sizes = (x.nbytes,) if outs is None else _sizes(outs)
        gives = [x.nbytes if rank == root else -1 for rank in range(self._group.size)]
        said = self._said("gather", x, root=root, gives=gives, takes=() if outs is None else sizes)
        return IpcCall(self, said, partial(self._made, plans.gather, sizes, root=root), [x], outs or ())

    def _plan_scatter(self, out: DeviceArray, blocks: Arrays | None, root: int) -> Call:
        sizes = (out.nbytes,) if blocks is None else _sizes(blocks)
        takes = [out.nbytes if rank == root else -1 for rank in range(self._group.size)]
        said = self._said("scatter", out, root=root, gives=() if blocks is None else sizes, takes=takes)
        return IpcCall(self, said, partial(self._made, plans.scatter, sizes, root=root), blocks or (), [out])

    def _plan_all_to_all(self, outs: Arrays, blocks: Arrays) -> Call:
        gives, takes = _sizes(blocks), _sizes(outs)
        said = self._said("all_to_all", blocks[0], gives=gives, takes=takes)
        return IpcCall(self, said, partial(self._made, plans.all_to_all, gives, takes), blocks, outs)

    # ---- what calls are made of ----------------------------------------------------------------------

    def _made(self, make: Callable[..., plans.Plan], *args: Any, **options: Any) -> plans.Plan:
        *sizes, slot = args
        return make(self._group.rank, self._group.size, *sizes, slot, **options)

    def _said(
        self,
        operation: str,
        x: DeviceArray,
        *,
        shape: int = 0,
        op: ReduceOp | None = None,
        root: int = 0,
        parts: Sequence[int] = (),
        gives: Sequence[int] = (),
        takes: Sequence[int] = (),
    ) -> signature.Signature:
        if op is not None and op.code == PREMUL_SUM:
            op = ReduceOp.SUM
        call = signature.encode(operation, x.dtype, op=op, parts=parts) | root << signature.ROOT_SHIFT
        balance = signature.balance(self._group.rank, gives, takes) & at.BALANCE_MASK
        return signature.Signature(call, shape, balance)

    def _is_for_fallback(self, nbytes: int) -> bool:
        return self._hand_over_above is not None and nbytes > self._hand_over_above

    def _check_element(self, itemsize: int, parts: int) -> None:
        slot = self._slot_wanted if self._shared is None else self._shared.slot
        if itemsize > slot // parts:
            raise ArrayError(f"an element has {itemsize} bytes; reductions on GPUs take {slot // parts} here")

    # ---- point to point ------------------------------------------------------------------------------

    def _send(self, x: Adopted, dst: int, tag: int) -> None:
        self._fallback._send(x, dst, tag)

    def _isend(self, x: Adopted, dst: int, tag: int) -> Work:
        return self._fallback._isend(x, dst, tag)

    def _recv(self, x: Adopted, src: int | None, tag: int) -> int:
        return self._fallback._recv(x, src, tag)

    def _irecv(self, x: Adopted, src: int | None, tag: int) -> Work:
        return self._fallback._irecv(x, src, tag)

    # ---- when things go wrong, and the end -----------------------------------------------------------

    def _judge(self, number: int) -> None:
        """The GPU is past a call: fail the group if the call has not gone as it should.

        A rank that fails the group tells the peers before its streams go on (`abort`), so what it wrote over meanwhile
        is seen here as its failure.
        """
        vigil = self._group.monitor
        error = self._group.failure or self._stopped(number)
        if error is None and FAILED in vigil._states():
            error = vigil.verdict([], f"call {number} of the group {self._group.name!r} on a GPU")
        if error is not None:
            self._fail(error)

    def _stopped(self, number: int) -> GroupError | None:
        """Why nothing is said any more since a call up to this one."""
        if self._shared is None:
            return None
        words = self._shared.control
        stopped = int(words[at.STOPPED // 8])
        if not 0 < stopped <= number:
            return None
        group = self._group
        if words[at.WHY // 8] != at.MISMATCH:
            return AbortedError(f"call {stopped} of the group {group.name!r} on a GPU was broken off")
        lines = words[at.SAID // 8 :][: at.LINE_WORDS * group.size].reshape(group.size, at.LINE_WORDS)
        said = [(int(line[at.CALL // 8]), int(line[at.SHAPE // 8])) for line in lines]
        text = signature.describe_mismatch(said, group.ranks)
        return AbortedError(f"on a GPU {signature.mismatch(text, stopped, group.name)}")

    def _trouble(self) -> GroupError | None:
        return self._stopped(self._calls)

    def _fail(self, error: GroupError) -> None:
        if isinstance(error, CollectiveTimeoutError) and (late := self._late()):
            names = ", ".join(map(str, late))
            error = CollectiveTimeoutError(f"{error}; not begun on rank {names}", late)
        super()._fail(error)

    def _late(self) -> list[int]:
        """The ranks that have not begun the call under way."""
        if self._shared is None:
            return []
        arrived = self._shared.control[at.ARRIVED // 8 :][: self._group.size].tolist()
        here = arrived[self._group.rank]
        return [rank for rank, last in zip(self._group.ranks, arrived, strict=True) if last < here]

    def _break_off(self) -> None:
        if self._line is not None:
            self._line.stop(lambda: self._watcher.outstanding == 0)

    def _release(self) -> None:
        if self._shared is None or self._line is None or self._lane is None:
            return
        if self._broken or self._group.failure is not None:
            self._shared.lose()
        else:
            vigil = self._group.monitor
            self._line.say_bye(self._lane.stream)
            self._shared.close(lambda: vigil.verdict([], "leaving") is not None)
        self._shared = self._line = None


def _sizes(arrays: Arrays) -> tuple[int, ...]:
    return tuple(x.nbytes for x in arrays)
