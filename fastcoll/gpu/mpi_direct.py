"""MpiCarrier: GPU arrays handed to a CUDA-aware MPI library as they are, for groups of the backend mpi.

The group's own plans do the work: it meets the other ranks, and gives MPI addresses on GPUs instead of the host's. A
call waits until the arrays' streams have done what was queued on them when it was made, and returns when its result is
on the GPU, as a staged one does. Reductions are our kernels', in rank order. What cannot be done so is staged, on all
ranks alike: scan and exscan, functions of the user's, many ranks, and reductions where a rank has no kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, runtime_checkable

from ..core.group import ProcessGroup
from ..core.operation import Call
from ..core.reduce_op import PREMUL_SUM, ReduceOp
from ..core.work import Work
from ..interop.arrays import Adopted
from .array import DeviceArray
from .mpi_mail import DirectMail
from .mpi_memory import DeviceMemory, parts
from .runtime import runtime
from .staged_mail import arrays_of
from .staging import StagedCarrier, _checked

MOST_SOURCES = 64
"""Arrays that a kernel reduces (kernels/cuda/reduce.py)."""

Arrays = Sequence[DeviceArray]


@runtime_checkable
class TakesGpus(Protocol):
    """A group of net/mpi.py.

    Attributes:
        cuda_aware: whether the MPI library of every rank says that it takes memory of GPUs.
    """

    cuda_aware: bool

    def take_gpus(self, memory: Any, current: Callable[[], AbstractContextManager[None]]) -> None:
        """Let the group's hooks take arrays on GPUs."""


