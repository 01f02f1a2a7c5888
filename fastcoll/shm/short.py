"""The synchronous path: a collective on arrays that need no preparation is one compiled call, and nothing else.

Each method tries that first. The entry itself finds out whether it can do the call (validate.py), and says LATER
where it cannot: arrays of other kinds, a dtype or reduce operation seen for the first time, wrong arguments, a
group that failed, operations that are queued. Then the general path in group.py has it.

A list becomes a tuple, since another thread could take an array out of a list while the entry uses it.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

from ..core import signature
from ..core.group import ProcessGroup
from ..core.reduce_op import ReduceOp
from ..core.status import DONE, LATER
from ..core.work import Work
from ..interop.arrays import adopt
from ..interop.tensors import header_of, headers_for, plain_types
from ..kernels.jit import Entry
from ..p2p.engine import Engine
from ..p2p.pipe import ANY, ARMED
from . import movement as moving
from . import reductions as collectives
from . import ring_kernels

_all_reduce = collectives.all_reduce
_reduce = collectives.reduce
_reduce_scatter = collectives.reduce_scatter
_barrier = collectives.barrier
_broadcast = moving.broadcast
_all_gather = moving.all_gather
_gather = moving.gather
_scatter = moving.scatter
_all_to_all = moving.all_to_all

_send = ring_kernels.send
_receive = ring_kernels.receive
_post_send = ring_kernels.post_send
_post_receive = ring_kernels.post_receive

_FIRST_CALL = Entry._first_call.__code__

BARRIER = signature.encode("barrier")


def is_refusal(error: BaseException) -> bool:
    """Whether an entry itself raised the error, over an argument that is no integer of 64 bits.

    Then the traceback ends in the method that called the entry, or in the entry's first call, which compiles. What
    a signal handler raises has other frames.
    """
    rest = error.__traceback__ and error.__traceback__.tb_next
    ends_here = rest is None or (rest.tb_next is None and rest.tb_frame.f_code is _FIRST_CALL)
    return ends_here and isinstance(error, TypeError | OverflowError)


class ShortPaths(ProcessGroup):
    """A group whose context is at the address `_c`, and its rings' table at `_m`."""

    _c: int
    _m: int
    messages: Engine
    _ahead: int = 0
    """Nanoseconds that a wait of a head start may take; 0: asynchronous calls begin on the progress thread."""

    @abstractmethod
    def _go_on(self, code: int, entry: Entry, *args: Any) -> bool:
        """What follows an entry that came back without DONE; False: it said LATER."""

    @abstractmethod
    def _torn(self, entry: Entry, error: BaseException) -> None:
        """An entry's call was left by an exception: raise it, and fail the group if that was half-way.

        Returns if the arguments were none that an entry takes: a LATER of its own kind.
        """

    @abstractmethod
    def _begin(self, entry: Entry, *args: Any) -> Work | None:
        """Begin an asynchronous call on this thread (head_start.py); None: leave it to the general path."""

    def _further(self, code: int, entry: Entry, tensor: Any, how: Any) -> bool:
        """As `_go_on`, and on LATER the call once more with a header in the place of a tensor."""
        if code == LATER:
            if type(tensor) not in plain_types:
                return False
            tensor = header_of(tensor)
            if (code := entry.call(self._c, tensor, how)) == DONE:
                return True
        return self._go_on(code, entry, tensor, how)

    def _further_on(self, code: int, entry: Entry, *args: Any) -> bool:
        """As `_further`, where any of the arguments may be a tensor or a tuple with tensors."""
        if code == LATER:
            if not plain_types:
                return False
            args = headers_for(args)
            if (code := entry.call(self._c, *args)) == DONE:
                return True
        return self._go_on(code, entry, *args)

    def all_reduce(self, tensor: Any, op: ReduceOp = ReduceOp.SUM, async_op: bool = False) -> Any:
        if not async_op:
            try:
                code = _all_reduce.call(self._c, tensor, op)
                if code == DONE or self._further(code, _all_reduce, tensor, op):
                    return None
            except BaseException as error:
                self._torn(_all_reduce, error)
        elif self._ahead and (work := self._begin(_all_reduce, tensor, op)):
            return work
        return super().all_reduce(tensor, op, async_op)

    def reduce(self, tensor: Any, root: int, op: ReduceOp = ReduceOp.SUM, async_op: bool = False) -> Any:
        if not async_op:
            try:
                code = _reduce.call(self._c, tensor, tensor, op, root)
                if code == DONE or self._further_on(code, _reduce, tensor, tensor, op, root):
                    return None
            except BaseException as error:
                self._torn(_reduce, error)
        return super().reduce(tensor, root, op, async_op)

    def reduce_scatter(
        self, output: Any, input_list: Sequence[Any], op: ReduceOp = ReduceOp.SUM, async_op: bool = False
    ) -> Work | None:
        if not async_op and type(input_list) is list:
            blocks = tuple(input_list)
            try:
                code = _reduce_scatter.call(self._c, output, blocks, op)
                if code == DONE or self._further_on(code, _reduce_scatter, output, blocks, op):
                    return None
            except BaseException as error:
                self._torn(_reduce_scatter, error)
        return super().reduce_scatter(output, input_list, op, async_op)

    def reduce_scatter_single(
        self, output: Any, input: Any, op: ReduceOp = ReduceOp.SUM, async_op: bool = False
    ) -> Work | None:
        if not async_op and type(input) is not tuple:
            try:
                code = _reduce_scatter.call(self._c, output, input, op)
                if code == DONE or self._further_on(code, _reduce_scatter, output, input, op):
                    return None
            except BaseException as error:
                self._torn(_reduce_scatter, error)
        elif (
            self._ahead
            and type(input) is not tuple
            and (work := self._begin(_reduce_scatter, output, input, op))
        ):
            return work
        return super().reduce_scatter_single(output, input, op, async_op)

    def broadcast(self, tensor: Any, root: int, async_op: bool = False) -> Any:
        if not async_op:
            try:
                code = _broadcast.call(self._c, tensor, root)
                if code == DONE or self._further(code, _broadcast, tensor, root):
                    return None
            except BaseException as error:
                self._torn(_broadcast, error)
        elif self._ahead and (work := self._begin(_broadcast, tensor, root)):
            return work
        return super().broadcast(tensor, root, async_op)

    def all_gather(self, output_list: Any, tensor: Any = None, async_op: bool = False) -> Any:
        if not async_op and type(output_list) is list:
            outs = tuple(output_list)
            try:
                code = _all_gather.call(self._c, outs, tensor)
                if code == DONE or self._further_on(code, _all_gather, outs, tensor):
                    return None
            except BaseException as error:
                self._torn(_all_gather, error)
        return super().all_gather(output_list, tensor, async_op)

    def all_gather_single(self, output: Any, input: Any, async_op: bool = False) -> Work | None:
        if not async_op and type(output) is not tuple:
            try:
                code = _all_gather.call(self._c, output, input)
                if code == DONE or self._further_on(code, _all_gather, output, input):
                    return None
            except BaseException as error:
                self._torn(_all_gather, error)
        elif self._ahead and type(output) is not tuple and (work := self._begin(_all_gather, output, input)):
            return work
        return super().all_gather_single(output, input, async_op)

    def gather(
        self, tensor: Any, output_list: Sequence[Any] | None, root: int, async_op: bool = False
    ) -> Work | None:
        if not async_op and (output_list is None or type(output_list) is list):
            outs = None if output_list is None else tuple(output_list)
            try:
                code = _gather.call(self._c, outs, tensor, root)
                if code == DONE or self._further_on(code, _gather, outs, tensor, root):
                    return None
            except BaseException as error:
                self._torn(_gather, error)
        return super().gather(tensor, output_list, root, async_op)

    def scatter(
        self, tensor: Any, input_list: Sequence[Any] | None, root: int, async_op: bool = False
    ) -> Any:
        if not async_op and (input_list is None or type(input_list) is list):
            blocks = None if input_list is None else tuple(input_list)
            try:
                code = _scatter.call(self._c, tensor, blocks, root)
                if code == DONE or self._further_on(code, _scatter, tensor, blocks, root):
                    return None
            except BaseException as error:
                self._torn(_scatter, error)
        return super().scatter(tensor, input_list, root, async_op)

    def all_to_all(
        self, output_list: Sequence[Any], input_list: Sequence[Any], async_op: bool = False
    ) -> Work | None:
        if not async_op and type(output_list) is list and type(input_list) is list and input_list:
            outs, blocks = tuple(output_list), tuple(input_list)
            try:
                code = _all_to_all.call(self._c, outs, blocks, blocks[0])
                if code == DONE or self._further_on(code, _all_to_all, outs, blocks, blocks[0]):
                    return None
            except BaseException as error:
                self._torn(_all_to_all, error)
        return super().all_to_all(output_list, input_list, async_op)

    def all_to_all_single(
        self,
        output: Any,
        input: Any,
        output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
        async_op: bool = False,
    ) -> Work | None:
        if (
            not async_op
            and output_split_sizes is None
            and input_split_sizes is None
            and type(output) is not tuple
        ):
            try:
                code = _all_to_all.call(self._c, output, input, input)
                if code == DONE or self._further_on(code, _all_to_all, output, input, input):
                    return None
            except BaseException as error:
                self._torn(_all_to_all, error)
        return super().all_to_all_single(output, input, output_split_sizes, input_split_sizes, async_op)

    def barrier(self, async_op: bool = False, timeout: float | None = None) -> Work | None:
        if not async_op and timeout is None:
            try:
                code = _barrier.call(self._c, BARRIER)
                if code == DONE or self._go_on(code, _barrier, BARRIER):
                    return None
            except BaseException as error:
                self._torn(_barrier, error)
        return super().barrier(async_op, timeout)

    def send(self, tensor: Any, dst: int, tag: int = 0) -> None:
        try:
            code = _send.call(self._m, dst, tensor, tag, -1)
            if code == DONE:
                return None
            if code == LATER and type(tensor) in plain_types:
                code = _send.call(self._m, dst, header_of(tensor), tag, -1)
            if code == DONE:
                return None
            if code != LATER:
                return self.messages.resume_send(code, adopt(tensor, writable=False).array, dst, tag)
        except BaseException as error:
            self._torn_message(error, "send")
        return super().send(tensor, dst, tag)

    def recv(self, tensor: Any, src: int | None = None, tag: int = 0) -> int:
        try:
            code = _receive.call(self._m, ANY if src is None else src, tensor, tag, -1)
            if code < DONE:
                return -1 - code
            if code == LATER and type(tensor) in plain_types:
                code = _receive.call(self._m, ANY if src is None else src, header_of(tensor), tag, -1)
            if code < DONE:
                return -1 - code
            if code != LATER:
                return self.messages.resume_receive(code, adopt(tensor, writable=True).array, src, tag)
        except BaseException as error:
            self._torn_message(error, "recv")
        return super().recv(tensor, src, tag)

    def isend(self, tensor: Any, dst: int, tag: int = 0) -> Work:
        messages = self.messages
        if not messages.inbox and type(dst) is int:
            try:
                number = _post_send.call(self._m, dst, tensor, tag, -1)
                if number >= 0:
                    return self.gate.unheard.note(messages.sent(number, tensor, dst, tag))
            except BaseException as error:
                self._torn_message(error, "isend")
        return super().isend(tensor, dst, tag)

    def irecv(self, tensor: Any, src: int | None = None, tag: int = 0) -> Work:
        messages = self.messages
        if not messages.inbox and type(src) is int:
            try:
                code = _post_receive.call(self._m, src, tensor, tag, -1)
                if code == DONE:
                    return messages.received(tensor, src, tag)
                if code == ARMED:
                    return self.gate.unheard.note(messages.armed(tensor, src, tag))
            except BaseException as error:
                self._torn_message(error, "irecv")
        return super().irecv(tensor, src, tag)

    def _torn_message(self, error: BaseException, doing: str) -> None:
        """As `_torn`, for messages."""
        self.messages.torn(error, doing)
        if not is_refusal(error):
            raise
