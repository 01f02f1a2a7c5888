"""TorchCalls: what torch calls on a process group, as calls on a group of fastcoll.

The methods are named as torch names them since 2.13, and take what those of groups in C++ take: torch's options, or in
their place `op`, `root` and `timeout`, by position too, and then a tensor where there is a list of one. A call with
opts.asyncOp goes to the group's progress thread, so that it overlaps with what the caller computes; C++ (DDP's reducer,
functional collectives) always asks for that. Without it, as in `dist.all_reduce(x)`, the operation is done when the
call returns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as torch_dist
from torch._C import _distributed_c10d as c10d

from ..core.group import ProcessGroup
from ..core.reduce_op import ReduceOp
from ..core.work import Work
from ..errors import CollectiveTimeoutError, UnavailableError, UsageError
from .dispatch import shown
from .groups import leave_group
from .sparse import all_reduce_sparse
from .work import DoneWork, PendingWork

Tensors = list[torch.Tensor]
Limit = timedelta | None

# By torch's ReduceOp, which is what options hold: its members (RedOpType) do not equal it from their side.
_OPS: dict[Any, ReduceOp] = {
    torch_dist.ReduceOp(getattr(torch_dist.ReduceOp, name)): getattr(ReduceOp, name)
    for name in ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")
}
_UNSET = timedelta()  # of a timeout: torch says "the group's" by a negative one


def _refused(name: str, cure: str) -> Any:
    """A method of torch's backends that fastcoll's have not."""

    def refuse(self: TorchCalls, *args: Any, **options: Any) -> NoReturn:
        raise UnavailableError(f"{name}: a group of fastcoll has no such thing; {cure}")

    return refuse


class TorchCalls:
    """The operations. `opts` are torch's options of each, None for the defaults; ranks are group ranks.

    Every method returns a Work, and raises what the methods of fastcoll.ProcessGroup raise.

    Attributes:
        fastcoll: the group that carries the operations out.
    """

    fastcoll: ProcessGroup

    # ---- reductions -------------------------------------------------------------------------------

    def allreduce(self, tensors: Any, opts: Any = None, timeout: Limit = None, *, op: Any = None) -> DoneWork:
        opts, x = _options(c10d.AllreduceOptions, opts, op, None, timeout), _only("tensors", tensors)
        if getattr(x, "is_sparse", False):
            return _run("allreduce_", opts, [x], all_reduce_sparse, self.fastcoll, x, _op(opts))
        return _run("allreduce_", opts, [x], self.fastcoll.all_reduce, x, _op(opts))

    allreduce_sparse = allreduce

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> DoneWork:
        reduce = self.fastcoll.all_reduce_coalesced
        return _run("allreduce_coalesced_", opts, tensors, reduce, tensors, _op(opts))

    def reduce(
        self,
        tensors: Any,
        opts: Any = None,
        op: Any = None,
        timeout: Limit = None,
        *,
        root: int | None = None,
    ) -> DoneWork:
        opts, x = _options(c10d.ReduceOptions, opts, op, root, timeout), _only("tensors", tensors)
        return _run("reduce_", opts, [x], self.fastcoll.reduce, x, _root(opts), _op(opts))

    def reduce_scatter(
        self, outputs: Any, inputs: Any, opts: Any = None, timeout: Limit = None, *, op: Any = None
    ) -> DoneWork:
        opts = _options(c10d.ReduceScatterOptions, opts, op, None, timeout)
        out, blocks = _only("outputs", outputs), _only_list("inputs", inputs)
        return _run("reduce_scatter_", opts, [out], self.fastcoll.reduce_scatter, out, blocks, _op(opts))

    def reduce_scatter_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> DoneWork:
        reduce = self.fastcoll.reduce_scatter_single
        return _run("_reduce_scatter_base_", opts, [output], reduce, output, input, _op(opts))

    def reduce_scatter_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> DoneWork:
        op, name = _op(opts), "reduce_scatter_tensor_coalesced_"
        calls = [(out, x, op) for out, x in _pairs(outputs, inputs)]
        return _run_each(name, opts, outputs, self.fastcoll.reduce_scatter_single, calls)

    # ---- moves ------------------------------------------------------------------------------------

    def broadcast(
        self, tensors: Any, opts: Any = None, timeout: Limit = None, *, root: int | None = None
    ) -> DoneWork:
        opts, x = _options(c10d.BroadcastOptions, opts, None, root, timeout), _only("tensors", tensors)
        return _run("broadcast_", opts, [x], self.fastcoll.broadcast, x, _root(opts))

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None, *, timeout: Limit = None) -> DoneWork:
        opts, outs = (
            _options(c10d.AllgatherOptions, opts, None, None, timeout),
            _only_list("outputs", outputs),
        )
        return _run("allgather_", opts, outs, self.fastcoll.all_gather, outs, _only("inputs", inputs))

    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> DoneWork:
        return _run("_allgather_base_", opts, [output], self.fastcoll.all_gather_single, output, input)

    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> DoneWork:
        calls, name = _pairs(outputs, inputs), "allgather_into_tensor_coalesced_"
        return _run_each(name, opts, outputs, self.fastcoll.all_gather_single, calls)

    def allgather_coalesced(self, outputs: list[Tensors], inputs: Tensors, opts: Any = None) -> DoneWork:
        if any(len(outs) != len(inputs) for outs in outputs):
            raise UsageError(
                f"outputs has lists of {[len(outs) for outs in outputs]} tensors; there are {len(inputs)} inputs, so "
                "give a list of as many for each rank"
            )
        lists = [list(outs) for outs in zip(*outputs, strict=True)]  # torch has a list for each rank
        flat = [out for outs in outputs for out in outs]
        gather = self.fastcoll.all_gather_coalesced
        return _run("allgather_coalesced_", opts, flat, gather, lists, inputs)

    def gather(
        self, outputs: Any, inputs: Any, opts: Any = None, timeout: Limit = None, *, root: int | None = None
    ) -> DoneWork:
        opts, x = _options(c10d.GatherOptions, opts, None, root, timeout), _only("inputs", inputs)
        outs = _only_list("outputs", outputs) if outputs else None
        return _run("gather_", opts, outs or [], self.fastcoll.gather, x, outs, opts.rootRank)

    def gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> DoneWork:
        opts = _options(c10d.GatherOptions, opts, None, None, None)
        outs = None
        if opts.rootRank == self.fastcoll.rank:
            if output.numel() != self.fastcoll.size * input.numel() or not output.is_contiguous():
                raise UsageError(
                    f"output has shape {list(output.shape)} and strides {output.stride()}; give a contiguous one of "
                    f"{self.fastcoll.size} x {input.numel()} elements"
                )
            outs = list(output.view(self.fastcoll.size, -1).unbind())
        return _run("gather_", opts, [output], self.fastcoll.gather, input, outs, opts.rootRank)

    def scatter(
        self, outputs: Any, inputs: Any, opts: Any = None, timeout: Limit = None, *, root: int | None = None
    ) -> DoneWork:
        opts, out = _options(c10d.ScatterOptions, opts, None, root, timeout), _only("outputs", outputs)
        blocks = _only_list("inputs", inputs) if inputs else None
        return _run("scatter_", opts, [out], self.fastcoll.scatter, out, blocks, opts.rootRank)

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> DoneWork:
        return _run("alltoall_", opts, outputs, self.fastcoll.all_to_all, outputs, inputs)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_splits: Sequence[int] = (),
        input_splits: Sequence[int] = (),
        opts: Any = None,
        *,
        timeout: Limit = None,
    ) -> DoneWork:
        opts = _options(c10d.AllToAllOptions, opts, None, None, timeout)
        outs, ins = output_splits or None, input_splits or None  # torch says "equal parts" by an empty list
        return _run(
            "alltoall_base_", opts, [output], self.fastcoll.all_to_all_single, output, input, outs, ins
        )

    def barrier(self, opts: Any = None, *, timeout: Limit = None) -> DoneWork:
        opts = _options(c10d.BarrierOptions, opts, None, None, timeout)
        # The timeout is the barrier's own here, not that of waiting for it.
        if _is_async(opts):
            return PendingWork([_started(self.fastcoll.barrier, (), timeout=limit_of(opts))], [])
        self.fastcoll.barrier(timeout=limit_of(opts))
        return DoneWork([])

    def monitored_barrier(self, timeout: Limit = None, wait_all_ranks: bool = False) -> None:
        """A barrier that names every missing rank on every rank, whatever `wait_all_ranks` is.

        Up to 2.13 torch.distributed.monitored_barrier calls it for Gloo's groups alone; call it on the group.
        """
        self.fastcoll.monitored_barrier(None if timeout is None else timeout.total_seconds())

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

    def get_error(self) -> Any:
        """How the group has failed."""
        failure = self.fastcoll.failure
        if failure is None:
            return c10d.ErrorType.SUCCESS
        return (
            c10d.ErrorType.TIMEOUT
            if isinstance(failure, CollectiveTimeoutError)
            else c10d.ErrorType.COMM_ERROR
        )

    def abort(self) -> None:
        """Fail the group on all ranks, from any thread."""
        self.fastcoll.abort()

    def shutdown(self) -> None:
        """Leave the group. Leaving twice is fine."""
        leave_group(self.fastcoll)

    # ---- what torch asks other backends for -------------------------------------------------------

    supports_splitting = supports_coalescing = supports_shrinking = supports_reconfigure = supports_window = (
        False
    )
    supports_time_estimate = _supports_time_estimate = supports_abort_hooks = supports_completion_hooks = (
        False
    )

    def supports_tensor_alloc(self, device: Any) -> bool:
        return False

    shrink = _refused("shrink", "destroy this one, and make one of the other ranks by new_group(ranks)")
    split = split_group = _refused("split", "use torch.distributed.new_group(ranks)")
    merge = merge_remote_group = _refused("merge", "start all ranks in one world, and use new_group(ranks)")
    reconfigure = get_reconfigure_handle = _refused("reconfigure", "let torchrun start the ranks anew")
    suspend = resume = memory_stats = _refused(
        "suspend", "destroy the group, and make it again when it is needed"
    )
    new_window = _refused(
        "new_window", "use send and recv, or fastcoll.symmetric in a world of fastcoll's own"
    )
    allocate_tensor = _refused("allocate_tensor", "torch.empty makes tensors that are as good here")
    register_abort_hook = unregister_abort_hook = _refused("abort hooks", "catch what the call raises")
    register_completion_hook = unregister_completion_hook = _refused(
        "completion hooks", "use work.get_future()"
    )
    _register_on_completion_hook = register_completion_hook
    _start_time_estimate = _end_time_estimate = _refused("time estimates", "measure the call")
    _start_coalescing = _end_coalescing = _refused(
        "coalescing", "use torch.distributed's own, which needs none"
    )


def _options(kind: Any, opts: Any, op: Any, root: int | None, timeout: Limit) -> Any:
    """The options of a call, where `opts` may be what the short forms have in their place."""
    if isinstance(opts, kind):
        return opts
    if isinstance(opts, timedelta):
        timeout = opts
    elif isinstance(opts, int):
        root = opts
    elif opts is not None:
        op = opts
    options = kind()
    said = {"reduceOp": op, "rootRank": root, "timeout": timeout}
    for name, value in said.items():
        if value is not None:
            try:
                setattr(options, name, value)
            except (AttributeError, TypeError) as error:
                raise UsageError(
                    f"{name} is {value!r}; this operation takes torch's {kind.__name__}"
                ) from error
    return options


def _run(name: str, opts: Any, tensors: Tensors, call: Callable[..., Work | None], *args: Any) -> DoneWork:
    """One operation, which torch's dispatcher has by `name`; its results are in `tensors`."""
    shown(name)
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
    name: str, opts: Any, tensors: Tensors, call: Callable[..., Work | None], calls: Sequence[tuple[Any, ...]]
) -> DoneWork:
    """Several operations of one kind that are one to torch."""
    shown(name)
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