class MpiCarrier(StagedCarrier):
    """See this module's docstring.

    Args:
        group: one that TakesGpus, and whose library does.
    """

    def __init__(self, group: ProcessGroup) -> None:
        super().__init__(group)
        assert isinstance(group, TakesGpus)
        # The hooks take what they are told of; their annotations speak of the host's arrays.
        self._hooks: Any = group
        self._memory = DeviceMemory(self._transit)
        self._direct_mail = DirectMail(group, self._transit)
        self._hooks.take_gpus(self._memory, lambda: runtime().on(self._direct_mail.device))

    def _direct(self, name: str, inputs: Arrays, outputs: Arrays, run: Callable[[], Any]) -> Call:
        """A call that lets the group's plans work on the arrays; returns what `run` does."""
        arrays = [*inputs, *outputs]
        marks = self.mark(arrays)

        def call() -> Any:
            with self.whole(name, arrays), self._memory.use(arrays):
                self.await_marks(marks, name)
                return run()

        return call

    def _apart(self, inputs: Arrays, outputs: Arrays) -> list[DeviceArray]:
        """The inputs, copied where they share memory with outputs; this rank's own two may be the very same."""
        rank = self._group.rank

        def clashes(k: int, x: DeviceArray) -> bool:
            return any(
                x.overlaps(out)
                and not (
                    x.address == out.address
                    and (len(inputs) == 1 or k == rank)
                    and (len(outputs) == 1 or j == rank)
                )
                for j, out in enumerate(outputs)
            )

        return [self._memory.lay_out([x]) if clashes(k, x) else x for k, x in enumerate(inputs)]

    # ---- moves ---------------------------------------------------------------------------------------

    def _plan_broadcast(self, x: DeviceArray, root: int, parts: Sequence[int] = ()) -> Call:
        return self._direct("broadcast", [x], [], lambda: self._hooks._plan_broadcast(x, root, parts)())

    def _plan_all_gather(self, outs: Arrays, x: DeviceArray, parts: Sequence[int] = ()) -> Call:
        def run() -> None:
            (source,) = self._apart([x], outs)
            self._hooks._plan_all_gather(outs, source, parts)()

        return self._direct("all_gather", [x], outs, run)

    def _plan_gather(self, outs: Arrays | None, x: DeviceArray, root: int) -> Call:
        def run() -> None:
            (source,) = self._apart([x], outs or ())
            self._hooks._plan_gather(outs, source, root)()

        return self._direct("gather", [x], outs or (), run)

    def _plan_scatter(self, out: DeviceArray, blocks: Arrays | None, root: int) -> Call:
        def run() -> None:
            sources = None if blocks is None else self._apart(blocks, [out])
            self._hooks._plan_scatter(out, sources, root)()

        return self._direct("scatter", blocks or (), [out], run)

    def _plan_all_to_all(self, outs: Arrays, blocks: Arrays) -> Call:
        def run() -> None:
            self._hooks._plan_all_to_all(outs, self._apart(blocks, outs))()

        return self._direct("all_to_all", blocks, outs, run)

    def _plan_all_gather_coalesced(self, lists: Sequence[Sequence[Adopted]], xs: Sequence[Adopted]) -> Call:
        inputs, per_rank = arrays_of(xs), [arrays_of(outs) for outs in zip(*lists, strict=True)]

        def run() -> None:
            flat = self._memory.lay_out(inputs)
            wholes = [self._memory.array(sum(out.size for out in outs), outs[0]) for outs in per_rank]
            self._hooks._plan_all_gather(wholes, flat, [x.size for x in inputs])()
            for whole, outs in zip(wholes, per_rank, strict=True):
                self._memory.copy_all(parts(whole, outs), outs)

        return self._direct("all_gather", inputs, [out for outs in per_rank for out in outs], run)

    # ---- reductions ----------------------------------------------------------------------------------

    def _reduction(
        self,
        name: str,
        inputs: Arrays,
        outputs: Arrays,
        op: ReduceOp,
        direct: Callable[[ReduceOp], bool],
        staged: Callable[[], Call],
    ) -> Call:
        """A reduction on the GPU, or through the host.

        Args:
            direct: does it, or returns False on all ranks where one of them can't; takes what is left to do once
                PREMUL_SUM's inputs are scaled.
            staged: plans it for the host.
        """
        plain = _checked(op, inputs[0].dtype)
        if op.function is not None or self._group.size > MOST_SOURCES:
            return staged()
        on_gpu = self._direct(name, inputs, outputs, lambda: direct(plain))

        def call() -> None:
            if not on_gpu():
                staged()()

        return call

    def _scaled(self, xs: Arrays, op: ReduceOp) -> DeviceArray:
        """Copies, one after the other, scaled for PREMUL_SUM if there are kernels."""
        flat = self._memory.lay_out(xs)
        if op.code == PREMUL_SUM and self._memory.has_kernels():
            self._memory.scale(flat, op.factor)
        return flat

    def _sources(self, xs: Arrays, outputs: Arrays, op: ReduceOp) -> list[DeviceArray]:
        """What is reduced, apart from the outputs."""
        return parts(self._scaled(xs, op), xs) if op.code == PREMUL_SUM else self._apart(xs, outputs)

    def _all_reduce(self, xs: Arrays, op: ReduceOp, sizes: Sequence[int]) -> Call:
        staged = super()._all_reduce

        def direct(plain: ReduceOp) -> bool:
            if len(xs) == 1 and plain is op:
                return bool(self._hooks._plan_all_reduce(xs[0], op, sizes)())
            flat = self._scaled(xs, op)
            done = bool(self._hooks._plan_all_reduce(flat, plain, sizes)())
            if done:
                self._memory.copy_all(parts(flat, xs), xs)
            return done

        return self._reduction("all_reduce", xs, [], op, direct, lambda: staged(xs, op, sizes))

    def _plan_reduce(self, out: DeviceArray, x: DeviceArray, op: ReduceOp, root: int) -> Call:
        staged = super()._plan_reduce
        outs = [out] if self._group.rank == root else []

        def direct(plain: ReduceOp) -> bool:
            (source,) = self._sources([x], outs, op)
            return bool(self._hooks._plan_reduce(out if outs else source, source, plain, root)())

        return self._reduction("reduce", [x], outs, op, direct, lambda: staged(out, x, op, root))

    def _plan_reduce_scatter(self, out: DeviceArray, blocks: Arrays, op: ReduceOp) -> Call:
        staged = super()._plan_reduce_scatter

        def direct(plain: ReduceOp) -> bool:
            sources = self._sources(blocks, [out], op)
            return bool(self._hooks._plan_reduce_scatter(out, sources, plain)())

        return self._reduction("reduce_scatter", blocks, [out], op, direct, lambda: staged(out, blocks, op))

    # ---- point to point ------------------------------------------------------------------------------

    def _send(self, x: Adopted, dst: int, tag: int) -> None:
        if self._direct_mail.suits(x, dst):
            self._direct_mail.send(x, dst, tag)
        else:
            super()._send(x, dst, tag)

    def _isend(self, x: Adopted, dst: int, tag: int) -> Work:
        if self._direct_mail.suits(x, dst):
            return self._direct_mail.isend(x, dst, tag)
        return super()._isend(x, dst, tag)

    def _recv(self, x: Adopted, src: int | None, tag: int) -> int:
        if self._direct_mail.suits(x, src):
            return self._direct_mail.recv(x, src, tag)
        return super()._recv(x, src, tag)

    def _irecv(self, x: Adopted, src: int | None, tag: int) -> Work:
        if self._direct_mail.suits(x, src):
            return self._direct_mail.irecv(x, src, tag)
        return super()._irecv(x, src, tag)
