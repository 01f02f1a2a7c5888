"""The process group that torch uses; a group of fastcoll carries out its operations.

The class is a subclass of torch's ProcessGroup, not of its Backend. Up to torch 2.13 Python code cannot subclass
Backend. In later releases C++ wraps the Works of a Backend in Python in Works of its own, whose `is_completed` is
always False and which have no source rank. A ProcessGroup in Python replaces all backends that were requested for its
group. So no other backend serves CUDA tensors in this group.

The methods have the names that torch uses since 2.13, and take the same arguments as the methods of process groups in
C++: torch's options or, in the short form, `op`, `root` and `timeout`, by name or by position. In the short form, a
tensor replaces a list of one tensor. A call with opts.asyncOp may run on the group's progress thread, and overlaps with
the caller's computation; C++ (DDP's reducer, functional collectives) always sets asyncOp. In a call without asyncOp,
such as `dist.all_reduce(x)`, the operation is complete when the call returns.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from ..core.group import ProcessGroup
from ..errors import CollectiveTimeoutError, GroupError, UnavailableError, UsageError
from . import calls as c
from .calls import Tensors
from .jobs import leave_group, make_group, refuse_gpus, refuse_options
from .sparse import all_reduce_sparse
from .work import DoneWork, PendingWork

_GROUPS_OWN = timedelta(milliseconds=-1)  # C++ passes it for "the group's timeout"


def gloos_sentence(rank: int, missing: Sequence[int], limit: float, all_of_them: bool) -> str:
    """Return the text of the error of Gloo's monitored barrier, without a full stop; ranks are group ranks."""
    if rank > 0:
        return (
            f"Rank {rank} successfully reached monitoredBarrier, but received errors while waiting for send/recv from "
            "rank 0. Please check rank 0 logs for faulty rank"
        )
    time = f"{1000 * limit:.0f} ms"
    if limit <= 0 or not missing:
        return f"Rank 0 timed out in monitoredBarrier after {time}"
    ranks = f"Ranks {', '.join(map(str, missing))}" if all_of_them else f"Rank {missing[0]}"
    return f"[Rank 0]: {ranks} failed to pass monitoredBarrier in {time}"


def _lacks(name: str, cure: str) -> Any:
    """Return a method that refuses every call, for a method that torch's own backends have and fastcoll lacks."""

    def refuse(self: FastcollProcessGroup, *args: Any, **options: Any) -> NoReturn:
        raise UnavailableError(f"{name}: a group of fastcoll does not have it; {cure}")

    return refuse


