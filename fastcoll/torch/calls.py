"""TorchCalls: what torch calls on a process group, as calls on a group of fastcoll.

Both adapters have these methods, named as torch names them since 2.13. A call with opts.asyncOp goes to the group's
progress thread, so that it overlaps with what the caller computes; C++ (DDP's reducer, functional collectives) always
asks for that. Without it, as in `dist.all_reduce(x)`, the operation is done when the call returns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch

from ..errors import UsageError
from ..group import ProcessGroup
from ..reduce_op import ReduceOp
from ..work import Work
from .groups import leave_group
from .reductions import reduction
from .work import DoneWork, PendingWork

Tensors = list[torch.Tensor]

_UNSET = timedelta()  # of a timeout: torch says "the group's" by a negative one


class TorchCalls:
    """The operations. `opts` are torch's options of each, None for the defaults; ranks are group ranks.

    Every method returns a Work, and raises what the methods of fastcoll.ProcessGroup raise.

    Attributes:
        fastcoll: the group that carries the operations out.
    """

    fastcoll: ProcessGroup

    # ---- reductions -------------------------------------------------------------------------------

    def allreduce(self, tensors: Tensors, opts: Any = None) -> DoneWork:
        return _run(opts, tensors, self.fastcoll.all_reduce, _only("tensors", tensors), _op(opts))

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> DoneWork:
        return _run(opts, tensors, self.fastcoll.all_reduce_coalesced, tensors, _op(opts))

    def reduce(self, tensors: Tensors, opts: Any) -> DoneWork:
        x = _only("tensors", tensors)
        return _run(opts, tensors, self.fastcoll.reduce, x, opts.rootRank, _op(opts))

    def reduce_scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any = None) -> DoneWork:
        out, blocks = _only("outputs", outputs), _only("inputs", inputs)
        return _run(opts, outputs, self.fastcoll.reduce_scatter, out, blocks, _op(opts))

    def reduce_scatter_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> DoneWork:
        return _run(opts, [output], self.fastcoll.reduce_scatter_single, output, input, _op(opts))

    def reduce_scatter_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> DoneWork:
        op = _op(opts)
        calls = [(out, x, op) for out, x in zip(outputs, inputs, strict=True)]
        return _run_each(opts, outputs, self.fastcoll.reduce_scatter_single, calls)

    # ---- moves ------------------------------------------------------------------------------------

    def broadcast(self, tensors: Tensors, opts: Any) -> DoneWork:
        return _run(opts, tensors, self.fastcoll.broadcast, _only("tensors", tensors), opts.rootRank)

    def allgather(self, outputs: list[Tensors], inputs: Tensors, opts: Any = None) -> DoneWork:
        outs = _only("outputs", outputs)
        return _run(opts, outs, self.fastcoll.all_gather, outs, _only("inputs", inputs))

    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> DoneWork:
        return _run(opts, [output], self.fastcoll.all_gather_single, output, input)

    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> DoneWork:
        calls = list(zip(outputs, inputs, strict=True))
        return _run_each(opts, outputs, self.fastcoll.all_gather_single, calls)

    def allgather_coalesced(self, outputs: list[Tensors], inputs: Tensors, opts: Any = None) -> DoneWork:
        lists = [list(outs) for outs in zip(*outputs, strict=True)]  # torch has a list for each rank
        flat = [out for outs in outputs for out in outs]
        return _run(opts, flat, self.fastcoll.all_gather_coalesced, lists, inputs)

    def gather(self, outputs: list[Tensors], inputs: Tensors, opts: Any) -> DoneWork:
        root, x = opts.rootRank, _only("inputs", inputs)
        outs = _only("outputs", outputs) if root == self.fastcoll.rank else None
        return _run(opts, outs or [], self.fastcoll.gather, x, outs, root)

    def scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any) -> DoneWork:
        root, out = opts.rootRank, _only("outputs", outputs)
        blocks = _only("inputs", inputs) if root == self.fastcoll.rank else None
        return _run(opts, outputs, self.fastcoll.scatter, out, blocks, root)

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> DoneWork:
        return _run(opts, outputs, self.fastcoll.all_to_all, outputs, inputs)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_splits: Sequence[int] = (),
        input_splits: Sequence[int] = (),
        opts: Any = None,
    ) -> DoneWork:
        outs, ins = output_splits or None, input_splits or None  # torch says "equal parts" by an empty list
        return _run(opts, [output], self.fastcoll.all_to_all_single, output, input, outs, ins)

    def barrier(self, opts: Any = None) -> DoneWork:
        # The timeout is the barrier's own here, not that of waiting for it.
        if _is_async(opts):
            return PendingWork([_started(self.fastcoll.barrier, (), timeout=limit_of(opts))], [])
        self.fastcoll.barrier(timeout=limit_of(opts))
        return DoneWork([])

    # ---- point to point ---------------------------------------------------------------------------

    def send(self, tensors: Tensors, dst: int, tag: int) -> PendingWork:
        return PendingWork([self.fastcoll.isend(_only("tensors", tensors), dst, tag)], tensors)

    def recv(self, tensors: Tensors, src: int, tag: int) -> PendingWork:
        return PendingWork([self.fastcoll.irecv(_only("tensors", tensors), src, tag)], tensors)

    def recv_anysource(self, tensors: Tensors, tag: int) -> PendingWork:
        return PendingWork([self.fastcoll.irecv(_only("tensors", tensors), None, tag)], tensors)

    # ---- life -------------------------------------------------------------------------------------

    def set_timeout(self, timeout: timedelta) -> None:
        """What collectives may take from now on; sends and receives keep the timeout that the group was made with."""
        self.fastcoll.timeout = timeout.total_seconds()

    def abort(self) -> None:
        """Fail the group on all ranks, from any thread."""
        self.fastcoll.abort()

    def shutdown(self) -> None:
        """Leave the group. Leaving twice is fine."""
        leave_group(self.fastcoll)


def _run(opts: Any, tensors: Tensors, call: Callable[..., Work | None], *args: Any) -> DoneWork:
    """One operation; its results are in `tensors`."""
    limit = limit_of(opts)
    if _is_async(opts):
        work = _started(call, args)
        return DoneWork(tensors) if work.is_success() else PendingWork([work], tensors, limit)
    if limit is None:
        call(*args)
        return DoneWork(tensors)
    pending = PendingWork([_started(call, args)], tensors, limit)
    pending.wait()
    return pending


def _run_each(
    opts: Any, tensors: Tensors, call: Callable[..., Work | None], calls: Sequence[tuple[Any, ...]]
) -> DoneWork:
    """Several operations of one kind that are one to torch."""
    work = PendingWork([_started(call, args) for args in calls], tensors, limit_of(opts))
    if not _is_async(opts):
        work.wait()
    return work


def _started(call: Callable[..., Work | None], args: tuple[Any, ...], **options: Any) -> Work:
    work = call(*args, async_op=True, **options)
    assert work is not None
    return work


def _is_async(opts: Any) -> bool:
    # Older torch has no asyncOp in some options, and waits for the Work itself.
    return bool(getattr(opts, "asyncOp", True))


def _op(opts: Any) -> ReduceOp:
    return ReduceOp.SUM if opts is None else reduction(opts.reduceOp)


def limit_of(opts: Any) -> float | None:
    """The seconds that this call may take; None: those of the group."""
    if opts is None or opts.timeout <= _UNSET:
        return None
    return float(opts.timeout.total_seconds())


def _only(what: str, items: Sequence[Any]) -> Any:
    """What torch gives in a list, one for each device of a rank."""
    if len(items) != 1:
        raise UsageError(f"{what} has {len(items)} items; a rank has one device here, so give one")
    return items[0]
