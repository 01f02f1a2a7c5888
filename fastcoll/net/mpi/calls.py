"""A collective call over MPI: it meets the other ranks, then does what it is for, and knows what to do when that fails.

Every wait comes back every 50 ms to look at signals, the clock and the peers. A call on arrays in the memory of GPUs is
another one than that on the host's: nothing of theirs fits into a row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from ...core import signature
from ...core.group import ProcessGroup
from ...core.members import Member
from ...core.monitor import Wait
from ...core.operands import Array
from ...core.operation import Call
from ...core.reduce_op import ReduceOp
from ...errors import AbortedError, GroupError
from ...kernels.reduce import reducer
from ..tcp.plans.shape import Limits, Shape
from ..tcp.sizes import sizes_of
from ..tcp.vigil import NetVigil
from . import meet_kernels as words
from .control import MpiControl
from .library import Library
from .meet import Meeting, Said
from .memory import Block, HostMemory, Memory, blocks_of
from .moves import Moves, are_near
from .reduce import Reductions
from .requests import Requests

_MOST_PREPARED = 1024
_NOTICE, _MEET, _MOVE = 1, 2, 3
FIRST_FREE_TAG = 4
_NO_LIMITS = Limits(0, 0)
_ON_GPU = 1 << 7  # in a call word, where the operation's number leaves it free


class Place(NamedTuple):
    """Where the arrays of a call lie, and what is done with them there.

    Attributes:
        room, little: bytes that a row may have of them, as in Meeting; -1: nothing, not even of empty ones.
    """

    memory: Memory
    moves: Moves
    reductions: Reductions
    room: int
    little: int


class MpiCalls(ProcessGroup):
    """The part of MpiGroup that all collectives share."""

    def __init__(
        self,
        library: Library,
        comm: Any,
        name: str,
        members: Sequence[Member],
        timeout: float,
        dedicated: bool,
    ) -> None:
        super().__init__(name, [member.rank for member in members], comm.rank, timeout)
        self._library = library
        self._comm = comm
        self._control = MpiControl(library, comm, _NOTICE)
        self.monitor = NetVigil(members, comm.rank, self._control)
        self.monitor.on_failure = self._stop
        self._meeting = Meeting(library, comm, dedicated, _MEET)
        self._requests = Requests(library, dedicated)
        self._host = self._place(HostMemory(self.size, self._look), self._meeting.room, self._meeting.little)
        self._gpus: Place | None = None
        self._prepared: dict[Any, Said] = {}
        self._wait: Wait | None = None
        self._limit = timeout
        self._moving = False

    def _place(self, memory: Memory, room: int, little: int) -> Place:
        moves = Moves(self._library, self._comm, self._requests, _MOVE, self._look, memory)
        return Place(memory, moves, Reductions(moves, memory), room, little)

    def _at(self, x: Any) -> Place:
        """Where an array lies."""
        if type(x) is np.ndarray:
            return self._host
        assert self._gpus is not None
        return self._gpus

    def _plan(
        self,
        operation: str,
        dtype: np.dtype[Any] | None,
        nbytes: Sequence[int],
        move: Callable[[bool], None],
        *,
        at: Place | None = None,
        able: bool = True,
        op: ReduceOp | None = None,
        root: int = 0,
        parts: Sequence[int] = (),
        blocks: Sequence[Block] = (),
        attached: Sequence[int] = (),
        timeout: float | None = None,
    ) -> Call:
        """A call: the meeting, and then what it is for.

        Args:
            nbytes: as in plans/shape.py.
            move: does it; takes whether all ranks' blocks are near.
            at: where the arrays lie; None: on the host.
            able: whether this rank can do it there. Where one cannot, no rank does, and the call returns False.
            blocks: those that one of MPI's operations with a `v` in its name reads or writes together.
            attached: a block of at most `room` bytes for all ranks to see, or empty.
        """
        on_gpu = at is not None and at.memory.on_gpu
        said = self._said(operation, dtype, op, root, tuple(nbytes), tuple(parts), on_gpu)
        near = able if on_gpu else are_near(blocks)

        def call() -> bool:
            self.gate.check_usable()
            try:
                self._wait, self._limit = None, self.timeout if timeout is None else timeout
                self._moving = False
                found = self._meeting.meet(said, near, attached, self._look)
                if found in (words.DIFFERENT, words.UNBALANCED):
                    raise self._mismatch(found, said)
                self._moving = True
                if done := found == words.AGREED or not on_gpu:
                    move(found == words.AGREED)
                self._meeting.end()
                return done
            except BaseException as error:
                raise self._torn(error) from error.__cause__

        return call

    def _said(
        self,
        operation: str,
        dtype: np.dtype[Any] | None,
        op: ReduceOp | None,
        root: int,
        nbytes: tuple[int, ...],
        parts: tuple[int, ...],
        on_gpu: bool,
    ) -> Said:
        key: tuple[Any, ...] = (operation, dtype, op, root, nbytes, parts)  # as in mpi_short.py
        if on_gpu:
            key += (_ON_GPU,)
        found = self._prepared.get(key)
        if found is None:
            code = signature.encode(operation, dtype, op=op, parts=parts) | root << signature.ROOT_SHIFT
            sizes = sizes_of(Shape(operation, self.size, self.rank, nbytes, _NO_LIMITS, root=root))
            found = Said(
                code | _ON_GPU * on_gpu, sizes, signature.balance(self.rank, sizes.gives, sizes.takes)
            )
            if not on_gpu:
                self._let_finish(found, operation, dtype, op, root, nbytes)
            if len(self._prepared) < _MOST_PREPARED:
                self._prepared[key] = found
        return found

    def _let_finish(
        self,
        said: Said,
        operation: str,
        dtype: np.dtype[Any] | None,
        op: ReduceOp | None,
        root: int,
        nbytes: tuple[int, ...],
    ) -> None:
        """Where all data is attached, tell the compiled call what is left to do."""
        own = nbytes[0] if nbytes else 0
        if own > self._meeting.room or len(set(nbytes)) > 1:
            return
        if operation == "barrier":
            said.finish_by(words.NOTHING, 0)
        elif operation == "broadcast":
            said.finish_by(words.FROM_ROOT, own, root)
        elif operation == "all_gather":
            said.finish_by(words.FROM_ALL, own)
        elif operation == "all_reduce" and op is not None and dtype is not None:
            how = reducer(op, dtype)
            said.finish_by(words.REDUCE, own, 0, how.address, how.code, own // how.itemsize)

    def _look(self) -> None:
        """Every 50 ms of a call: raise if going on is hopeless."""
        if self._wait is None:
            self._wait = Wait(self.monitor, self._doing(), self._late, self._limit)
        self._wait.look()

    def _doing(self) -> str:
        """The call under way, for messages."""
        _, code, shape = self._meeting.rows[self.rank, : words.ROW_BALANCE].tolist()
        return (
            f"{signature.describe(code & ~_ON_GPU, shape)}, call {self._meeting.calls} of group {self.name!r}"
        )

    def _late(self) -> list[int]:
        """The group ranks that have not come; once all have, those that may still be in the call."""
        if not self._moving:
            return self._meeting.late()
        return [rank for rank in range(self.size) if rank != self.rank and not self.monitor.has_left(rank)]

    def _mismatch(self, found: int, said: Said) -> Exception:
        """The error of calls that differ, which all ranks have seen; the group goes on."""
        rows = self._meeting.rows[:, words.ROW_CODE : words.ROW_SHAPE + 1].tolist()
        heads = [(code & ~_ON_GPU, shape) for code, shape in rows]
        error = signature.refused(
            heads, self.ranks, self.gate.refusal, self._from_all, self._meeting.calls, self.name
        )
        text = signature.describe_differences(signature.comparable(heads), self.ranks)
        on_gpus = [self.ranks[rank] for rank, (code, _) in enumerate(rows) if code & _ON_GPU]
        if 0 < len(on_gpus) < self.size:
            text += f"; the arrays of {on_gpus} are on GPUs, those of the others are not"
        if found == words.UNBALANCED:
            tables = self._from_all(np.array([said.sizes.gives, said.sizes.takes], np.int64)).tolist()
            sizes = [(gives, takes) for gives, takes in tables]
            text = signature.describe_mismatch(heads, self.ranks, lambda: sizes)
        self._meeting.end()
        return error or signature.mismatch(text, self._meeting.calls, self.name)

    def _from_all(self, own: Array) -> Array:
        """Every rank's array; all of them ask, since all have seen that something does not fit."""
        everybody = np.empty((self.size, *own.shape), own.dtype)
        everybody[self.rank] = own
        blocks = blocks_of(list(everybody))
        self._host.moves.all_gather(blocks, blocks[self.rank], True, everybody)
        return everybody

    def _torn(self, error: BaseException) -> BaseException:
        """What to raise for an exception; the group fails if it was half-way, since the peers go on with it."""
        if isinstance(error, self._library.MPI.Exception):
            error = AbortedError(f"{self._doing()}: the MPI library says: {error}")
        if isinstance(error, GroupError):
            self.fail(error)
        elif self._meeting.under_way:
            here = self.monitor.name(self.rank)
            self.fail(AbortedError(f"{here} was interrupted by {type(error).__name__} in {self._doing()}"))
        return error

    def _stop(self) -> None:
        """The group has failed, wherever that was found."""
        self.gate.failure = self.monitor.failure
