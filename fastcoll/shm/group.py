"""ShmGroup: the ranks of one node over one shared-memory segment.

The synchronous path is in short.py. Here is the rarer one: what the other calls are made of, and what happens
when an entry comes back early (signals, deadlines, dead peers, mismatches).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..core import signature
from ..core.members import Member
from ..core.monitor import Wait
from ..core.operands import Array
from ..core.operation import Call
from ..core.reduce_op import ReduceOp
from ..core.status import AGAIN, DIVIDED, DONE, LATER, MISMATCH, MIXED, WORKED
from ..errors import AbortedError, ArrayError, GroupError
from ..kernels import waiting
from ..kernels.jit import Entry
from ..kernels.reduce import reducer
from ..p2p.engine import Engine
from ..p2p.mailing import Mailing
from ..p2p.pipe import Pipe
from ..p2p.transfers import kind_of
from ..rendezvous import Store
from . import context_layout as words
from . import movement as moving
from . import reductions as collectives
from . import rounds
from .context import Context, Report, What, kept, patience
from .head_start import HeadStart
from .lanes import Lanes
from .meeting import meet
from .pipe import RingPipe
from .segment import Segment
from .short import is_refusal
from .symmetric import NOTE_BYTES, ShmMemory, SymmetricArrays
from .vigil import ShmVigil

_CLOSE_SECONDS = 5.0
_POLL_SECONDS = 1e-4
_SHARED = np.dtype(np.int64), np.dtype(np.uint8)
_UNDER_WAY = (AGAIN, WORKED, DIVIDED, MIXED)


class ShmGroup(HeadStart, Mailing):
    """Collectives and point-to-point between the ranks of one node, through POSIX shared memory."""

    backend = "shm"

    @classmethod
    def make(
        cls,
        store: Store,
        name: str,
        members: Sequence[Member],
        rank: int,
        timeout: float,
        neighbours: int | None = None,
    ) -> ShmGroup:
        """Meet the other members in a new segment; collective.

        Args:
            store: the group's own (prefixed) store.
            members: all ranks of the group, in the order of their group ranks.
            rank: this process's group rank.
            timeout: seconds, for this and for every call on the group.
            neighbours: ranks of the job on this node, members or not; None: all of its ranks.

        Raises:
            ResourceError: no shared memory; raised on every rank.
            PeerDiedError, StoreTimeoutError: a member died or did not come.
        """
        there = members[rank].world_size if neighbours is None else neighbours
        segment, cores, lanes = meet(store, members, rank, timeout, there)
        share = cores // max(there, len(members))
        return cls(name, members, rank, timeout, segment, cores, lanes, share)

    def __init__(
        self,
        name: str,
        members: Sequence[Member],
        rank: int,
        timeout: float,
        segment: Segment,
        cores: int,
        lanes: int,
        share: int,
    ) -> None:
        super().__init__(name, [member.rank for member in members], rank, timeout)
        self._segment = segment
        self.monitor = ShmVigil(segment, members, rank)
        self.monitor.on_failure = self._stop
        self._context = Context(segment.address, segment.layout, rank, cores)
        self._c = self._context.address
        self._share = share
        self._lanes = Lanes.of(name, self._context, segment, rank, cores, lanes, self.monitor, self.fail)
        self._report = Report(segment, self._context, rank, self.ranks, name)
        modes = patience(segment.layout.size, cores)
        self.pipe = RingPipe(
            segment.address, segment.layout, rank, self.monitor, modes, self._context.address
        )
        routes: list[tuple[Pipe, int]] = [(self.pipe, peer) for peer in range(segment.layout.size)]
        self.messages = Engine(routes, rank, self.monitor, timeout)
        self._m = self.pipe.address
        self._symmetric = SymmetricArrays(
            self.ranks, rank, timeout, self.monitor, self._context, modes, self.gate.check_usable, self.fail
        )
        self._whats: dict[Any, What] = {}
        for dtype in _SHARED:  # while the memo has room
            self._what("all_gather", dtype)
        self.gate.also(
            inside=lambda: self._context.is_mine() or self._is_handing_over(),
            busy=lambda: self._context[words.BUSY] != 0 or bool(self._symmetric.waits),
        )
        self.gate.queue.count_in(self._context.words[words.PENDING : words.PENDING + 1])

    # ---- when an entry comes back early --------------------------------------------------------------

    def _go_on(
        self, code: int, entry: Entry, *args: Any, tags: int = 0, timeout: float | None = None
    ) -> bool:
        if code in _UNDER_WAY:
            code = self._carry_on(code, entry, args, tags, self.timeout if timeout is None else timeout)
            if code == LATER:
                raise AbortedError(f"{self._report.doing(entry.name)}: an array was changed meanwhile")
        if code == MISMATCH:
            difference = self._report.mismatch(self._from_all, self.gate.refusal)
            self._context.let_go()
            raise difference
        return code == DONE

    def _carry_on(self, code: int, entry: Entry, args: tuple[Any, ...], tags: int, limit: float) -> int:
        """Call an entry again until it has an end; returns how it ended."""
        wait: Wait | None = None

        def look(code: int, context: Context) -> None:
            nonlocal wait
            self._context.words[words.LATE] = context[words.LATE]
            wait = wait or Wait(self.monitor, self._report.doing(entry.name), self._report.late, limit)
            wait.look() if code == AGAIN else wait.worked()

        while code in _UNDER_WAY:
            if code == DIVIDED:
                self._lanes.run(entry, args, look)
            elif code != MIXED:
                look(code, self._context)
            how = rounds.HELD if code == MIXED else rounds.RESUMED
            code = entry.call(self._c | tags | how, *args)
        return code

    def _from_all(self, own: Array) -> Array:
        """Every rank's array, by the thread whose call has the context; its dtype is one of `_SHARED`."""
        everybody = np.empty((self.size, *own.shape), own.dtype)
        code = moving.all_gather.call(self._c | rounds.HELD, everybody, own)
        self._go_on(code, moving.all_gather, everybody, own, tags=rounds.HELD)
        return everybody

    def _torn(self, entry: Entry, error: BaseException) -> None:
        if self._context.is_mine():
            if not isinstance(error, GroupError):
                here = self.monitor.name(self.rank)
                error = AbortedError(
                    f"{here} was interrupted by {type(error).__name__} in {self._report.doing(entry.name)}"
                )
            self.fail(error)
            self._lanes.settle()
            self._context.let_go()
        elif is_refusal(error):
            return
        raise

    def _stop(self) -> None:
        """The group has failed, wherever that was found: leave the synchronous path from now on."""
        self._context.words[words.SHUT] = 1
        self.gate.failure = self.monitor.failure

    # ---- what calls are made of ----------------------------------------------------------------------

    def _what(
        self,
        operation: str,
        dtype: np.dtype[Any],
        op: ReduceOp | None = None,
        *,
        pieces: int = 1,
        parts: Sequence[int] = (),
    ) -> What:
        """The description of a call, made at its first use.

        Args:
            op: for a reducing call.
            pieces: how many pieces, of at least one element each, must fit into a slot of a reducing call.
            parts: sizes of the arrays of a coalesced call; its description is not kept.
        """
        key = (operation, op, dtype)
        if not parts and key in self._whats:
            return self._whats[key]
        call = signature.encode(operation, dtype, op=op, parts=parts)
        if operation == "message":
            what = What(kind_of(0, dtype), dtype.itemsize)
        elif op is None:
            what = What(call, dtype.itemsize)
        else:
            largest = self._segment.layout.slot // pieces
            if dtype.itemsize > largest:
                raise ArrayError(
                    f"an element of {dtype} has {dtype.itemsize} bytes; {operation} takes {largest} here"
                )
            what = What(call, dtype.itemsize, reducer(op, dtype)[:2])
        if not parts and self._whats.setdefault(key, what) is what:
            self._context.remember(signature.code_of(operation), dtype, op, what)
        return what

    def _plan(self, entry: Entry, what: What | None, *args: Any, timeout: float | None = None) -> Call:
        """A call of an entry on prepared arrays."""
        if what is not None:
            args = kept(entry.name, args, what.itemsize)

        def call() -> None:
            self.gate.check_usable()
            if what is not None:
                self._context.words[words.GIVEN] = what.address
            try:
                code = entry.call(self._c | rounds.PREPARED, *args)
                while not self._go_on(code, entry, *args, tags=rounds.PREPARED, timeout=timeout):
                    # The synchronous call of another thread is under way, which ends within its own timeout.
                    time.sleep(_POLL_SECONDS)
                    self.gate.check_usable()
                    code = entry.call(self._c | rounds.PREPARED, *args)
            except BaseException as error:
                self._torn(entry, error)
                raise

        return call

    def _plan_all_reduce(self, x: Array, op: ReduceOp, parts: Sequence[int] = ()) -> Call:
        return self._plan(collectives.all_reduce, self._what("all_reduce", x.dtype, op, parts=parts), x, op)

    def _plan_reduce(self, out: Array, x: Array, op: ReduceOp, root: int) -> Call:
        return self._plan(collectives.reduce, self._what("reduce", x.dtype, op), out, x, op, root)

    def _plan_scan(self, out: Array, x: Array, op: ReduceOp, exclusive: bool) -> Call:
        what = self._what("exscan" if exclusive else "scan", x.dtype, op)
        return self._plan(collectives.scan, what, out, x, op, exclusive)

    def _plan_reduce_scatter(self, out: Array, blocks: Sequence[Array], op: ReduceOp) -> Call:
        what = self._what("reduce_scatter", out.dtype, op, pieces=max(1, self.size - 1))
        return self._plan(collectives.reduce_scatter, what, out, tuple(blocks), op)

    def _plan_broadcast(self, x: Array, root: int, parts: Sequence[int] = ()) -> Call:
        return self._plan(moving.broadcast, self._what("broadcast", x.dtype, parts=parts), x, root)

    def _plan_all_gather(self, outs: Sequence[Array], x: Array, parts: Sequence[int] = ()) -> Call:
        return self._plan(moving.all_gather, self._what("all_gather", x.dtype, parts=parts), tuple(outs), x)

    def _plan_gather(self, outs: Sequence[Array] | None, x: Array, root: int) -> Call:
        taken = None if outs is None else tuple(outs)
        return self._plan(moving.gather, self._what("gather", x.dtype), taken, x, root)

    def _plan_scatter(self, out: Array, blocks: Sequence[Array] | None, root: int) -> Call:
        given = None if blocks is None else tuple(blocks)
        return self._plan(moving.scatter, self._what("scatter", out.dtype), out, given, root)

    def _plan_all_to_all(self, outs: Sequence[Array], blocks: Sequence[Array]) -> Call:
        what = self._what("all_to_all", outs[0].dtype)
        return self._plan(moving.all_to_all, what, tuple(outs), tuple(blocks), blocks[0])

    def _plan_meeting(self, operation: str, timeout: float) -> Call:
        return self._plan(collectives.barrier, None, signature.encode(operation), timeout=timeout)

    # ---- point to point ------------------------------------------------------------------------------

    def learn(self, dtype: np.dtype[Any]) -> None:
        self._what("message", dtype)

    # ---- symmetric arrays ----------------------------------------------------------------------------

    def symmetric_memory(self, nbytes: int, label: str) -> ShmMemory:
        return self._symmetric.allocate(self._exchange, nbytes, label)

    def _exchange(self, note: str) -> list[str]:
        """Every rank's note."""
        data = note.encode()[:NOTE_BYTES]
        own = np.zeros(NOTE_BYTES, np.uint8)
        own[: len(data)] = np.frombuffer(data, np.uint8)
        outs = [np.empty_like(own) for _ in self.ranks]
        what = self._what("symmetric.empty", own.dtype)
        self.run("symmetric.empty", self._plan(moving.all_gather, what, tuple(outs), own), (), False)
        return [out.tobytes().rstrip(b"\0").decode(errors="replace") for out in outs]

    # ---- when things go wrong, and the end -----------------------------------------------------------

    def _close(self, reason: GroupError | None) -> None:
        self._context.words[words.SHUT] = 1
        self._context.take_back()
        self.messages.close(reason)
        # A call under way was aborted and ends within moments. One that a killed thread has left behind is
        # not worth waiting for: then the mapping stays until the process ends.
        deadline = time.monotonic() + _CLOSE_SECONDS
        # A signal handler that closes the group whose call it interrupted would wait for itself.
        turn = not self.gate.is_inside() and self.gate.turn.acquire(timeout=_CLOSE_SECONDS)
        free = turn
        while free and waiting.seize.call(self._c + 8 * words.BUSY) == LATER:
            free = time.monotonic() < deadline
            time.sleep(_POLL_SECONDS)
        self.monitor.leave()
        if self._lanes.close() and free:
            self._segment.close()
        if turn:
            self.gate.turn.release()

    def disown(self, error: GroupError) -> None:
        """In a child of fork: make every use raise, and leave the segment, which is the parent's, alone."""
        self.monitor.failure = error
        self._stop()
