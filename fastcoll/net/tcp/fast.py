"""The fast path over TCP for synchronous calls on plain arrays: it skips validation and planning.

It carries out a call only if an equal call, with arrays of the same sizes, was prepared before. Between two ranks, an
all_reduce of 8 bytes takes 7.8 us on this path and 9.1 us on the general path (AMD EPYC). Messages of plain arrays of
numbers have a fast path, too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...arrays.imported import ImportedArray
from ...core.group import ProcessGroup
from ...core.message import Status
from ...core.operands import Array, is_message, sum_for
from ...core.prepared import fast_methods
from ...core.reduce_op import ReduceOp
from ...core.status import DONE, LATER
from ...core.work import Work
from ...p2p.engine import Engine
from ...p2p.transfers import kind_of
from .pipe import TcpPipe
from .plans.choose import plan_for

_KINDS = (
    "all_reduce",
    "broadcast",
    "reduce",
    "all_gather",
    "reduce_scatter",
    "gather",
    "scatter",
    "all_to_all",
)


def fast_calls(
    group: ProcessGroup,
    pipe: TcpPipe,
    messages: Engine,
    run: Callable[[Any, tuple[Array, ...]], bool],
    combines: bool,
) -> dict[str, Callable[..., Any]]:
    """Return fast functions that replace methods of a group over TCP.

    A fast function passes calls that it cannot carry out to the group's method. `run` carries out the call that was
    prepared for a key; it returns False if it has not carried it out. `combines` is whether headers are combined.
    """
    gate, size = group.gate, group.size

    def is_ready(tensor: Any, peer: Any, tag: Any) -> bool:
        """Return whether a message needs no further validation and the group is usable."""
        return is_message(tensor, peer, tag, size) and gate.failure is None and not gate.closed

    def send(tensor: Any, dst: int, tag: int = 0) -> None:
        if is_ready(tensor, dst, tag):
            try:
                status = pipe.send(tensor, dst, kind_of(tag, tensor.dtype))
                if status == DONE:
                    return None
                if status != LATER:
                    return messages.resume_send(status, tensor, dst, tag)
            except BaseException as error:
                messages.torn(error, "send")
                raise
        return group.send(tensor, dst, tag)

    def recv(tensor: Any, src: int | None = None, tag: int = 0, status: Status | None = None) -> int:
        if status is None and is_ready(tensor, src, tag):
            try:
                code = pipe.receive(tensor, src, kind_of(tag, tensor.dtype))  # type: ignore[arg-type]
                if code < DONE:
                    return -1 - code
                if code != LATER:
                    return messages.resume_receive(code, tensor, src, tag)
            except BaseException as error:
                messages.torn(error, "recv")
                raise
        return group.recv(tensor, src, tag, status)

    def isend(tensor: Any, dst: int, tag: int = 0) -> Work:
        if is_ready(tensor, dst, tag):
            return gate.unobserved.note(messages.isend(ImportedArray(tensor), dst, tag))
        return group.isend(tensor, dst, tag)

    def irecv(tensor: Any, src: int | None = None, tag: int = 0, status: Status | None = None) -> Work:
        if status is None and is_ready(tensor, src, tag):
            return gate.unobserved.note(messages.irecv(ImportedArray(tensor), src, tag))
        return group.irecv(tensor, src, tag, status)

    # Some reductions need a division at the end (`folded`), which the fast path does not do.
    folds_once = (lambda op: folded(op, combines) is op) if combines else None
    collectives = fast_methods(group, _KINDS, run, folds_once, plan_for)
    return {**collectives, "send": send, "recv": recv, "isend": isend, "irecv": irecv}


def folded(op: ReduceOp, combines: bool) -> ReduceOp:
    """Return the operation that the engine applies for `op`.

    In a group that combines headers, partial results are reduced again. So for AVG this is SUM there, and the caller
    then divides the result.
    """
    return sum_for(op) if combines else op
