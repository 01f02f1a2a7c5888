"""The synchronous path: a collective on arrays that need no preparation is one compiled call.

Each method tries this call first. The entry validates the arguments itself (validate.py) and returns LATER if it cannot
do the call: other kinds of arrays, a dtype or reduce operation used for the first time, wrong arguments, a failed
group, or queued operations. Then the method makes the call on the general path in group.py.

A list is copied to a tuple, because another thread could remove an array from a list while the entry uses it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..arrays.tensors import header_of, headers_for, plain_types
from ..compiler.jit import Entry
from ..core import signature
from ..core.group import ProcessGroup
from ..core.reduce_op import ReduceOp
from ..core.status import DONE, LATER
from ..core.work import Work
from ..p2p.engine import Engine
from ..p2p.short_cuts import Entries, short_cuts
from . import requests, ring_kernels
from .calls import Calls
from .inline_start import InlineStart
from .movement import all_gather, all_to_all, broadcast, gather, scatter
from .reductions import all_reduce, barrier, reduce, reduce_scatter, scan

BARRIER = signature.encode("barrier")
MESSAGES = Entries(ring_kernels.send, ring_kernels.receive, requests.post_send, requests.post_receive)


class Fast:
    """Fast versions of the methods of a group in shared memory."""

    def __init__(
        self, group: ProcessGroup, calls: Calls, messages: Engine, mailbox: int, inline_start: InlineStart
    ) -> None:
        self._group = group
        self._c = calls.context.address
        self._messages = short_cuts(group, messages, mailbox, MESSAGES)
        self._resume, self._torn, self._carry_on = calls.resume, calls.torn, calls.carry_on
        self._begin = inline_start.begin

    def table(self) -> dict[str, Callable[..., Any]]:
        """Return the methods below and those of messages, by the names of the group's methods."""
        own = {name: getattr(self, name) for name in vars(Fast) if name[0] != "_" and name != "table"}
        return own | self._messages._asdict()

    def _continue(self, code: int, entry: Entry, tensor: Any, how: Any) -> bool:
        """Continue a call after `code`, and return whether it is complete.

        On LATER call the entry again: with an array header in place of a tensor, and after a call that was open.
        """
        if code == LATER and type(tensor) in plain_types:
            tensor = header_of(tensor)
            if (code := entry.call(self._c, tensor, how)) == DONE:
                return True
        return self._complete(code, entry, tensor, how)

    def _continue_any(self, code: int, entry: Entry, *args: Any) -> bool:
        """Continue a call as `_continue` does, if any argument may be a tensor or a tuple with tensors."""
        if code == LATER and plain_types:
            args = headers_for(args)
            if (code := entry.call(self._c, *args)) == DONE:
                return True
        return self._complete(code, entry, *args)

    def _complete(self, code: int, entry: Entry, *args: Any) -> bool:
        if code == LATER:
            if not self._carry_on():
                return False
            code = entry.call(self._c, *args)
        return code == DONE or self._resume(code, entry, *args)

    def all_reduce(self, tensor: Any, op: ReduceOp = ReduceOp.SUM, async_op: bool = False) -> Any:
        if not async_op:
            try:
                code = all_reduce.call(self._c, tensor, op)
                if code == DONE or self._continue(code, all_reduce, tensor, op):
                    return None
            except BaseException as error:
                self._torn(all_reduce, error)
        elif work := self._begin(all_reduce, tensor, op):
            return work
        return self._group.all_reduce(tensor, op, async_op)

    def reduce(self, tensor: Any, root: int, op: ReduceOp = ReduceOp.SUM, async_op: bool = False) -> Any:
        if not async_op:
            try:
                code = reduce.call(self._c, tensor, tensor, op, root)
                if code == DONE or self._continue_any(code, reduce, tensor, tensor, op, root):
                    return None
            except BaseException as error:
                self._torn(reduce, error, root)
        elif work := self._begin(reduce, tensor, tensor, op, root, integers=(root,)):
            return work
        return self._group.reduce(tensor, root, op, async_op)

    def scan(self, tensor: Any, op: ReduceOp = ReduceOp.SUM, async_op: bool = False) -> Any:
        return self._scanned(tensor, op, async_op, False)

    def exscan(self, tensor: Any, op: ReduceOp = ReduceOp.SUM, async_op: bool = False) -> Any:
        return self._scanned(tensor, op, async_op, True)

    def _scanned(self, tensor: Any, op: ReduceOp, async_op: bool, exclusive: bool) -> Any:
        if not async_op:
            try:
                code = scan.call(self._c, tensor, tensor, op, exclusive)
                if code == DONE or self._continue_any(code, scan, tensor, tensor, op, exclusive):
                    return None
            except BaseException as error:
                self._torn(scan, error)
        elif work := self._begin(scan, tensor, tensor, op, exclusive):
            return work
        general = self._group.exscan if exclusive else self._group.scan
        return general(tensor, op, async_op)

    def reduce_scatter(
        self, output: Any, input_list: Sequence[Any], op: ReduceOp = ReduceOp.SUM, async_op: bool = False
    ) -> Work | None:
        if type(input_list) is not list:
            return self._group.reduce_scatter(output, input_list, op, async_op)
        blocks = tuple(input_list)
        if not async_op:
            try:
                code = reduce_scatter.call(self._c, output, blocks, op)
                if code == DONE or self._continue_any(code, reduce_scatter, output, blocks, op):
                    return None
            except BaseException as error:
                self._torn(reduce_scatter, error)
        elif work := self._begin(reduce_scatter, output, blocks, op):
            return work
        return self._group.reduce_scatter(output, input_list, op, async_op)

    def reduce_scatter_single(
        self,
        output: Any,
        input: Any,
        op: ReduceOp = ReduceOp.SUM,
        async_op: bool = False,
        input_split_sizes: Sequence[int] | None = None,
    ) -> Work | None:
        if input_split_sizes is not None:
            return self._reduce_scatter_parts(output, input, op, async_op, input_split_sizes)
        if not async_op and type(input) is not tuple:
            try:
                code = reduce_scatter.call(self._c, output, input, op)
                if code == DONE or self._continue_any(code, reduce_scatter, output, input, op):
                    return None
            except BaseException as error:
                self._torn(reduce_scatter, error)
        elif type(input) is not tuple and (work := self._begin(reduce_scatter, output, input, op)):
            return work
        return self._group.reduce_scatter_single(output, input, op, async_op)

    def _reduce_scatter_parts(
        self, output: Any, input: Any, op: ReduceOp, async_op: bool, sizes: Sequence[int]
    ) -> Work | None:
        """Cut the input into its parts, which the entry takes as a tuple of blocks."""
        blocks = _blocks_of(input, sizes)
        if blocks and async_op:
            if work := self._begin(reduce_scatter, output, blocks, op):
                return work
        elif blocks:
            try:
                code = reduce_scatter.call(self._c, output, blocks, op)
                if code == DONE or self._continue_any(code, reduce_scatter, output, blocks, op):
                    return None
            except BaseException as error:
                self._torn(reduce_scatter, error)
        return self._group.reduce_scatter_single(output, input, op, async_op, sizes)

    def broadcast(self, tensor: Any, root: int, async_op: bool = False) -> Any:
        if not async_op:
            try:
                code = broadcast.call(self._c, tensor, root)
                if code == DONE or self._continue(code, broadcast, tensor, root):
                    return None
            except BaseException as error:
                self._torn(broadcast, error, root)
        elif work := self._begin(broadcast, tensor, root, integers=(root,)):
            return work
        return self._group.broadcast(tensor, root, async_op)

    def all_gather(self, output_list: Any, tensor: Any = None, async_op: bool = False) -> Any:
        if type(output_list) is not list:
            return self._group.all_gather(output_list, tensor, async_op)
        outs = tuple(output_list)
        if not async_op:
            try:
                code = all_gather.call(self._c, outs, tensor)
                if code == DONE or self._continue_any(code, all_gather, outs, tensor):
                    return None
            except BaseException as error:
                self._torn(all_gather, error)
        elif work := self._begin(all_gather, outs, tensor):
            return work
        return self._group.all_gather(output_list, tensor, async_op)

    def all_gather_single(self, output: Any, input: Any, async_op: bool = False) -> Work | None:
        if not async_op and type(output) is not tuple:
            try:
                code = all_gather.call(self._c, output, input)
                if code == DONE or self._continue_any(code, all_gather, output, input):
                    return None
            except BaseException as error:
                self._torn(all_gather, error)
        elif type(output) is not tuple and (work := self._begin(all_gather, output, input)):
            return work
        return self._group.all_gather_single(output, input, async_op)

    def gather(
        self, tensor: Any, output_list: Sequence[Any] | None, root: int, async_op: bool = False
    ) -> Work | None:
        if output_list is not None and type(output_list) is not list:
            return self._group.gather(tensor, output_list, root, async_op)
        outs = None if output_list is None else tuple(output_list)
        if not async_op:
            try:
                code = gather.call(self._c, outs, tensor, root)
                if code == DONE or self._continue_any(code, gather, outs, tensor, root):
                    return None
            except BaseException as error:
                self._torn(gather, error, root)
        elif work := self._begin(gather, outs, tensor, root, integers=(root,)):
            return work
        return self._group.gather(tensor, output_list, root, async_op)

    def gather_single(self, tensor: Any, output: Any, root: int, async_op: bool = False) -> Work | None:
        if not async_op and type(output) is not tuple:
            try:
                code = gather.call(self._c, output, tensor, root)
                if code == DONE or self._continue_any(code, gather, output, tensor, root):
                    return None
            except BaseException as error:
                self._torn(gather, error, root)
        elif type(output) is not tuple and (
            work := self._begin(gather, output, tensor, root, integers=(root,))
        ):
            return work
        return self._group.gather_single(tensor, output, root, async_op)

    def scatter(
        self, tensor: Any, input_list: Sequence[Any] | None, root: int, async_op: bool = False
    ) -> Any:
        if input_list is not None and type(input_list) is not list:
            return self._group.scatter(tensor, input_list, root, async_op)
        blocks = None if input_list is None else tuple(input_list)
        if not async_op:
            try:
                code = scatter.call(self._c, tensor, blocks, root)
                if code == DONE or self._continue_any(code, scatter, tensor, blocks, root):
                    return None
            except BaseException as error:
                self._torn(scatter, error, root)
        elif work := self._begin(scatter, tensor, blocks, root, integers=(root,)):
            return work
        return self._group.scatter(tensor, input_list, root, async_op)

    def scatter_single(self, tensor: Any, input: Any, root: int, async_op: bool = False) -> Any:
        if not async_op and type(input) is not tuple:
            try:
                code = scatter.call(self._c, tensor, input, root)
                if code == DONE or self._continue_any(code, scatter, tensor, input, root):
                    return None
            except BaseException as error:
                self._torn(scatter, error, root)
        elif type(input) is not tuple and (
            work := self._begin(scatter, tensor, input, root, integers=(root,))
        ):
            return work
        return self._group.scatter_single(tensor, input, root, async_op)

    def all_to_all(
        self, output_list: Sequence[Any], input_list: Sequence[Any], async_op: bool = False
    ) -> Work | None:
        if type(output_list) is not list or type(input_list) is not list or not input_list:
            return self._group.all_to_all(output_list, input_list, async_op)
        outs, blocks = tuple(output_list), tuple(input_list)
        if not async_op:
            try:
                code = all_to_all.call(self._c, outs, blocks, blocks[0])
                if code == DONE or self._continue_any(code, all_to_all, outs, blocks, blocks[0]):
                    return None
            except BaseException as error:
                self._torn(all_to_all, error)
        elif work := self._begin(all_to_all, outs, blocks, blocks[0]):
            return work
        return self._group.all_to_all(output_list, input_list, async_op)

    def all_to_all_single(
        self,
        output: Any,
        input: Any,
        output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
        async_op: bool = False,
    ) -> Work | None:
        splits = output_split_sizes, input_split_sizes
        if splits[0] is not None or splits[1] is not None or type(output) is tuple:
            return self._group.all_to_all_single(output, input, *splits, async_op)
        if not async_op:
            try:
                code = all_to_all.call(self._c, output, input, input)
                if code == DONE or self._continue_any(code, all_to_all, output, input, input):
                    return None
            except BaseException as error:
                self._torn(all_to_all, error)
        elif work := self._begin(all_to_all, output, input, input):
            return work
        return self._group.all_to_all_single(output, input, *splits, async_op)

    def barrier(self, async_op: bool = False, timeout: float | None = None) -> Work | None:
        if not async_op and timeout is None:
            try:
                code = barrier.call(self._c, BARRIER)
                if code == DONE or self._complete(code, barrier, BARRIER):
                    return None
            except BaseException as error:
                self._torn(barrier, error)
        elif timeout is None and (work := self._begin(barrier, BARRIER)):
            return work
        return self._group.barrier(async_op, timeout)


def _blocks_of(x: Any, sizes: Sequence[int]) -> tuple[Any, ...]:
    """Cut an ndarray into blocks of `sizes` rows; return () if the general path must check the arguments."""
    if type(x) is not np.ndarray or type(sizes) not in (list, tuple) or not x.ndim:
        return ()
    blocks, start = [], 0
    for size in sizes:
        if type(size) is not int or size < 0:
            return ()
        blocks.append(x[start : start + size])
        start += size
    return tuple(blocks) if start == len(x) else ()
