"""The short cuts of messages: send, recv, isend and irecv of `group.fast`, each of which makes one compiled call.

The compiled functions (*entries*) belong to a pipe (pipe.py). An entry checks its arguments, and returns LATER if it
cannot send or receive the message, because the array is not a plain ndarray, an argument is wrong, or earlier
operations come first. Then the short cut calls the group's method.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import index
from typing import Any, NamedTuple

from ..arrays.arrays import import_array
from ..arrays.tensors import header_of, plain_types
from ..compiler.jit import Entry
from ..core.group import ProcessGroup
from ..core.message import Status
from ..core.operands import refuses
from ..core.status import DONE, LATER
from ..core.work import Work
from .engine import Engine
from .pipe import ANY
from .transfers import Receive, Send


class Entries(NamedTuple):
    """The entries of a pipe.

    Each takes the address of the pipe's table, a peer's number in the pipe, an array, the tag, and -1 for the size,
    which means the array's own size.
    """

    send: Entry
    receive: Entry
    post_send: Entry
    post_receive: Entry


class ShortCuts(NamedTuple):
    """Functions that replace the group's methods. They take a peer's number in the pipe instead of its group rank."""

    send: Callable[..., None]
    recv: Callable[..., int]
    isend: Callable[..., Work]
    irecv: Callable[..., Work]


def short_cuts(
    group: ProcessGroup,
    messages: Engine,
    address: int,
    entries: Entries,
    rank_of: Callable[[Any], Any] = lambda number: number,
) -> ShortCuts:
    """Make the short cuts of one group and one pipe.

    Args:
        address: the address of the pipe's table.
        rank_of: converts a peer's number in the pipe to its group rank. If the two differ, `recv` may return the
            number, and `isend` and `irecv` do not work.
    """
    send_now, receive_now, post_send, post_receive = entries
    progress = messages.progress
    messages.notes = group.gate.unobserved.note

    def torn(error: BaseException, doing: str, *integers: Any) -> bool:
        """Clean up after an exception in a short cut; return whether to raise it.

        If it returns False, an argument is wrong, and the group's method, which is called next, raises a better
        error.
        """
        messages.torn(error, doing)
        return not refuses(error, integers)

    def send(tensor: Any, dst: int, tag: int = 0) -> None:
        try:
            code = send_now.call(address, dst, tensor, tag, -1)
            if code == DONE:
                return None
            if code == LATER and type(tensor) in plain_types:
                code = send_now.call(address, dst, header_of(tensor), tag, -1)
            if code == DONE:
                return None
            if code != LATER:
                array = import_array(tensor, writable=False).array
                return messages.resume_send(code, array, index(rank_of(dst)), index(tag))
        except BaseException as error:
            if torn(error, "send", dst, tag):
                raise
        return group.send(tensor, rank_of(dst), tag)

    def recv(tensor: Any, src: int | None = None, tag: int = 0, status: Status | None = None) -> int:
        if status is not None:
            return group.recv(tensor, src, tag, status)
        try:
            code = receive_now.call(address, ANY if src is None else src, tensor, tag, -1)
            if code < DONE:
                return -1 - code
            if code == LATER and type(tensor) in plain_types:
                code = receive_now.call(address, ANY if src is None else src, header_of(tensor), tag, -1)
            if code < DONE:
                return -1 - code
            if code != LATER:
                array = import_array(tensor, writable=True).array
                return messages.resume_receive(code, array, src if src is None else rank_of(src), index(tag))
        except BaseException as error:
            if torn(error, "recv", ANY if src is None else src, tag):
                raise
        return group.recv(tensor, src if src is None else rank_of(src), tag)

    def isend(tensor: Any, dst: int, tag: int = 0) -> Work:
        try:
            send = Send().of(progress, tensor, dst, tag)
            if (number := post_send.call(address, dst, tensor, tag, -1, send)) >= 0:
                send.request = number
                return send
        except BaseException as error:
            if torn(error, "isend", dst, tag):
                raise
        return group.isend(tensor, dst, tag)

    def irecv(tensor: Any, src: int | None = None, tag: int = 0, status: Status | None = None) -> Work:
        if src is not None and status is None:
            try:
                receive = Receive().of(progress, tensor, src, tag, src)
                if (number := post_receive.call(address, src, tensor, tag, -1, receive)) >= 0:
                    receive.request = number
                    return receive
            except BaseException as error:
                if torn(error, "irecv", src, tag):
                    raise
        return group.irecv(tensor, src, tag, status)

    return ShortCuts(send, recv, isend, irecv)
