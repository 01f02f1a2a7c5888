"""Collectives on several arrays of each rank: on several GPUs, on one, or on the host; see api/multigpu.py.

A rank reduces its arrays in the order of the list into memory of its own, makes one ordinary call of its group with
that, and hands out the result. What a rank does alone comes before and after the group's call. On the host both are
part of the call. On GPUs the first part is queued on the first array's stream, when the call is made; the last one on
the carrier's stream, or on one that the host waits for, if that is how the carrier works.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from ..core.carrier import StreamCall
from ..core.group import ProcessGroup
from ..core.operands import check_apart, divide, scaled, sum_for
from ..core.operation import Operation
from ..core.partition import pieces
from ..core.reduce_op import AVG, PREMUL_SUM, ReduceOp
from ..core.work import Work
from ..errors import ArrayError, UsageError
from ..interop.arrays import Adopted, Array
from .device_array import DeviceArray, OnDevice, scratch
from .runtime import runtime, waited_stream

_BYTE = np.dtype(np.uint8)


def all_reduce(group: ProcessGroup, tensors: Sequence[Any], op: ReduceOp, async_op: bool) -> Any:
    if _length("tensor_list", tensors) == 1:
        return group.all_reduce(tensors[0], op, async_op)
    items = _adopted(group, tensors, "tensor_list")
    mine = Several(group, items, "tensor_list")
    total = mine.room(mine.arrays[0].size)
    return mine.run(
        "all_reduce_multigpu",
        lambda mover: mover.fold(total, mine.arrays, op),
        Operation("all_reduce", (total,), (total,), mine.left_of(op)),
        lambda mover: _hand_out(mover, total, op, mine.arrays, len(items)),
        items,
        async_op,
    )


def reduce(
    group: ProcessGroup, tensors: Sequence[Any], root: int, op: ReduceOp, place: int, async_op: bool
) -> Any:
    root = group.checked_rank("root", root)
    place = _index("dst_tensor", place, _length("tensor_list", tensors))
    if len(tensors) == 1:
        return group.reduce(tensors[0], root, op, async_op)
    written = [place] if group.rank == root else []
    items = _adopted(group, tensors, "tensor_list", written)
    mine = Several(group, items, "tensor_list")
    total = mine.room(mine.arrays[0].size)
    return mine.run(
        "reduce_multigpu",
        lambda mover: mover.fold(total, mine.arrays, op),
        Operation("reduce", (total,), (total,), mine.left_of(op), root),
        lambda mover: _hand_out(mover, total, op, [mine.arrays[k] for k in written], len(items)),
        [items[k] for k in written],
        async_op,
    )


def broadcast(group: ProcessGroup, tensors: Sequence[Any], root: int, place: int, async_op: bool) -> Any:
    root = group.checked_rank("root", root)
    place = _index("src_tensor", place, _length("tensor_list", tensors))
    if len(tensors) == 1:
        return group.broadcast(tensors[0], root, async_op)
    here = group.rank == root
    written = [k for k in range(len(tensors)) if not here or k != place]
    items = _adopted(group, tensors, "tensor_list", written)
    mine = Several(group, items, "tensor_list")
    value = mine.room(mine.arrays[0].size)

    def before(mover: Mover) -> None:
        if here:
            mover.copy(value, mine.arrays[place])

    return mine.run(
        "broadcast_multigpu",
        before,
        Operation("broadcast", (value,), (value,), root=root),
        lambda mover: _hand_out(mover, value, ReduceOp.SUM, [mine.arrays[k] for k in written], 1),
        [items[k] for k in written],
        async_op,
    )


def all_gather(
    group: ProcessGroup, lists: Sequence[Sequence[Any]], tensors: Sequence[Any], async_op: bool
) -> Work | None:
    many = _length("input_tensor_list", tensors)
    if len(lists) != many:
        raise UsageError(f"output_tensor_lists has {len(lists)} lists for {many} input tensors")
    items = _adopted(group, tensors, "input_tensor_list", ())
    mine = Several(group, items, "input_tensor_list")
    outs = [
        group.adopt_list(outputs, group.size * many, writable=True, what=f"output_tensor_lists[{k}]")
        for k, outputs in enumerate(lists)
    ]
    for k, outputs in enumerate(outs):
        check_alike(f"output_tensor_lists[{k}]", outputs, mine.arrays[0], "input_tensor_list[0]")
    size = mine.arrays[0].size
    everything = mine.room(group.size * many * size)
    ranks = pieces(everything, [many * size] * group.size)
    slots = pieces(everything, [size] * group.size * many)

    def before(mover: Mover) -> None:
        for slot, x in zip(slots[group.rank * many :], mine.arrays, strict=False):
            mover.copy(slot, x)

    def after(mover: Mover) -> None:
        for outputs in outs:
            for out, slot in zip(outputs, slots, strict=True):
                mover.copy(out.array, slot)

    return mine.run(
        "all_gather_multigpu",
        before,
        Operation("all_gather", tuple(ranks), (ranks[group.rank],), parts=(size,) * many),
        after,
        [out for outputs in outs for out in outputs],
        async_op,
    )


def _length(what: str, tensors: Any) -> int:
    if not isinstance(tensors, list | tuple) or not tensors:
        raise UsageError(f"{what} must be a list of arrays, one at least")
    return len(tensors)


def _index(name: str, index: int, length: int) -> int:
    if not 0 <= index < length:
        raise UsageError(f"{name} is {index}; tensor_list has {length} arrays, counted from 0")
    return index


def _adopted(
    group: ProcessGroup, tensors: Sequence[Any], what: str, written: Sequence[int] | None = None
) -> list[Adopted]:
    """The arrays of a list.

    Args:
        written: places of those that the call writes; None for all.
    """
    items = [
        group.adopt(x, writable=written is None or k in written, what=f"{what}[{k}]")
        for k, x in enumerate(tensors)
    ]
    if written is None:
        check_apart(items, what)
    return items


def _hand_out(mover: Mover, total: Any, op: ReduceOp, outs: Sequence[Any], many: int) -> None:
    if op.code == AVG and many > 1 and outs:
        mover.divide(total, many)
    for out in outs:
        mover.copy(out, total)


# ---- what a rank does with arrays of its own -------------------------------------------------------------


class Mover(Protocol):
    """What a rank does with its own arrays. Arrays of a call have one dtype and lie in one kind of memory."""

    def fold(self, out: Any, xs: Sequence[Any], op: ReduceOp) -> None:
        """out = reduction of xs, in their order, with which the ranks' reduction begins; out is apart from them.

        An average is a sum, to be divided later; what PREMUL_SUM scales is scaled here or by the GPU's carrier.
        """

    def divide(self, x: Any, n: int) -> None:
        """x /= n, as AVG divides."""

    def copy(self, out: Any, x: Any) -> None:
        """out = x."""


def _local(op: ReduceOp) -> ReduceOp:
    return ReduceOp.SUM if op.code == PREMUL_SUM else sum_for(op)


class OnHost:
    """See Mover."""

    def fold(self, out: Array, xs: Sequence[Array], op: ReduceOp) -> None:
        from ..kernels.reduce import reducer

        how = reducer(_local(op), out.dtype)
        addresses = np.array([x.ctypes.data for x in xs])
        function = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 5)(how.address)
        function(how.code, out.ctypes.data, addresses.ctypes.data, len(xs), out.size)
        source, _ = scaled(out, op)
        if source is not out:
            out[...] = source

    def divide(self, x: Array, n: int) -> None:
        divide(x, n)

    def copy(self, out: Array, x: Array) -> None:
        out.reshape(-1)[...] = x.reshape(-1)


class OnStream:
    """Queues on a stream of one GPU, which is current."""

    def __init__(self, device: int, stream: int) -> None:
        self._device, self._stream = device, stream

    def fold(self, out: DeviceArray, xs: Sequence[DeviceArray], op: ReduceOp) -> None:
        from ..kernels.cuda.reducers import cuda_reducer

        here = [x if x.device == self._device else self._brought(x) for x in xs]
        addresses = [x.address for x in here]
        cuda_reducer(_local(op), out.dtype).launch(out.address, addresses, out.size, self._stream)

    def _brought(self, x: DeviceArray) -> DeviceArray:
        # Dropped when the fold is queued: the pool gives it to what is queued later on this stream.
        copied = scratch(x.size, x.dtype, self._device, self._stream)
        self.copy(copied, x)
        return copied

    def divide(self, x: DeviceArray, n: int) -> None:
        from ..kernels.cuda.reducers import cuda_reducer

        zero = scratch(x.size, x.dtype, self._device, self._stream)
        bytes_of = cuda_reducer(ReduceOp.BXOR, _BYTE)
        bytes_of.launch(zero.address, [x.address, x.address], x.nbytes, self._stream)
        others = [zero.address] * (n - 1)
        cuda_reducer(ReduceOp.AVG, x.dtype).launch(x.address, [x.address, *others], x.size, self._stream)

    def copy(self, out: DeviceArray, x: DeviceArray) -> None:
        if out.address != x.address:
            runtime().copy(out.address, x.address, x.nbytes, self._stream)


Part = Callable[[Mover], None]


class Several:
    """The arrays that one rank gives to a call.

    Args:
        group: the call's.
        items: the arrays, adopted; one at least.
        what: the argument's name, for messages.

    Attributes:
        arrays: adopted.
        on_host: whether they lie in host memory.
    """

    def __init__(self, group: ProcessGroup, items: Sequence[Adopted], what: str) -> None:
        self.items = list(items)
        self.arrays: list[Any] = [item.array for item in items]
        self._group = group
        self.on_host = type(self.arrays[0]) is np.ndarray
        check_alike(what, items, self.arrays[0], f"{what}[0]")

    def left_of(self, op: ReduceOp) -> ReduceOp:
        """What the group's call does after `Mover.fold`, which has scaled what lies on the host."""
        return scaled(np.empty(0, self.arrays[0].dtype), op)[1] if self.on_host else op

    def room(self, size: int) -> Any:
        """Memory of the call's own where the first array is."""
        x = self.arrays[0]
        if self.on_host:
            return np.empty(size, x.dtype)
        return scratch(size, x.dtype, x.device, x.stream, x.owner)

    def run(
        self,
        name: str,
        before: Part,
        operation: Operation,
        after: Part,
        outputs: Sequence[Adopted],
        async_op: bool,
    ) -> Work | None:
        """Carry a call out.

        Args:
            before: this rank's own part, which writes nothing of the caller's.
            operation: the group's.
            after: this rank's own part that writes `outputs`.
        """
        if self.on_host:
            inner = self._group.planned(operation)

            def call() -> None:
                before(OnHost())
                inner()
                after(OnHost())

            return self._group.run(name, call, outputs, async_op)
        targets: list[Any] = list(outputs)
        first: DeviceArray = self.arrays[0]
        with runtime().on(first.device):
            _follow(first.device, first.stream, [*self.arrays, *(target.array for target in targets)])
            before(OnStream(first.device, first.stream))
        ends = _Ends(first, after, targets)
        inner = self._group.planned(operation)
        if isinstance(inner, StreamCall):
            return self._group.run(name, _Streamed(inner, ends), (), async_op)

        def staged() -> None:
            inner()
            ends.now()

        return self._group.run(name, staged, outputs, async_op)


