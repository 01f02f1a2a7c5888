"""One collective over shared GPU memory, before and while it is queued, and its Work."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from ...core.carrier import StreamCall
from ...core.partition import pieces
from ...core.reduce_op import PREMUL_SUM, ReduceOp
from ...core.signature import Signature
from ...errors import ArrayError
from ...interop.arrays import Adopted
from ...kernels.cuda.reduce import CudaReducer, cuda_reducer
from ...kernels.cuda.scale import scale
from ..array import DeviceArray
from ..border import OnDevice
from ..stream_work import Own, StreamWork
from ..streams import Turn
from .plans import Fold, Plan

if TYPE_CHECKING:
    from .carrier import IpcCarrier

Arrays = Sequence[DeviceArray]
MakePlan = Callable[[int], Plan]
"""The plan for slots of so many bytes."""


class IpcWork(StreamWork):
    """A StreamWork that looks whether the ranks agreed before it says that it is over.

    Args:
        number: of the call.
        judge: is told the number when the GPU is past it; fails the group if the call has not gone as it should.
    """

    def __init__(
        self, describe: str, own: Own, arrays: Arrays, number: int, judge: Callable[[int], None]
    ) -> None:
        super().__init__(describe, own, arrays)
        self._number, self._judge = number, judge

    def _is_past(self) -> bool:
        past = super()._is_past()
        if past and not self._done.is_set():
            self._judge(self._number)
        return past


class IpcCall(StreamCall):
    """A collective.

    Args:
        said: what is compared.
        make: makes the plan.
        ins, outs: the arrays that it reads and writes.
        op: of a reducing call.

    Raises:
        ArrayError: arrays that cannot be reduced.
    """

    def __init__(
        self,
        carrier: IpcCarrier,
        said: Signature,
        make: MakePlan,
        ins: Arrays,
        outs: Arrays,
        op: ReduceOp | None = None,
    ) -> None:
        self._carrier, self._said, self._make = carrier, said, make
        self._ins, self._outs, self._op = list(ins), list(outs), op
        self._plan: Plan = ()
        self._reducer = None if op is None else _reducer(op, ins[0].dtype)
        if op is not None:
            _check_aligned([*ins, *outs])

    def start(self, name: str, owners: Sequence[Adopted]) -> StreamWork:
        carrier, arrays = self._carrier, [*self._ins, *self._outs]
        with carrier._in_turn(name):
            self._plan = self._make(carrier._slot(arrays))
            self._compile()
            number = carrier._next()
            handle = IpcWork(
                carrier._describe(name, arrays), carrier._own(arrays), arrays, number, carrier._judge
            )

            def work(turn: Turn) -> None:
                self._queue(turn, number)
                for owner in owners:
                    cast(OnDevice, owner).unpack(turn.stream)

            carrier._queue([handle], arrays, work)
            return handle

    def _compile(self) -> None:
        """Before anything is queued, as a function that cannot be compiled is refused; on all ranks alike."""
        if self._reducer is not None:
            sources = {len(item.srcs) for item in self._plan if isinstance(item, Fold)}
            with self._carrier._current():
                for n in sources or {self._carrier._group.size}:
                    self._reducer.prepare(n)

    def _queue(self, turn: Turn, number: int) -> None:
        self._run(turn, number, [self._input(turn, k) for k in range(len(self._ins))], self._outs)

    def _run(self, turn: Turn, number: int, ins: Arrays, outs: Arrays) -> None:
        queue = self._carrier._line
        assert queue is not None
        queue.run(turn.stream, number, self._plan, self._said, ins, outs, self._reducer)

    def _input(self, turn: Turn, k: int) -> DeviceArray:
        """Input k as the plan may use it: scaled for PREMUL_SUM, and apart from the outputs but its own."""
        x = self._ins[k]
        if self._op is not None and self._op.code == PREMUL_SUM:
            return _scaled(turn, x, self._op.factor)
        if not any(self._clash(k, x, j, out) for j, out in enumerate(self._outs)):
            return x
        copied = turn.scratch(x.size, x.dtype)
        turn.copy(copied, x)
        return copied

    def _clash(self, k: int, x: DeviceArray, j: int, out: DeviceArray) -> bool:
        """Whether they share memory; this rank's own input and output, or the only ones, may be the very same."""
        rank = self._carrier._group.rank
        own = (len(self._ins) == 1 or k == rank) and (len(self._outs) == 1 or j == rank)
        return x.overlaps(out) and not (own and x.address == out.address)


class Coalesced(IpcCall):
    """A call on arrays that are laid one after another in memory of the turn's own.

    Args:
        ins: the arrays to be laid out as the one input.
        lists: for each output, the arrays that it is taken apart into; of a reducing call those of `ins`.
    """

    def __init__(
        self,
        carrier: IpcCarrier,
        said: Signature,
        make: MakePlan,
        ins: Arrays,
        lists: Sequence[Arrays],
        op: ReduceOp | None = None,
    ) -> None:
        super().__init__(carrier, said, make, ins, [x for xs in lists for x in xs], op)
        self._lists = lists

    def _queue(self, turn: Turn, number: int) -> None:
        flat = self._laid_out(turn, self._ins)
        _copy_all(turn, _parts(flat, self._ins), self._ins)
        if self._op is None:
            flats = [self._laid_out(turn, xs) for xs in self._lists]
        else:
            flats = [flat]
            if self._op.code == PREMUL_SUM:
                flat = _scaled(turn, flat, self._op.factor)
        self._run(turn, number, [flat], flats)
        for one, xs in zip(flats, self._lists, strict=True):
            _copy_all(turn, xs, _parts(one, xs))

    def _laid_out(self, turn: Turn, xs: Arrays) -> DeviceArray:
        return turn.scratch(sum(x.size for x in xs), self._ins[0].dtype)


def _parts(flat: DeviceArray, xs: Arrays) -> Arrays:
    return cast(Arrays, pieces(cast(Any, flat), [x.size for x in xs]))


def _copy_all(turn: Turn, dsts: Arrays, srcs: Arrays) -> None:
    for dst, src in zip(dsts, srcs, strict=True):
        turn.copy(dst, src)


def _scaled(turn: Turn, x: DeviceArray, factor: Any) -> DeviceArray:
    result = turn.scratch(x.size, x.dtype)
    scale(result.address, x.address, x.size, x.dtype, factor, turn.stream)
    return result


def _reducer(op: ReduceOp, dtype: np.dtype[Any]) -> CudaReducer:
    if op.code != PREMUL_SUM:
        return cuda_reducer(op, dtype)
    if dtype.kind in "biu":
        raise ArrayError(f"PREMUL_SUM takes float and complex arrays, got {dtype}; scale it beforehand")
    return cuda_reducer(ReduceOp.SUM, dtype)


def _check_aligned(arrays: Arrays) -> None:
    for x in arrays:
        if x.size and x.dtype.names is None and x.address % x.dtype.alignment:
            raise ArrayError(
                f"a {x} lies at {x.address:#x}, which is not aligned to {x.dtype.alignment} bytes; give a copy of it"
            )
