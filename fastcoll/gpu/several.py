"""Collectives on several arrays of each rank, on GPUs or on the host; see api/multigpu.py.

A rank makes one ordinary call of its group, with a *local part* before it and one after it. In a reduction, the first
part reduces the rank's arrays, in the order of the list, into scratch memory, and the second part copies the result to
the rank's arrays. On the host, both parts run inside the call. On GPUs, the first part is queued on the first array's
stream when the call is made. The second part is queued on the stream of the group's carrier (the object that executes
the group's operations on GPU arrays). A carrier that works synchronously has no such stream. With such a carrier, the
second part is queued on a new stream, and the host waits for it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import partial, wraps
from typing import Any, TypeAlias

import numpy as np

from ..arrays.arrays import Array, ImportedArray
from ..core.backend import StreamCall
from ..core.group import ProcessGroup
from ..core.operands import check_apart, divide, scaled, sum_for
from ..core.operation import Operation
from ..core.partition import pieces
from ..core.reduce_op import AVG, PREMUL_SUM, ReduceOp
from ..core.work import Work
from ..errors import ArrayError, UsageError
from .device_array import DeviceArray, OnDevice, scratch
from .runtime import runtime, waited_stream
from .streams import StreamScope


def _collective(prepare: Callable[..., Callable[[], Any]]) -> Callable[..., Any]:
    """Return a function that makes the call that `prepare` returns; wrong arguments are refused on all ranks."""

    @wraps(prepare)
    def call(group: ProcessGroup, *arguments: Any) -> Any:
        with group.preparing(f"{prepare.__name__}_multigpu"):
            prepared = prepare(group, *arguments)
        return prepared()

    return call


@_collective
def all_reduce(
    group: ProcessGroup, tensors: Sequence[Any], op: ReduceOp, async_op: bool
) -> Callable[[], Any]:
    if _length("tensor_list", tensors) == 1:
        return partial(group.fast.all_reduce, tensors[0], op, async_op)
    return _reduced(group, "all_reduce", tensors, None, op, 0, async_op)


@_collective
def reduce(
    group: ProcessGroup, tensors: Sequence[Any], root: int, op: ReduceOp, index: int, async_op: bool
) -> Callable[[], Any]:
    root = group.checked_rank("root", root)
    index = _index("dst_tensor", index, _length("tensor_list", tensors))
    if len(tensors) == 1:
        return partial(group.fast.reduce, tensors[0], root, op, async_op)
    return _reduced(group, "reduce", tensors, [index] * (group.rank == root), op, root, async_op)


def _reduced(
    group: ProcessGroup,
    kind: str,
    tensors: Sequence[Any],
    written: Sequence[int] | None,
    op: ReduceOp,
    root: int,
    async_op: bool,
) -> Callable[[], Any]:
    mine = Several(group, tensors, "tensor_list", written)
    if written is None:
        check_apart(mine.items, "tensor_list")
    total, outputs = mine.room(mine.arrays[0].size), mine.written
    # On the host `fold` applies PREMUL_SUM's factor, so the group's call must not.
    left = scaled(np.empty(0, total.dtype), op)[1] if mine.on_host else op

    def after(mover: Mover) -> None:
        if op.code == AVG and outputs:
            mover.divide(total, len(tensors))
        for out in outputs:
            mover.copy(out.array, total)

    return mine.prepare(
        f"{kind}_multigpu",
        lambda mover: mover.fold(total, mine.arrays, op),
        Operation(kind, (total,), (total,), left, root),
        after,
        outputs,
        async_op,
    )


@_collective
def broadcast(
    group: ProcessGroup, tensors: Sequence[Any], root: int, index: int, async_op: bool
) -> Callable[[], Any]:
    root = group.checked_rank("root", root)
    index = _index("src_tensor", index, _length("tensor_list", tensors))
    if len(tensors) == 1:
        return partial(group.fast.broadcast, tensors[0], root, async_op)
    here = group.rank == root
    mine = Several(group, tensors, "tensor_list", [k for k in range(len(tensors)) if not here or k != index])
    check_apart(mine.items, "tensor_list", once=True)
    value = mine.room(mine.arrays[0].size)

    def before(mover: Mover) -> None:
        if here:
            mover.copy(value, mine.arrays[index])

    def after(mover: Mover) -> None:
        for out in mine.written:
            mover.copy(out.array, value)

    operation = Operation("broadcast", (value,), (value,), root=root)
    return mine.prepare("broadcast_multigpu", before, operation, after, mine.written, async_op)


@_collective
def all_gather(
    group: ProcessGroup, lists: Sequence[Sequence[Any]], tensors: Sequence[Any], async_op: bool
) -> Callable[[], Any]:
    many = _length("input_tensor_list", tensors)
    if len(lists) != many:
        raise UsageError(f"output_tensor_lists has {len(lists)} lists for {many} input tensors")
    mine = Several(group, tensors, "input_tensor_list", ())
    names = [f"output_tensor_lists[{k}]" for k in range(many)]
    outs = [
        group.import_list(outputs, group.size * many, writable=True, what=name)
        for name, outputs in zip(names, lists, strict=True)
    ]
    for name, outputs in zip(names, outs, strict=True):
        check_alike(name, outputs, mine.arrays[0], "input_tensor_list[0]")
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

    operation = Operation("all_gather", tuple(ranks), (ranks[group.rank],), parts=(size,) * many)
    written = [out for outputs in outs for out in outputs]
    return mine.prepare("all_gather_multigpu", before, operation, after, written, async_op)


def _length(what: str, tensors: Any) -> int:
    if not isinstance(tensors, list | tuple) or not tensors:
        raise UsageError(f"{what} must be a list of arrays, one at least")
    return len(tensors)


def _index(name: str, index: int, length: int) -> int:
    if not 0 <= index < length:
        raise UsageError(f"{name} is {index}; tensor_list has {length} arrays, counted from 0")
    return index


# ---- the local parts of a call ---------------------------------------------------------------------------


class OnHost:
    """The local parts of a call on host arrays. All arrays of a call have one dtype."""

    def fold(self, out: Array, xs: Sequence[Array], op: ReduceOp) -> None:
        """Reduce `xs`, in their order, into `out`: this rank's contribution to the ranks' reduction.

        For AVG this is the sum; it is divided by the number of arrays after the group's call. PREMUL_SUM's factor is
        applied here; on a GPU the carrier applies it.

        Args:
            out: must share no memory with `xs`.
        """
        from ..kernels.reduce import reducer

        how = reducer(_local(op), out.dtype)
        addresses = np.array([x.ctypes.data for x in xs])
        function = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 5)(how.address)
        function(how.code, out.ctypes.data, addresses.ctypes.data, len(xs), out.size)
        source, _ = scaled(out, op)
        if source is not out:
            out[...] = source

    def divide(self, x: Array, n: int) -> None:
        """Divide x by n in place, as AVG divides."""
        divide(x, n)

    def copy(self, out: Array, x: Array) -> None:
        out.reshape(-1)[...] = x.reshape(-1)


class OnStream(StreamScope):
    """The local parts of a call on one GPU, which must be the current one.

    Later work on the stream may reuse the scratch memory of a part.
    """

    def fold(self, out: DeviceArray, xs: Sequence[DeviceArray], op: ReduceOp) -> None:
        self._reduce(_local(op), out, [x if x.device == self.device else self.copied([x]) for x in xs])

    def divide(self, x: DeviceArray, n: int) -> None:
        """Divide x by n in place: replace x by the average of x and n - 1 arrays of zeros (x ^ x)."""
        bits = DeviceArray(x.address, np.dtype(np.uint8), (x.nbytes,), x.device, x.stream, x.owner)
        zero = self.scratch_like([bits])
        self._reduce(ReduceOp.BXOR, zero, [bits, bits])
        self._reduce(ReduceOp.AVG, x, [x, *[zero] * (n - 1)])

    def _reduce(self, op: ReduceOp, out: DeviceArray, xs: Sequence[DeviceArray]) -> None:
        from ..kernels.cuda.reducers import cuda_reducer

        cuda_reducer(op, out.dtype).launch(out.address, [x.address for x in xs], out.size, self.stream)


Mover: TypeAlias = Any
"""OnHost or OnStream."""
Part = Callable[[Mover], None]


def _local(op: ReduceOp) -> ReduceOp:
    return ReduceOp.SUM if op.code == PREMUL_SUM else sum_for(op)


class Several:
    """The imported arrays that one rank passes to a call.

    Args:
        indices: indices of the arrays that the call writes (`written`); None: the call writes all arrays.
    """

    def __init__(
        self, group: ProcessGroup, tensors: Sequence[Any], what: str, indices: Sequence[int] | None
    ) -> None:
        self.items = [
            group.import_array(x, writable=indices is None or k in indices, what=f"{what}[{k}]")
            for k, x in enumerate(tensors)
        ]
        self.arrays: list[Any] = [item.array for item in self.items]
        self.written = self.items if indices is None else [self.items[k] for k in indices]
        self._group = group
        self.on_host = type(self.arrays[0]) is np.ndarray
        check_alike(what, self.items, self.arrays[0], f"{what}[0]")

    def room(self, size: int) -> Any:
        """Return scratch memory on the device of the first array."""
        x = self.arrays[0]
        if self.on_host:
            return np.empty(size, x.dtype)
        return scratch(size, x.dtype, x.device, x.stream, x.owner)

    def prepare(
        self,
        name: str,
        before: Part,
        operation: Operation,
        after: Part,
        outputs: Sequence[ImportedArray],
        async_op: bool,
    ) -> Callable[[], Work | None]:
        """Prepare a call, and return the function that makes it.

        Args:
            before, after: the local parts before and after the group's call; only `after` writes `outputs`.
        """
        first = self.arrays[0]
        if not self.on_host:
            with runtime().on(first.device):
                for x in (*self.arrays, *(output.array for output in outputs)):
                    _follow(first, first.stream, x, x.stream)
                before(OnStream(runtime(), first.device, first.stream))
                for x in self.arrays:  # it has been read; the caller may write to it or free it now
                    _follow(x, x.stream, first, first.stream)
        inner = self._group.planned(operation)
        ends = _Ends(first, after, outputs)
        if isinstance(inner, StreamCall):
            return partial(self._group.run, name, inner, [ends], async_op)

        def call() -> None:
            if self.on_host:
                before(OnHost())
            inner()
            if self.on_host:
                after(OnHost())
            else:
                ends.now()

        return partial(self._group.run, name, call, outputs, async_op)


def check_alike(what: str, items: Sequence[ImportedArray], y: Any, other: str) -> None:
    """Raise an error unless all arrays are in one kind of memory, and have one dtype and size."""
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
    """An output that runs the local part after the call when a carrier unpacks it on the carrier's stream."""

    __slots__ = ("_after", "_targets")

    def __init__(self, first: DeviceArray, after: Part, targets: Sequence[Any]) -> None:
        super().__init__(first)
        self._after, self._targets = after, targets

    def unpack(self, stream: int) -> None:
        with runtime().on(self.array.device):
            self._after(OnStream(runtime(), self.array.device, stream))
        for target in self._targets:
            _follow(target.array, target.array.stream, self.array, stream)
            target.unpack(target.array.stream)

    def now(self) -> None:
        """Run the local part on a stream that the host waits for; `ProcessGroup.run` unpacks packed arrays."""
        device = self.array.device
        with runtime().on(device), waited_stream(runtime(), device) as stream:
            self._after(OnStream(runtime(), device, stream))


def _follow(x: DeviceArray, stream: int, other: DeviceArray, other_stream: int) -> None:
    """Make `stream`, on the GPU of x, wait for `other_stream`, on the GPU of `other`.

    Work queued on `stream` from now on waits for the work that is queued on `other_stream` now.
    """
    if (x.device, stream) != (other.device, other_stream):
        event = runtime().new_event(other.device)
        with runtime().on(other.device):
            runtime().record(event, other_stream)
        with runtime().on(x.device):
            runtime().order(stream, event)
        runtime().end_event(event)
