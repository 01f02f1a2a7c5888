"""ProcessGroup: a set of ranks that do collective operations together.

A public method makes an Operation of its arguments or refuses them (`preparing`), has the backend plan it, and carries
the plan out in its turn (gate.py). What is refused here is told to the peers, since their calls then match nothing.
Names in errors are those of torch.distributed's functions: `root` is src or dst there.

All ranks in this file are group ranks, 0..size-1; the api room translates global ranks.
"""

from __future__ import annotations

import operator
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, cast, final

import numpy as np

from ..arrays.arrays import ImportedArray, OnDeviceError, finish_all, import_array, import_list
from ..errors import AbortedError, ArrayError, GroupError, MismatchError, UsageError
from ..record import dump
from ..record.recorder import located
from . import operands, trees
from .backend import Backend, DeviceCarrier, Messages, StreamCall
from .message import Status
from .monitor import describe_exit
from .operands import OBJECTS_TAG, WORLD_OF_ONE, Array, apart, arrays_of, checked_tag, scaled
from .operation import COMPOSITIONS, Call, Operation, then_split
from .operations import METHODS
from .reduce_op import ReduceOp
from .request import Request
from .trees import CONTAINERS
from .work import Work, refuse_to_block


@final
class ProcessGroup:
    """A set of ranks that do collective operations together.

    Every operation is collective (all ranks of the group call it, in the same order) except for the
    point-to-point ones. Synchronous calls block until the operation is complete on this rank, return
    None, and raise within the group's timeout; with `async_op=True` they return a Work at once and the
    arrays belong to the operation until it is complete. An operation in place on an immutable array (JAX's)
    returns a new one, as does the Work's `result`.

    Raises (every operation):
        UsageError: the call is wrong; the group stays usable.
        MismatchError: the ranks' calls differ; raised on every rank before data moves.
        GroupError: a peer died, did not come in time, or the group failed earlier.
        NotInitializedError: the group was destroyed.

    Attributes:
        fast: the methods below that do collectives and messages, under the same names, for callers who want speed:
            where the backend has one (`Backend.fast`: shm/fast.py, net/tcp/fast.py, ...), a function that does the
            plain case at once, and leaves the rest to the method.
        name: unique in the job.
        ranks: global rank of each group rank.
        rank: this process's rank in the group.
        backend: what carries operations on arrays in host memory out.
        messages: the same for messages.
        gate: who may run a call now.
        monitor: which of the others live.
        at_the_end: what is to be done first as the group ends here, in no time.
        before_leaving: what to do before the group is left in order; it may block.
    """

    def __init__(self, backend: Backend) -> None:
        self.backend, self.gate = backend, backend.gate
        self.monitor, self.messages = backend.monitor, backend.messages
        gate = self.gate
        self.name, self.ranks, self.rank = gate.name, gate.ranks, gate.rank
        self._make_devices: Callable[[ProcessGroup], DeviceCarrier] | None = None
        self._device_carrier: DeviceCarrier | None = None
        self._turn_to_make = threading.Lock()
        self.at_the_end: list[Callable[[], None]] = []
        self.before_leaving: Callable[[], None] | None = None

        def stop() -> None:  # the monitor has found, or been told, that the group has failed
            gate.failure = backend.monitor.failure
            backend.stop()

        backend.monitor.on_failure = stop
        dump.listen()
        calls = {name: getattr(self, name) for name in (*METHODS, *_MESSAGES)}
        calls.update(backend.fast(self))
        if (record := self.monitor.record) is not None and record.keeps_sites:
            calls.update((name, located(calls[name], record)) for name in METHODS)
        # As a ProcessGroup for type checkers, since these are its methods' names and arguments.
        self.fast: ProcessGroup = cast(ProcessGroup, _Calls())
        for name, call in calls.items():
            setattr(self.fast, name, call)

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
        """Take a caller's array in, wherever its memory is; see arrays/arrays.py."""
        try:
            return import_array(x, writable=writable, what=what, functional=functional)
        except OnDeviceError as error:
            refused = error.with_traceback(None)
        return self.devices(refused).import_array(x, writable=writable, what=what)

    def import_list(self, xs: Sequence[Any], n: int, *, writable: bool, what: str) -> list[ImportedArray]:
        """Take in a list of `n` arrays; outputs have memory of their own each."""
        items = import_list(xs, n, writable=writable, what=what, import_array=self.import_array)
        if writable and n > 1:
            operands.check_apart(items, what)
        return items

    def checked_rank(self, what: str, rank: Any) -> int:
        """A group rank, or a UsageError; `what` names the argument."""
        try:
            number = operator.index(rank)
        except TypeError as error:
            raise UsageError(f"{what} is {rank!r}; give a rank as an integer") from error
        if not 0 <= number < self.size:
            hint = WORLD_OF_ONE if self.size == 1 and self.name == "WORLD" else ""
            raise UsageError(f"{what} is {number}; the group {self.name} has ranks 0..{self.size - 1}{hint}")
        return number

    def preparing(self, name: str) -> _Preparing:
        """What is raised in this block refuses the collective call `name` before its turn: the peers are told."""
        return _Preparing(self, name)

    def refuse(self, name: str, error: Exception) -> None:
        """Tell the peers that this rank's collective call `name` was refused; does not wait for them.

        It is queued as a call that matches no other, so theirs raise MismatchError with this text. Where all ranks
        refuse theirs, nothing is left over. What a signal handler tries in the middle of a call is nobody's call.
        """
        gate = self.gate
        if self.size == 1 or gate.failure is not None or gate.closed or gate.is_inside():
            return
        text = f"rank {self.ranks[self.rank]}'s {name} was refused: {type(error).__name__}: {error}"
        meeting = self.planned(Operation("refused"))

        def call() -> None:
            gate.refusal = text
            try:
                meeting()
            except MismatchError:
                pass  # the others raise it; here the refusal itself was raised
            finally:
                gate.refusal = ""

        with suppress(RuntimeError):  # the group was closed meanwhile, or no thread can be started
            gate.submit(f"the refused {name}", partial(gate.in_turn, call), heard=True)

    # ---- GPUs --------------------------------------------------------------------------------------

    def serve_gpus(self, make: Callable[[ProcessGroup], DeviceCarrier]) -> None:
        """What carries arrays on GPUs is made by `make` when the first one comes; without this they are refused."""
        self._make_devices = make

    def devices(self, refused: OnDeviceError | None = None) -> DeviceCarrier:
        """What carries arrays on GPUs; `refused`: what to raise where nothing does."""
        with self._turn_to_make:
            if self._device_carrier is None:
                if self._make_devices is None:
                    raise refused or UsageError(f"the group {self.name} serves no GPUs")
                self._device_carrier = self._make_devices(self)
            return self._device_carrier

    def splits_gpus(self) -> bool:
        """Whether `split_gpus` has anything to do; the same on all ranks, between calls."""
        return self._device_carrier is not None and self._device_carrier.splits

    def split_gpus(self, group: ProcessGroup | None) -> None:
        """Give a new group of some of this one's ranks what carries its arrays on GPUs, made from what this one has.

        Collective; `group` is None on ranks that are not in it.
        """
        made = self.devices().split(group)
        if group is not None:
            group._device_carrier = made

    # ---- calls -------------------------------------------------------------------------------------

    def rows_of_all(self, own: Array) -> Array:
        """Every rank's `own`, of one size, row by row; collective, in a call of the group or between two."""
        rows = np.empty((self.size, *own.shape), own.dtype)
        self.planned(Operation("all_gather", tuple(rows), (own,)))()
        return rows

    def planned(self, operation: Operation, timeout: float | None = None) -> Call:
        """What carries an operation on arrays in host memory, or on GPUs, out; or a composition of what it can do."""
        arrays = operation.inputs or operation.outputs
        on_host = not arrays or type(arrays[0]) is np.ndarray
        carrier = self.backend if on_host else self.devices()
        if operation.kind in carrier.natively:
            return carrier.plan(operation, timeout)
        return COMPOSITIONS[operation.kind](carrier.plan, operation)

    def run(self, name: str, call: Call, owners: Sequence[ImportedArray], async_op: bool) -> Work | None:
        """Carry a call out, behind all earlier ones, then write packed copies back to their owners.

        Returns:
            The Work, or None; the array that stands for an immutable one, if that was adopted with `renew`.
        """
        gate = self.gate
        gate.check_usable()
        if gate.is_inside():
            raise UsageError(f"{name}: a signal handler may not use the group whose call it interrupted")
        if isinstance(call, StreamCall):
            work = call.start(name, owners)
            if async_op:
                return work
            work.wait()  # the arrays' stream does, and the host does not
            return None

        def job() -> Any:
            gate.in_turn(call)
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
        """Reduce over all ranks, in place; the same bits on every rank. Also all arrays of a dict, list or tuple."""
        if isinstance(tensor, CONTAINERS):
            return trees.all_reduce(self, tensor, op, async_op)
        with self.preparing("all_reduce"):
            x = self.import_array(tensor, writable=True, functional=True)
            source, plain = scaled(x.array, op)
            call = self.planned(Operation("all_reduce", (source,), (source,), plain))
        if source is not x.array:
            call = then_split(call, source, (x.array,))
        return self.run("all_reduce", call, (x,), async_op)

    def reduce(self, tensor: Any, root: int, op: ReduceOp = ReduceOp.SUM, async_op: bool = False) -> Any:
        """Reduce over all ranks into the root's array; the others' arrays stay as they are."""
        return self._reduced("reduce", tensor, op, async_op, root)

    def scan(self, tensor: Any, op: ReduceOp = ReduceOp.SUM, async_op: bool = False) -> Any:
        """Inclusive prefix reduction in place: rank r gets the reduction of ranks 0..r."""
        return self._reduced("scan", tensor, op, async_op, self.rank)

    def exscan(self, tensor: Any, op: ReduceOp = ReduceOp.SUM, async_op: bool = False) -> Any:
        """Exclusive prefix reduction in place: ranks 0..r-1; rank 0's array stays as it is."""
        return self._reduced("exscan", tensor, op, async_op, self.rank)

    def _reduced(self, kind: str, tensor: Any, op: ReduceOp, async_op: bool, root: int) -> Any:
        """A reduction in place, into the array of `root`; in a scan every rank is its own."""
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

        Parts are along the first dimension, and the same on all ranks; None for the split sizes means equal parts.
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
        """Copy the root's array into everybody's; same dtype and number of elements everywhere.

        Also all arrays of a dict, list or tuple.
        """
        if isinstance(tensor, CONTAINERS):
            return trees.broadcast(self, tensor, root, async_op)
        with self.preparing("broadcast"):
            root = self.checked_rank("src", root)
            x = self.import_array(tensor, writable=self.rank != root, functional=True)
            call = self.planned(Operation("broadcast", (x.array,), (x.array,), root=root))
        return self.run("broadcast", call, (x,), async_op)

    def all_gather(self, output_list: Any, tensor: Any = None, async_op: bool = False) -> Any:
        """Rank r's array goes to list item r on every rank; sizes may differ between ranks.

        With one array, and no list, ranks tell one another their shapes first, and get a list of new arrays.
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
        """The arrays of all ranks, equal in size, one after the other in `output`."""
        with self.preparing("all_gather_single"):
            out = self.import_array(output, writable=True, what="output_tensor")
            x = self.import_array(input, writable=False, what="input_tensor")
            outs = operands.equal_blocks("output_tensor", out.array, "input_tensor", x.array, self.size)
            call = self.planned(Operation("all_gather", outs, apart([x.array], outs, own=self.rank)))
        return self.run("all_gather", call, (out,), async_op)

    def gather(
        self, tensor: Any, output_list: Sequence[Any] | None, root: int, async_op: bool = False
    ) -> Work | None:
        """Rank r's array goes to list item r on the root; elsewhere the list is None."""
        return self._gather("gather", tensor, output_list, root, async_op)

    def gather_single(self, tensor: Any, output: Any, root: int, async_op: bool = False) -> Work | None:
        """The arrays of all ranks, equal in size, one after the other in the root's `output`; elsewhere None."""
        return self._gather("gather_single", tensor, output, root, async_op)

    def _gather(self, name: str, tensor: Any, given: Any, root: int, async_op: bool) -> Work | None:
        with self.preparing(name):
            root = self.checked_rank("dst", root)
            x = self.import_array(tensor, writable=False)
            what = "gather_list" if name == "gather" else "gather_tensor"
            owners, outs = self._import_on_root(given, root, x, writable=True, what=what)
            call = self.planned(Operation("gather", outs, apart([x.array], outs, own=root), root=root))
        return self.run("gather", call, owners, async_op)

    def scatter(
        self, tensor: Any, input_list: Sequence[Any] | None, root: int, async_op: bool = False
    ) -> Any:
        """List item r of the root goes to rank r's array; elsewhere the list is None."""
        return self._scatter("scatter", tensor, input_list, root, async_op)

    def scatter_single(self, tensor: Any, input: Any, root: int, async_op: bool = False) -> Any:
        """Part r of the size equal parts of the root's `input` goes to rank r's array; elsewhere it is None."""
        return self._scatter("scatter_single", tensor, input, root, async_op)

    def _scatter(self, name: str, tensor: Any, given: Any, root: int, async_op: bool) -> Any:
        with self.preparing(name):
            root = self.checked_rank("src", root)
            out = self.import_array(tensor, writable=True, functional=True)
            what = "scatter_list" if name == "scatter" else "scatter_tensor"
            _, blocks = self._import_on_root(given, root, out, writable=False, what=what)
            sources = apart(blocks, [out.array], own=root)
            call = self.planned(Operation("scatter", (out.array,), sources, root=root))
        return self.run("scatter", call, (out,), async_op)

    def _import_on_root(
        self, given: Any, root: int, own: ImportedArray, *, writable: bool, what: str
    ) -> tuple[Sequence[ImportedArray], tuple[Any, ...]]:
        """What only the root gives, and its arrays, one a rank: a list, or a whole of blocks like `own`; else none."""
        is_list = what.endswith("_list")
        if self.rank != root:
            if given if is_list else given is not None:
                expected = "None or empty" if is_list else "None"
                raise UsageError(
                    f"{what} must be {expected} on rank {self.rank}; only the root (rank {root}) gives it"
                )
            return (), ()
        if given is None:
            cure = f"a list of {self.size} arrays" if is_list else f"{self.size} times the elements of tensor"
            raise UsageError(f"{what} is None on the root (group rank {root}); give {cure}")
        if not is_list:
            whole = self.import_array(given, writable=writable, what=what)
            return (whole,), operands.equal_blocks(what, whole.array, "tensor", own.array, self.size)
        items = self.import_list(given, self.size, writable=writable, what=what)
        operands.check_fit("tensor", own.array, f"{what}[{root}]", items[root].array)
        operands.check_dtypes(what, items, own.array)
        return items, arrays_of(items)

    def all_to_all(
        self, output_list: Sequence[Any], input_list: Sequence[Any], async_op: bool = False
    ) -> Work | None:
        """List item p of rank r goes to list item r of rank p; all shapes may differ."""
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
        """Part p of rank r's input goes to part r of rank p's output.

        Parts are along the first dimension; None for the split sizes means equal parts.
        """
        with self.preparing("all_to_all_single"):
            out = self.import_array(output, writable=True, what="output")
            x = self.import_array(input, writable=False, what="input")
            if out.array.dtype != x.array.dtype:
                raise ArrayError(
                    f"output is {out.array.dtype}, input is {x.array.dtype}; they must be the same"
                )
            outs = operands.parts_along_rows("output", out.array, output_split_sizes, self.size)
            blocks = operands.parts_along_rows("input", x.array, input_split_sizes, self.size)
            here = self.rank
            operands.check_fit(f"output part {here}", outs[here], f"input part {here}", blocks[here])
            call = self.planned(Operation("all_to_all", tuple(outs), apart(blocks, outs)))
        return self.run("all_to_all", call, (out,), async_op)

    def all_reduce_coalesced(
        self, tensors: Sequence[Any], op: ReduceOp = ReduceOp.SUM, async_op: bool = False
    ) -> Work | None:
        """`all_reduce` of several arrays of one dtype in one operation; an array given twice is reduced once."""
        with self.preparing("all_reduce_coalesced"):
            given = self._import_of_one_dtype(tensors, writable=True, what="tensors")
            operands.check_apart(given, "tensors", once=True)
            owners = operands.distinct(given)
            xs = arrays_of(owners)
            call = self.planned(Operation("all_reduce_coalesced", xs, xs, op))
        return self.run("all_reduce_coalesced", call, owners, async_op)

    def all_gather_coalesced(
        self, output_lists: Sequence[Sequence[Any]], tensors: Sequence[Any], async_op: bool = False
    ) -> Work | None:
        """`all_gather` of several arrays of one dtype at the price of one.

        Array k of rank r goes to `output_lists[k][r]`.
        """
        given, taken, owners = "input_tensor_list", "output_tensor_lists", []
        with self.preparing("all_gather_coalesced"):
            xs = self._import_of_one_dtype(tensors, writable=False, what=given)
            if not isinstance(output_lists, Sequence) or len(output_lists) != len(xs):
                raise UsageError(
                    f"{taken} must be a list of {len(xs)} lists of arrays, one for each array of {given}"
                )
            for k, (lists, x) in enumerate(zip(output_lists, xs, strict=True)):
                outs = self.import_list(lists, self.size, writable=True, what=f"{taken}[{k}]")
                operands.check_dtypes(f"{taken}[{k}]", outs, x.array)
                operands.check_fit(
                    f"{given}[{k}]", x.array, f"{taken}[{k}][{self.rank}]", outs[self.rank].array
                )
                owners += outs
            operands.check_apart(owners, taken, self.size)
            call = self.planned(Operation("all_gather_coalesced", arrays_of(owners), arrays_of(xs)))
        return self.run("all_gather_coalesced", call, owners, async_op)

    def _import_of_one_dtype(self, tensors: Any, *, writable: bool, what: str) -> list[ImportedArray]:
        if not isinstance(tensors, Sequence):
            raise UsageError(f"{what} is of type {type(tensors).__name__}; give a list of arrays")
        if not tensors:
            raise UsageError(f"{what} is empty; give at least one array")
        xs = import_list(tensors, len(tensors), writable=writable, what=what, import_array=self.import_array)
        operands.check_dtypes(what, xs, xs[0].array)
        return xs

    def barrier(self, async_op: bool = False, timeout: float | None = None) -> Work | None:
        """Wait until every rank has called."""
        return self.run("barrier", self.planned(Operation("barrier"), timeout), (), async_op)

    def monitored_barrier(self, timeout: float | None = None) -> None:
        """A barrier that names all missing ranks, on every rank; `timeout` in seconds, None for the group's own."""
        self.run("monitored_barrier", self.planned(Operation("monitored_barrier"), timeout), (), False)

    # ---- point to point ----------------------------------------------------------------------------

    def send(self, tensor: Any, dst: int, tag: int = 0) -> None:
        """Send to `dst`; returns when it has been received (to oneself: when it is buffered)."""
        dst = self.checked_rank("dst", dst)
        x, messages = self._prepared(tensor, writable=False)
        messages.send(x, dst, checked_tag(tag))

    def recv(self, tensor: Any, src: int | None = None, tag: int = 0, status: Status | None = None) -> int:
        """Receive into `tensor` from `src`, or from whoever sends first; returns the sender's rank.

        The message must have the array's dtype and number of elements. With `status`, which is filled, it may have
        fewer elements. Any other message is an error on both sides.
        """
        src = self.checked_src(src)
        x, messages = self._prepared(tensor, writable=True)
        return messages.recv(x, src, operands.checked_receive_tag(tag), _checked_status(status))

    def isend(self, tensor: Any, dst: int, tag: int = 0) -> Work:
        """`send` that returns a Work at once."""
        return self.ready_isend(tensor, self.checked_rank("dst", dst), tag)()

    def ready_isend(self, tensor: Any, dst: int, tag: int) -> Callable[[], Work]:
        """All of `isend` but the posting, which the result does; `dst` is checked."""
        x, messages = self._prepared(tensor, writable=False)
        post = self.post_send if messages is self.messages else messages.isend
        return partial(post, x, dst, checked_tag(tag))

    def irecv(self, tensor: Any, src: int | None = None, tag: int = 0, status: Status | None = None) -> Work:
        """`recv` that returns a Work at once; the Work's result is the sender's rank."""
        return self.ready_irecv(tensor, self.checked_src(src), tag, status)()

    def ready_irecv(
        self, tensor: Any, src: int | None, tag: int, status: Status | None = None
    ) -> Callable[[], Work]:
        """All of `irecv` but the posting, which the result does; `src` is checked."""
        x, messages = self._prepared(tensor, writable=True)
        post = self.post_receive if messages is self.messages else messages.irecv
        return partial(post, x, src, operands.checked_receive_tag(tag), _checked_status(status))

    def send_init(self, tensor: Any, dst: int, tag: int = 0) -> Request:
        """Make an `isend` that the Request's `start` posts, any number of times."""
        self.ready_isend(tensor, self.checked_rank("dst", dst), tag)  # checks the arguments
        return Request(partial(self.isend, tensor, dst, tag))

    def recv_init(
        self, tensor: Any, src: int | None = None, tag: int = 0, status: Status | None = None
    ) -> Request:
        """Make an `irecv` that the Request's `start` posts, any number of times."""
        self.ready_irecv(tensor, self.checked_src(src), tag, status)
        return Request(partial(self.irecv, tensor, src, tag, status))

    def probe(self, src: int | None = None, tag: int = operands.ANY_TAG) -> Status:
        """Wait for a message from `src`, or any rank, that no receive has taken; return its Status, leave it there."""
        return self.messages.probe(*self._sought(src, tag))

    def iprobe(self, src: int | None = None, tag: int = operands.ANY_TAG) -> Status | None:
        """Return what `probe` would find now, or None. Never waits."""
        return self.messages.iprobe(*self._sought(src, tag))

    def _sought(self, src: int | None, tag: int) -> tuple[int | None, int]:
        self.gate.check_usable()
        return self.checked_src(src), operands.checked_receive_tag(tag)

    def _prepared(self, tensor: Any, *, writable: bool) -> tuple[ImportedArray, Messages]:
        """The array of a message, adopted, and what carries the message out."""
        self.gate.check_usable()
        x = self.import_array(tensor, writable=writable)
        if type(x.array) is not np.ndarray:
            return x, self.devices().messages
        self.backend.learn(x.array.dtype)
        return x, self.messages

    def post_send(self, x: ImportedArray, dst: int, tag: int) -> Work:
        """`isend` of an adopted host array."""
        self.backend.learn(x.array.dtype)
        return self.gate.unobserved.note(self.messages.isend(x, dst, tag))

    def post_receive(self, x: ImportedArray, src: int | None, tag: int, status: Status | None = None) -> Work:
        """`irecv` into an adopted host array."""
        self.backend.learn(x.array.dtype)
        return self.gate.unobserved.note(self.messages.irecv(x, src, tag, status))

    def send_objects(self, data: Array, dst: int) -> None:
        """`send` of contiguous bytes or sizes of objects, which no receive of an array takes."""
        self.send_apart(data, self.checked_rank("dst", dst), OBJECTS_TAG)

    def recv_objects(self, data: Array, src: int | None) -> int:
        """`recv` of what `send_objects` sends; no array that is sent comes here."""
        return self.recv_apart(data, self.checked_src(src), OBJECTS_TAG)

    def send_apart(self, x: Array, dst: int, tag: int) -> None:
        """`send` of a plain array with a tag above those of users, such as JAX_TAGS + 5; `dst` is already checked."""
        self.gate.check_usable()
        self.messages.send(ImportedArray(x), dst, tag)

    def recv_apart(self, x: Array, src: int | None, tag: int, status: Status | None = None) -> int:
        """Receive a message of `send_apart`."""
        self.gate.check_usable()
        return self.messages.recv(ImportedArray(x), src, tag, status)

    # ---- life -------------------------------------------------------------------------------------

    def abort(self, reason: str = "abort() was called") -> None:
        """Fail the group now, from any thread: calls under way and pending Works raise on all ranks."""
        if not self.gate.closed:
            here = self.monitor.name(self.rank)
            self.fail(AbortedError(f"{here} aborted the group {self.name}: {reason}"))

    def fail(self, error: GroupError) -> None:
        """Fail the group with an error, from any thread, and tell the peers."""
        self.backend.fail(error)

    def disown(self, error: GroupError) -> None:
        """In a child of fork: make every use raise `error`, without a word to the peers."""
        self.monitor.failure = self.gate.failure = error
        self.backend.disown(error)

    def may_wait(self) -> bool:
        """Whether this thread may wait for what is under way, which does not get on by this thread alone."""
        return self.gate.may_wait() and not self.messages.is_entered()

    def close(self, exit_reason: str = "") -> None:
        """Leave the group and release what it holds. Closing twice is fine; what is under way and later calls raise.

        The peers read the `farewell`; by default the exception that is being handled, if there is one.
        """
        if not self.gate.closed:
            self.monitor.exit_reason = exit_reason = exit_reason or describe_exit(sys.exc_info()[1])
            if self.gate.is_busy():
                before = f"{self.gate.refusal}; then " if self.gate.refusal else ""
                self.abort(f"{before}it {exit_reason} while operations were under way")
            self.gate.closed = True
            for end in self.at_the_end:
                end()
            self.gate.queue.close()
            if self._device_carrier is not None:
                self._device_carrier.close(self.gate.failure)
            self.backend.close(self.gate.failure)
            dump.listen_no_more()

    def checked_src(self, src: int | None) -> int | None:
        """The rank that a receive is from, if it is one; None: any."""
        return None if src is None else self.checked_rank("src", src)


def _checked_status(status: Any) -> Status | None:
    if status is not None and not isinstance(status, Status):
        raise UsageError(f"status is of type {type(status).__name__}; give a Status(), which is filled")
    return status


_MESSAGES = ("send", "recv", "isend", "irecv")


class _Calls:
    """What `ProcessGroup.fast` has. An instance whose attributes are set one by one is read in half the time."""


class _Preparing:
    """See `ProcessGroup.preparing`; a class of its own, since a generator takes 1 us more."""

    __slots__ = ("_group", "_name")

    def __init__(self, group: ProcessGroup, name: str) -> None:
        self._group, self._name = group, name

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, Exception):
            self._group.refuse(self._name, error)
