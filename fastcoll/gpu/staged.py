"""StagedCarrier: GPU arrays over any CPU backend, through pinned host memory.

A call waits until the arrays' streams have done the work that was queued on them when the call was made. It then copies
the inputs to the host, executes the operation there by the group's CPU backend, copies the results back, and returns
when they are on the GPU. An asynchronous call does all this on the group's progress thread. A large array is split into
segments, so that copies and the CPU backend overlap:

    down   segment k+1 to the host, on one stream
    CPU    segment k, by the group's CPU backend
    up     segment k-1 to the GPU, on another stream

The segments use three buffers in rotation. A buffer is refilled only after its copy up is complete, because the stream
that copies down waits for that copy; if nothing is copied down, the host waits. Before the first segment all ranks
compare their calls, because a rank with an array of another size would have other segments.

The send of a message waits for the array's stream and copies the array to the host. The message is sent from there, and
the caller may reuse the array when the send is complete. A receive is posted with host memory. The thread that
completes the receive first waits for the array's stream and copies the message to the GPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, cast

import numpy as np

from ..arrays.arrays import Array, ImportedArray
from ..core import signature
from ..core.backend import DeviceCarrier, Messages
from ..core.group import ProcessGroup
from ..core.message import Status
from ..core.operands import scaled
from ..core.operation import Call, Operation
from ..core.operations import KINDS
from ..core.partition import Span, segments
from ..core.reduce_op import ReduceOp
from ..core.work import Work
from ..errors import FastcollError, GroupError, MismatchError, UsageError
from ..kernels.reduce import reducer
from .device_array import DeviceArray, OnDevice, import_array
from .runtime import runtime
from .staging import Marks, Staging, host_views
from .streams import Compared

Arrays = Sequence[DeviceArray]

SEGMENT = 4 << 20
"""Bytes of a segment; smaller arrays are not split.

