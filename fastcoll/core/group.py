"""ProcessGroup: a set of ranks that do collective operations together.

A public method makes an Operation (operation.py) from its arguments, or refuses wrong arguments (`preparing`). The
backend makes a *call* from the operation (`plan`), and the gate (gate.py) runs the call when its turn comes. Error
texts use the argument names of torch.distributed's functions. So an error about the argument `root` names it "src" or
"dst".

All ranks in this file are group ranks, 0..size-1; fastcoll/api translates global ranks.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, cast, final

import numpy as np

from ..arrays.arrays import ImportedArray, OnDeviceError, finish_all, import_array, import_list
from ..errors import AbortedError, GroupError, UnavailableError, UsageError, encodable
from ..record import dump
from ..record.recorder import located
from . import arguments, operands, profiler, trees
from .backend import Backend, DeviceCarrier, StreamCall
from .devices import Devices
from .message import Status
from .monitor import describe_exit
from .operands import Array, apart, arrays_of, scaled
from .operation import COMPOSITIONS, Call, Operation, then_split
from .operations import METHODS
from .point_to_point import PointToPoint
from .reduce_op import ReduceOp
from .refusals import Preparing
from .request import Request
from .travel import checked as checked_narrow
from .trees import CONTAINERS
from .work import Work, refuse_to_block


@final
class ProcessGroup:
    """A set of ranks that do collective operations together.

    Every operation except for messages is collective: all ranks of the group call it, in the same order. Synchronous
    calls block until the operation is complete on this rank, and return None; if it cannot complete, they raise an
    error, at the latest after the group's timeout. With `async_op=True` they return a Work at once, and the program may
    not use the arrays until the operation is complete. An in-place operation on an immutable array (JAX's) returns a
    new array; with `async_op=True`, the Work's `result` returns it.

    Raises (every operation):
        UsageError: the call is wrong; the group stays usable.
        MismatchError: the ranks' calls differ; raised on every rank before data moves.
        GroupError: a peer died, did not make its call in time, or the group failed earlier.
        NotInitializedError: the group was destroyed.

    Attributes:
        fast: the methods below for collectives and messages, under the same names. If the backend has a fast function
            for a method (`Backend.fast`: shm/fast.py, net/tcp/fast.py, ...), `fast` has that function instead. It
            handles the plain case with one compiled call, and calls the method in all other cases.
        name: unique in the job.
        ranks: global rank of each group rank.
        rank: this process's rank in the group.
        backend: carries out operations on arrays in host memory.
        messages: carries out messages of arrays in host memory.
        gpus: carries out operations and messages of arrays on GPUs.
        p2p: the methods for messages, and further ones for other parts of the package.
        gate: decides which thread may run a call now.
        monitor: knows which peers live.
        at_the_end: functions that `close` calls before it closes anything; they must not block.
        before_leaving: a function that is called before this rank leaves the group normally, not because of a failure;
            it may block.
    """

    def __init__(self, backend: Backend) -> None:
        self.backend, self.gate = backend, backend.gate
        self.monitor, self.messages = backend.monitor, backend.messages
        gate = self.gate
        self.name, self.ranks, self.rank = gate.name, gate.ranks, gate.rank
        self.gpus = Devices(self, self.name)
        self.at_the_end: list[Callable[[], None]] = []
        self.before_leaving: Callable[[], None] | None = None

        def stop() -> None:  # called when the group has failed, here or on a peer
            gate.failure = backend.monitor.failure
            backend.stop()

        backend.monitor.on_failure = stop
        dump.listen()
        self.p2p = PointToPoint(
            backend, self.checked_rank, self.import_array, lambda: self.devices().messages
        )
        calls = {name: getattr(self, name) for name in (*METHODS, *_MESSAGES)}
        calls.update(backend.fast(self))
        if (record := self.monitor.record) is not None and record.keeps_sites:
            calls.update((name, located(calls[name], record)) for name in METHODS)
        # For type checkers, `fast` is a ProcessGroup, since its functions have the same names and arguments.
        self.fast: ProcessGroup = cast(ProcessGroup, _Calls())
        for name, call in calls.items():
            setattr(self.fast, name, call)
        profiler.note(self)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    @property
    def timeout(self) -> float:
        """Seconds that a call may take."""
        return self.gate.timeout

    @timeout.setter
    def timeout(self, seconds: float) -> None:
        self.backend.limit(seconds)

    @property
    def failure(self) -> GroupError | None:
        """Why the group failed, or None."""
        return self.gate.failure

    def __repr__(self) -> str:
        return f"<ProcessGroup {self.name!r} on {self.backend.name}, rank {self.rank} of {self.size}>"

    # ---- arguments ---------------------------------------------------------------------------------

    def import_array(
        self, x: Any, *, writable: bool, what: str = "tensor", functional: bool = False
    ) -> ImportedArray:
        """Import a caller's array from host memory (arrays/arrays.py) or a GPU."""
        try:
            return import_array(x, writable=writable, what=what, functional=functional)
        except OnDeviceError as error:
            refused = error.with_traceback(None)
        return self.devices(refused).import_array(x, writable=writable, what=what)

    def import_list(self, xs: Sequence[Any], n: int, *, writable: bool, what: str) -> list[ImportedArray]:
        """Import a list of `n` arrays. Writable ones may not share memory."""
        items = import_list(xs, n, writable=writable, what=what, import_array=self.import_array)
        if writable and n > 1:
            operands.check_apart(items, what)
        return items

    def checked_rank(self, what: str, rank: Any) -> int:
        """Return the argument `what` as a group rank, or raise UsageError."""
        return operands.checked_rank(what, rank, self.size, self.name)

    def preparing(self, name: str) -> Preparing:
        """Return a context manager: an exception in its block refuses the collective call `name` on all ranks."""
        return Preparing(self.gate, self.planned, name)

    def devices(self, refused: OnDeviceError | None = None) -> DeviceCarrier:
        """Return the DeviceCarrier; if the group cannot use GPUs, raise `refused`."""
        return self.gpus.get(refused)

    # ---- calls -------------------------------------------------------------------------------------

    def rows_of_all(self, own: Array) -> Array:
        """Return an array with one row for each rank: the rank's array `own`. Collective.

        The ranks' arrays have equal sizes. Call this inside a call of the group, or while no call is in progress.
        """
        rows = np.empty((self.size, *own.shape), own.dtype)
        self.planned(Operation("all_gather", tuple(rows), (own,)))()
        return rows

    def planned(self, operation: Operation, timeout: float | None = None) -> Call:
        """Make the call of an operation, by the backend, or by the DeviceCarrier if the arrays are on GPUs.

        If the backend or DeviceCarrier does not carry out this kind of operation natively, the call is composed of
        other operations (operation.py).
        """
        arrays = operation.inputs or operation.outputs
        on_host = not arrays or type(arrays[0]) is np.ndarray
        carrier = self.backend if on_host else self.devices()
        if operation.kind in carrier.natively:
            return carrier.plan(operation, timeout)
        return COMPOSITIONS[operation.kind](carrier.plan, operation)

    def run(self, name: str, call: Call, owners: Sequence[ImportedArray], async_op: bool) -> Work | None:
        """Run a call after all earlier calls, then copy packed arrays back to the program's arrays (`owners`).

        Returns:
            With `async_op` a Work; else None, or the new array if an owner is an immutable array that was imported with
            `functional`.
        """
        gate = self.gate
        gate.check_usable()
        if gate.is_inside():
            raise UsageError(f"{name}: a signal handler may not use the group whose call it interrupted")
        if isinstance(call, StreamCall):
            work = call.start(name, owners)
            if async_op:
                return work
            work.wait()  # makes the arrays' stream wait, not the host
            return None

        def job() -> Any:
            gate.run_exclusively(call)
            return finish_all(owners)

        if async_op:
            work = gate.submit(name, job)
            work.outputs = [array for x in owners for array in x.arrays]
            return work
        functional: Work | None
        if not gate.queue.pending:
            functional = job()
            return functional
        with self.preparing(name):
            refuse_to_block(name)
        functional = gate.queue.submit(name, job).result()
        return functional

    # ---- collectives -------------------------------------------------------------------------------

    def all_reduce(self, tensor: Any, op: ReduceOp = ReduceOp.SUM, async_op: bool = False) -> Any:
        """Reduce over all ranks, in place; every rank gets the same bits.

        `tensor` may also be a dict, list or tuple of arrays.
        """
        if isinstance(tensor, CONTAINERS):
            return trees.all_reduce(self, tensor, op, async_op)
        with self.preparing("all_reduce"):
            x = self.import_array(tensor, writable=True, functional=True)
            source, plain = scaled(x.array, op)
            call = self.planned(Operation("all_reduce", (source,), (source,), plain))
        if source is not x.array:
            call = then_split(call, source, (x.array,))
        return self.run("all_reduce", call, (x,), async_op)

    def all_reduce_narrow(
        self, tensor: Any, op: ReduceOp, async_op: bool, travel: str | None, lost: Any
    ) -> Any:
        """Do `all_reduce` on an array of float32 that travels between nodes in a narrow type (travel.py)."""
        with self.preparing("all_reduce"):
            x = self.import_array(tensor, writable=True, functional=True)
            narrow = checked_narrow(travel, x.array, op, lost)
            if not self.backend.narrows:
                raise UnavailableError(
                    f"the group {self.name} runs on {self.backend.name}, where travel={travel!r} is not available; "
                    "leave travel out, or use the backend 'tcp'"
                )
            call = self.planned(Operation("all_reduce", (x.array,), (x.array,), op, narrow=narrow))
        return self.run("all_reduce", call, (x,), async_op)

    def reduce(self, tensor: Any, root: int, op: ReduceOp = ReduceOp.SUM, async_op: bool = False) -> Any:
        """Reduce over all ranks into the root's array; the other ranks' arrays are not changed."""
        return self._reduced("reduce", tensor, op, async_op, root)

    def scan(self, tensor: Any, op: ReduceOp = ReduceOp.SUM, async_op: bool = False) -> Any:
        """Inclusive prefix reduction in place: rank r gets the reduction of ranks 0..r."""
        return self._reduced("scan", tensor, op, async_op, self.rank)

    def exscan(self, tensor: Any, op: ReduceOp = ReduceOp.SUM, async_op: bool = False) -> Any:
        """Exclusive prefix reduction in place: rank r gets the reduction of ranks 0..r-1, rank 0 keeps its array."""
        return self._reduced("exscan", tensor, op, async_op, self.rank)

    def _reduced(self, kind: str, tensor: Any, op: ReduceOp, async_op: bool, root: int) -> Any:
        """Reduce in place into the array of `root`; in a scan every rank is its own root."""
        with self.preparing(kind):
            root = self.checked_rank("dst", root)
            x = self.import_array(tensor, writable=self.rank == root, functional=True)
            source, plain = scaled(x.array, op)
            to = root if kind == "reduce" else 0
            call = self.planned(Operation(kind, (x.array,), (source,), plain, to))
        return self.run(kind, call, (x,), async_op)

    def reduce_scatter(
        self, output: Any, input_list: Sequence[Any], op: ReduceOp = ReduceOp.SUM, async_op: bool = False
    ) -> Work | None:
        """Reduce list item r over all ranks into rank r's output; items may differ in shape."""
        with self.preparing("reduce_scatter"):
            out = self.import_array(output, writable=True, what="output")
            blocks = self.import_list(input_list, self.size, writable=False, what="input_list")
            operands.check_fit("output", out.array, f"input_list[{self.rank}]", blocks[self.rank].array)
            operands.check_dtypes("input_list", blocks, out.array)
            call = self._reduce_scatter(out.array, arrays_of(blocks), op)
        return self.run("reduce_scatter", call, (out,), async_op)

    def reduce_scatter_single(
        self,
        output: Any,
        input: Any,
        op: ReduceOp = ReduceOp.SUM,
        async_op: bool = False,
        input_split_sizes: Sequence[int] | None = None,
    ) -> Work | None:
        """Reduce over all ranks; rank r's output gets part r of the result.

        The parts lie along the first dimension, and have the same sizes on all ranks. Without split sizes, all parts
        have equal sizes.
        """
        with self.preparing("reduce_scatter_single"):
            out = self.import_array(output, writable=True, what="output")
            x = self.import_array(input, writable=False, what="input")
            if input_split_sizes is None:
                blocks = operands.equal_blocks("input", x.array, "output", out.array, self.size)
            else:
                blocks = tuple(operands.parts_along_rows("input", x.array, input_split_sizes, self.size))
                operands.check_fit("output", out.array, f"input part {self.rank}", blocks[self.rank])
            call = self._reduce_scatter(out.array, blocks, op)
        return self.run("reduce_scatter", call, (out,), async_op)

    def _reduce_scatter(self, out: Any, blocks: Sequence[Any], op: ReduceOp) -> Call:
        pairs = [scaled(block, op) for block in blocks]
        sources = apart([source for source, _ in pairs], [out], own=self.rank)
        return self.planned(Operation("reduce_scatter", (out,), sources, pairs[0][1]))

    def broadcast(self, tensor: Any, root: int, async_op: bool = False) -> Any:
        """Copy the root's array to all ranks' arrays, which have the same dtype and number of elements.

        `tensor` may also be a dict, list or tuple of arrays.
        """
        if isinstance(tensor, CONTAINERS):
            return trees.broadcast(self, tensor, root, async_op)
        with self.preparing("broadcast"):
            root = self.checked_rank("src", root)
            x = self.import_array(tensor, writable=self.rank != root, functional=True)
            call = self.planned(Operation("broadcast", (x.array,), (x.array,), root=root))
        return self.run("broadcast", call, (x,), async_op)

    def all_gather(self, output_list: Any, tensor: Any = None, async_op: bool = False) -> Any:
        """Copy rank r's array to list item r on every rank; sizes may differ between ranks.

        With one array and no list, ranks exchange their shapes first, and each returns a list of new arrays.
        """
        if tensor is None and not isinstance(output_list, CONTAINERS):
            return trees.all_gather_new(self, output_list, async_op)
        with self.preparing("all_gather"):
            owners = self.import_list(output_list, self.size, writable=True, what="tensor_list")
            x = self.import_array(tensor, writable=False)
            operands.check_fit("tensor", x.array, f"tensor_list[{self.rank}]", owners[self.rank].array)
            operands.check_dtypes("tensor_list", owners, x.array)
            outs = arrays_of(owners)
            call = self.planned(Operation("all_gather", outs, apart([x.array], outs, own=self.rank)))
        return self.run("all_gather", call, owners, async_op)

    def all_gather_single(self, output: Any, input: Any, async_op: bool = False) -> Work | None:
        """Concatenate all ranks' arrays, of equal sizes, in `output`."""
        with self.preparing("all_gather_single"):
            out = self.import_array(output, writable=True, what="output_tensor")
            x = self.import_array(input, writable=False, what="input_tensor")
            outs = operands.equal_blocks("output_tensor", out.array, "input_tensor", x.array, self.size)
            call = self.planned(Operation("all_gather", outs, apart([x.array], outs, own=self.rank)))
        return self.run("all_gather", call, (out,), async_op)

    def gather(
        self, tensor: Any, output_list: Sequence[Any] | None, root: int, async_op: bool = False
    ) -> Work | None:
        """Copy rank r's array to list item r on the root; the list is None on other ranks."""
        return self._gather("gather", tensor, output_list, root, async_op)

    def gather_single(self, tensor: Any, output: Any, root: int, async_op: bool = False) -> Work | None:
        """Concatenate all ranks' arrays, of equal sizes, in the root's `output`; other ranks give None."""
        return self._gather("gather_single", tensor, output, root, async_op)

    def _gather(self, name: str, tensor: Any, given: Any, root: int, async_op: bool) -> Work | None:
        with self.preparing(name):
            root = self.checked_rank("dst", root)
            x = self.import_array(tensor, writable=False)
            what = "gather_list" if name == "gather" else "gather_tensor"
            owners, outs = arguments.on_root(self, given, root, x, writable=True, what=what)
            call = self.planned(Operation("gather", outs, apart([x.array], outs, own=root), root=root))
        return self.run("gather", call, owners, async_op)

    def scatter(
        self, tensor: Any, input_list: Sequence[Any] | None, root: int, async_op: bool = False
    ) -> Any:
        """Copy list item r of the root to rank r's array; the list is None on other ranks."""
        return self._scatter("scatter", tensor, input_list, root, async_op)

    def scatter_single(self, tensor: Any, input: Any, root: int, async_op: bool = False) -> Any:
        """Divide the root's `input` into equal parts, and copy part r to rank r's array; other ranks give None."""
        return self._scatter("scatter_single", tensor, input, root, async_op)

    def _scatter(self, name: str, tensor: Any, given: Any, root: int, async_op: bool) -> Any:
        with self.preparing(name):
            root = self.checked_rank("src", root)
            out = self.import_array(tensor, writable=True, functional=True)
            what = "scatter_list" if name == "scatter" else "scatter_tensor"
            _, blocks = arguments.on_root(self, given, root, out, writable=False, what=what)
            sources = apart(blocks, [out.array], own=root)
            call = self.planned(Operation("scatter", (out.array,), sources, root=root))
        return self.run("scatter", call, (out,), async_op)

    def all_to_all(
        self, output_list: Sequence[Any], input_list: Sequence[Any], async_op: bool = False
    ) -> Work | None:
        """Copy list item p of rank r to list item r of rank p; all shapes may differ."""
        given, taken, here = "input_tensor_list", "output_tensor_list", self.rank
        with self.preparing("all_to_all"):
            owners = self.import_list(output_list, self.size, writable=True, what=taken)
            items = self.import_list(input_list, self.size, writable=False, what=given)
            outs, blocks = arrays_of(owners), arrays_of(items)
            operands.check_fit(f"{taken}[{here}]", outs[here], f"{given}[{here}]", blocks[here])
            operands.check_dtypes(taken, owners, blocks[0])
            operands.check_dtypes(given, items, blocks[0])
            call = self.planned(Operation("all_to_all", outs, apart(blocks, outs)))
        return self.run("all_to_all", call, owners, async_op)

    def all_to_all_single(
        self,
        output: Any,
        input: Any,
        output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
        async_op: bool = False,
    ) -> Work | None:
        """Copy part p of rank r's input to part r of rank p's output.

        Parts are along the first dimension; None or an empty list for the split sizes means equal parts.
        """
        with self.preparing("all_to_all_single"):
            out = self.import_array(output, writable=True, what="output")
            x = self.import_array(input, writable=False, what="input")
            outs, sources = arguments.rows_for_ranks(self, out, x, output_split_sizes, input_split_sizes)
            call = self.planned(Operation("all_to_all", outs, sources))
        return self.run("all_to_all", call, (out,), async_op)

    def all_reduce_coalesced(
        self, tensors: Sequence[Any], op: ReduceOp = ReduceOp.SUM, async_op: bool = False
    ) -> Work | None:
        """Do `all_reduce` on several arrays of one dtype in one operation; an array given twice is reduced once."""
        with self.preparing("all_reduce_coalesced"):
            given = arguments.of_one_dtype(self, tensors, writable=True, what="tensors")
            operands.check_apart(given, "tensors", once=True)
            owners = operands.distinct(given)
            xs = arrays_of(owners)
            call = self.planned(Operation("all_reduce_coalesced", xs, xs, op))
        return self.run("all_reduce_coalesced", call, owners, async_op)

    def all_gather_coalesced(
        self, output_lists: Sequence[Sequence[Any]], tensors: Sequence[Any], async_op: bool = False
    ) -> Work | None:
        """Do `all_gather` on several arrays of one dtype in one operation.

        Array k of rank r is copied to `output_lists[k][r]`.
        """
        given, taken = "input_tensor_list", "output_tensor_lists"
        with self.preparing("all_gather_coalesced"):
            xs = arguments.of_one_dtype(self, tensors, writable=False, what=given)
            owners = arguments.gathered_lists(self, output_lists, xs, given, taken)
            call = self.planned(Operation("all_gather_coalesced", arrays_of(owners), arrays_of(xs)))
        return self.run("all_gather_coalesced", call, owners, async_op)

    def barrier(self, async_op: bool = False, timeout: float | None = None) -> Work | None:
        """Block until every rank has called `barrier`."""
        return self.run("barrier", self.planned(Operation("barrier"), timeout), (), async_op)

    def monitored_barrier(self, timeout: float | None = None) -> None:
        """Do a barrier whose error names all missing ranks, on every rank.

        Args:
            timeout: seconds; None for the group's own.
        """
        self.run("monitored_barrier", self.planned(Operation("monitored_barrier"), timeout), (), False)

    # ---- point to point ----------------------------------------------------------------------------

    def send(self, tensor: Any, dst: int, tag: int = 0) -> None:
        """Send to `dst`, and return when the message has been received.

        If `dst` is this rank and the array is in host memory, return as soon as the message is buffered.
        """
        self.p2p.send(tensor, dst, tag)

    def recv(self, tensor: Any, src: int | None = None, tag: int = 0, status: Status | None = None) -> int:
        """Receive into `tensor` from `src`, or from the rank that sends first; return the sender's rank.

        The message must have the array's dtype and number of elements. If a `status` is given, it is filled, and the
        message may have fewer elements. Any other message is an error on both sides.
        """
        return self.p2p.recv(tensor, src, tag, status)

    def isend(self, tensor: Any, dst: int, tag: int = 0) -> Work:
        """Post a send, and return its Work."""
        return self.p2p.isend(tensor, dst, tag)

    def irecv(self, tensor: Any, src: int | None = None, tag: int = 0, status: Status | None = None) -> Work:
        """Post a receive, and return its Work, whose result is the sender's rank."""
        return self.p2p.irecv(tensor, src, tag, status)

    def send_init(self, tensor: Any, dst: int, tag: int = 0) -> Request:
        """Return a Request; each call of its `start` posts this `isend` anew."""
        return self.p2p.send_init(tensor, dst, tag)

    def recv_init(
        self, tensor: Any, src: int | None = None, tag: int = 0, status: Status | None = None
    ) -> Request:
        """Return a Request; each call of its `start` posts this `irecv` anew."""
        return self.p2p.recv_init(tensor, src, tag, status)

    def probe(self, src: int | None = None, tag: int = operands.ANY_TAG) -> Status:
        """Wait for a message from `src`, or any rank, that no receive has taken, and return its Status."""
        return self.p2p.probe(src, tag)

    def iprobe(self, src: int | None = None, tag: int = operands.ANY_TAG) -> Status | None:
        """Return what `probe` would find now, or None. Never waits."""
        return self.p2p.iprobe(src, tag)

    # ---- life -------------------------------------------------------------------------------------

    def abort(self, reason: str = "abort() was called") -> None:
        """Fail the group now, from any thread: calls under way and pending Works raise on all ranks."""
        if not self.gate.closed:
            here = self.monitor.name(self.rank)
            self.fail(AbortedError(f"{here} aborted the group {self.name}: {encodable(str(reason))}"))

    def fail(self, error: GroupError) -> None:
        """Fail the group with an error, and inform the peers. Any thread may call this."""
        self.backend.fail(error)

    def disown(self, error: GroupError) -> None:
        """In a child process made by fork: make every later use raise `error`. Sends and publishes nothing."""
        self.monitor.failure = self.gate.failure = error
        self.backend.disown(error)

    def may_wait(self) -> bool:
        """Whether this thread may wait for operations under way, because they progress without this thread."""
        return self.gate.may_wait() and not self.messages.is_entered()

    def close(self, exit_reason: str = "") -> None:
        """Leave the group and release its resources. Operations under way and later calls raise.

        The peers read the `exit_reason`. By default it describes the exception that is being handled, if any. A second
        call has no effect.
        """
        if not self.gate.closed:
            self.monitor.exit_reason = exit_reason = exit_reason or describe_exit(sys.exc_info()[1])
            if self.gate.is_busy():
                before = f"{self.gate.refusal}; then " if self.gate.refusal else ""
                self.abort(f"{before}it {exit_reason} while operations were under way")
            self.gate.closed = True
            with ExitStack() as steps:  # in reverse order; Ctrl-C in one step does not prevent the others
                steps.callback(dump.listen_no_more)
                steps.callback(lambda: self.backend.close(self.gate.failure))
                if (carrier := self.gpus.carrier) is not None:
                    steps.callback(lambda: carrier.close(self.gate.failure))
                steps.callback(self.gate.queue.close)
                for end in reversed(self.at_the_end):
                    steps.callback(end)


_MESSAGES = ("send", "recv", "isend", "irecv")


class _Calls:
    """The object `ProcessGroup.fast`, whose attributes are functions.

    They are set one by one (setattr), because an attribute set in this way is read in half the time.
    """
