"""ShmGroup: the ranks of one node over one shared-memory segment.

A synchronous all_reduce is one compiled call. Everything else here is the rarer path: preparing the
other operations, and what happens when a kernel comes back early (signals, deadlines, dead peers,
mismatches).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .. import calls
from ..arrays import Adopted
from ..errors import AbortedError, ArrayError, GroupError
from ..group import ProcessGroup
from ..kernels.pointers import address_of, header_of
from ..kernels.reduce import reducer
from ..members import Member
from ..operands import Array, Call
from ..reduce_op import ReduceOp
from ..rendezvous import Store
from ..work import Work
from . import collectives as run
from . import rounds
from .blocks import Blocks
from .context import Context, patience
from .mailbox import Mailbox
from .meeting import meet
from .report import Report, Sizes
from .segment import Segment
from .vigil import Vigil, Wait

Kernel = Callable[..., int]

# Looked up once: the synchronous path has a budget of a few hundred nanoseconds.
_all_reduce: Kernel = run.all_reduce
_DONE = rounds.DONE
_CLOSE_SECONDS = 5.0


class ShmGroup(ProcessGroup):
    """Collectives and point-to-point between the ranks of one node, through POSIX shared memory."""

    backend = "shm"

    @classmethod
    def make(cls, store: Store, name: str, members: Sequence[Member], rank: int, timeout: float) -> ShmGroup:
        """Meet the other members in a new segment; collective.

        Args:
            store: the group's own (prefixed) store.
            members: all ranks of the group, in the order of their group ranks.
            rank: this process's group rank.
            timeout: seconds, for this and for every call on the group.

        Raises:
            ResourceError: no shared memory; raised on every rank.
            PeerDiedError, StoreTimeoutError: a member died or did not come.
        """
        segment, cores = meet(store, members, rank, timeout)
        return cls(name, members, rank, timeout, segment, cores)

    def __init__(
        self, name: str, members: Sequence[Member], rank: int, timeout: float, segment: Segment, cores: int
    ) -> None:
        super().__init__(name, [member.rank for member in members], rank, timeout)
        self._segment = segment
        self._vigil = Vigil(segment, members, rank)
        self._vigil.on_failure = self._stop
        self._context = Context(segment.address, segment.layout, rank, cores)
        self._c = self._context.address
        self._report = Report(segment, self._context, rank, self.ranks, name)
        self._mailbox = Mailbox(
            segment.address, segment.layout, rank, self._vigil, timeout, patience(segment.layout.size, cores)
        )
        self._whats: dict[Any, tuple[int, Array]] = {}
        self._ready: dict[Any, int] = {}

    # ---- the synchronous path ----------------------------------------------------------------------

    def all_reduce(self, tensor: Any, op: ReduceOp = ReduceOp.SUM, async_op: bool = False) -> Work | None:
        """Reduce over all ranks, in place; the same bits on every rank."""
        if type(tensor) is np.ndarray and not async_op and not self._queue.pending:
            with self._turn:  # which no signal can tear apart, as it could acquire() and try
                what = self._ready.get((op, tensor.dtype))
                if what is not None and tensor.flags.carray:
                    try:
                        code = _all_reduce(self._c, header_of(tensor), tensor.nbytes, what)
                        if code != _DONE:
                            self._go_on(code, _all_reduce, (self._c, header_of(tensor), tensor.nbytes, what))
                    except BaseException as error:
                        self._torn(_all_reduce, error)
                        raise
                    return None
        return super().all_reduce(tensor, op, async_op)

    def _go_on(
        self,
        code: int,
        kernel: Kernel,
        args: tuple[int, ...],
        sizes: Sizes = ((), ()),
        timeout: float | None = None,
    ) -> None:
        """What follows a kernel that came back early: call it again while that makes sense."""
        if code == rounds.AGAIN:
            limit = self.timeout if timeout is None else timeout
            wait = Wait(self._vigil, self._report.doing(kernel.__name__), self._report.late, limit)
            while code == rounds.AGAIN:
                wait.look()
                code = kernel(*args)
        if code == rounds.MISMATCH:
            raise self._report.mismatch(sizes, self._plan_barrier(self.timeout))

    def _torn(self, kernel: Kernel, error: BaseException) -> None:
        """A call ended half-way: the group can't go on, and the peers must know."""
        if self._context[rounds.LATE] >= 0:
            if not isinstance(error, GroupError):
                here = self._vigil.name(self.rank)
                error = AbortedError(
                    f"{here} was interrupted by {type(error).__name__} in {self._report.doing(kernel.__name__)}"
                )
            self._fail(error)

    def _fail(self, error: GroupError) -> None:
        self._vigil.fail(error)
        self._mailbox.abort()

    def _stop(self) -> None:
        """The group has failed, wherever that was found: leave the synchronous path from now on."""
        self._ready = {}
        self.failure = self._vigil.failure

    # ---- what calls are made of ----------------------------------------------------------------------

    def _what(
        self,
        operation: str,
        dtype: np.dtype[Any],
        op: ReduceOp,
        *,
        root: int = 0,
        pieces: int = 1,
        parts: Sequence[int] = (),
    ) -> int:
        """The address of the description of a reducing call, made at its first use.

        Args:
            pieces: how many pieces, of at least one element each, must fit into a slot.
            parts: sizes of the arrays of a coalesced call.
        """
        key = (operation, op, dtype, root, tuple(parts))
        found = self._whats.get(key)
        if found is None:
            largest = self._segment.layout.slot // pieces
            if dtype.itemsize > largest:
                raise ArrayError(
                    f"an element of {dtype} has {dtype.itemsize} bytes; {operation} takes {largest} here"
                )
            compiled = reducer(op, dtype)
            words = np.zeros(run.WHAT_WORDS, np.int64)
            words[run.CALL] = calls.encode(operation, dtype, op=op, root=root, parts=parts)
            words[run.REDUCER], words[run.CODE], words[run.ITEMSIZE] = compiled[:3]
            # Of two threads that make the same one, both use the first: a call holds its address.
            found = self._whats.setdefault(key, (address_of(words), words))
        return found[0]

    def _plan(
        self,
        kernel: Kernel,
        *args: int,
        keep: tuple[Any, ...] = (),
        sizes: Sizes = ((), ()),
        timeout: float | None = None,
    ) -> Call:
        """A call of a kernel. `keep` holds what the integers point to; `sizes` are what this rank gives
        to and takes from each rank, in bytes, to explain a mismatch."""
        args = (self._c, *args)

        def call(_keep: tuple[Any, ...] = keep) -> None:
            self._check_usable()
            try:
                code = kernel(*args)
                if code != _DONE:
                    self._go_on(code, kernel, args, sizes, timeout)
            except BaseException as error:
                self._torn(kernel, error)
                raise

        return call

    def _plan_all_reduce(self, x: Array, op: ReduceOp, parts: Sequence[int] = ()) -> Call:
        what = self._what("all_reduce", x.dtype, op, parts=parts)
        call = self._plan(run.all_reduce, header_of(x), x.nbytes, what, keep=(x,))
        if parts:
            return call

        def call_and_remember() -> None:
            ready = self._ready  # a group that fails or closes meanwhile has another one afterwards
            call()
            ready[op, x.dtype] = what

        return call_and_remember

    def _plan_reduce(self, out: Array, x: Array, op: ReduceOp, root: int) -> Call:
        what = self._what("reduce", x.dtype, op, root=root)
        return self._plan(run.reduce, header_of(out), header_of(x), x.nbytes, what, root, keep=(out, x))

    def _plan_scan(self, out: Array, x: Array, op: ReduceOp, exclusive: bool) -> Call:
        what = self._what("exscan" if exclusive else "scan", x.dtype, op)
        return self._plan(
            run.scan, header_of(out), header_of(x), x.nbytes, what, int(exclusive), keep=(out, x)
        )

    def _plan_reduce_scatter(self, out: Array, blocks: Sequence[Array], op: ReduceOp) -> Call:
        what = self._what("reduce_scatter", out.dtype, op, pieces=self.size)
        table = Blocks(blocks)
        return self._plan(
            run.reduce_scatter,
            header_of(out),
            table.addresses,
            table.nbytes,
            what,
            table.shape,
            keep=(out, table),
        )

    def _plan_broadcast(self, x: Array, root: int) -> Call:
        call = calls.encode("broadcast", x.dtype, root=root)
        return self._plan(run.broadcast, header_of(x), x.nbytes, call, root, keep=(x,))

    def _plan_all_gather(self, outs: Sequence[Array], x: Array, parts: Sequence[int] = ()) -> Call:
        table = Blocks(outs)
        call = calls.encode("all_gather", x.dtype, uneven=True, parts=parts)
        gives = [x.nbytes] * self.size
        balance = calls.balance(self.rank, gives, table.sizes)
        return self._plan(
            run.all_gather,
            table.addresses,
            table.nbytes,
            header_of(x),
            x.nbytes,
            call,
            balance,
            keep=(table, x),
            sizes=(gives, table.sizes),
        )

    def _plan_gather(self, outs: Sequence[Array] | None, x: Array, root: int) -> Call:
        sends: list[Array | None] = [None] * self.size
        sends[root] = x
        return self._exchange("gather", sends, outs or [None] * self.size, x.dtype, root, spread=False)

    def _plan_scatter(self, out: Array, blocks: Sequence[Array] | None, root: int) -> Call:
        receives: list[Array | None] = [None] * self.size
        receives[root] = out
        return self._exchange("scatter", blocks or [None] * self.size, receives, out.dtype, root, spread=True)

    def _plan_all_to_all(self, outs: Sequence[Array], blocks: Sequence[Array]) -> Call:
        return self._exchange("all_to_all", blocks, outs, outs[0].dtype, 0, spread=True)

    def _exchange(
        self,
        operation: str,
        sends: Sequence[Array | None],
        receives: Sequence[Array | None],
        dtype: np.dtype[Any],
        root: int,
        *,
        spread: bool,
    ) -> Call:
        gives, takes = Blocks(sends), Blocks(receives)
        return self._plan(
            run.exchange,
            gives.addresses,
            gives.nbytes,
            takes.addresses,
            takes.nbytes,
            calls.encode(operation, dtype, root=root, uneven=True),
            self.size if spread else 1,
            max(gives.largest, takes.largest),
            calls.balance(self.rank, gives.sizes, takes.sizes),
            keep=(gives, takes),
            sizes=(gives.sizes, takes.sizes),
        )

    def _plan_barrier(self, timeout: float) -> Call:
        return self._plan(run.barrier, calls.encode("barrier"), timeout=timeout)

    # ---- point to point ------------------------------------------------------------------------------

    def _send(self, x: Adopted, dst: int, tag: int) -> None:
        self._mailbox.send(x, dst, tag)

    def _recv(self, x: Adopted, src: int | None, tag: int) -> int:
        return self._mailbox.recv(x, src, tag)

    def _isend(self, x: Adopted, dst: int, tag: int) -> Work:
        return self._mailbox.isend(x, dst, tag)

    def _irecv(self, x: Adopted, src: int | None, tag: int) -> Work:
        return self._mailbox.irecv(x, src, tag)

    # ---- when things go wrong, and the end -----------------------------------------------------------

    def abort(self, reason: str = "abort() was called") -> None:
        """Fail the group now, from any thread: calls under way and pending Works raise on all ranks."""
        if self._closed:
            return
        self._fail(AbortedError(f"{self._vigil.name(self.rank)} aborted the group {self.name}: {reason}"))

    def _close(self, reason: GroupError | None) -> None:
        self._ready = {}
        self._mailbox.close(reason)
        # A call under way was aborted and ends within moments. A turn that a killed thread has kept is
        # not worth waiting for: then the mapping stays until the process ends.
        held = self._turn.acquire(timeout=_CLOSE_SECONDS)
        self._vigil.leave()
        if held:
            self._segment.close()
            self._turn.release()

    def disown(self, error: GroupError) -> None:
        """In a child of fork: make every use raise, and leave the segment, which is the parent's, alone."""
        self._vigil.failure = error
        self._stop()
