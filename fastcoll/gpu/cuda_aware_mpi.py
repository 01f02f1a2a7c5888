"""MpiCarrier: passes GPU arrays to a CUDA-aware MPI library, for groups of the backend mpi.

The group's own backend executes the operation. The addresses that it passes to MPI are in GPU memory instead of host
memory. A call waits until the arrays' streams have done the work that was queued on them when the call was made. It
returns when its result is on the GPU. fastcoll's kernels do the reductions, in rank order. Some calls are *staged*
instead on all ranks, that is, StagedCarrier (staged.py) copies the arrays through host memory. These are scan and
exscan, reductions by a user's function, reductions among more than MOST_SOURCES ranks, and reductions if some rank has
no kernels.

For a large message, MPI gets the address of the array in GPU memory. A small message travels inside a control message
of net/mpi/pipe.py, which the host writes. So small messages are staged. Messages of a rank to itself are staged, too.
The other side sees no difference: a message may be sent from a GPU and received into host memory.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from types import SimpleNamespace
from typing import Any, Protocol, runtime_checkable

import numpy as np

from ..arrays.arrays import Array, ImportedArray
from ..core.group import ProcessGroup
from ..core.message import Status
from ..core.operation import Call, Operation
from ..core.operations import KINDS
from ..core.reduce_op import ReduceOp
from ..core.work import Work
from . import auto
from .device_array import DeviceArray
from .runtime import runtime
from .staged import StagedCarrier, StagedMessages, array_of, checked
from .staging import Staging, host_views
from .streams import StreamScope

MOST_SOURCES = 64
"""The largest number of arrays that one kernel can reduce (kernels/cuda/reducers.py)."""

Arrays = Sequence[DeviceArray]
Block = tuple[int, int]
"""Address and number of bytes."""


@runtime_checkable
class TakesGpus(Protocol):
    """A backend of net/mpi, which can take GPU arrays."""

    cuda_aware: bool  # the MPI library of every rank reports that it takes GPU memory

    def take_gpus(self, memory: Any, current: Callable[[], AbstractContextManager[None]]) -> None:
        """Make `plan` accept GPU arrays from now on; see MpiBackend.take_gpus."""


class MpiCarrier(StagedCarrier):
    """The carrier that the module docstring describes; the group's backend is a TakesGpus that is `cuda_aware`."""

    def __init__(self, group: ProcessGroup) -> None:
        super().__init__(group)
        assert isinstance(group.backend, TakesGpus)
        self._memory = DeviceMemory(self.staging)
        self._direct: Any = group.backend  # Any, because the backend's annotations do not include GPU arrays
        self.messages = messages = MpiMessages(group, self.staging)
        group.backend.take_gpus(self._memory, lambda: runtime().on(messages.device))

    # ---- collectives ---------------------------------------------------------------------------------

    def plan(self, operation: Operation, timeout: float | None = None) -> Call:
        kind, outputs, inputs, op, root, _, _ = operation
        if kind == "reduce" and root != self.group.rank:
            outputs = ()
        plain = None if op is None else checked(op, inputs[0].dtype)
        by_kernels = op is None or (op.function is None and self.group.size <= MOST_SOURCES)
        if kind in ("scan", "exscan") or not by_kernels:
            return super().plan(operation, timeout)
        staged = super().plan
        arrays = [*inputs, *outputs]
        marks = self.staging.mark(arrays)

        def call() -> None:
            with self.all_or_nothing(kind, arrays), self._memory.use(arrays):
                self.staging.await_marks(marks, kind)
                done = self._carry_out(operation, outputs, plain)
            if not done and plain is not None:
                staged(operation)()

        return call

    def _carry_out(self, operation: Operation, outputs: Arrays, plain: ReduceOp | None) -> bool:
        """Execute the operation by the group's backend; return False on all ranks if one of them cannot.

        Args:
            plain: the reduction that remains once the inputs are scaled.
        """
        kind, inputs, op = operation.kind, operation.inputs, operation.op
        memory, scope = self._memory, self._memory.scope
        by = op if auto.has_kernels() else plain  # without kernels nothing is scaled; the call is staged
        if KINDS[kind].made_of or (kind == "all_reduce" and plain is not op):
            one, finish = scope.as_one(operation._replace(op=by), self.group.size)
            memory.settle()
            done = bool(self._direct.plan(one._replace(op=plain))())
            if done:
                finish()
                memory.settle()
            return done
        sources: Arrays = inputs
        if kind not in ("all_reduce", "broadcast"):
            sources = scope.apart([scope.scaled(x, by) for x in inputs], outputs, self.group.rank)
            memory.settle()
        targets = outputs or (sources if kind == "reduce" else ())
        direct = operation._replace(outputs=tuple(targets), inputs=tuple(sources), op=plain)
        return bool(self._direct.plan(direct)())


