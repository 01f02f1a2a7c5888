"""MpiGroup: the ranks of an MPI job, through the MPI library that mpi4py has found.

Each call begins with a meeting of its own (mpi_calls.py, mpi_meet.py), so calls that do not match are refused on all
ranks before MPI, which does not look, moves anything. Then MPI moves the data (mpi_moves.py) and our reducers
combine it (mpi_reduce.py). Messages are those of messages/ over channels of MPI (mpi_mail.py).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from ...core.members import Member
from ...core.operands import Array
from ...core.operation import Call
from ...core.reduce_op import ReduceOp
from ...errors import GroupError
from ...p2p.mailbox import Mailbox
from ...p2p.mailing import Mailing
from ...rendezvous import Store
from . import meet_kernels as words
from .calls import FIRST_FREE_TAG, Place
from .comm import lay_down, make_comm
from .landing import Landing, MpiCourier
from .library import Library, load
from .mail import INSIDE, MpiChannels, Tags
from .memory import Block, Memory, copy
from .moves import are_near
from .requests import abandon
from .short import MpiShort

_CLOSE_SECONDS = 5.0
_MAIL = Tags(*range(FIRST_FREE_TAG, FIRST_FREE_TAG + 3))


class MpiGroup(MpiShort, Mailing):
    """Collectives and point-to-point between the ranks of an MPI job. A group is a communicator."""

    backend = "mpi"

    @classmethod
    def make(
        cls,
        store: Store,
        name: str,
        members: Sequence[Member],
        rank: int,
        timeout: float,
        crowd: Sequence[Member] | None = None,
    ) -> MpiGroup:
        """Make the group's communicator; collective. The arguments are those of TcpGroup.make.

        Raises:
            UnavailableError: MPI is not there, or the members are not ranks of one MPI job.
            PeerDiedError, StoreTimeoutError: a member died or did not come.
        """
        library = load()
        comm, cuda_aware = make_comm(library, store, name, members, rank, timeout)
        return cls(library, comm, name, members, timeout, crowd or members, cuda_aware)

    def __init__(
        self,
        library: Library,
        comm: Any,
        name: str,
        members: Sequence[Member],
        timeout: float,
        crowd: Sequence[Member],
        cuda_aware: bool,
    ) -> None:
        dedicated = _is_dedicated(crowd, members[comm.rank])
        super().__init__(library, comm, name, members, timeout, dedicated)
        self.cuda_aware = cuda_aware
        self._channels = MpiChannels(library, comm, _MAIL, dedicated)
        courier = MpiCourier(self._channels, comm.rank)
        self._mail = Mailbox(self._channels, courier, comm.rank, self.monitor, timeout)

    # ---- reductions ------------------------------------------------------------------------------

    def _plan_reduction(
        self,
        operation: str,
        out: Array,
        x: Array,
        op: ReduceOp,
        many: Callable[[Place, Any, Block, Block], None],
        few: slice | None,
        root: int = 0,
        parts: Sequence[int] = (),
    ) -> Call:
        """A reduction of one array on each rank.

        Args:
            many: does it by moving arrays; takes where they lie, what reduces, out and x.
            few: of which ranks, where they are attached; None where this rank gets no result.
        """
        at = self._at(x)
        target, block = at.memory.blocks([out, x])
        how = at.memory.reducer(op, x.dtype, [target, block])
        small = block[1] <= (at.little if operation == "reduce" else at.room)

        def move(near: bool) -> None:
            if not small:
                many(at, how, target, block)
            elif few is not None and (sources := self._meeting.attached[few]):
                at.reductions.fold(how, target[0], sources, block[1])

        return self._plan(
            operation, x.dtype, [block[1]], move, at=at, able=how is not None, op=op, root=root, parts=parts,
            attached=block if small else (),
        )  # fmt: skip

    def _plan_all_reduce(self, x: Array, op: ReduceOp, parts: Sequence[int] = ()) -> Call:
        def many(at: Place, how: Any, target: Block, block: Block) -> None:
            at.reductions.all_reduce(how, block, x)

        return self._plan_reduction("all_reduce", x, x, op, many, slice(None), parts=parts)

    def _plan_reduce(self, out: Array, x: Array, op: ReduceOp, root: int) -> Call:
        def many(at: Place, how: Any, target: Block, block: Block) -> None:
            at.reductions.reduce(how, target, block, root, (out, x))

        few = slice(None) if self.rank == root else None
        return self._plan_reduction("reduce", out, x, op, many, few, root=root)

    def _plan_scan(self, out: Array, x: Array, op: ReduceOp, exclusive: bool) -> Call:
        def many(at: Place, how: Any, target: Block, block: Block) -> None:
            at.reductions.scan(how, target, block, exclusive, (out, x))

        few = slice(self.rank + (not exclusive))
        return self._plan_reduction("exscan" if exclusive else "scan", out, x, op, many, few)

    def _plan_reduce_scatter(self, out: Array, blocks: Sequence[Array], op: ReduceOp) -> Call:
        at = self._at(out)
        (target,), sources = at.memory.blocks([out]), at.memory.blocks(blocks)
        how = at.memory.reducer(op, out.dtype, [target, *sources])

        def move(near: bool) -> None:
            at.reductions.reduce_scatter(how, target, sources, near, (out, blocks))

        sizes, able = [nbytes for _, nbytes in sources], how is not None
        return self._plan("reduce_scatter", out.dtype, sizes, move, at=at, able=able, op=op, blocks=sources)

    # ---- moves -----------------------------------------------------------------------------------

    def _plan_broadcast(self, x: Array, root: int, parts: Sequence[int] = ()) -> Call:
        at = self._at(x)
        (block,) = at.memory.blocks([x])
        small = block[1] <= at.room

        def move(near: bool) -> None:
            if not small:
                at.moves.broadcast(block, root, x)
            elif self.rank != root:
                copy((self._meeting.attached[root], block[1]), block)

        attached = block if small and self.rank == root else ()
        return self._plan(
            "broadcast", x.dtype, [block[1]], move, at=at, root=root, parts=parts, attached=attached
        )

    def _plan_all_gather(self, outs: Sequence[Array], x: Array, parts: Sequence[int] = ()) -> Call:
        at = self._at(x)
        takes, (block,) = at.memory.blocks(outs), at.memory.blocks([x])

        def move(near: bool) -> None:
            if self._are_attached(at.room):
                self._copy_attached(takes)
            else:
                at.moves.all_gather(takes, block, near, (outs, x))

        attached = block if block[1] <= at.room else ()
        sizes = [nbytes for _, nbytes in takes]
        return self._plan(
            "all_gather", x.dtype, sizes, move, at=at, parts=parts, blocks=takes, attached=attached
        )

    def _plan_gather(self, outs: Sequence[Array] | None, x: Array, root: int) -> Call:
        at = self._at(x)
        takes, (block,) = at.memory.blocks(outs or ()), at.memory.blocks([x])

        def move(near: bool) -> None:
            if self._are_attached(at.little):
                self._copy_attached(takes)
            else:
                at.moves.gather(takes, block, root, near, (outs, x))

        attached = block if block[1] <= at.little else ()
        blocks = [block] if outs is None else takes
        sizes = [nbytes for _, nbytes in blocks]
        return self._plan("gather", x.dtype, sizes, move, at=at, root=root, blocks=blocks, attached=attached)

    def _are_attached(self, room: int) -> bool:
        """Whether every rank's array is in its row, as those of at most `room` bytes are."""
        return int(self._meeting.rows[:, words.ROW_SHAPE].max()) <= room

    def _copy_attached(self, targets: Sequence[Block]) -> None:
        """What each rank attached; to nowhere, where this rank gets no result."""
        for source, (target, nbytes) in zip(self._meeting.attached, targets, strict=False):
            copy((source, nbytes), (target, nbytes))

    def _plan_scatter(self, out: Array, blocks: Sequence[Array] | None, root: int) -> Call:
        at = self._at(out)
        gives, (block,) = at.memory.blocks(blocks or ()), at.memory.blocks([out])

        def move(near: bool) -> None:
            at.moves.scatter(block, gives, root, near, (out, blocks))

        mine = [block] if blocks is None else gives
        sizes = [nbytes for _, nbytes in mine]
        return self._plan("scatter", out.dtype, sizes, move, at=at, root=root, blocks=mine)

    def _plan_all_to_all(self, outs: Sequence[Array], blocks: Sequence[Array]) -> Call:
        at = self._at(outs[0])
        takes, gives = at.memory.blocks(outs), at.memory.blocks(blocks)

        def move(near: bool) -> None:
            at.moves.exchange(gives, takes, near, (outs, blocks))

        # Each side has a base address of its own.
        farther = takes if are_near(gives) else gives
        sizes = [nbytes for _, nbytes in (*takes, *gives)]
        return self._plan("all_to_all", blocks[0].dtype, sizes, move, at=at, blocks=farther)

    def _plan_meeting(self, operation: str, timeout: float) -> Call:
        return self._plan(operation, None, [], lambda near: None, timeout=timeout)

    # ---- GPUs ------------------------------------------------------------------------------------

    def take_gpus(self, memory: Memory, current: Callable[[], AbstractContextManager[None]]) -> None:
        """From now on the hooks above also take dense arrays on GPUs: what `memory` knows, with a dtype.

        The MPI library of every rank must be CUDA-aware.

        Args:
            memory: theirs.
            current: a context in which their GPU is the thread's current one, for the threads that carry messages.
        """
        self._gpus = self._place(memory, -1, -1)
        self._channels.current = current

    def landing(self, view: Array, finish: Callable[[Array | None], None]) -> Landing:
        """What `_recv` and `_irecv` take for an array on a GPU; the arguments are those of Landing.

        It must have more bytes than what is inside a letter, as must what `_send` and `_isend` are given of GPUs.
        """
        assert view.nbytes > self.least_on_gpus
        return Landing(view, finish)

    @property
    def least_on_gpus(self) -> int:
        """Messages up to so many bytes must come from and go to the host's memory."""
        return INSIDE

    # ---- the end ---------------------------------------------------------------------------------

    def _close(self, reason: GroupError | None) -> None:
        self._mail.close(reason)
        # A call under way was aborted and ends within moments; a signal handler's own call never does.
        turn = not self.gate.is_inside() and self.gate.turn.acquire(timeout=_CLOSE_SECONDS)
        self.monitor.leave()
        failed = self.monitor.failure is not None
        if turn:
            if failed:
                abandon([], (self._meeting, self._host, self._gpus))
            else:
                self._meeting.free()
            lay_down(self._library, self._comm, self._control, failed)
            self.gate.turn.release()

    def disown(self, error: GroupError) -> None:
        """In a child of fork: make every use raise. MPI is the parent's."""
        self.monitor.failure = self.gate.failure = error


def _is_dedicated(crowd: Sequence[Member], me: Member) -> bool:
    """Whether there is a core for each rank of this host."""
    here = [member for member in crowd if member.boot_id == me.boot_id]
    return len(here) <= len(os.sched_getaffinity(0))
