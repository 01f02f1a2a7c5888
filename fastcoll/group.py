"""ProcessGroup: what every backend is, and what all of them share.

The public methods here validate once and adopt the arrays; a backend implements the `_plan_*` hooks,
which see contiguous ndarrays only and return a *call*: a function without arguments that carries the
operation out. Calls of one group run one at a time and in order, on the caller's thread when nothing is
ahead of them and on the group's progress thread otherwise.

All ranks in this file are group ranks, 0..size-1; api.py translates global ranks.
"""

from __future__ import annotations

import operator
import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from .arrays import Adopted, adopt, adopt_list
from .errors import ArrayError, GroupError, NotInitializedError, UnavailableError, UsageError
from .memory import SymmetricMemory
from .operands import (
    Array,
    Call,
    adopt_same_dtype,
    apart,
    arrays_of,
    check_dtypes,
    check_fit,
    checked_tag,
    equal_blocks,
    flattened,
    parts_along_rows,
    scaled,
    then_split,
)
from .reduce_op import ReduceOp
from .work import ProgressQueue, Work, refuse_to_block


class ProcessGroup(ABC):
    """A set of ranks that do collective operations together.

    Every operation is collective (all ranks of the group call it, in the same order) except for the
    point-to-point ones. Synchronous calls block until the operation is complete on this rank, return
    None, and raise within the group's timeout; with `async_op=True` they return a Work at once and the
    arrays belong to the operation until it is complete.

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
    """

    backend: ClassVar[str]

    def __init__(self, name: str, ranks: Sequence[int], rank: int, timeout: float) -> None:
        self.name = name
        self.ranks = tuple(ranks)
        self.rank = rank
        self.timeout = timeout
        self.failure: GroupError | None = None
        self._closed = False
        self._turn = threading.Lock()
        self._inside: set[int] = set()  # threads that have the turn, or wait for it
        self._queue = ProgressQueue(name)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r} rank {self.rank} of {self.size}>"

    # ---- what a backend implements -----------------------------------------------------------------
    # Arrays are C-contiguous ndarrays; inputs and outputs overlap only where it is said. A hook checks
    # what it can without talking to peers (UsageError, ArrayError) and must not block; the call that it
    # returns blocks, raises GroupError or MismatchError, and leaves the arrays of a failed call undefined.

    @abstractmethod
    def _plan_all_reduce(self, x: Array, op: ReduceOp, parts: Sequence[int] = ()) -> Call:
        """x = reduction of x over all ranks; `parts`, sizes that must agree, for a coalesced call."""

    @abstractmethod
    def _plan_reduce(self, out: Array, x: Array, op: ReduceOp, root: int) -> Call:
        """On the root out = reduction of x over all ranks; out may be x. Others' out is not touched."""

    @abstractmethod
    def _plan_scan(self, out: Array, x: Array, op: ReduceOp, exclusive: bool) -> Call:
        """out = reduction of x over ranks 0..rank, or 0..rank-1 (rank 0's out stays); out may be x."""

    @abstractmethod
    def _plan_reduce_scatter(self, out: Array, blocks: Sequence[Array], op: ReduceOp) -> Call:
        """out = reduction of block `rank` over all ranks; out may be blocks[rank]."""

    @abstractmethod
    def _plan_broadcast(self, x: Array, root: int) -> Call:
        """x = the root's x."""

    @abstractmethod
    def _plan_all_gather(self, outs: Sequence[Array], x: Array, parts: Sequence[int] = ()) -> Call:
        """outs[r] = rank r's x; sizes may differ between ranks; x may be outs[rank]; `parts` as above."""

    @abstractmethod
    def _plan_gather(self, outs: Sequence[Array] | None, x: Array, root: int) -> Call:
        """On the root outs[r] = rank r's x; outs is None elsewhere."""

    @abstractmethod
    def _plan_scatter(self, out: Array, blocks: Sequence[Array] | None, root: int) -> Call:
        """out = the root's blocks[rank]; blocks is None elsewhere."""

    @abstractmethod
    def _plan_all_to_all(self, outs: Sequence[Array], blocks: Sequence[Array]) -> Call:
        """outs[r] = rank r's blocks[rank]; no overlap between outs and blocks."""

    @abstractmethod
    def _plan_barrier(self, timeout: float) -> Call:
        """Return when all ranks have called; at the timeout name all missing ranks."""

    @abstractmethod
    def _isend(self, x: Adopted, dst: int, tag: int) -> Work:
        """Post a message. Complete when the receiver has taken it."""

    @abstractmethod
    def _irecv(self, x: Adopted, src: int | None, tag: int) -> Work:
        """Post a receive, from any rank when src is None; the result is the sender's rank."""

    @abstractmethod
    def _send(self, x: Adopted, dst: int, tag: int) -> None:
        """As `_isend` and waiting for it; to oneself, returns once the message is buffered."""

    @abstractmethod
    def _recv(self, x: Adopted, src: int | None, tag: int) -> int:
        """As `_irecv` and waiting for it."""

    @abstractmethod
    def _close(self, reason: GroupError | None) -> None:
        """Release everything; `reason` says why when it is not an orderly end. Called once."""

    # ---- collectives ------------------------------------------------------------------------------

    def all_reduce(self, tensor: Any, op: ReduceOp = ReduceOp.SUM, async_op: bool = False) -> Work | None:
        """Reduce over all ranks, in place; the same bits on every rank."""
        x = adopt(tensor, writable=True)
        source, plain = scaled(x.array, op)
        call = self._plan_all_reduce(source, plain)
        if source is not x.array:
            call = then_split(call, source, (x,))
        return self._run("all_reduce", call, (x,), async_op)

    def reduce(
        self, tensor: Any, root: int, op: ReduceOp = ReduceOp.SUM, async_op: bool = False
    ) -> Work | None:
        """Reduce over all ranks into the root's array; the others' arrays stay as they are."""
        root = self._checked_rank("root", root)
        x = adopt(tensor, writable=self.rank == root)
        source, plain = scaled(x.array, op)
        call = self._plan_reduce(x.array, source, plain, root)
        return self._run("reduce", call, (x,), async_op)

    def scan(self, tensor: Any, op: ReduceOp = ReduceOp.SUM, async_op: bool = False) -> Work | None:
        """Inclusive prefix reduction in place: rank r gets the reduction of ranks 0..r."""
        return self._scan("scan", tensor, op, False, async_op)

    def exscan(self, tensor: Any, op: ReduceOp = ReduceOp.SUM, async_op: bool = False) -> Work | None:
        """Exclusive prefix reduction in place: ranks 0..r-1; rank 0's array stays as it is."""
        return self._scan("exscan", tensor, op, True, async_op)

    def _scan(self, name: str, tensor: Any, op: ReduceOp, exclusive: bool, async_op: bool) -> Work | None:
        x = adopt(tensor, writable=True)
        source, plain = scaled(x.array, op)
        call = self._plan_scan(x.array, source, plain, exclusive)
        return self._run(name, call, (x,), async_op)

    def reduce_scatter(
        self, output: Any, input_list: Sequence[Any], op: ReduceOp = ReduceOp.SUM, async_op: bool = False
    ) -> Work | None:
        """Reduce list item r over all ranks into rank r's output; items may differ in shape."""
        out = adopt(output, writable=True, what="output")
        blocks = adopt_list(input_list, self.size, writable=False, what="input_list")
        check_fit("output", out.array, f"input_list[{self.rank}]", blocks[self.rank].array)
        check_dtypes("input_list", blocks, out.array)
        return self._reduce_scatter(out, [block.array for block in blocks], op, async_op)

    def reduce_scatter_single(
        self, output: Any, input: Any, op: ReduceOp = ReduceOp.SUM, async_op: bool = False
    ) -> Work | None:
        """Reduce over all ranks; rank r's output gets part r of the size equal parts of the result."""
        out = adopt(output, writable=True, what="output")
        x = adopt(input, writable=False, what="input")
        return self._reduce_scatter(
            out, equal_blocks("input", x.array, "output", out.array, self.size), op, async_op
        )

    def _reduce_scatter(self, out: Adopted, blocks: list[Array], op: ReduceOp, async_op: bool) -> Work | None:
        pairs = [scaled(block, op) for block in blocks]
        sources = apart([source for source, _ in pairs], [out.array], own=self.rank)
        call = self._plan_reduce_scatter(out.array, sources, pairs[0][1])
        return self._run("reduce_scatter", call, (out,), async_op)

    def broadcast(self, tensor: Any, root: int, async_op: bool = False) -> Work | None:
        """Copy the root's array into everybody's; same dtype and number of elements everywhere."""
        root = self._checked_rank("root", root)
        x = adopt(tensor, writable=self.rank != root)
        return self._run("broadcast", self._plan_broadcast(x.array, root), (x,), async_op)

    def all_gather(self, output_list: Sequence[Any], tensor: Any, async_op: bool = False) -> Work | None:
        """Rank r's array goes to list item r on every rank; sizes may differ between ranks."""
        outs = adopt_list(output_list, self.size, writable=True, what="output_list")
        x = adopt(tensor, writable=False)
        check_fit("tensor", x.array, f"output_list[{self.rank}]", outs[self.rank].array)
        check_dtypes("output_list", outs, x.array)
        return self._all_gather(outs, [out.array for out in outs], x.array, async_op)

    def all_gather_single(self, output: Any, input: Any, async_op: bool = False) -> Work | None:
        """The arrays of all ranks, equal in size, one after the other in `output`."""
        out = adopt(output, writable=True, what="output")
        x = adopt(input, writable=False, what="input")
        outs = equal_blocks("output", out.array, "input", x.array, self.size)
        return self._all_gather((out,), outs, x.array, async_op)

    def _all_gather(
        self, owners: Sequence[Adopted], outs: Sequence[Array], x: Array, async_op: bool
    ) -> Work | None:
        (source,) = apart([x], outs, own=self.rank)
        return self._run("all_gather", self._plan_all_gather(outs, source), owners, async_op)

    def gather(
        self, tensor: Any, output_list: Sequence[Any] | None, root: int, async_op: bool = False
    ) -> Work | None:
        """Rank r's array goes to list item r on the root; elsewhere the list is None."""
        root = self._checked_rank("root", root)
        x = adopt(tensor, writable=False)
        outs = self._adopt_on_root(output_list, root, writable=True, what="output_list")
        if outs is not None:
            check_fit("tensor", x.array, f"output_list[{root}]", outs[root].array)
            check_dtypes("output_list", outs, x.array)
        (source,) = apart([x.array], arrays_of(outs) or (), own=root)
        call = self._plan_gather(arrays_of(outs), source, root)
        return self._run("gather", call, outs or (), async_op)

    def scatter(
        self, tensor: Any, input_list: Sequence[Any] | None, root: int, async_op: bool = False
    ) -> Work | None:
        """List item r of the root goes to rank r's array; elsewhere the list is None."""
        root = self._checked_rank("root", root)
        out = adopt(tensor, writable=True)
        blocks = self._adopt_on_root(input_list, root, writable=False, what="input_list")
        if blocks is not None:
            check_fit("tensor", out.array, f"input_list[{root}]", blocks[root].array)
            check_dtypes("input_list", blocks, out.array)
        sources = None if blocks is None else apart([b.array for b in blocks], [out.array], own=root)
        call = self._plan_scatter(out.array, sources, root)
        return self._run("scatter", call, (out,), async_op)

    def all_to_all(
        self, output_list: Sequence[Any], input_list: Sequence[Any], async_op: bool = False
    ) -> Work | None:
        """List item p of rank r goes to list item r of rank p; all shapes may differ."""
        outs = adopt_list(output_list, self.size, writable=True, what="output_list")
        blocks = adopt_list(input_list, self.size, writable=False, what="input_list")
        here = self.rank
        check_fit(f"output_list[{here}]", outs[here].array, f"input_list[{here}]", blocks[here].array)
        for name, items in (("output_list", outs), ("input_list", blocks)):
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
        out = adopt(output, writable=True, what="output")
        x = adopt(input, writable=False, what="input")
        if out.array.dtype != x.array.dtype:
            raise ArrayError(f"output is {out.array.dtype}, input is {x.array.dtype}; they must be the same")
        outs = parts_along_rows("output", out.array, output_split_sizes, self.size)
        blocks = parts_along_rows("input", x.array, input_split_sizes, self.size)
        check_fit(f"output part {self.rank}", outs[self.rank], f"input part {self.rank}", blocks[self.rank])
        return self._all_to_all((out,), outs, blocks, async_op)

    def _all_to_all(
        self, owners: Sequence[Adopted], outs: list[Array], blocks: list[Array], async_op: bool
    ) -> Work | None:
        call = self._plan_all_to_all(outs, apart(blocks, outs))
        return self._run("all_to_all", call, owners, async_op)

    def barrier(self, async_op: bool = False, timeout: float | None = None) -> Work | None:
        """Wait until every rank has called."""
        limit = self.timeout if timeout is None else timeout
        return self._run("barrier", self._plan_barrier(limit), (), async_op)

    def monitored_barrier(self, timeout: float | None = None) -> None:
        """A barrier with a timeout of its own that names all missing ranks, on every rank.

        Args:
            timeout: seconds; None for the group's own.
        """
        limit = self.timeout if timeout is None else timeout
        self._run("monitored_barrier", self._plan_barrier(limit), (), False)

    def all_reduce_coalesced(
        self, tensors: Sequence[Any], op: ReduceOp = ReduceOp.SUM, async_op: bool = False
    ) -> Work | None:
        """`all_reduce` of several arrays of one dtype at the price of one."""
        xs = adopt_same_dtype(tensors, writable=True)
        flat = flattened(xs)
        source, plain = scaled(flat, op)
        call = self._plan_all_reduce(source, plain, [x.array.size for x in xs])
        return self._run("all_reduce_coalesced", then_split(call, source, xs), xs, async_op)

    def all_gather_coalesced(
        self, output_lists: Sequence[Sequence[Any]], tensors: Sequence[Any], async_op: bool = False
    ) -> Work | None:
        """`all_gather` of several arrays of one dtype at the price of one.

        Array k of rank r goes to `output_lists[k][r]`.
        """
        if len(output_lists) != len(tensors):
            raise UsageError(f"output_lists has {len(output_lists)} lists for {len(tensors)} tensors")
        xs = adopt_same_dtype(tensors, writable=False)
        lists = [
            adopt_list(o, self.size, writable=True, what=f"output_lists[{k}]")
            for k, o in enumerate(output_lists)
        ]
        for k, (outs, x) in enumerate(zip(lists, xs, strict=True)):
            check_dtypes(f"output_lists[{k}]", outs, x.array)
            check_fit(f"tensors[{k}]", x.array, f"output_lists[{k}][{self.rank}]", outs[self.rank].array)
        per_rank = [[outs[r] for outs in lists] for r in range(self.size)]
        flats = [np.empty(sum(o.array.size for o in outs), xs[0].array.dtype) for outs in per_rank]
        source = flattened(xs)
        call = self._plan_all_gather(flats, source, [x.array.size for x in xs])
        for flat, outs in zip(flats, per_rank, strict=True):
            call = then_split(call, flat, outs)
        return self._run("all_gather_coalesced", call, [o for outs in lists for o in outs], async_op)

    # ---- point to point ---------------------------------------------------------------------------

    def send(self, tensor: Any, dst: int, tag: int = 0) -> None:
        """Send to `dst`; returns when it has been received (to oneself: when it is buffered)."""
        dst = self._checked_rank("dst", dst)
        self._check_usable()
        self._send(adopt(tensor, writable=False), dst, checked_tag(tag))

    def recv(self, tensor: Any, src: int | None = None, tag: int = 0) -> int:
        """Receive into `tensor` from `src`, or from whoever sends first; returns the sender's rank.

        The message must have the array's dtype and number of elements; anything else is an error on
        both sides.
        """
        src = self._checked_src(src)
        self._check_usable()
        return self._recv(adopt(tensor, writable=True), src, checked_tag(tag))

    def isend(self, tensor: Any, dst: int, tag: int = 0) -> Work:
        """`send` that returns a Work at once."""
        dst = self._checked_rank("dst", dst)
        self._check_usable()
        return self._isend(adopt(tensor, writable=False), dst, checked_tag(tag))

    def irecv(self, tensor: Any, src: int | None = None, tag: int = 0) -> Work:
        """`recv` that returns a Work at once; the Work's result is the sender's rank."""
        src = self._checked_src(src)
        self._check_usable()
        return self._irecv(adopt(tensor, writable=True), src, checked_tag(tag))

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
    def disown(self, error: GroupError) -> None:
        """In a child of fork: make every use raise `error`, without a word to the peers."""

    def close(self) -> None:
        """Leave the group and release what it holds. Closing twice is fine; later calls raise."""
        if not self._closed:
            if self._is_busy():
                self.abort("it was destroyed while operations were under way")
            self._closed = True
            self._queue.close()
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
        """Carry a call out, behind all earlier ones, then write packed copies back to their owners."""
        self._check_usable()
        if self._is_inside():
            raise UsageError(f"{name}: a signal handler may not use the group whose call it interrupted")

        def job() -> None:
            thread = threading.get_ident()
            self._inside.add(thread)
            try:
                with self._turn:
                    call()
            finally:
                self._inside.discard(thread)
            for owner in owners:
                owner.finish()

        if async_op:
            return self._queue.submit(name, job)
        if self._queue.pending:
            refuse_to_block(name)
            self._queue.submit(name, job).wait()
        else:
            job()
        return None

    def _checked_rank(self, what: str, rank: Any) -> int:
        try:
            number = operator.index(rank)
        except TypeError as error:
            raise UsageError(f"{what} is {rank!r}; give a rank as an integer") from error
        if not 0 <= number < self.size:
            raise UsageError(f"{what} is {number}; the group {self.name} has ranks 0..{self.size - 1}")
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
            return adopt_list(items, self.size, writable=writable, what=what)
        if items:
            raise UsageError(
                f"{what} must be None or empty on rank {self.rank}; only the root (rank {root}) gives it"
            )
        return None
