"""StagedCarrier: GPU arrays over any CPU backend, through pinned host memory.

A call waits until the arrays' streams have done what was queued on them when it was made, copies the inputs to the
host, has the group's CPU backend do the operation there, copies the results back, and returns when they are on the GPU.
An asynchronous one does so on the group's progress thread. A large one goes in segments, so that copies and the CPU
backend work at the same time:

    down   segment k+1 to the host, on one stream
    CPU    segment k, by the group's CPU backend
    up     segment k-1 to the GPU, on another stream

Three buffers take turns. A segment's buffer is filled again when its copy up is past: the GPU waits for that, or the
host, where nothing comes down. Before the first segment all ranks tell each other what they call, since a rank with
an array of another size would go through other segments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np

from ..core import signature
from ..core.backend import Messages
from ..core.carrier import DeviceCarrier
from ..core.group import ProcessGroup
from ..core.operands import scaled
from ..core.operation import Call, Operation
from ..core.reduce_op import ReduceOp
from ..errors import FastcollError, GroupError, MismatchError, UsageError
from ..interop.arrays import Adopted, Array
from ..kernels.reduce import reducer
from .device_array import DeviceArray, adopt
from .runtime import runtime
from .staged_mail import StagedMail
from .streams import Compared
from .transit import Marks, Transit, laid_out

Arrays = Sequence[DeviceArray]

SEGMENT = 4 << 20
"""Bytes of a segment; smaller arrays go in one piece. The copy of 4 MiB over PCIe takes some 0.2 ms, many times what
starting it takes; not measured on hardware."""
_BUFFERS = 3
_IN_PLACE = ("all_reduce", "all_reduce_coalesced", "broadcast")


class StagedCarrier(DeviceCarrier):
    """The carrier of GPU arrays that works with every backend and any GPUs."""

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group
        self._transit = Transit(group)
        self._mail = StagedMail(group, self._transit)

    @property
    def messages(self) -> Messages:
        return self._mail

    def adopt(self, x: Any, *, writable: bool, what: str) -> Adopted:
        return adopt(x, writable=writable, what=what)

    # ---- collectives ---------------------------------------------------------------------------------

    def plan(self, operation: Operation, timeout: float | None = None) -> Call:
        kind, outs, ins, op, root, parts = operation
        rank = self._group.rank
        plain = None if op is None else checked(op, (outs or ins)[0].dtype)
        down, up = ins, outs
        if kind == "broadcast":
            down, up = (ins, ()) if rank == root else ((), outs)
        elif (kind == "reduce" and rank != root) or (kind == "exscan" and rank == 0):
            up = ()
        if kind in (*_IN_PLACE, "reduce") and _bytes(ins) > SEGMENT:
            return self._in_segments(operation._replace(op=plain), down, up, op)
        in_place = kind in _IN_PLACE or (outs != () and up == ())
        arrays = ins if in_place else (*ins, *outs)
        marks = self._transit.mark(arrays)

        def call() -> None:
            with self.whole(kind, arrays), self._transit.pool.lent(_bytes(arrays)) as buffer:
                self._transit.await_marks(marks, kind)
                hosts = tuple(laid_out(buffer, arrays))
                given, taken = hosts[: len(ins)], hosts if in_place else hosts[len(ins) :]
                self._transit.fetch(down, given)
                if op is not plain:
                    for host in given:
                        _scale(host, op)
                self._group.planned(Operation(kind, taken, given, plain, root, parts))()
                self._transit.bring(up, taken)

        return call

    def mark(self, arrays: Arrays) -> Marks:
        """See Transit."""
        return self._transit.mark(arrays)

    def await_marks(self, marks: Marks, doing: str) -> None:
        """See Transit."""
        self._transit.await_marks(marks, doing)

    @contextmanager
    def whole(self, name: str, arrays: Sequence[DeviceArray]) -> Iterator[None]:
        """A call on this rank; the group fails if it ends half-way, as the peers count on it."""
        with self._transit.in_use(arrays):
            try:
                yield
            except UsageError:
                raise  # all ranks have the same
            except BaseException as error:
                self._group.abort(f"{name} of arrays on a GPU ended with {type(error).__name__}: {error}")
                # Before the memory of copies that are queued is free.
                with suppress(FastcollError):
                    self._transit.settle()
                raise

    # ---- large arrays --------------------------------------------------------------------------------

    def _in_segments(self, operation: Operation, down: Arrays, up: Arrays, op: ReduceOp | None) -> Call:
        """A call whose arrays come down and go up one after the other, as one.

        Args:
            operation: with what is reduced on the host.
            op: what is reduced; its inputs may have to be scaled.
        """
        kind = operation.kind.removesuffix("_coalesced")
        arrays = operation.inputs
        said = Compared.of(operation, self._group.size)
        marks = self._transit.mark((*arrays, *operation.outputs))

        def each(host: Array) -> None:
            if op is not operation.op:
                _scale(host, op)
            self._group.planned(Operation(kind, (host,), (host,), operation.op, operation.root))()

        def call() -> None:
            with self.whole(kind, arrays):
                self._agree(said.call, _bytes(arrays))
                self._transit.await_marks(marks, kind)
                self._run_segments(kind, down, up, each)

        return call

    def _agree(self, said: int, nbytes: int) -> None:
        """Compare the ranks' calls.

        Raises:
            MismatchError: they differ; on all ranks.
        """
        group = self._group
        rows = group.rows_of_all(np.array([said, nbytes], np.int64))
        everybody = [(call, shape) for call, shape in rows.tolist()]
        if len(set(everybody)) > 1:
            raise MismatchError(
                f"the ranks' calls with arrays on GPUs do not match in group {group.name!r}: "
                f"{signature.describe_differences(everybody, group.ranks)}; all ranks must make the same calls in the "
                "same order"
            )

    def _run_segments(self, name: str, down: Arrays, up: Arrays, each: Callable[[Array], None]) -> None:
        """Carry a call out whose arrays are ready; `each` does the CPU backend's part on a segment, in place."""
        whole = down or up
        dtype, size = whole[0].dtype, sum(x.size for x in whole)
        length = max(1, SEGMENT // dtype.itemsize)
        ends = [min(start + length, size) for start in range(0, size, length)]
        nbytes = length * dtype.itemsize
        with self._transit.pool.lent(_BUFFERS * nbytes) as buffer:
            slots = [np.frombuffer(buffer, dtype, length, k * nbytes) for k in range(_BUFFERS)]
            device = next(x.device for x in whole if x.size)
            pipeline = _Pipeline(self._transit, device, slots, name)
            try:
                start = 0
                pipeline.down(0, down, 0, ends[0])
                for k, end in enumerate(ends):
                    if k + 1 < len(ends):
                        pipeline.down(k + 1, down, end, ends[k + 1])
                    each(pipeline.ready(k, bool(down))[: end - start])
                    pipeline.up(k, up, start, end)
                    start = end
            finally:
                try:
                    self._transit.settle()
                finally:
                    pipeline.close()

    # ---- the end -------------------------------------------------------------------------------------

    def abort(self) -> None:
        """Nothing to do: calls see that the group has failed, and copies end by themselves."""

    def close(self, reason: GroupError | None) -> None:
        self._transit.close()


class _Pipeline:
    """The copies of one call: for each buffer, events behind its last copies down and up."""

    def __init__(self, transit: Transit, device: int, slots: list[Array], name: str) -> None:
        self._transit, self._device, self._slots, self._name = transit, device, slots, name
        self._down, self._up = transit.stream(device, "down"), transit.stream(device, "up")
        self._downs = [transit.events.take(device) for _ in slots]
        self._ups = [transit.events.take(device) for _ in slots]

    def down(self, k: int, inputs: Arrays, start: int, end: int) -> None:
        """Queue the copy of elements to the buffer of segment k."""
        slot = k % _BUFFERS
        if inputs:
            if k >= _BUFFERS:
                runtime().order(self._down, self._ups[slot])
            for address, host in _pieces(inputs, start, end, self._slots[slot]):
                runtime().to_host(host, address, self._down)
            self._record(self._downs[slot], self._down)

    def ready(self, k: int, comes_down: bool) -> Array:
        """The buffer of segment k, once the CPU may use it."""
        slot = k % _BUFFERS
        if comes_down:
            self._transit.until(self._downs[slot], self._name)
        elif k >= _BUFFERS:
            self._transit.until(self._ups[slot], self._name)
        return self._slots[slot]

    def up(self, k: int, outputs: Arrays, start: int, end: int) -> None:
        """Queue the copy of segment k's buffer to elements."""
        slot = k % _BUFFERS
        for address, host in _pieces(outputs, start, end, self._slots[slot]):
            runtime().to_device(address, host, self._up)
        self._record(self._ups[slot], self._up)

    def _record(self, event: int, stream: int) -> None:
        with runtime().on(self._device):
            runtime().record(event, stream)

    def close(self) -> None:
        """Give the events back."""
        self._transit.events.give(self._device, [*self._downs, *self._ups])


def _pieces(arrays: Arrays, start: int, end: int, slot: Array) -> Iterator[tuple[int, Array]]:
    """Where elements start..end of arrays, one after the other, lie: addresses, and their places in a buffer."""
    begin = 0
    for x in arrays:
        first, last = max(start - begin, 0), min(end - begin, x.size)
        if first < last:
            at = begin + first - start
            yield x.address + first * x.dtype.itemsize, slot[at : at + last - first]
        begin += x.size


def _bytes(arrays: Arrays) -> int:
    return sum(x.nbytes for x in arrays)


def checked(op: ReduceOp, dtype: np.dtype[Any]) -> ReduceOp:
    """The operation that the CPU backend does, after `_scale`; raises what is wrong with it."""
    _, plain = scaled(np.empty(0, dtype), op)
    reducer(plain, dtype)
    return plain


def _scale(host: Array, op: ReduceOp | None) -> None:
    """PREMUL_SUM's factor, in place."""
    assert op is not None
    host[...] = scaled(host, op)[0]
