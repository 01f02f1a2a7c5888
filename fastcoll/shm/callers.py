"""The native calls of the shared-memory backend, which compiled callers call (specified in kernels/c_entries.py).

A native call is a C function. It takes the context, the group's state for compiled code. It finds the spec of the call
(the reducer and more) in a table of the context, the memo, by the call word that the caller passes; `open` has added
the spec. Then it runs the same code as the entry of its operation, that is, the function that Python calls. So
failpoints, the record, the tuner, and symmetric and shared arrays work as in the entry. If a native call returns early,
Python calls it again, in the same way as an entry, because `_NativeCall` has an entry's interface. The native calls of
collectives are compiled with the entries, as their twins (reductions.py, movement.py); a native call of messages is
compiled or loaded when its operation is first used.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from itertools import count
from typing import Any

import numpy as np

from ..compiler.jit import NJIT, c_function
from ..core import signature
from ..core.backend import NativeCalls
from ..core.operands import Array
from ..core.operations import OPERATIONS
from ..core.reduce_op import ReduceOp
from ..core.status import DONE
from ..kernels.c_entries import (
    NATIVE_CALL,
    POST_RECV,
    POST_SEND,
    RECV,
    REDUCE_SCATTER_SPLIT,
    SEND,
    SPLIT,
    TEST,
    WAIT,
    WAIT_ANY,
)
from ..p2p import handles
from ..p2p.engine import Engine
from ..p2p.pipe import ANY
from ..p2p.transfers import Transfer, tag_of
from . import movement as move
from . import reductions as red
from . import rings
from .calls import Calls
from .pipe import RingPipe
from .requests import (
    BESIDE,
    MAILBOX_AT,
    post_receive_call,
    post_send_call,
    receive_call,
    send_call,
    test_call,
    wait_any_call,
    wait_call,
)

_TWINS = {signature.code_of(name): twin for name, twin in {
    "barrier": red.barrier_call, "all_reduce": red.all_reduce_call, "reduce": red.reduce_call, "scan": red.scan_call,
    "exscan": red.exscan_call, "reduce_scatter": red.reduce_scatter_call, "broadcast": move.broadcast_call,
    "all_gather": move.all_gather_call, "gather": move.gather_call, "scatter": move.scatter_call,
    "all_to_all": move.all_to_all_call,
}.items()} | {REDUCE_SCATTER_SPLIT: red.reduce_scatter_split_call, SPLIT: move.all_to_all_split_call}  # fmt: skip
_MESSAGES: dict[int, Callable[..., Any]] = {
    SEND: send_call, RECV: receive_call, POST_SEND: post_send_call, POST_RECV: post_receive_call, WAIT: wait_call,
    TEST: test_call, WAIT_ANY: wait_any_call,
}  # fmt: skip
MESSAGES = {op: function.__name__.removesuffix("_call") for op, function in _MESSAGES.items()}
"""Names of the native calls of messages, which no entry has as twins, by the operations' numbers (c_entries.py)."""


class _NativeCall:
    """A native call with the part of an entry's interface that `Calls.resume` uses."""

    def __init__(self, op: int) -> None:
        if op in MESSAGES:
            self.name = MESSAGES[op]
            what = f"{self.name} for compiled callers"
            self.address = c_function(_MESSAGES[op], NATIVE_CALL, what, NJIT, failing=True)
        else:
            self.name = _TWINS[op].function.__name__.removesuffix("_call")
            self.address = _TWINS[op].address
        self.call = ctypes.CFUNCTYPE(*[ctypes.c_int64] * 7)(self.address)


_made: dict[int, Any] = {}
_mailboxes = count(1)


def native_call(op: int) -> Any:
    """Return the native call of an operation; compile or load it at first use."""
    if op not in _made:
        _made[op] = _NativeCall(op)
    return _made[op]


class ShmNativeCalls(NativeCalls):
    """The native calls of one group."""

    def __init__(self, calls: Calls, pipe: RingPipe, messages: Engine) -> None:
        self._calls, self._messages = calls, messages
        context = calls.context
        self.context, self.mailbox = context.address, pipe.address
        self.memory = context.words, pipe.table, pipe.rows
        self._known: set[int] = set()
        self._table = pipe.table[rings.REQUESTS :]
        self._table[rings.NUMBERS] = next(_mailboxes) << MAILBOX_AT
        messages.adopts = self._import

    def _import(self, number: int, transfer: Transfer) -> None:
        handles.put(number, self._calls.gate.unobserved.note(transfer))

    def open(self, op: int, call: int, dtype: np.dtype[Any] | None, reduce_op: ReduceOp | None) -> int:
        if op > RECV:
            self._table[rings.RELEASE] = handles.release_address
            if self._table[rings.NUMBERS] >= BESIDE or not handles.release_address:
                return 0
        address = native_call(op).address
        if dtype is not None and op < SEND and call not in self._known:
            self._known.add(call)
            code = call & 0xFF
            spec = self._calls.spec(OPERATIONS[code], dtype, reduce_op)
            self._calls.context.remember_call(code, call, spec)
        return address

    def go_on(self, code: int, op: int, words: tuple[int, ...], x: Callable[[], Array]) -> int:
        calls, peer = self._calls, words[-1]
        if code >= BESIDE:
            return self._wait(code - BESIDE)
        if op >= SEND:
            try:
                messages, tag = self._messages, tag_of(words[-2])
                if op == RECV:
                    return messages.resume_receive(code, x(), None if peer == ANY else peer, tag)
                messages.resume_send(code, x(), peer, tag)
            except BaseException as error:
                self.torn(op, error)
                raise
            return DONE
        try:
            calls.resume(code, _made[op], *words)
        except BaseException as error:
            calls.torn(_made[op], error)
        return DONE

    def _wait(self, number: int) -> int:
        """Wait for a request that `send_call` or `receive_call` has posted."""
        self.take_over()
        work = handles.find(number)
        return handles.source_of(number) if work is None else handles.end(number, work)

    def take_over(self) -> None:
        self._messages.take_over()

    def stay_awake(self) -> None:
        self._messages.stay_awake()

    def torn(self, op: int, error: BaseException) -> None:
        if op >= SEND:
            self._messages.torn(error, "recv" if op == RECV else "send")
        elif self._calls.context.is_mine():
            self._calls.torn(_made[op], error)