def _root(opts: Any) -> int:
    if opts.rootTensor:
        raise UsageError(f"rootTensor is {opts.rootTensor}; a rank has one tensor here, number 0")
    return int(opts.rootRank)


def _only(what: str, items: Any) -> Any:
    """What torch gives in a list, one for each device of a rank, or as it is."""
    if isinstance(items, torch.Tensor):
        return items
    if len(items) != 1:
        raise UsageError(f"{what} has {len(items)} items; a rank has one device here, so give one")
    return items[0]


def _only_list(what: str, items: Any) -> Any:
    """The list of tensors that torch gives in a list, one for each device of a rank, or as it is."""
    return items if items and isinstance(items[0], torch.Tensor) else _only(what, items)


def _pairs(outputs: Tensors, inputs: Tensors) -> list[tuple[torch.Tensor, torch.Tensor]]:
    if len(outputs) != len(inputs):
        raise UsageError(f"there are {len(outputs)} outputs and {len(inputs)} inputs; give as many of both")
    return list(zip(outputs, inputs, strict=True))


def reduction(op: Any) -> ReduceOp:
    """The operation that torch's `op` asks for.

    Raises:
        UnavailableError: fastcoll has no such operation.
    """
    if op == torch_dist.ReduceOp.SUM:  # a third of the time of a look into the table
        return ReduceOp.SUM
    try:
        return _OPS[op]
    except KeyError:
        if op == torch_dist.ReduceOp.PREMUL_SUM:
            factor = op.factor
            return ReduceOp.PREMUL_SUM(factor.item() if hasattr(factor, "item") else factor)
        names = ", ".join(known.name for known in _OPS.values())
        raise UnavailableError(f"op is {op!r}; give one of {names} or PREMUL_SUM") from None
