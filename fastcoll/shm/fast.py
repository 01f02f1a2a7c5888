"""The synchronous path: a collective on arrays that need no preparation is one compiled call, and nothing else.

Each method tries that first. The entry itself finds out whether it can do the call (validate.py), and says LATER
where it cannot: arrays of other kinds, a dtype or reduce operation seen for the first time, wrong arguments, a
group that failed, operations that are queued. Then the general path in group.py has it.

A list becomes a tuple, since another thread could take an array out of a list while the entry uses it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import index
from typing import TYPE_CHECKING, Any

from ..core import signature
from ..core.group import ProcessGroup
from ..core.message import Status
from ..core.reduce_op import ReduceOp
from ..core.status import DONE, LATER
from ..core.work import Work
from ..interop.arrays import adopt
from ..interop.tensors import header_of, headers_for, plain_types
from ..kernels.jit import Entry
from ..p2p.pipe import ANY, ARMED
from . import ring_kernels
from .head_start import refuses
from .movement import all_gather, all_to_all, broadcast, gather, scatter
from .reductions import all_reduce, barrier, reduce, reduce_scatter

if TYPE_CHECKING:
    from .backend import ShmBackend

_send = ring_kernels.send
_receive = ring_kernels.receive
_post_send = ring_kernels.post_send
_post_receive = ring_kernels.post_receive

BARRIER = signature.encode("barrier")


class Fast:
    """What stands in for a group's methods where it runs in shared memory."""

    def __init__(self, group: ProcessGroup, backend: ShmBackend) -> None:
        self._group = group
        self._c, self._m = backend.context.address, backend.pipe.address
        self._messages = backend.messages
        self._resume, self._torn = backend.resume, backend.torn
        self._head_start = backend.head_start
        self._note = group.gate.unheard.note

    def table(self) -> dict[str, Callable[..., Any]]:
        """The methods below, by the names of the group's."""
        return {name: getattr(self, name) for name in vars(Fast) if name[0] != "_" and name != "table"}

    def _further(self, code: int, entry: Entry, tensor: Any, how: Any) -> bool:
        """As `_go_on`, and on LATER the call once more with a header in the place of a tensor."""
        if code == LATER:
            if type(tensor) not in plain_types:
                return False
            tensor = header_of(tensor)
            if (code := entry.call(self._c, tensor, how)) == DONE:
                return True
        return self._resume(code, entry, tensor, how)

    def _further_on(self, code: int, entry: Entry, *args: Any) -> bool:
        """As `_further`, where any of the arguments may be a tensor or a tuple with tensors."""
        if code == LATER:
            if not plain_types:
                return False
            args = headers_for(args)
            if (code := entry.call(self._c, *args)) == DONE:
                return True
        return self._resume(code, entry, *args)

    def all_reduce(self, tensor: Any, op: ReduceOp = ReduceOp.SUM, async_op: bool = False) -> Any:
        if not async_op:
            try:
                code = all_reduce.call(self._c, tensor, op)
                if code == DONE or self._further(code, all_reduce, tensor, op):
                    return None
            except BaseException as error:
                self._torn(all_reduce, error)
        elif work := self._head_start.begin(all_reduce, tensor, op):
            return work
        return ProcessGroup.all_reduce(self._group, tensor, op, async_op)

    def reduce(self, tensor: Any, root: int, op: ReduceOp = ReduceOp.SUM, async_op: bool = False) -> Any:
        if not async_op:
            try:
                code = reduce.call(self._c, tensor, tensor, op, root)
                if code == DONE or self._further_on(code, reduce, tensor, tensor, op, root):
                    return None
            except BaseException as error:
                self._torn(reduce, error, root)
        return ProcessGroup.reduce(self._group, tensor, root, op, async_op)

    def reduce_scatter(
        self, output: Any, input_list: Sequence[Any], op: ReduceOp = ReduceOp.SUM, async_op: bool = False
    ) -> Work | None:
        if not async_op and type(input_list) is list:
            blocks = tuple(input_list)
            try:
                code = reduce_scatter.call(self._c, output, blocks, op)
                if code == DONE or self._further_on(code, reduce_scatter, output, blocks, op):
                    return None
            except BaseException as error:
                self._torn(reduce_scatter, error)
        return ProcessGroup.reduce_scatter(self._group, output, input_list, op, async_op)

    def reduce_scatter_single(
        self, output: Any, input: Any, op: ReduceOp = ReduceOp.SUM, async_op: bool = False
    ) -> Work | None:
        if not async_op and type(input) is not tuple:
            try:
                code = reduce_scatter.call(self._c, output, input, op)
                if code == DONE or self._further_on(code, reduce_scatter, output, input, op):
                    return None
            except BaseException as error:
                self._torn(reduce_scatter, error)
        elif type(input) is not tuple and (work := self._head_start.begin(reduce_scatter, output, input, op)):
            return work
        return ProcessGroup.reduce_scatter_single(self._group, output, input, op, async_op)

    def broadcast(self, tensor: Any, root: int, async_op: bool = False) -> Any:
        if not async_op:
            try:
                code = broadcast.call(self._c, tensor, root)
                if code == DONE or self._further(code, broadcast, tensor, root):
                    return None
            except BaseException as error:
                self._torn(broadcast, error, root)
        elif work := self._head_start.begin(broadcast, tensor, root, integers=(root,)):
            return work
        return ProcessGroup.broadcast(self._group, tensor, root, async_op)

    def all_gather(self, output_list: Any, tensor: Any = None, async_op: bool = False) -> Any:
        if not async_op and type(output_list) is list:
            outs = tuple(output_list)
            try:
                code = all_gather.call(self._c, outs, tensor)
                if code == DONE or self._further_on(code, all_gather, outs, tensor):
                    return None
            except BaseException as error:
                self._torn(all_gather, error)
        return ProcessGroup.all_gather(self._group, output_list, tensor, async_op)

    def all_gather_single(self, output: Any, input: Any, async_op: bool = False) -> Work | None:
        if not async_op and type(output) is not tuple:
            try:
                code = all_gather.call(self._c, output, input)
                if code == DONE or self._further_on(code, all_gather, output, input):
                    return None
            except BaseException as error:
                self._torn(all_gather, error)
        elif type(output) is not tuple and (work := self._head_start.begin(all_gather, output, input)):
            return work
        return ProcessGroup.all_gather_single(self._group, output, input, async_op)

    def gather(
        self, tensor: Any, output_list: Sequence[Any] | None, root: int, async_op: bool = False
    ) -> Work | None:
        if not async_op and (output_list is None or type(output_list) is list):
            outs = None if output_list is None else tuple(output_list)
            try:
                code = gather.call(self._c, outs, tensor, root)
                if code == DONE or self._further_on(code, gather, outs, tensor, root):
                    return None
            except BaseException as error:
                self._torn(gather, error, root)
        return ProcessGroup.gather(self._group, tensor, output_list, root, async_op)

    def scatter(
        self, tensor: Any, input_list: Sequence[Any] | None, root: int, async_op: bool = False
    ) -> Any:
        if not async_op and (input_list is None or type(input_list) is list):
            blocks = None if input_list is None else tuple(input_list)
            try:
                code = scatter.call(self._c, tensor, blocks, root)
                if code == DONE or self._further_on(code, scatter, tensor, blocks, root):
                    return None
            except BaseException as error:
                self._torn(scatter, error, root)
        return ProcessGroup.scatter(self._group, tensor, input_list, root, async_op)

    def all_to_all(
        self, output_list: Sequence[Any], input_list: Sequence[Any], async_op: bool = False
    ) -> Work | None:
        if not async_op and type(output_list) is list and type(input_list) is list and input_list:
            outs, blocks = tuple(output_list), tuple(input_list)
            try:
                code = all_to_all.call(self._c, outs, blocks, blocks[0])
                if code == DONE or self._further_on(code, all_to_all, outs, blocks, blocks[0]):
                    return None
            except BaseException as error:
                self._torn(all_to_all, error)
        return ProcessGroup.all_to_all(self._group, output_list, input_list, async_op)

    def all_to_all_single(
        self,
        output: Any,
        input: Any,
        output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
        async_op: bool = False,
    ) -> Work | None:
        even = output_split_sizes is None and input_split_sizes is None
        if even and not async_op and type(output) is not tuple:
            try:
                code = all_to_all.call(self._c, output, input, input)
                if code == DONE or self._further_on(code, all_to_all, output, input, input):
                    return None
            except BaseException as error:
                self._torn(all_to_all, error)
        splits = output_split_sizes, input_split_sizes
        return ProcessGroup.all_to_all_single(self._group, output, input, *splits, async_op)

    def barrier(self, async_op: bool = False, timeout: float | None = None) -> Work | None:
        if not async_op and timeout is None:
            try:
                code = barrier.call(self._c, BARRIER)
                if code == DONE or self._resume(code, barrier, BARRIER):
                    return None
            except BaseException as error:
                self._torn(barrier, error)
        return ProcessGroup.barrier(self._group, async_op, timeout)

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
                return self._messages.resume_send(
                    code, adopt(tensor, writable=False).array, index(dst), index(tag)
                )
        except BaseException as error:
            if self._torn_message(error, "send", dst, tag):
                raise
        return ProcessGroup.send(self._group, tensor, dst, tag)

    def recv(self, tensor: Any, src: int | None = None, tag: int = 0, status: Status | None = None) -> int:
        if status is not None:
            return ProcessGroup.recv(self._group, tensor, src, tag, status)
        try:
            code = _receive.call(self._m, ANY if src is None else src, tensor, tag, -1)
            if code < DONE:
                return -1 - code
            if code == LATER and type(tensor) in plain_types:
                code = _receive.call(self._m, ANY if src is None else src, header_of(tensor), tag, -1)
            if code < DONE:
                return -1 - code
            if code != LATER:
                return self._messages.resume_receive(
                    code, adopt(tensor, writable=True).array, src, index(tag)
                )
        except BaseException as error:
            if self._torn_message(error, "recv", ANY if src is None else src, tag):
                raise
        return ProcessGroup.recv(self._group, tensor, src, tag)

    def isend(self, tensor: Any, dst: int, tag: int = 0) -> Work:
        messages = self._messages
        if not messages.inbox and type(dst) is int and not messages.queued.get(dst):
            try:
                number = _post_send.call(self._m, dst, tensor, tag, -1)
                if number >= 0:
                    return self._note(messages.sent(number, tensor, dst, index(tag)))
            except BaseException as error:
                if self._torn_message(error, "isend", dst, tag):
                    raise
        return ProcessGroup.isend(self._group, tensor, dst, tag)

    def irecv(self, tensor: Any, src: int | None = None, tag: int = 0, status: Status | None = None) -> Work:
        messages = self._messages
        if not messages.inbox and type(src) is int and status is None:
            try:
                code = _post_receive.call(self._m, src, tensor, tag, -1)
                if code == DONE:
                    return messages.received(tensor, src, index(tag))
                if code == ARMED:
                    return self._note(messages.armed(tensor, src, index(tag)))
            except BaseException as error:
                if self._torn_message(error, "irecv", src, tag):
                    raise
        return ProcessGroup.irecv(self._group, tensor, src, tag, status)

    def _torn_message(self, error: BaseException, doing: str, *integers: Any) -> bool:
        """As `ShmBackend.torn`, for messages."""
        self._messages.torn(error, doing)
        return not refuses(error, integers)
