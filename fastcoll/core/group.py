"""ProcessGroup: what every backend is, and what all of them share.

The public methods here validate once and adopt the arrays; a backend implements the `_plan_*` hooks,
which see contiguous ndarrays only and return a *call*: a function without arguments that carries the
operation out. Calls of one group run one at a time and in order, on the caller's thread when nothing is
ahead of them and on the group's progress thread otherwise.

All ranks in this file are group ranks, 0..size-1; api.py translates global ranks.
"""

from __future__ import annotations

import operator
import sys
import threading
from abc import abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, ClassVar, cast

import numpy as np

from ..errors import ArrayError, GroupError, MismatchError, NotInitializedError, UnavailableError, UsageError
from ..interop.arrays import Adopted, OnDeviceError, Renewed, adopt, adopt_list, finish_all, room_like
from .arguments import WORLD_OF_ONE
from .carrier import Call, Carrier, DeviceCarrier, StreamCall
from .memory import SymmetricMemory
from .monitor import Vigil, last_words
from .operands import (
    OBJECTS_TAG,
    SHAPE_NOTE,
    Array,
    agreed_shapes,
    apart,
    arrays_of,
    check_apart,
    check_dtypes,
    check_fit,
    checked_tag,
    equal_blocks,
    flattened,
    parts_along_rows,
    scaled,
    shape_note,
    then_split,
)
from .reduce_op import ReduceOp
from .signature import SHAPES
from .trees import CONTAINERS, Tree
from .work import ProgressQueue, Unheard, Work, is_progressing, refuse_to_block


