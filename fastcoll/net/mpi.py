"""MpiGroup: the ranks of an MPI job, through the MPI library that mpi4py has found.

Each call begins with a meeting of its own (mpi_calls.py, mpi_meet.py), so calls that do not match are refused on all
ranks before MPI, which does not look, moves anything. Then MPI moves the data (mpi_moves.py) and our reducers
combine it (mpi_reduce.py). Messages are those of messages/ over channels of MPI (mpi_mail.py).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

from ..arrays import Adopted
from ..errors import AbortedError, GroupError
from ..kernels.reduce import Reducer, reducer
from ..members import Member
from ..messages.courier import Courier
from ..messages.mailbox import Mailbox
from ..operands import Array, Call
from ..reduce_op import ReduceOp
from ..rendezvous import Store
from ..work import Work
from . import mpi_kernels as words
from .mpi_calls import FIRST_FREE_TAG, MpiCalls
from .mpi_comm import lay_down, make_comm
from .mpi_library import Library, load
from .mpi_mail import MpiChannels, Tags
from .mpi_meet import MOST_ATTACHED
from .mpi_moves import Block, are_near, blocks_of, copy
from .mpi_reduce import Reductions
from .mpi_requests import abandon

_CLOSE_SECONDS = 5.0
_MAIL = Tags(*range(FIRST_FREE_TAG, FIRST_FREE_TAG + 3))


class MpiGroup(MpiCalls):
    """Collectives and point-to-point between the ranks of an MPI job. A group is a communicator."""

    backend = "mpi"

    @classmethod
    def make(cls, store: Store, name: str, members: Sequence[Member], rank: int, timeout: float) -> MpiGroup:
        """Make the group's communicator; collective. The arguments are those of ShmGroup.make.

        Raises:
            UnavailableError: MPI is not there, or the members are not ranks of one MPI job.
            PeerDiedError, StoreTimeoutError: a member died or did not come.
        """
        library = load()
        comm = make_comm(library, store, name, members, rank, timeout)
        return cls(library, comm, name, members, timeout)

    def __init__(
        self, library: Library, comm: Any, name: str, members: Sequence[Member], timeout: float
    ) -> None:
        dedicated = _is_dedicated(members, comm.rank)
        super().__init__(library, comm, name, members, timeout, dedicated)
        self._reductions = Reductions(self._moves, self._look)
        channels = MpiChannels(library, comm, _MAIL, dedicated)
        self._mail = Mailbox(channels, Courier(channels, comm.rank), comm.rank, self._vigil, timeout)

    # ---- reductions ------------------------------------------------------------------------------

    def _plan_reduction(
        self,
        operation: str,
        out: Array,
        x: Array,
        op: ReduceOp,
        many: Callable[[Reducer, Block, Block], None],
        few: slice | None,
        root: int = 0,
        parts: Sequence[int] = (),
    ) -> Call:
        """A reduction of one array on each rank.

        Args:
            many: does it by moving arrays; takes what reduces, out and x.
            few: of which ranks, where they are attached; None where this rank gets no result.
        """
        how = reducer(op, x.dtype)
        target, block = blocks_of([out, x])
        small = block[1] <= MOST_ATTACHED

        def move(near: bool) -> None:
            if not small:
                many(how, target, block)
            elif few is not None and (sources := self._meeting.attached[few]):
                self._reductions.fold(how, target[0], sources, block[1])

        attached = block if small else ()
        return self._plan(
            operation, x.dtype, [block[1]], move, op=op, root=root, parts=parts, attached=attached
        )

    def _plan_all_reduce(self, x: Array, op: ReduceOp, parts: Sequence[int] = ()) -> Call:
        def many(how: Reducer, target: Block, block: Block) -> None:
            self._reductions.all_reduce(how, block, x)

        return self._plan_reduction("all_reduce", x, x, op, many, slice(None), parts=parts)

    def _plan_reduce(self, out: Array, x: Array, op: ReduceOp, root: int) -> Call:
        def many(how: Reducer, target: Block, block: Block) -> None:
            self._reductions.reduce(how, target, block, root, (out, x))

        few = slice(None) if self.rank == root else None
        return self._plan_reduction("reduce", out, x, op, many, few, root=root)

    def _plan_scan(self, out: Array, x: Array, op: ReduceOp, exclusive: bool) -> Call:
        def many(how: Reducer, target: Block, block: Block) -> None:
            self._reductions.scan(how, target, block, exclusive, (out, x))

        few = slice(self.rank + (not exclusive))
        return self._plan_reduction("exscan" if exclusive else "scan", out, x, op, many, few)

    def _plan_reduce_scatter(self, out: Array, blocks: Sequence[Array], op: ReduceOp) -> Call:
        how = reducer(op, out.dtype)
        (target,), sources = blocks_of([out]), blocks_of(blocks)

        def move(near: bool) -> None:
            self._reductions.reduce_scatter(how, target, sources, near, (out, blocks))

        sizes = [nbytes for _, nbytes in sources]
        return self._plan("reduce_scatter", out.dtype, sizes, move, op=op, blocks=sources)

    # ---- moves -----------------------------------------------------------------------------------

    def _plan_broadcast(self, x: Array, root: int) -> Call:
        (block,) = blocks_of([x])
        small = block[1] <= MOST_ATTACHED

        def move(near: bool) -> None:
            if not small:
                self._moves.broadcast(block, root, x)
            elif self.rank != root:
                copy((self._meeting.attached[root], block[1]), block)

        attached = block if small and self.rank == root else ()
        return self._plan("broadcast", x.dtype, [block[1]], move, root=root, attached=attached)

    def _plan_all_gather(self, outs: Sequence[Array], x: Array, parts: Sequence[int] = ()) -> Call:
        takes, (block,) = blocks_of(outs), blocks_of([x])

        def move(near: bool) -> None:
            if self._are_attached():
                self._copy_attached(takes)
            else:
                self._moves.all_gather(takes, block, near, (outs, x))

        attached = block if block[1] <= MOST_ATTACHED else ()
        sizes = [nbytes for _, nbytes in takes]
        return self._plan("all_gather", x.dtype, sizes, move, parts=parts, blocks=takes, attached=attached)

    def _plan_gather(self, outs: Sequence[Array] | None, x: Array, root: int) -> Call:
        takes, (block,) = blocks_of(outs or ()), blocks_of([x])

        def move(near: bool) -> None:
            if self._are_attached():
                self._copy_attached(takes)
            else:
                self._moves.gather(takes, block, root, near, (outs, x))

        attached = block if block[1] <= MOST_ATTACHED else ()
        blocks = [block] if outs is None else takes
        sizes = [nbytes for _, nbytes in blocks]
        return self._plan("gather", x.dtype, sizes, move, root=root, blocks=blocks, attached=attached)

    def _are_attached(self) -> bool:
        """Whether every rank's array is in its row."""
        return int(self._meeting.rows[:, words.SHAPE].max()) <= MOST_ATTACHED

    def _copy_attached(self, targets: Sequence[Block]) -> None:
        """What each rank attached; to nowhere, where this rank gets no result."""
        for source, (target, nbytes) in zip(self._meeting.attached, targets, strict=False):
            copy((source, nbytes), (target, nbytes))

    def _plan_scatter(self, out: Array, blocks: Sequence[Array] | None, root: int) -> Call:
        gives, (block,) = blocks_of(blocks or ()), blocks_of([out])

        def move(near: bool) -> None:
            self._moves.scatter(block, gives, root, near, (out, blocks))

        mine = [block] if blocks is None else gives
        return self._plan("scatter", out.dtype, [nbytes for _, nbytes in mine], move, root=root, blocks=mine)

    def _plan_all_to_all(self, outs: Sequence[Array], blocks: Sequence[Array]) -> Call:
        takes, gives = blocks_of(outs), blocks_of(blocks)

        def move(near: bool) -> None:
            self._moves.exchange(gives, takes, near, (outs, blocks))

        # Each side has a base address of its own.
        farther = takes if are_near(gives) else gives
        sizes = [nbytes for _, nbytes in (*takes, *gives)]
        return self._plan("all_to_all", blocks[0].dtype, sizes, move, blocks=farther)

    def _plan_barrier(self, timeout: float) -> Call:
        return self._plan("barrier", None, [], lambda near: None, timeout=timeout)

    # ---- point to point --------------------------------------------------------------------------

    def _send(self, x: Adopted, dst: int, tag: int) -> None:
        self._mail.send(x, dst, tag)

    def _recv(self, x: Adopted, src: int | None, tag: int) -> int:
        return self._mail.recv(x, src, tag)

    def _isend(self, x: Adopted, dst: int, tag: int) -> Work:
        return self._mail.isend(x, dst, tag)

    def _irecv(self, x: Adopted, src: int | None, tag: int) -> Work:
        return self._mail.irecv(x, src, tag)

    # ---- the end ---------------------------------------------------------------------------------

    def _fail(self, error: GroupError) -> None:
        super()._fail(error)
        self._mail.abort()

    def abort(self, reason: str = "abort() was called") -> None:
        """Fail the group now, from any thread: calls under way and pending Works raise on all ranks."""
        if not self._closed:
            here = self._vigil.name(self.rank)
            self._fail(AbortedError(f"{here} aborted the group {self.name}: {reason}"))

    def _close(self, reason: GroupError | None) -> None:
        self._mail.close(reason)
        # A call under way was aborted and ends within moments; a signal handler's own call never does.
        turn = not self._is_inside() and self._turn.acquire(timeout=_CLOSE_SECONDS)
        self._vigil.leave()
        failed = self._vigil.failure is not None
        if turn:
            if failed:
                abandon([], (self._meeting, self._moves))
            else:
                self._meeting.free()
            lay_down(self._library, self._comm, self._control, failed)
            self._turn.release()

    def disown(self, error: GroupError) -> None:
        """In a child of fork: make every use raise. MPI is the parent's."""
        self._vigil.failure = self.failure = error


def _is_dedicated(members: Sequence[Member], rank: int) -> bool:
    """Whether there is a core for each rank of this host."""
    here = [member for member in members if member.boot_id == members[rank].boot_id]
    return len(here) <= len(os.sched_getaffinity(0))