A copy of 4 MiB over PCIe takes about 0.2 ms, many times its start-up cost. This is an estimate, not measured on
hardware.
"""
_BUFFERS = 3


class StagedCarrier(DeviceCarrier):
    """The carrier of GPU arrays that works with every backend and any GPUs."""

    def __init__(self, group: ProcessGroup) -> None:
        self.group = group
        self.staging = Staging(group)
        self.messages: Messages = StagedMessages(group, self.staging)

    import_array = staticmethod(import_array)

    # ---- collectives ---------------------------------------------------------------------------------

    def plan(self, operation: Operation, timeout: float | None = None) -> Call:
        kind, outs, ins, op, root, parts, _ = operation
        rank = self.group.rank
        plain = None if op is None else checked(op, (outs or ins)[0].dtype)
        down, up = ins, outs
        if kind == "broadcast":
            down, up = (ins, ()) if rank == root else ((), outs)
        elif (kind == "reduce" and rank != root) or (kind == "exscan" and rank == 0):
            up = ()
        if (KINDS[kind].is_in_place or kind == "reduce") and _bytes(ins) > SEGMENT:
            return self._in_segments(operation._replace(op=plain), down, up, op)
        in_place = KINDS[kind].is_in_place or (outs != () and up == ())
        arrays = ins if in_place else (*ins, *outs)
        marks = self.staging.mark(arrays)

        def call() -> None:
            with self.all_or_nothing(kind, arrays), self.staging.pool.lent(_bytes(arrays)) as buffer:
                self.staging.await_marks(marks, kind)
                hosts = tuple(host_views(buffer, arrays))
                given, taken = hosts[: len(ins)], hosts if in_place else hosts[len(ins) :]
                self.staging.copy("down", down, given)
                if op is not plain:
                    for host in given:
                        _scale(host, op)
                self.group.planned(Operation(kind, taken, given, plain, root, parts))()
                self.staging.copy("up", up, taken)

        return call

    @contextmanager
    def all_or_nothing(self, name: str, arrays: Sequence[DeviceArray]) -> Iterator[None]:
        """Run a call in a `with` block; any error but a UsageError fails the group, as the peers wait for this rank."""
        with self.staging.in_use(arrays):
            try:
                yield
            except UsageError:
                raise  # all ranks raise the same error
            except BaseException as error:
                self.group.abort(f"{name} of arrays on a GPU ended with {type(error).__name__}: {error}")
                # The queued copies must end before their memory is freed.
                with suppress(FastcollError):
                    self.staging.settle()
                raise

    # ---- large arrays --------------------------------------------------------------------------------

    def _in_segments(self, operation: Operation, down: Arrays, up: Arrays, op: ReduceOp | None) -> Call:
        """Return a call on arrays that are copied down and up as if they were one array.

        Args:
            op: the caller's reduction; `operation.op` is the reduction that remains after `_scale`.
        """
        kind = KINDS[operation.kind].made_of or operation.kind
        arrays = operation.inputs
        compared = Compared.of(operation, self.group.size)
        marks = self.staging.mark((*arrays, *operation.outputs))
        moved = down or up
        dtype = moved[0].dtype
        spans = segments(sum(x.size for x in moved), max(1, SEGMENT // dtype.itemsize))

        def call() -> None:
            with self.all_or_nothing(kind, arrays), ExitStack() as ends:
                self._agree(compared.call, _bytes(arrays))
                self.staging.await_marks(marks, kind)
                room = _BUFFERS * spans[0].nbytes * dtype.itemsize
                buffer = ends.enter_context(self.staging.pool.lent(room))
                pipeline = _Pipeline(self.staging, kind, down, up, spans, buffer)
                ends.callback(pipeline.close)
                # On any exit, the copies must end before their memory is freed.
                ends.callback(self.staging.settle)
                pipeline.fetch(0)
                for k in range(len(spans)):
                    if k + 1 < len(spans):
                        pipeline.fetch(k + 1)
                    host = pipeline.ready(k)
                    if op is not operation.op:
                        _scale(host, op)
                    self.group.planned(Operation(kind, (host,), (host,), operation.op, operation.root))()
                    pipeline.bring(k)

        return call

    def _agree(self, compared: int, nbytes: int) -> None:
        """Compare the ranks' calls.

        Raises:
            MismatchError: on all ranks, if the calls differ.
        """
        group = self.group
        rows = group.rows_of_all(np.array([compared, nbytes], np.int64))
        everybody = [(call, shape) for call, shape in rows.tolist()]
        if len(set(everybody)) > 1:
            raise MismatchError(
                f"the ranks' calls with arrays on GPUs do not match in group {group.name!r}: "
                f"{signature.describe_differences(everybody, group.ranks)}; all ranks must make the same calls in the "
                "same order"
            )

    # ---- the end -------------------------------------------------------------------------------------

    def abort(self) -> None:
        """Do nothing, because calls see that the group has failed, and copies end by themselves."""

    def close(self, reason: GroupError | None) -> None:
        self.staging.close()


class _Pipeline:
    """The copies of one call, with events behind each buffer's last copies down and up."""

    def __init__(
        self, staging: Staging, name: str, down: Arrays, up: Arrays, spans: Sequence[Span], buffer: Array
    ) -> None:
        self._staging, self._name, self._arrays, self._spans = staging, name, (down, up), spans
        first = next(x for x in down or up if x.size)
        length = spans[0].nbytes
        self._slots = np.frombuffer(buffer, first.dtype, _BUFFERS * length).reshape(_BUFFERS, length)
        self._device = device = first.device
        self._down, self._up = staging.stream(device, "down"), staging.stream(device, "up")
        self._downs = [staging.events.take(device) for _ in self._slots]
        self._ups = [staging.events.take(device) for _ in self._slots]

    def fetch(self, k: int) -> None:
        """Queue the copy of segment k to its buffer, if the call copies anything down."""
        down, slot = self._arrays[0], k % _BUFFERS
        if down:
            if k >= _BUFFERS:
                runtime().order(self._down, self._ups[slot])
            for address, host in self._parts(down, k):
                runtime().to_host(host, address, self._down)
            self._record(self._downs[slot], self._down)

    def ready(self, k: int) -> Array:
        """Wait until the CPU may use segment k's buffer, and return it."""
        slot = k % _BUFFERS
        if self._arrays[0] or k >= _BUFFERS:
            self._staging.until((self._downs if self._arrays[0] else self._ups)[slot], self._name)
        host: Array = self._slots[slot][: self._spans[k].nbytes]
        return host

    def bring(self, k: int) -> None:
        """Queue the copy of segment k's buffer to the GPU."""
        for address, host in self._parts(self._arrays[1], k):
            runtime().to_device(address, host, self._up)
        self._record(self._ups[k % _BUFFERS], self._up)

    def _parts(self, arrays: Arrays, k: int) -> Iterator[tuple[int, Array]]:
        """Yield the GPU addresses of segment k's elements, each with its slice of the buffer.

        The arrays are treated as one long array, in their order.
        """
        (start, length), begin = self._spans[k], 0
        for x in arrays:
            first, last = max(start - begin, 0), min(start + length - begin, x.size)
            if first < last:
                at = begin + first - start
                yield x.address + first * x.dtype.itemsize, self._slots[k % _BUFFERS][at : at + last - first]
            begin += x.size

    def _record(self, event: int, stream: int) -> None:
        with runtime().on(self._device):
            runtime().record(event, stream)

    def close(self) -> None:
        """Give the events back."""
        self._staging.events.give(self._device, [*self._downs, *self._ups])