def check_alike(what: str, items: Sequence[Adopted], y: Any, other: str) -> None:
    """Arrays that stand for the same data must be in one kind of memory, of one dtype and size."""
    for index, item in enumerate(items):
        x: Any = item.array
        if type(x) is not type(y):
            raise ArrayError(f"{what}[{index}] and {other} must both be on GPUs, or both in host memory")
        if x.dtype != y.dtype or x.size != y.size:
            raise UsageError(
                f"{what}[{index}] ({x.dtype}, shape {x.shape}) and {other} ({y.dtype}, shape {y.shape}) must have "
                "the same dtype and number of elements"
            )


class _Ends(OnDevice):
    """A rank's last part, in the place of an output that a carrier unpacks on its stream."""

    __slots__ = ("_after", "_targets")

    def __init__(self, first: DeviceArray, after: Part, targets: Sequence[OnDevice]) -> None:
        super().__init__(first)
        self._after, self._targets = after, targets

    def unpack(self, stream: int) -> None:
        device = self.array.device
        with runtime().on(device):
            self._after(OnStream(device, stream))
        event = runtime().new_event(device)
        with runtime().on(device):
            runtime().record(event, stream)
        for target in self._targets:
            x = target.array
            with runtime().on(x.device):
                runtime().order(x.stream, event)
            target.unpack(x.stream)
        runtime().end_event(event)

    def now(self) -> None:
        """On a stream that the host waits for; what is packed stays so."""
        device = self.array.device
        with runtime().on(device), waited_stream(runtime(), device) as stream:
            self._after(OnStream(device, stream))


class _Streamed(StreamCall):
    def __init__(self, call: StreamCall, ends: _Ends) -> None:
        self._call, self._ends = call, ends

    def start(self, name: str, owners: Sequence[Adopted]) -> Work:
        return self._call.start(name, [self._ends])


def _follow(device: int, stream: int, arrays: Sequence[DeviceArray]) -> None:
    """What is queued on a stream from here on waits for what the arrays' streams hold now."""
    for there, other in dict.fromkeys((x.device, x.stream) for x in arrays):
        if (there, other) == (device, stream):
            continue
        event = runtime().new_event(there)
        with runtime().on(there):
            runtime().record(event, other)
        with runtime().on(device):
            runtime().order(stream, event)
        runtime().end_event(event)
