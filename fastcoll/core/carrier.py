"""Carrier: what carries operations out, for arrays of one kind.

Every ProcessGroup is the carrier of its host arrays. Arrays on GPUs have a DeviceCarrier in each group (see
fastcoll/gpu/). A hook checks what it can without talking to peers (UsageError, ArrayError) and
must not block; the call that it returns blocks, raises GroupError or MismatchError, and leaves the arrays of a failed
call undefined. What only queues work on a GPU returns a StreamCall instead.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Generic, Protocol, TypeVar

from ..errors import GroupError
from ..interop.arrays import Adopted
from .operation import COMPOSITIONS, Call, Operation
from .reduce_op import ReduceOp
from .work import Work

A = TypeVar("A")
"""The arrays of a carrier: contiguous ndarrays, or DeviceArrays."""


_HOOKS: dict[str, Callable[[Any, Operation], Call]] = {
    "all_reduce": lambda c, o: c._plan_all_reduce(o.outputs[0], o.op, o.parts),
    "reduce": lambda c, o: c._plan_reduce(o.outputs[0], o.inputs[0], o.op, o.root),
    "scan": lambda c, o: c._plan_scan(o.outputs[0], o.inputs[0], o.op, False),
    "exscan": lambda c, o: c._plan_scan(o.outputs[0], o.inputs[0], o.op, True),
    "reduce_scatter": lambda c, o: c._plan_reduce_scatter(o.outputs[0], o.inputs, o.op),
    "broadcast": lambda c, o: c._plan_broadcast(o.outputs[0], o.root, o.parts),
    "all_gather": lambda c, o: c._plan_all_gather(o.outputs, o.inputs[0], o.parts),
    "gather": lambda c, o: c._plan_gather(o.outputs or None, o.inputs[0], o.root),
    "scatter": lambda c, o: c._plan_scatter(o.outputs[0], o.inputs or None, o.root),
    "all_to_all": lambda c, o: c._plan_all_to_all(o.outputs, o.inputs),
}


class Carrier(ABC, Generic[A]):
    """The hooks. Host inputs and outputs overlap only where it is said; device arrays may overlap anywhere."""

    natively: frozenset[str] = frozenset(_HOOKS)
    """The kinds that it carries out itself; the others are compositions of these."""

    def plan(self, operation: Operation, timeout: float | None = None) -> Call:
        """See `Operation`; until a carrier has this method itself, its hooks stand for it."""
        return _HOOKS[operation.kind](self, operation)

    # Who has `plan` needs no hooks: those that are called still make an Operation.

    def _plan_all_reduce(self, x: A, op: ReduceOp, parts: Sequence[int] = ()) -> Call:
        return self.plan(Operation("all_reduce", (x,), (x,), op, parts=tuple(parts)))

    def _plan_reduce(self, out: A, x: A, op: ReduceOp, root: int) -> Call:
        return self.plan(Operation("reduce", (out,), (x,), op, root))

    def _plan_scan(self, out: A, x: A, op: ReduceOp, exclusive: bool) -> Call:
        return self.plan(Operation("exscan" if exclusive else "scan", (out,), (x,), op))

    def _plan_reduce_scatter(self, out: A, blocks: Sequence[A], op: ReduceOp) -> Call:
        return self.plan(Operation("reduce_scatter", (out,), tuple(blocks), op))

    def _plan_broadcast(self, x: A, root: int, parts: Sequence[int] = ()) -> Call:
        return self.plan(Operation("broadcast", (x,), (x,), root=root, parts=tuple(parts)))

    def _plan_all_gather(self, outs: Sequence[A], x: A, parts: Sequence[int] = ()) -> Call:
        return self.plan(Operation("all_gather", tuple(outs), (x,), parts=tuple(parts)))

    def _plan_gather(self, outs: Sequence[A] | None, x: A, root: int) -> Call:
        return self.plan(Operation("gather", tuple(outs or ()), (x,), root=root))

    def _plan_scatter(self, out: A, blocks: Sequence[A] | None, root: int) -> Call:
        return self.plan(Operation("scatter", (out,), tuple(blocks or ()), root=root))

    def _plan_all_to_all(self, outs: Sequence[A], blocks: Sequence[A]) -> Call:
        return self.plan(Operation("all_to_all", tuple(outs), tuple(blocks)))

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


class StreamCall(ABC):
    """A call that only queues work on a GPU; `ProcessGroup._run` starts it on the caller's thread, in order."""

    @abstractmethod
    def start(self, name: str, owners: Sequence[Adopted]) -> Work:
        """Queue the work behind what the arrays' streams hold, then `finish` of the owners; does not wait for a GPU.

        The Work's `wait` makes the stream that is then current in the arrays' library wait, and not the host; its
        `is_completed` asks the GPU.
        """

    def __call__(self) -> None:
        """As `start` and waiting for it on the stream, for callers that know calls only."""
        self.start("a call on a GPU", ()).wait()


class Messages(Protocol):
    """Messages of arrays on GPUs."""

    def isend(self, x: Adopted, dst: int, tag: int) -> Work:
        """Post a message. Complete when the receiver has taken it."""

    def irecv(self, x: Adopted, src: int | None, tag: int) -> Work:
        """Post a receive, from any rank when src is None; the result is the sender's rank."""

    def send(self, x: Adopted, dst: int, tag: int) -> None:
        """As `isend` and waiting for it; to oneself, returns once the message is buffered."""

    def recv(self, x: Adopted, src: int | None, tag: int) -> int:
        """As `irecv` and waiting for it."""


class DeviceCarrier(ABC):
    """What carries operations on the arrays of GPUs out, in one group."""

    natively: frozenset[str] = frozenset((*_HOOKS, *COMPOSITIONS))

    @property
    @abstractmethod
    def messages(self) -> Messages:
        """What carries messages out."""

    @abstractmethod
    def plan(self, operation: Operation, timeout: float | None = None) -> Call:
        """What carries an operation out: a call that blocks, or a StreamCall.

        Checks what it can without talking to peers (UsageError, ArrayError); does not block.
        """

    @abstractmethod
    def adopt(self, x: Any, *, writable: bool, what: str) -> Adopted:
        """Take an array on a GPU in, as `arrays.adopt` does host arrays; `array` is a dense DeviceArray.

        Strided arrays are packed on their own stream.

        Raises:
            ArrayError: it cannot be used, or is read-only where the call writes.
            UnavailableError: an extra is missing.
        """

    @property
    def splits(self) -> bool:
        """Whether `split` can be called; the same on all ranks, between calls."""
        return False

    def split(self, group: Any) -> DeviceCarrier | None:
        """The carrier of a new group of some of this one's ranks, made from what this one has; collective, and blocks.

        Args:
            group: the new ProcessGroup, with its ranks in this one's order; None on ranks that are not in it, where
                the result is None too.

        Raises:
            GroupError: it cannot be made; this carrier's group has failed.
        """
        raise NotImplementedError

    @abstractmethod
    def abort(self) -> None:
        """The group has failed: end what is under way, from any thread, without waiting."""

    @abstractmethod
    def close(self, reason: GroupError | None) -> None:
        """Release everything; `reason` says why when it is not an orderly end. Called once."""