def _bytes(arrays: Arrays) -> int:
    return sum(x.nbytes for x in arrays)


def checked(op: ReduceOp, dtype: np.dtype[Any]) -> ReduceOp:
    """Return the reduction that remains after `_scale`; raise an error if it is not defined for the dtype."""
    _, plain = scaled(np.empty(0, dtype), op)
    reducer(plain, dtype)
    return plain


def _scale(host: Array, op: ReduceOp | None) -> None:
    """Apply PREMUL_SUM's factor in place."""
    assert op is not None
    host[...] = scaled(host, op)[0]


# ---- messages --------------------------------------------------------------------------------------------


class StagedMessages:
    """Messages of GPU arrays; arguments, results and errors are as for host arrays (core/backend.py).

    Args of isend and irecv:
        marks: events that were recorded earlier behind the work that was queued on the array's stream then; None:
            record them now. A receive with marks waits for them when it is posted; a receive without marks, when it
            copies the message to the GPU.
    """

    def __init__(self, group: ProcessGroup, staging: Staging) -> None:
        self._group, self._staging = group, staging

    def send(self, x: ImportedArray, dst: int, tag: int) -> None:
        buffer, host = self._fetched(x, "send", None)
        self._group.messages.send(ImportedArray(host), dst, tag)
        self._staging.pool.give(buffer)

    def isend(self, x: ImportedArray, dst: int, tag: int, marks: Marks | None = None) -> Work:
        buffer, host = self._fetched(x, "isend", marks)
        work = self._group.p2p.post_send(ImportedArray(host), dst, tag)

        def give(work: Work) -> None:
            # After an error, the backend may still use the memory; it is freed with the last reference.
            if work.is_success():
                self._staging.pool.give(buffer)

        work.add_done_callback(give)
        return work

    def _fetched(self, imported: ImportedArray, name: str, marks: Marks | None) -> tuple[Array, Array]:
        """Wait for an array's stream, and copy the array to the host; return the buffer and the copy in it."""
        x = array_of(imported)
        with self._staging.in_use([x]):
            buffer = self._staging.pool.take(x.nbytes)
            (host,) = host_views(buffer, [x])
            self._staging.await_marks(self._staging.mark([x]) if marks is None else marks, name)
            self._staging.copy("down", [x], [host])
        return buffer, host.reshape(x.shape)

    def recv(self, x: ImportedArray, src: int | None, tag: int, status: Status | None = None) -> int:
        return self._group.messages.recv(_StagedReceive(self._staging, x, None), src, tag, status)

    def irecv(
        self,
        x: ImportedArray,
        src: int | None,
        tag: int,
        status: Status | None = None,
        marks: Marks | None = None,
    ) -> Work:
        with self._staging.in_use([array_of(x)]):
            if marks is not None:
                self._staging.await_marks(marks, "irecv")
            incoming = _StagedReceive(self._staging, x, None if marks is None else [])
            return self._group.p2p.post_receive(incoming, src, tag, status)


class _StagedReceive(ImportedArray):
    """Host memory that receives a message; `finish` copies it to the GPU."""

    __slots__ = ("_buffer", "_count", "_marks", "_staging", "_target")
    needs_copy_back = True

    def __init__(self, staging: Staging, target: ImportedArray, marks: Marks | None) -> None:
        x = array_of(target)
        self._staging, self._target = staging, target
        with staging.in_use([x]):
            self._buffer = staging.pool.take(x.nbytes)
            self._marks = staging.mark([x]) if marks is None else marks
        (host,) = host_views(self._buffer, [x])
        super().__init__(host.reshape(x.shape))
        self._count = x.size

    def received(self, nbytes: int) -> None:
        self._count = nbytes // (self.array.itemsize or 1)

    def finish(self) -> None:
        target, count = array_of(self._target), self._count
        with self._staging.in_use([target]):
            self._staging.await_marks(self._marks, "recv")
            self._staging.copy("up", [target.reshape(-1)[:count]], [self.array.reshape(-1)[:count]])
            self._target.finish()
        self._staging.pool.give(self._buffer)


def array_of(item: ImportedArray) -> DeviceArray:
    """Return the GPU array of an imported argument."""
    x: DeviceArray = cast(OnDevice, item).array
    return x