class FastcollProcessGroup(dist.ProcessGroup):  # type: ignore[misc]
    """A process group of torch over a group of fastcoll, which is the attribute `fastcoll`.

    Operations return a Work, or None without asyncOp, and raise fastcoll's errors. `opts` are torch's options of each
    operation, None for the defaults; ranks are group ranks. `store` is torch's store for this group.
    """

    def __init__(self, group: ProcessGroup, store: Any) -> None:
        super().__init__(group.rank, group.size)
        self.fastcoll, self._store = group, store
        self._name = self._description = ""
        self._is_split = False

    # ---- reductions -------------------------------------------------------------------------------

    def allreduce(self, tensors: Any, opts: Any = None, *short: Any, **named: Any) -> DoneWork | None:
        if type(opts) is not c10d.AllreduceOptions:
            opts = c.options(c10d.AllreduceOptions, opts, *short, **named)
        x = c.only("tensors", tensors)
        if getattr(x, "is_sparse", False):
            return c.run("allreduce_", opts, [x], all_reduce_sparse, self.fastcoll, x, c.op(opts))
        return c.run("allreduce_", opts, [x], self.fastcoll.fast.all_reduce, x, c.op(opts))

    allreduce_sparse = allreduce

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> DoneWork | None:
        reduce = self.fastcoll.fast.all_reduce_coalesced
        return c.run("allreduce_coalesced_", opts, tensors, reduce, tensors, c.op(opts))

    def reduce(self, tensors: Any, opts: Any = None, *short: Any, **named: Any) -> DoneWork | None:
        if type(opts) is not c10d.ReduceOptions:
            opts = c.options(c10d.ReduceOptions, opts, *short, **named)
        x = c.only("tensors", tensors)
        return c.run("reduce_", opts, [x], self.fastcoll.fast.reduce, x, c.root(opts), c.op(opts))

    def reduce_scatter(
        self, outputs: Any, inputs: Any, opts: Any = None, *short: Any, **named: Any
    ) -> DoneWork | None:
        if type(opts) is not c10d.ReduceScatterOptions:
            opts = c.options(c10d.ReduceScatterOptions, opts, *short, **named)
        out, blocks = c.only("outputs", outputs), c.only_list("inputs", inputs)
        return c.run(
            "reduce_scatter_", opts, [out], self.fastcoll.fast.reduce_scatter, out, blocks, c.op(opts)
        )

    def reduce_scatter_single(
        self, output: torch.Tensor, input: torch.Tensor, opts: Any = None
    ) -> DoneWork | None:
        reduce = self.fastcoll.fast.reduce_scatter_single
        return c.run("_reduce_scatter_base_", opts, [output], reduce, output, input, c.op(opts))

    def reduce_scatter_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> DoneWork | None:
        op, name = c.op(opts), "reduce_scatter_tensor_coalesced_"
        calls = [(out, x, op) for out, x in c.pairs(outputs, inputs)]
        return c.run_each(name, opts, outputs, self.fastcoll.fast.reduce_scatter_single, calls)

    # ---- moves ------------------------------------------------------------------------------------

    def broadcast(self, tensors: Any, opts: Any = None, *short: Any, **named: Any) -> DoneWork | None:
        if type(opts) is not c10d.BroadcastOptions:
            opts = c.options(c10d.BroadcastOptions, opts, *short, **named)
        x = c.only("tensors", tensors)
        return c.run("broadcast_", opts, [x], self.fastcoll.fast.broadcast, x, c.root(opts))

    def allgather(
        self, outputs: Any, inputs: Any, opts: Any = None, *short: Any, **named: Any
    ) -> DoneWork | None:
        if type(opts) is not c10d.AllgatherOptions:
            opts = c.options(c10d.AllgatherOptions, opts, *short, **named)
        outs = c.only_list("outputs", outputs)
        return c.run("allgather_", opts, outs, self.fastcoll.fast.all_gather, outs, c.only("inputs", inputs))

    def all_gather_single(
        self, output: torch.Tensor, input: torch.Tensor, opts: Any = None
    ) -> DoneWork | None:
        return c.run("_allgather_base_", opts, [output], self.fastcoll.fast.all_gather_single, output, input)

    def all_gather_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> DoneWork | None:
        calls, name = c.pairs(outputs, inputs), "allgather_into_tensor_coalesced_"
        return c.run_each(name, opts, outputs, self.fastcoll.fast.all_gather_single, calls)

    def allgather_coalesced(
        self, outputs: list[Tensors], inputs: Tensors, opts: Any = None
    ) -> DoneWork | None:
        if any(len(outs) != len(inputs) for outs in outputs):
            raise UsageError(
                f"outputs has lists of {[len(outs) for outs in outputs]} tensors; there are {len(inputs)} inputs, so "
                "give a list of as many for each rank"
            )
        # torch takes a list of outputs for each rank, fastcoll takes one for each input.
        lists = [list(outs) for outs in zip(*outputs, strict=True)]
        flat = [out for outs in outputs for out in outs]
        gather = self.fastcoll.fast.all_gather_coalesced
        return c.run("allgather_coalesced_", opts, flat, gather, lists, inputs)

    def gather(
        self, outputs: Any, inputs: Any, opts: Any = None, *short: Any, **named: Any
    ) -> DoneWork | None:
        if type(opts) is not c10d.GatherOptions:
            opts = c.options(c10d.GatherOptions, opts, *short, **named)
        x = c.only("inputs", inputs)
        outs = c.only_list("outputs", outputs) if outputs else None
        return c.run("gather_", opts, outs or [], self.fastcoll.fast.gather, x, outs, opts.rootRank)

    def gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> DoneWork | None:
        opts = c.options(c10d.GatherOptions, opts)
        whole = output if opts.rootRank == self.fastcoll.rank else None
        return c.run("gather_", opts, [output], self.fastcoll.fast.gather_single, input, whole, opts.rootRank)

    def scatter(
        self, outputs: Any, inputs: Any, opts: Any = None, *short: Any, **named: Any
    ) -> DoneWork | None:
        if type(opts) is not c10d.ScatterOptions:
            opts = c.options(c10d.ScatterOptions, opts, *short, **named)
        out = c.only("outputs", outputs)
        blocks = c.only_list("inputs", inputs) if inputs else None
        return c.run("scatter_", opts, [out], self.fastcoll.fast.scatter, out, blocks, opts.rootRank)

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> DoneWork | None:
        return c.run("alltoall_", opts, outputs, self.fastcoll.fast.all_to_all, outputs, inputs)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_splits: Sequence[int] = (),
        input_splits: Sequence[int] = (),
        opts: Any = None,
        *short: Any,
        **named: Any,
    ) -> DoneWork | None:
        if type(opts) is not c10d.AllToAllOptions:
            opts = c.options(c10d.AllToAllOptions, opts, *short, **named)
        exchange = self.fastcoll.fast.all_to_all_single
        # Empty means equal parts. A program may pass arrays, which have no truth value.
        sizes = [None if x is None or len(x) == 0 else x for x in (output_splits, input_splits)]
        return c.run("alltoall_base_", opts, [output], exchange, output, input, *sizes)

    def barrier(self, opts: Any = None, *short: Any, **named: Any) -> DoneWork | None:
        if type(opts) is not c10d.BarrierOptions:
            opts = c.options(c10d.BarrierOptions, opts, *short, **named)
        # Here the timeout is that of the barrier itself, not of waiting for its Work.
        barrier = c.recorded(self.fastcoll.fast.barrier)
        if c.is_async(opts):
            return PendingWork([c.started(barrier, (), timeout=c.limit_of(opts))], [])
        barrier(timeout=c.limit_of(opts))
        return None

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Synchronise all ranks; an error has Gloo's text, which callers match on, and names every missing rank.

        torch.distributed.monitored_barrier calls this method only if the backend is named gloo; otherwise call it on
        the group.
        """
        limit = self.fastcoll.timeout if timeout in (None, _GROUPS_OWN) else timeout.total_seconds()
        self.fastcoll.gate.check_usable()  # of a failure before this call, the sentence would not be true
        try:
            self.fastcoll.fast.monitored_barrier(limit)
        except GroupError as error:
            missing = [number for number, rank in enumerate(self.fastcoll.ranks) if rank in error.ranks]
            sentence = gloos_sentence(self.fastcoll.rank, missing, limit, wait_all_ranks)
            raise type(error)(f"{sentence}; {error}", error.ranks) from error

    # ---- point to point ---------------------------------------------------------------------------

    def send(self, tensors: Tensors, dst: int, tag: int) -> PendingWork:
        return PendingWork(
            [c.recorded(self.fastcoll.fast.isend)(c.only("tensors", tensors), dst, tag)], tensors
        )

    def recv(self, tensors: Tensors, src: int, tag: int) -> PendingWork:
        return PendingWork(
            [c.recorded(self.fastcoll.fast.irecv)(c.only("tensors", tensors), src, tag)], tensors
        )

    def recv_anysource(self, tensors: Tensors, tag: int) -> PendingWork:
        return PendingWork(
            [c.recorded(self.fastcoll.fast.irecv)(c.only("tensors", tensors), None, tag)], tensors
        )

    # ---- life -------------------------------------------------------------------------------------

    def split_group(
        self,
        new_ranks: Sequence[int],
        timeout: timedelta | None = None,
        opts: Any = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: Sequence[torch.device] | None = None,
    ) -> FastcollProcessGroup | None:
        """Make a group of `new_ranks`, in their order; return None on other ranks, which need not make this call.

        torch.distributed.split_group calls this method; before torch 2.15, only with an accelerator.
        """
        whole, name = self.fastcoll, group_name or f"{self._name}:split:{list(new_ranks)}"
        refuse_options(opts)
        if device_types is not None and torch.device("cpu") not in device_types:
            refuse_gpus(whole)
        members = [whole.ranks[whole.checked_rank("new_ranks", rank)] for rank in new_ranks]
        if whole.rank not in new_ranks:
            return None
        store, limit = dist.PrefixStore(f"{name}/", self._store), whole.timeout
        made = make_group(
            store,
            name,
            list(new_ranks).index(whole.rank),
            len(members),
            limit if timeout is None else timeout.total_seconds(),
            members,
            dist.get_world_size() if dist.is_initialized() else whole.size,
            whole,
        )
        group = FastcollProcessGroup(made, store)
        group._is_split = True
        group.setGroupName(name)
        group.setGroupDesc(group_desc or f"{self._description}:split")
        return group

    def get_group_store(self) -> Any:
        return self._store

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the timeout of later collectives and messages."""
        self.fastcoll.timeout = timeout.total_seconds()

    _set_default_timeout = set_timeout  # the name in Gloo's and NCCL's backends

    def get_error(self) -> Any:
        failure, kinds = self.fastcoll.failure, c10d.ErrorType
        if failure is None:
            return kinds.SUCCESS
        return kinds.TIMEOUT if isinstance(failure, CollectiveTimeoutError) else kinds.COMM_ERROR

    def abort(self) -> None:
        self.fastcoll.abort()

    def shutdown(self) -> None:
        """Leave the group. Leaving twice is fine."""
        leave_group(self.fastcoll)

    # The names that torch had before 2.13.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single
    gather_into_tensor = gather_single
    recvAnysource = recv_anysource  # the name that C++ looks up

    # ---- names, by which DeviceMesh, functional collectives and FSDP2 find groups ------------------

    def getBackendName(self) -> str:
        return "fastcoll"

    def setGroupName(self, name: str) -> None:
        self._name = name

    def getGroupName(self) -> str:
        return self._name

    def setGroupDesc(self, description: str) -> None:
        self._description = description

    def getGroupDesc(self) -> str:
        return self._description

    # ---- methods that torch calls on the backend of a device --------------------------------------

    @property
    def _device_types(self) -> list[torch.device]:
        # From torch 2.15 on, if a group has devices while torch creates it, torch may attach a flight recorder, which
        # needs a group in C++. So a group has no devices until it is created. A group that split_group makes must have
        # its device at once; registration.py excludes it from flight recorders.
        is_made = self._is_split or self in dist.distributed_c10d._world.pg_map
        return [torch.device("cpu")] if is_made else []

    def _get_backend(self, device: torch.device) -> FastcollProcessGroup:
        if torch.device(device).type != "cpu":
            refuse_gpus(self.fastcoll)
        return self

    @property
    def options(self) -> Any:
        """Return torch's Backend.Options with the name and the timeout."""
        return c10d.Backend.Options("fastcoll", timedelta(seconds=self.fastcoll.timeout))

    # ---- methods that torch calls on other backends -----------------------------------------------

    supports_splitting = True
    supports_coalescing = supports_shrinking = supports_reconfigure = False
    supports_window = supports_abort_hooks = supports_completion_hooks = False
    supports_time_estimate = _supports_time_estimate = False

    def supports_tensor_alloc(self, device: Any) -> bool:
        return False

    shrink = _lacks("shrink", "destroy this one, and make one of the other ranks by new_group(ranks)")
    split = _lacks("split", "use split_group(ranks), or torch.distributed.new_group(ranks)")
    merge = merge_remote_group = _lacks("merge", "start all ranks in one world, and use new_group(ranks)")
    reconfigure = get_reconfigure_handle = _lacks("reconfigure", "let torchrun start the ranks anew")
    suspend = resume = memory_stats = _lacks(
        "suspend", "destroy the group, and make it again when it is needed"
    )
    new_window = _lacks("new_window", "use send and recv, or fastcoll.symmetric in a world of fastcoll's own")
    allocate_tensor = _lacks("allocate_tensor", "torch.empty makes tensors that are as good here")
    register_abort_hook = unregister_abort_hook = _lacks("abort hooks", "catch what the call raises")
    register_completion_hook = unregister_completion_hook = _lacks(
        "completion hooks", "use work.get_future()"
    )
    _register_on_completion_hook = register_completion_hook
    _start_time_estimate = _end_time_estimate = _lacks("time estimates", "measure the call")
    _start_coalescing = _end_coalescing = _lacks(
        "coalescing", "use torch.distributed's own, which needs none"
    )