class ProcessGroup(Carrier[Array]):
    """A set of ranks that do collective operations together.

    Every operation is collective (all ranks of the group call it, in the same order) except for the
    point-to-point ones. Synchronous calls block until the operation is complete on this rank, return
    None, and raise within the group's timeout; with `async_op=True` they return a Work at once and the
    arrays belong to the operation until it is complete. An operation in place on an immutable array (JAX's)
    returns a new one, as does the Work's `result`.

    Messages name the arguments as the functions of api.py do: `root` is src or dst there.

    Raises (every operation):
        UsageError: the call is wrong; the group stays usable.
        MismatchError: the ranks' calls differ; raised on every rank before data moves.
        GroupError: a peer died, did not come in time, or the group failed earlier.
        NotInitializedError: the group was destroyed.

    Attributes:
        name: unique in the job.
        ranks: global rank of each group rank.
        rank: this process's rank in the group.
        timeout: seconds that a call may take.
        failure: why the group failed, or None.
        unheard: its asynchronous operations that nobody has waited for.
    """

    backend: ClassVar[str]
    _vigil: Vigil

    def __init__(self, name: str, ranks: Sequence[int], rank: int, timeout: float) -> None:
        self.name = name
        self.ranks = tuple(ranks)
        self.rank = rank
        self.timeout = timeout
        self.failure: GroupError | None = None
        self._closed = False
        self._refusal = ""  # what the peers are told by the refused call under way
        self._turn = threading.Lock()
        self._inside: set[int] = set()  # threads that have the turn, or wait for it
        self._queue = ProgressQueue(name)
        self.unheard = Unheard()
        self._make_devices: Callable[[ProcessGroup], DeviceCarrier] | None = None
        self._device_carrier: DeviceCarrier | None = None
        self._turn_to_make = threading.Lock()

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r} rank {self.rank} of {self.size}>"

    @abstractmethod
    def _plan_meeting(self, operation: str, timeout: float) -> Call:
        """Return when all ranks have called `operation`, which moves no data; at the timeout name all missing ranks."""

    # ---- calls that are refused --------------------------------------------------------------------

    def preparing(self, name: str) -> _Preparing:
        """What is raised in this block refuses the collective call `name` before its turn: the peers are told."""
        return _Preparing(self, name)

    def refuse(self, name: str, error: Exception) -> None:
        """Tell the peers that this rank's collective call `name` was refused; does not wait for them.

        It is queued as a call that matches no other, so theirs raise MismatchError with this text. Where all ranks
        refuse theirs, nothing is left over. What a signal handler tries in the middle of a call is nobody's call.
        """
        if self.size == 1 or self.failure is not None or self._closed or self._is_inside():
            return
        text = f"rank {self.ranks[self.rank]}'s {name} was refused: {type(error).__name__}: {error}"
        meeting = self._plan_meeting("refused", self.timeout)

        def call() -> None:
            self._refusal = text
            try:
                meeting()
            except MismatchError:
                pass  # the others raise it; here the refusal itself was raised
            finally:
                self._refusal = ""

        with suppress(RuntimeError):  # the group was closed meanwhile, or no thread can be started
            work = self._queue.submit(f"the refused {name}", partial(self._in_turn, call))
            self.unheard.note(work, heard=True)

    # ---- arrays ------------------------------------------------------------------------------------

    def serve_gpus(self, make: Callable[[ProcessGroup], DeviceCarrier]) -> None:
        """What carries arrays on GPUs is made by `make` when the first one comes; without this they are refused."""
        self._make_devices = make

    def splits_gpus(self) -> bool:
        """Whether `split_gpus` has anything to do; the same on all ranks, between calls."""
        return self._device_carrier is not None and self._device_carrier.splits

    def split_gpus(self, group: ProcessGroup | None) -> None:
        """Give a new group of some of this one's ranks what carries its arrays on GPUs, made from what this one has.

        Collective; `group` is None on ranks that are not in it.
        """
        made = self._devices().split(group)
        if group is not None:
            group._device_carrier = made

    def begin_at_once(self) -> None:
        """Let asynchronous operations begin on their callers' threads, where progress threads have no cores.

        For callers that compute meanwhile; what would have to wait for peers is still done on the progress thread. A
        backend that has no such way does nothing.
        """

    def _devices(self, refused: OnDeviceError | None = None) -> DeviceCarrier:
        with self._turn_to_make:
            if self._device_carrier is None:
                if self._make_devices is None:
                    raise refused or UsageError(f"the group {self.name} serves no GPUs")
                self._device_carrier = self._make_devices(self)
            return self._device_carrier

    def _carrier(self, x: Any) -> Carrier[Any]:
        """What carries operations on an adopted array out."""
        return self if type(x) is np.ndarray else self._devices()

    def _adopt(self, x: Any, *, writable: bool, what: str = "tensor", renew: bool = False) -> Adopted:
        try:
            return adopt(x, writable=writable, what=what, renew=renew)
        except OnDeviceError as error:
            refused = error.with_traceback(None)
        return self._devices(refused).adopt(x, writable=writable, what=what)

    def _adopt_same_dtype(self, tensors: Sequence[Any], *, writable: bool, what: str) -> list[Adopted]:
        if not isinstance(tensors, Sequence):
            raise UsageError(f"{what} is of type {type(tensors).__name__}; give a list of arrays")
        if not tensors:
            raise UsageError(f"{what} is empty; give at least one array")
        xs = self._adopt_list(tensors, len(tensors), writable=writable, what=what)
        check_dtypes(what, xs, xs[0].array)
        return xs

    def _adopt_list(self, xs: Sequence[Any], n: int, *, writable: bool, what: str) -> list[Adopted]:
        """Take in a list of `n` arrays; outputs have memory of their own each."""
        items = adopt_list(xs, n, writable=writable, what=what, adopt=self._adopt)
        if writable and n > 1:
            check_apart(items, what)
        return items

    # ---- collectives ------------------------------------------------------------------------------

    def all_reduce(self, tensor: Any, op: ReduceOp = ReduceOp.SUM, async_op: bool = False) -> Any:
        """Reduce over all ranks, in place; the same bits on every rank. Also all arrays of a dict, list or tuple."""
        if isinstance(tensor, CONTAINERS):
            with self.preparing("all_reduce"):
                tree = Tree(tensor, lambda x, what: self._adopt(x, writable=True, what=what, renew=True))
                batches = tree.batches(lambda x: x.dtype)
                plan = self._carrier(tree.leaves[0].array)._plan_all_reduce_coalesced
                calls = [plan(leaves, op, tree.parts) for leaves in batches]
            return self._run_tree("all_reduce", tree, batches, calls, async_op)
        with self.preparing("all_reduce"):
            x = self._adopt(tensor, writable=True, renew=True)
            source, plain = scaled(x.array, op)
            call = self._carrier(source)._plan_all_reduce(source, plain)
            if source is not x.array:
                call = then_split(call, source, (x,))
        return self._run("all_reduce", call, (x,), async_op)

    def reduce(self, tensor: Any, root: int, op: ReduceOp = ReduceOp.SUM, async_op: bool = False) -> Any:
        """Reduce over all ranks into the root's array; the others' arrays stay as they are."""
        with self.preparing("reduce"):
            root = self._checked_rank("dst", root)
            x = self._adopt(tensor, writable=self.rank == root, renew=True)
            source, plain = scaled(x.array, op)
            call = self._carrier(source)._plan_reduce(x.array, source, plain, root)
        return self._run("reduce", call, (x,), async_op)

    def scan(self, tensor: Any, op: ReduceOp = ReduceOp.SUM, async_op: bool = False) -> Any:
        """Inclusive prefix reduction in place: rank r gets the reduction of ranks 0..r."""
        return self._scan("scan", tensor, op, False, async_op)

    def exscan(self, tensor: Any, op: ReduceOp = ReduceOp.SUM, async_op: bool = False) -> Any:
        """Exclusive prefix reduction in place: ranks 0..r-1; rank 0's array stays as it is."""
        return self._scan("exscan", tensor, op, True, async_op)

    def _scan(self, name: str, tensor: Any, op: ReduceOp, exclusive: bool, async_op: bool) -> Any:
        with self.preparing(name):
            x = self._adopt(tensor, writable=True, renew=True)
            source, plain = scaled(x.array, op)
            call = self._carrier(source)._plan_scan(x.array, source, plain, exclusive)
        return self._run(name, call, (x,), async_op)

    def reduce_scatter(
        self, output: Any, input_list: Sequence[Any], op: ReduceOp = ReduceOp.SUM, async_op: bool = False
    ) -> Work | None:
        """Reduce list item r over all ranks into rank r's output; items may differ in shape."""
        with self.preparing("reduce_scatter"):
            out = self._adopt(output, writable=True, what="output")
            blocks = self._adopt_list(input_list, self.size, writable=False, what="input_list")
            check_fit("output", out.array, f"input_list[{self.rank}]", blocks[self.rank].array)
            check_dtypes("input_list", blocks, out.array)
        return self._reduce_scatter(out, [block.array for block in blocks], op, async_op)

    def reduce_scatter_single(
        self, output: Any, input: Any, op: ReduceOp = ReduceOp.SUM, async_op: bool = False
    ) -> Work | None:
        """Reduce over all ranks; rank r's output gets part r of the size equal parts of the result."""
        with self.preparing("reduce_scatter_single"):
            out = self._adopt(output, writable=True, what="output")
            x = self._adopt(input, writable=False, what="input")
            blocks = equal_blocks("input", x.array, "output", out.array, self.size)
        return self._reduce_scatter(out, blocks, op, async_op)

    def _reduce_scatter(self, out: Adopted, blocks: list[Array], op: ReduceOp, async_op: bool) -> Work | None:
        with self.preparing("reduce_scatter"):
            pairs = [scaled(block, op) for block in blocks]
            sources = apart([source for source, _ in pairs], [out.array], own=self.rank)
            call = self._carrier(out.array)._plan_reduce_scatter(out.array, sources, pairs[0][1])
        return self._run("reduce_scatter", call, (out,), async_op)

    def broadcast(self, tensor: Any, root: int, async_op: bool = False) -> Any:
        """Copy the root's array into everybody's; same dtype and number of elements everywhere.

        Also all arrays of a dict, list or tuple.
        """
        if isinstance(tensor, CONTAINERS):
            return self._broadcast_tree(tensor, root, async_op)
        with self.preparing("broadcast"):
            root = self._checked_rank("src", root)
            x = self._adopt(tensor, writable=self.rank != root, renew=True)
            call = self._carrier(x.array)._plan_broadcast(x.array, root)
        return self._run("broadcast", call, (x,), async_op)

    def _broadcast_tree(self, tensors: Any, root: int, async_op: bool) -> Any:
        def planned(leaves: Sequence[Adopted]) -> Call:
            if tree.on_gpu:
                return self._devices()._plan_broadcast(cast(Any, leaves[0].array), root, tree.parts)
            xs = [Adopted(leaf.array.reshape(-1).view(np.uint8)) for leaf in leaves]
            flat = xs[0].array if len(xs) == 1 else flattened(xs)
            call = self._plan_broadcast(flat, root, tree.parts)
            return call if is_root or len(xs) == 1 else then_split(call, flat, xs)

        with self.preparing("broadcast"):
            root = self._checked_rank("src", root)
            is_root = self.rank == root
            tree = Tree(tensors, lambda x, what: self._adopt(x, writable=not is_root, what=what, renew=True))
            batches = [[leaf] for leaf in tree.leaves] if tree.on_gpu else tree.batches(lambda x: "bytes")
            calls = list(map(planned, batches))
        return self._run_tree("broadcast", tree, batches, calls, async_op)

    def _run_tree(
        self, name: str, tree: Tree, batches: list[list[Adopted]], calls: list[Call], async_op: bool
    ) -> Any:
        """Carry out the calls of a tree, one for each batch."""
        if not tree.on_gpu:
            return self._run(name, tree.in_turn(calls), (tree,), async_op)
        # A stream takes them in order, so the last one's Work stands for all.
        for call, leaves in zip(calls[:-1], batches, strict=False):
            self._run(name, call, leaves, False)
        return self._run(name, calls[-1], batches[-1], async_op)

    def all_gather(self, output_list: Any, tensor: Any = None, async_op: bool = False) -> Any:
        """Rank r's array goes to list item r on every rank; sizes may differ between ranks.

        With one array, and no list, ranks tell one another their shapes first, and get a list of new arrays.
        """
        if tensor is None and not isinstance(output_list, CONTAINERS):
            return self._all_gather_new(output_list, async_op)
        with self.preparing("all_gather"):
            outs = self._adopt_list(output_list, self.size, writable=True, what="tensor_list")
            x = self._adopt(tensor, writable=False)
            check_fit("tensor", x.array, f"tensor_list[{self.rank}]", outs[self.rank].array)
            check_dtypes("tensor_list", outs, x.array)
        return self._all_gather(outs, [out.array for out in outs], x.array, async_op)

    def _all_gather_new(self, tensor: Any, async_op: bool) -> Any:
        with self.preparing("all_gather"):
            x = self._adopt(tensor, writable=False)
            notes = np.empty(self.size, SHAPE_NOTE)
            note = shape_note(x.array).view(np.int64)
            tell = self._plan_all_gather(list(notes.view(np.int64).reshape(self.size, -1)), note, SHAPES)
        if type(x.array) is not np.ndarray:
            return self._all_gather_new_on_gpu(tensor, tell, notes, async_op)
        rooms: list[Renewed] = []

        def call() -> None:
            tell()
            rooms.extend(room_like(tensor, x.array, shape) for shape in agreed_shapes(notes, self.ranks))
            self._plan_all_gather([room.array for room in rooms], x.array)()

        made = Renewed(note, lambda _: [room.finish() for room in rooms])
        return self._run("all_gather", call, (made,), async_op)

    def _all_gather_new_on_gpu(self, tensor: Any, tell: Call, notes: Array, async_op: bool) -> list[Any]:
        if async_op or not hasattr(tensor, "new_empty"):
            raise UsageError(
                "all_gather(tensor) without a list takes, on a GPU, only torch's tensors and no async_op; give a "
                "list of arrays to gather into"
            )
        self._run("all_gather", tell, (), False)
        outs = [tensor.new_empty(shape) for shape in agreed_shapes(notes, self.ranks)]
        self.all_gather(outs, tensor)
        return outs

    def all_gather_single(self, output: Any, input: Any, async_op: bool = False) -> Work | None:
        """The arrays of all ranks, equal in size, one after the other in `output`."""
        with self.preparing("all_gather_single"):
            out = self._adopt(output, writable=True, what="output_tensor")
            x = self._adopt(input, writable=False, what="input_tensor")
            outs = equal_blocks("output_tensor", out.array, "input_tensor", x.array, self.size)
        return self._all_gather((out,), outs, x.array, async_op)

    def _all_gather(
        self, owners: Sequence[Adopted], outs: Sequence[Array], x: Array, async_op: bool
    ) -> Work | None:
        with self.preparing("all_gather"):
            (source,) = apart([x], outs, own=self.rank)
            call = self._carrier(source)._plan_all_gather(outs, source)
        return self._run("all_gather", call, owners, async_op)

    def gather(
        self, tensor: Any, output_list: Sequence[Any] | None, root: int, async_op: bool = False
    ) -> Work | None:
        """Rank r's array goes to list item r on the root; elsewhere the list is None."""
        with self.preparing("gather"):
            root = self._checked_rank("dst", root)
            x = self._adopt(tensor, writable=False)
            outs = self._adopt_on_root(output_list, root, writable=True, what="gather_list")
            if outs is not None:
                check_fit("tensor", x.array, f"gather_list[{root}]", outs[root].array)
                check_dtypes("gather_list", outs, x.array)
            (source,) = apart([x.array], arrays_of(outs) or (), own=root)
            call = self._carrier(source)._plan_gather(arrays_of(outs), source, root)
        return self._run("gather", call, outs or (), async_op)

    def scatter(
        self, tensor: Any, input_list: Sequence[Any] | None, root: int, async_op: bool = False
    ) -> Any:
        """List item r of the root goes to rank r's array; elsewhere the list is None."""
        with self.preparing("scatter"):
            root = self._checked_rank("src", root)
            out = self._adopt(tensor, writable=True, renew=True)
            blocks = self._adopt_on_root(input_list, root, writable=False, what="scatter_list")
            if blocks is not None:
                check_fit("tensor", out.array, f"scatter_list[{root}]", blocks[root].array)
                check_dtypes("scatter_list", blocks, out.array)
            sources = None if blocks is None else apart([b.array for b in blocks], [out.array], own=root)
            call = self._carrier(out.array)._plan_scatter(out.array, sources, root)
        return self._run("scatter", call, (out,), async_op)

    def all_to_all(
        self, output_list: Sequence[Any], input_list: Sequence[Any], async_op: bool = False
    ) -> Work | None:
        """List item p of rank r goes to list item r of rank p; all shapes may differ."""
        with self.preparing("all_to_all"):
            given, taken = "input_tensor_list", "output_tensor_list"
            outs = self._adopt_list(output_list, self.size, writable=True, what=taken)
            blocks = self._adopt_list(input_list, self.size, writable=False, what=given)
            here = self.rank
            check_fit(f"{taken}[{here}]", outs[here].array, f"{given}[{here}]", blocks[here].array)
            for name, items in ((taken, outs), (given, blocks)):
                check_dtypes(name, items, blocks[0].array)
        return self._all_to_all(outs, [out.array for out in outs], [b.array for b in blocks], async_op)

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
            out = self._adopt(output, writable=True, what="output")
            x = self._adopt(input, writable=False, what="input")
            if out.array.dtype != x.array.dtype:
                raise ArrayError(
                    f"output is {out.array.dtype}, input is {x.array.dtype}; they must be the same"
                )
            outs = parts_along_rows("output", out.array, output_split_sizes, self.size)
            blocks = parts_along_rows("input", x.array, input_split_sizes, self.size)
            check_fit(
                f"output part {self.rank}", outs[self.rank], f"input part {self.rank}", blocks[self.rank]
            )
        return self._all_to_all((out,), outs, blocks, async_op)

    def _all_to_all(
        self, owners: Sequence[Adopted], outs: list[Array], blocks: list[Array], async_op: bool
    ) -> Work | None:
        with self.preparing("all_to_all"):
            call = self._carrier(outs[0])._plan_all_to_all(outs, apart(blocks, outs))
        return self._run("all_to_all", call, owners, async_op)

    def barrier(self, async_op: bool = False, timeout: float | None = None) -> Work | None:
        """Wait until every rank has called."""
        limit = self.timeout if timeout is None else timeout
        return self._run("barrier", self._plan_meeting("barrier", limit), (), async_op)

    def monitored_barrier(self, timeout: float | None = None) -> None:
        """A barrier with a timeout of its own that names all missing ranks, on every rank.

        Args:
            timeout: seconds; None for the group's own.
        """
        limit = self.timeout if timeout is None else timeout
        self._run("monitored_barrier", self._plan_meeting("barrier", limit), (), False)

    def all_reduce_coalesced(
        self, tensors: Sequence[Any], op: ReduceOp = ReduceOp.SUM, async_op: bool = False
    ) -> Work | None:
        """`all_reduce` of several arrays of one dtype at the price of one."""
        with self.preparing("all_reduce_coalesced"):
            xs = self._adopt_same_dtype(tensors, writable=True, what="tensors")
            call = self._carrier(xs[0].array)._plan_all_reduce_coalesced(xs, op)
        return self._run("all_reduce_coalesced", call, xs, async_op)

    def _plan_all_reduce_coalesced(
        self, xs: Sequence[Adopted], op: ReduceOp, parts: Sequence[int] = ()
    ) -> Call:
        source, plain = scaled(xs[0].array if len(xs) == 1 else flattened(xs), op)
        call = self._plan_all_reduce(source, plain, parts or [x.array.size for x in xs])
        return call if source is xs[0].array else then_split(call, source, xs)

    def all_gather_coalesced(
        self, output_lists: Sequence[Sequence[Any]], tensors: Sequence[Any], async_op: bool = False
    ) -> Work | None:
        """`all_gather` of several arrays of one dtype at the price of one.

        Array k of rank r goes to `output_lists[k][r]`.
        """
        with self.preparing("all_gather_coalesced"):
            given, taken = "input_tensor_list", "output_tensor_lists"
            xs = self._adopt_same_dtype(tensors, writable=False, what=given)
            if not isinstance(output_lists, Sequence) or len(output_lists) != len(xs):
                raise UsageError(
                    f"{taken} must be a list of {len(xs)} lists of arrays, one for each array of {given}"
                )
            lists = [
                self._adopt_list(o, self.size, writable=True, what=f"{taken}[{k}]")
                for k, o in enumerate(output_lists)
            ]
            for k, (outs, x) in enumerate(zip(lists, xs, strict=True)):
                check_dtypes(f"{taken}[{k}]", outs, x.array)
                check_fit(f"{given}[{k}]", x.array, f"{taken}[{k}][{self.rank}]", outs[self.rank].array)
            check_apart([out for outs in lists for out in outs], taken, self.size)
            call = self._carrier(xs[0].array)._plan_all_gather_coalesced(lists, xs)
        return self._run("all_gather_coalesced", call, [o for outs in lists for o in outs], async_op)

    def _plan_all_gather_coalesced(self, lists: Sequence[Sequence[Adopted]], xs: Sequence[Adopted]) -> Call:
        per_rank = [[outs[r] for outs in lists] for r in range(self.size)]
        flats = [np.empty(sum(o.array.size for o in outs), xs[0].array.dtype) for outs in per_rank]
        call = self._plan_all_gather(flats, flattened(xs), [x.array.size for x in xs])
        for flat, outs in zip(flats, per_rank, strict=True):
            call = then_split(call, flat, outs)
        return call

    # ---- point to point ---------------------------------------------------------------------------

    def send(self, tensor: Any, dst: int, tag: int = 0) -> None:
        """Send to `dst`; returns when it has been received (to oneself: when it is buffered)."""
        dst = self._checked_rank("dst", dst)
        self._check_usable()
        x = self._adopt(tensor, writable=False)
        self._carrier(x.array)._send(x, dst, checked_tag(tag))

    def recv(self, tensor: Any, src: int | None = None, tag: int = 0) -> int:
        """Receive into `tensor` from `src`, or from whoever sends first; returns the sender's rank.

        The message must have the array's dtype and number of elements; anything else is an error on
        both sides.
        """
        src = self._checked_src(src)
        self._check_usable()
        x = self._adopt(tensor, writable=True)
        return self._carrier(x.array)._recv(x, src, checked_tag(tag))

    def isend(self, tensor: Any, dst: int, tag: int = 0) -> Work:
        """`send` that returns a Work at once."""
        return self._ready_isend(tensor, self._checked_rank("dst", dst), tag)()

    def _ready_isend(self, tensor: Any, dst: int, tag: int) -> Callable[[], Work]:
        """All of `isend` but the posting, which the result does; `dst` is checked."""
        self._check_usable()
        x = self._adopt(tensor, writable=False)
        return partial(self._carrier(x.array)._isend, x, dst, checked_tag(tag))

    def irecv(self, tensor: Any, src: int | None = None, tag: int = 0) -> Work:
        """`recv` that returns a Work at once; the Work's result is the sender's rank."""
        return self._ready_irecv(tensor, self._checked_src(src), tag)()

    def _ready_irecv(self, tensor: Any, src: int | None, tag: int) -> Callable[[], Work]:
        """All of `irecv` but the posting, which the result does; `src` is checked."""
        self._check_usable()
        x = self._adopt(tensor, writable=True)
        return partial(self._carrier(x.array)._irecv, x, src, checked_tag(tag))

    def send_objects(self, data: Array, dst: int) -> None:
        """`send` of contiguous bytes or sizes of objects, which no receive of an array takes."""
        self._check_usable()
        self._send(Adopted(data), self._checked_rank("dst", dst), OBJECTS_TAG)

    def recv_objects(self, data: Array, src: int | None) -> int:
        """`recv` of what `send_objects` sends; no array that is sent comes here."""
        self._check_usable()
        return self._recv(Adopted(data), self._checked_src(src), OBJECTS_TAG)

    # ---- symmetric arrays -------------------------------------------------------------------------

    def symmetric_memory(self, nbytes: int, label: str) -> SymmetricMemory:
        """Memory of `nbytes` for each rank that all ranks map; collective. See symmetric.py.

        Args:
            label: the shape and dtype that it is for, which all ranks must agree in.

        Raises:
            UnavailableError: this backend has none.
        """
        raise UnavailableError(
            f"the group {self.name} runs on {self.backend}, which has no symmetric arrays; make one of the ranks of "
            "one node with new_group(ranks, backend='shm')"
        )

    # ---- life -------------------------------------------------------------------------------------

    @abstractmethod
    def abort(self, reason: str = "abort() was called") -> None:
        """Fail the group now, from any thread: calls under way and pending Works raise on all ranks."""

    @abstractmethod
    def _fail(self, error: GroupError) -> None:
        """Fail the group with an error, from any thread, and tell the peers."""

    @abstractmethod
    def disown(self, error: GroupError) -> None:
        """In a child of fork: make every use raise `error`, without a word to the peers."""

    def may_wait(self) -> bool:
        """Whether this thread may wait for what is under way, which does not get on by this thread alone."""
        return not (self._closed or self._is_inside() or is_progressing())

    def start_to_leave(self) -> None:
        """Tell the other ranks that this one starts nothing more, though it still takes messages."""
        self._vigil.start_to_leave()

    def is_in_vain(self, work: Work) -> bool:
        """Whether no rank is left that could send the message which one of the group's operations needs."""
        return True

    def close(self, farewell: str = "") -> None:
        """Leave the group and release what it holds. Closing twice is fine; what is under way and later calls raise.

        Args:
            farewell: what the peers read of it; by default the exception that is being handled, if there is one.
        """
        if not self._closed:
            self._vigil.farewell = farewell = farewell or last_words(sys.exc_info()[1])
            if self._is_busy():
                before = f"{self._refusal}; then " if self._refusal else ""
                self.abort(f"{before}it {farewell} while operations were under way")
            self._closed = True
            self._queue.close()
            if self._device_carrier is not None:
                self._device_carrier._close(self.failure)
            self._close(self.failure)

    def _is_inside(self) -> bool:
        """Whether this thread is in the middle of a call: then this is a signal handler."""
        return threading.get_ident() in self._inside

    def _is_busy(self) -> bool:
        """Whether operations are under way or queued."""
        return self._queue.pending > 0 or self._turn.locked()

    def _check_usable(self) -> None:
        if self.failure is not None:
            # Without the tracebacks of earlier raises, which would keep their frames and arrays alive.
            raise self.failure.with_traceback(None)
        if self._closed:
            raise NotInitializedError(f"the group {self.name} was destroyed; make a new one")

    def _run(self, name: str, call: Call, owners: Sequence[Adopted], async_op: bool) -> Work | None:
        """Carry a call out, behind all earlier ones, then write packed copies back to their owners.

        Returns:
            The Work, or None; the array that stands for an immutable one, if that was adopted with `renew`.
        """
        self._check_usable()
        if self._is_inside():
            raise UsageError(f"{name}: a signal handler may not use the group whose call it interrupted")

        if isinstance(call, StreamCall):
            work = call.start(name, owners)
            if async_op:
                return work
            work.wait()  # the arrays' stream does, and the host does not
            return None

        def job() -> Any:
            self._in_turn(call)
            return finish_all(owners)

        if async_op:
            work = self.unheard.note(self._queue.submit(name, job))
            work.outputs = [array for x in owners for array in x.arrays]
            return work
        if self._queue.pending:
            with self.preparing(name):
                refuse_to_block(name)
            job = self._queue.submit(name, job).result
        renewed: Work | None = job()
        return renewed

    def _in_turn(self, call: Call) -> None:
        """Carry a call out on this thread."""
        thread = threading.get_ident()
        self._inside.add(thread)
        try:
            with self._turn:
                call()
        finally:
            self._inside.discard(thread)

    def _checked_rank(self, what: str, rank: Any) -> int:
        try:
            number = operator.index(rank)
        except TypeError as error:
            raise UsageError(f"{what} is {rank!r}; give a rank as an integer") from error
        if not 0 <= number < self.size:
            hint = WORLD_OF_ONE if self.size == 1 and self.name == "WORLD" else ""
            raise UsageError(f"{what} is {number}; the group {self.name} has ranks 0..{self.size - 1}{hint}")
        return number

    def _checked_src(self, src: int | None) -> int | None:
        return None if src is None else self._checked_rank("src", src)

    def _adopt_on_root(
        self, items: Sequence[Any] | None, root: int, *, writable: bool, what: str
    ) -> list[Adopted] | None:
        if self.rank == root:
            if items is None:
                raise UsageError(
                    f"{what} is None on the root (group rank {root}); give a list of {self.size} arrays"
                )
            return self._adopt_list(items, self.size, writable=writable, what=what)
        if items:
            raise UsageError(
                f"{what} must be None or empty on rank {self.rank}; only the root (rank {root}) gives it"
            )
        return None


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
