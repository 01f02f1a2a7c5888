"""StagedCarrier: GPU arrays over any CPU backend, through pinned host memory.

A call waits until the arrays' streams have done what was queued on them when it was made, copies the inputs to the
host, has the group's CPU backend do the operation there, copies the results back, and returns when they are on the GPU.
An asynchronous one does so on the group's progress thread. Large ones go in segments (segments.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np

from ..core.carrier import DeviceCarrier
from ..core.group import ProcessGroup
from ..core.operands import scaled
from ..core.operation import Call
from ..core.reduce_op import ReduceOp
from ..core.work import Work
from ..errors import FastcollError, GroupError, UsageError
from ..interop.arrays import Adopted, Array
from ..kernels.reduce import reducer
from . import border
from .array import DeviceArray
from .segments import SEGMENT, Segments, code_of
from .staged_mail import StagedMail, arrays_of
from .transit import Marks, Transit, laid_out

Plan = Callable[[list[Array]], Call]
"""Takes the host arrays, inputs first; returns what the CPU backend does with them."""


class StagedCarrier(DeviceCarrier):
    """The carrier of GPU arrays that works with every backend and any GPUs."""

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group
        self._transit = Transit(group)
        self._segments = Segments(group, self._transit)
        self._mail = StagedMail(group, self._transit)

    def adopt(self, x: Any, *, writable: bool, what: str) -> Adopted:
        return border.adopt(x, writable=writable, what=what)

    # ---- collectives ---------------------------------------------------------------------------------

    def _staged(
        self, name: str, inputs: Sequence[DeviceArray], outputs: Sequence[DeviceArray], plan: Plan
    ) -> Call:
        """A call on arrays of their own for inputs and outputs."""
        arrays = [*inputs, *outputs]
        marks = self._transit.mark(arrays)

        def call() -> None:
            with self.whole(name, arrays), self._transit.pool.lent(_bytes(arrays)) as buffer:
                self._transit.await_marks(marks, name)
                hosts = laid_out(buffer, arrays)
                self._transit.fetch(inputs, hosts[: len(inputs)])
                plan(hosts)()
                self._transit.bring(outputs, hosts[len(inputs) :])

        return call

    def _in_place(self, name: str, xs: Sequence[DeviceArray], plan: Plan) -> Call:
        """A call on arrays that are both inputs and outputs."""
        marks = self._transit.mark(xs)

        def call() -> None:
            with self.whole(name, xs), self._transit.pool.lent(_bytes(xs)) as buffer:
                self._transit.await_marks(marks, name)
                hosts = laid_out(buffer, xs)
                self._transit.fetch(xs, hosts)
                plan(hosts)()
                self._transit.bring(xs, hosts)

        return call

    def mark(self, arrays: Sequence[DeviceArray]) -> Marks:
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

    def _plan_all_reduce(self, x: DeviceArray, op: ReduceOp, parts: Sequence[int] = ()) -> Call:
        return self._all_reduce([x], op, parts)

    def _all_reduce(self, xs: Sequence[DeviceArray], op: ReduceOp, parts: Sequence[int]) -> Call:
        dtype = xs[0].dtype
        plain = _checked(op, dtype)

        def reduce(host: Array) -> Call:
            return self._group._plan_all_reduce(_scale(host, op), plain)

        if _bytes(xs) > SEGMENT:
            said = code_of("all_reduce", dtype, plain, parts=parts)
            return self._in_segments("all_reduce", xs, xs, reduce, said)

        def plan(hosts: list[Array]) -> Call:
            whole = _joined(hosts)
            return self._group._plan_all_reduce(_scale(whole, op), plain, parts)

        return self._in_place("all_reduce", xs, plan)

    def _plan_reduce(self, out: DeviceArray, x: DeviceArray, op: ReduceOp, root: int) -> Call:
        plain = _checked(op, x.dtype)

        def reduce(host: Array) -> Call:
            host = _scale(host, op)
            return self._group._plan_reduce(host, host, plain, root)

        here = self._group.rank == root
        if x.nbytes > SEGMENT:
            said = code_of("reduce", x.dtype, plain, root)
            return self._in_segments("reduce", [x], [out] if here else [], reduce, said)
        if not here:
            return self._staged("reduce", [x], [], lambda hosts: reduce(hosts[0]))

        def plan(hosts: list[Array]) -> Call:
            return self._group._plan_reduce(hosts[1], _scale(hosts[0], op), plain, root)

        return self._staged("reduce", [x], [out], plan)

    def _plan_scan(self, out: DeviceArray, x: DeviceArray, op: ReduceOp, exclusive: bool) -> Call:
        plain = _checked(op, x.dtype)
        outs = [] if exclusive and self._group.rank == 0 else [out]

        def plan(hosts: list[Array]) -> Call:
            host = _scale(hosts[0], op)
            return self._group._plan_scan(hosts[1] if outs else host, host, plain, exclusive)

        return self._staged("exscan" if exclusive else "scan", [x], outs, plan)

    def _plan_reduce_scatter(self, out: DeviceArray, blocks: Sequence[DeviceArray], op: ReduceOp) -> Call:
        plain = _checked(op, out.dtype)

        def plan(hosts: list[Array]) -> Call:
            *sources, host = hosts
            return self._group._plan_reduce_scatter(host, [_scale(x, op) for x in sources], plain)

        return self._staged("reduce_scatter", blocks, [out], plan)

    def _plan_broadcast(self, x: DeviceArray, root: int, parts: Sequence[int] = ()) -> Call:
        inputs, outputs = ([x], []) if self._group.rank == root else ([], [x])

        def plan(hosts: list[Array]) -> Call:
            return self._group._plan_broadcast(hosts[0], root, parts)

        if x.nbytes > SEGMENT:
            said = code_of("broadcast", x.dtype, root=root, parts=parts)
            return self._in_segments("broadcast", inputs, outputs, lambda host: plan([host]), said)
        return self._staged("broadcast", inputs, outputs, plan)

    def _plan_all_gather(
        self, outs: Sequence[DeviceArray], x: DeviceArray, parts: Sequence[int] = ()
    ) -> Call:
        return self._staged(
            "all_gather", [x], outs, lambda hosts: self._group._plan_all_gather(hosts[1:], hosts[0], parts)
        )

    def _plan_gather(self, outs: Sequence[DeviceArray] | None, x: DeviceArray, root: int) -> Call:
        def plan(hosts: list[Array]) -> Call:
            return self._group._plan_gather(None if outs is None else hosts[1:], hosts[0], root)

        return self._staged("gather", [x], outs or (), plan)

    def _plan_scatter(self, out: DeviceArray, blocks: Sequence[DeviceArray] | None, root: int) -> Call:
        def plan(hosts: list[Array]) -> Call:
            return self._group._plan_scatter(hosts[-1], None if blocks is None else hosts[:-1], root)

        return self._staged("scatter", blocks or (), [out], plan)

    def _plan_all_to_all(self, outs: Sequence[DeviceArray], blocks: Sequence[DeviceArray]) -> Call:
        n = len(blocks)
        return self._staged(
            "all_to_all", blocks, outs, lambda hosts: self._group._plan_all_to_all(hosts[n:], hosts[:n])
        )

    def _plan_all_reduce_coalesced(
        self, xs: Sequence[Adopted], op: ReduceOp, parts: Sequence[int] = ()
    ) -> Call:
        return self._all_reduce(arrays_of(xs), op, parts or [x.array.size for x in xs])

    def _plan_all_gather_coalesced(self, lists: Sequence[Sequence[Adopted]], xs: Sequence[Adopted]) -> Call:
        inputs, per_rank = arrays_of(xs), [arrays_of(outs) for outs in zip(*lists, strict=True)]
        outputs = [out for outs in per_rank for out in outs]

        def plan(hosts: list[Array]) -> Call:
            rest = iter(hosts[len(inputs) :])
            wholes = [_joined([next(rest) for _ in outs]) for outs in per_rank]
            return self._group._plan_all_gather(
                wholes, _joined(hosts[: len(inputs)]), [x.size for x in inputs]
            )

        return self._staged("all_gather", inputs, outputs, plan)

    def _in_segments(
        self,
        name: str,
        inputs: Sequence[DeviceArray],
        outputs: Sequence[DeviceArray],
        each: Callable[[Array], Call],
        said: int,
    ) -> Call:
        marks = self._transit.mark([*inputs, *outputs])

        def call() -> None:
            with self.whole(name, inputs or outputs):
                self._segments.agree(said, _bytes(inputs or outputs))
                self._transit.await_marks(marks, name)
                self._segments.run(name, inputs, outputs, each)

        return call

    # ---- point to point ------------------------------------------------------------------------------

    def _send(self, x: Adopted, dst: int, tag: int) -> None:
        self._mail.send(x, dst, tag)

    def _isend(self, x: Adopted, dst: int, tag: int) -> Work:
        return self._mail.isend(x, dst, tag)

    def _recv(self, x: Adopted, src: int | None, tag: int) -> int:
        return self._mail.recv(x, src, tag)

    def _irecv(self, x: Adopted, src: int | None, tag: int) -> Work:
        return self._mail.irecv(x, src, tag)

    # ---- the end -------------------------------------------------------------------------------------

    def abort(self) -> None:
        """Nothing to do: calls see that the group has failed, and copies end by themselves."""

    def _close(self, reason: GroupError | None) -> None:
        self._transit.close()


def _bytes(arrays: Sequence[DeviceArray]) -> int:
    return sum(x.nbytes for x in arrays)


def _joined(hosts: Sequence[Array]) -> Array:
    """Arrays that lie one after the other, as one."""
    filled = [host for host in hosts if host.size]
    if len(filled) < 2:
        return (filled or hosts)[0]
    first = filled[0]
    base: Array = np.ndarray((sum(host.size for host in filled),), first.dtype, first.base, _offset(first))
    return base


def _offset(host: Array) -> int:
    assert isinstance(host.base, np.ndarray)
    return host.ctypes.data - host.base.ctypes.data


def _checked(op: ReduceOp, dtype: np.dtype[Any]) -> ReduceOp:
    """The operation that the CPU backend does, after `_scale`; raises what is wrong with it."""
    _, plain = scaled(np.empty(0, dtype), op)
    reducer(plain, dtype)
    return plain


def _scale(host: Array, op: ReduceOp) -> Array:
    """What is reduced, in the same memory."""
    source, _ = scaled(host, op)
    if source is not host:
        host[...] = source
    return host