class MpiMessages:
    """Messages of GPU arrays: large ones by MPI from GPU memory, small ones staged."""

    def __init__(self, group: ProcessGroup, staging: Staging) -> None:
        self._group, self._staging, self._staged = group, staging, StagedMessages(group, staging)
        self._direct: Any = group.backend
        self.device = 0  # the GPU of the last message

    def _suits(self, x: ImportedArray, peer: int | None) -> bool:
        """Return whether MPI can carry a message directly from or to GPU memory.

        Args:
            peer: the destination, or the source; None: any.
        """
        return bool(x.array.nbytes > self._direct.least_on_gpus) and peer != self._group.rank

    def send(self, x: ImportedArray, dst: int, tag: int) -> None:
        if not self._suits(x, dst):
            self._staged.send(x, dst, tag)
            return
        with self._staging.in_use([array_of(x)]):
            self._group.messages.send(ImportedArray(self._ready(x.array, "send")), dst, tag)

    def isend(self, x: ImportedArray, dst: int, tag: int) -> Work:
        if not self._suits(x, dst):
            return self._staged.isend(x, dst, tag)
        with self._staging.in_use([array_of(x)]):
            return self._group.p2p.post_send(ImportedArray(self._ready(x.array, "isend")), dst, tag)

    # With `status` the message may be shorter than the array, and then its sender may have staged it. So a receive with
    # `status` is always staged.
    def recv(self, x: ImportedArray, src: int | None, tag: int, status: Status | None = None) -> int:
        if status is not None or not self._suits(x, src):
            return self._staged.recv(x, src, tag, status)
        with self._staging.in_use([array_of(x)]):
            return self._group.messages.recv(self._landing(x), src, tag)

    def irecv(self, x: ImportedArray, src: int | None, tag: int, status: Status | None = None) -> Work:
        if status is not None or not self._suits(x, src):
            return self._staged.irecv(x, src, tag, status)
        with self._staging.in_use([array_of(x)]):
            return self._group.p2p.post_receive(self._landing(x), src, tag)

    def _ready(self, x: Any, name: str) -> Array:
        """Wait for the array's stream; return an ndarray that has the array's GPU address.

        The host must not access the elements of this ndarray.
        """
        self.device = x.device
        self._staging.await_marks(self._staging.mark([x]), name)
        interface = {"version": 3, "typestr": "|u1", "shape": (x.nbytes,), "data": (x.address, False)}
        flat: Array = np.asarray(SimpleNamespace(__array_interface__=interface, owner=x)).view(x.dtype)
        return flat

    def _landing(self, imported: ImportedArray) -> ImportedArray:
        return _Landing(self._ready(imported.array, "recv"), imported, self._staging)


class _Landing(ImportedArray):
    """A GPU array that receives a message.

    MPI writes the message to the array; the host must not. But if the message arrived before its receive was posted, it
    is in host memory already. Then `put` keeps a copy of it in host memory, and `finish`, which runs on a thread that
    may wait for a GPU, copies it to the GPU.
    """

    __slots__ = ("_message", "_of", "_staging")
    needs_copy_back = True

    def __init__(self, view: Array, of: ImportedArray, staging: Staging) -> None:
        super().__init__(view)
        self._message: Array | None = None
        self._of, self._staging = of, staging

    def put(self, address: int, nbytes: int) -> None:
        """Keep a copy of the message, which is at a host address and has the size of the array."""
        self._message = np.empty(self.array.shape, self.array.dtype)
        ctypes.memmove(self._message.ctypes.data, address, nbytes)

    def finish(self) -> None:
        x = array_of(self._of)
        with self._staging.in_use([x]):
            if self._message is not None:
                with self._staging.pool.lent(x.nbytes) as buffer:
                    (host,) = host_views(buffer, [x])
                    host[...] = self._message
                    self._staging.copy("up", [x], [host])
                self._message = None
            self._of.finish()


# ---- memory ----------------------------------------------------------------------------------------------


class DeviceMemory:
    """The memory interface of net/mpi/execution.py, for arrays on a GPU.

    The GPU is that of the current call. Copies and reductions are queued on a stream of the group. The host waits for
    them before it calls MPI, because MPI does not order its work with streams. `scope` has this stream, and the call's
    scratch memory.
    """

    on_gpu = True

    def __init__(self, staging: Staging) -> None:
        self._staging = staging
        self.scope: StreamScope

    @contextmanager
    def use(self, arrays: Sequence[DeviceArray]) -> Iterator[None]:
        """Select the arrays' GPU, and make `scope` for it, during a `with` block.

        Only one call at a time may be inside such a block.
        """
        with self._staging.in_use(arrays):
            device = next((x.device for x in arrays if x.size), arrays[0].device)
            self.scope = StreamScope(runtime(), device, self._staging.stream(device, "own"))
            try:
                yield
            finally:
                del self.scope

    def settle(self) -> None:
        """Wait for the work queued on the stream of `scope`."""
        runtime().wait_stream(self.scope.stream)

    def blocks(self, arrays: Sequence[DeviceArray]) -> list[Block]:
        return [(x.address, x.nbytes) for x in arrays]

    def copy(self, source: Block, target: Block) -> None:
        if source[0] != target[0]:
            runtime().copy(target[0], source[0], source[1], self.scope.stream)
            self.settle()

    def scratch(self, nbytes: int) -> tuple[int, Any]:
        memory = runtime().allocate(nbytes, self.scope.device, self.scope.stream)
        return memory.ptr, memory

    def reducer(self, op: ReduceOp, dtype: np.dtype[Any], blocks: Sequence[Block]) -> Any:
        if not auto.has_kernels() or any(address % dtype.alignment for address, _ in blocks):
            return None
        from ..kernels.cuda.reducers import cuda_reducer

        return cuda_reducer(op, dtype)

    def fold(self, how: Any, target: int, sources: Sequence[int], nbytes: int) -> None:
        how.launch(target, sources, nbytes // how.itemsize, self.scope.stream)
        self.settle()
