"""The native calls of the shared-memory backend, which compiled callers call (specified in kernels/c_entries.py).

A native call is a C function. It takes the context, the group's state for compiled code. It finds the spec of the call
(the reducer and more) in a table of the context, the memo, by the call word that the caller passes; `open` has added
the spec. Then it runs the same code as the entry of its operation, that is, the function that Python calls. So
failpoints, the record, the tuner, and symmetric and shared arrays work as in the entry. If a native call returns early,
Python calls it again, in the same way as an entry, because `_NativeCall` has an entry's interface. A native call is
compiled or loaded when its operation is first used.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from itertools import count
from typing import Any

import numpy as np

from ..compiler.jit import NJIT, c_function, inlined
from ..core import signature
from ..core.backend import NativeCalls
from ..core.operands import Array
from ..core.operations import OPERATIONS
from ..core.reduce_op import ReduceOp
from ..core.status import DONE, LATER
from ..kernels.c_entries import (
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
from ..kernels.primitives import load_word
from ..p2p import handles
from ..p2p.engine import Engine
from ..p2p.pipe import ANY
from ..p2p.transfers import Transfer, tag_of
from . import context_layout as at
from . import reductions as red
from . import rings
from . import rounds as r
from . import validate as v
from .calls import Calls
from .movement import run_broadcast, run_exchange
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

_ALL_REDUCE = signature.code_of("all_reduce")
_REDUCE = signature.code_of("reduce")
_SCAN = signature.code_of("scan")
_EXSCAN = signature.code_of("exscan")
_REDUCE_SCATTER = signature.code_of("reduce_scatter")
_BROADCAST = signature.code_of("broadcast")
_ALL_GATHER = signature.code_of("all_gather")
_GATHER = signature.code_of("gather")
_SCATTER = signature.code_of("scatter")
_ALL_TO_ALL = signature.code_of("all_to_all")


@inlined
def _begin(h, operation, call, root):
    """Take the context and find the call's spec; return both, or 0 and 0.

    If it returns 0 and 0, Python must make the call.
    """
    c = r.take(h)
    if c == 0:
        return 0, 0
    spec = v.spec_by_call(c, h, operation, call)
    if spec == 0 or not v.is_rank(c, root):
        r.give_up(h)
        return 0, 0
    return c, spec


def barrier_call(h, data, out, nbytes, call, peer):
    c = r.take(h)
    return LATER if c == 0 else red.run_barrier(h, c, call)


def all_reduce_call(h, data, out, nbytes, call, peer):
    c, spec = _begin(h, _ALL_REDUCE, call, 0)
    return LATER if c == 0 else red.run_all_reduce(h, c, data, nbytes, spec)


def reduce_call(h, data, out, nbytes, call, peer):
    c, spec = _begin(h, _REDUCE, call, peer)
    return LATER if c == 0 else red.run_reduce(h, c, data, data, nbytes, spec, peer)


def scan_call(h, data, out, nbytes, call, peer):
    c, spec = _begin(h, _SCAN, call, 0)
    return LATER if c == 0 else red.run_scan(h, c, data, data, nbytes, spec, _SCAN)


def exscan_call(h, data, out, nbytes, call, peer):
    c, spec = _begin(h, _EXSCAN, call, 0)
    return LATER if c == 0 else red.run_scan(h, c, data, data, nbytes, spec, _EXSCAN)


def broadcast_call(h, data, out, nbytes, call, peer):
    c, spec = _begin(h, _BROADCAST, call, peer)
    return LATER if c == 0 else run_broadcast(h, c, data, nbytes, spec, peer)


def reduce_scatter_call(h, data, out, nbytes, call, peer):
    c, spec = _begin(h, _REDUCE_SCATTER, call, 0)
    if c == 0:
        return LATER
    v.list_equal(c, at.GIVES, data, nbytes)
    if not v.are_apart(c, h, out, nbytes, at.GIVES, True):
        return r.give_up(h)
    return red.run_reduce_scatter(h, c, out, nbytes, spec)


@inlined
def _list_split(c, which, address, sizes):
    """Enter consecutive blocks of these sizes into the table `which`; return their sum."""
    nbytes = 0
    for peer in range(load_word(c, at.SIZE)):
        v.list_one(c, which, peer, address + nbytes, load_word(sizes, peer))
        nbytes += load_word(sizes, peer)
    return nbytes


def reduce_scatter_split_call(h, data, out, sizes, call, peer):
    c, spec = _begin(h, _REDUCE_SCATTER, call, 0)
    if c == 0:
        return LATER
    _list_split(c, at.GIVES, data, sizes)
    nbytes = load_word(sizes, load_word(c, at.SIZE))
    if nbytes != load_word(sizes, load_word(c, at.RANK)) or not v.are_apart(
        c, h, out, nbytes, at.GIVES, True
    ):
        return r.give_up(h)
    return red.run_reduce_scatter(h, c, out, nbytes, spec)


def all_gather_call(h, data, out, nbytes, call, peer):
    c, spec = _begin(h, _ALL_GATHER, call, 0)
    if c == 0:
        return LATER
    v.list_equal(c, at.TAKES, out, nbytes)
    if not v.are_apart(c, h, data, nbytes, at.TAKES, True):
        return r.give_up(h)
    v.list_same(c, at.GIVES, data, nbytes)
    return run_exchange(h, c, _ALL_GATHER, spec, 0)


def gather_call(h, data, out, nbytes, call, peer):
    c, spec = _begin(h, _GATHER, call, peer)
    if c == 0:
        return LATER
    v.list_none(c, at.GIVES)
    v.list_none(c, at.TAKES)
    v.list_one(c, at.GIVES, peer, data, nbytes)
    if load_word(c, at.RANK) == peer:
        v.list_equal(c, at.TAKES, out, nbytes)
        if not v.are_apart(c, h, data, nbytes, at.TAKES, True):
            return r.give_up(h)
    return run_exchange(h, c, _GATHER, spec, peer)


def scatter_call(h, data, out, nbytes, call, peer):
    c, spec = _begin(h, _SCATTER, call, peer)
    if c == 0:
        return LATER
    v.list_none(c, at.GIVES)
    v.list_none(c, at.TAKES)
    v.list_one(c, at.TAKES, peer, out, nbytes)
    if load_word(c, at.RANK) == peer:
        v.list_equal(c, at.GIVES, data, nbytes)
        if not v.are_apart(c, h, out, nbytes, at.GIVES, True):
            return r.give_up(h)
    return run_exchange(h, c, _SCATTER, spec, peer)


def all_to_all_call(h, data, out, nbytes, call, peer):
    c, spec = _begin(h, _ALL_TO_ALL, call, 0)
    if c == 0:
        return LATER
    v.list_equal(c, at.GIVES, data, nbytes)
    v.list_equal(c, at.TAKES, out, nbytes)
    if not v.are_apart(c, h, data, nbytes * load_word(c, at.SIZE), at.TAKES, False):
        return r.give_up(h)
    return run_exchange(h, c, _ALL_TO_ALL, spec, 0)


def all_to_all_split_call(h, data, out, sizes, call, peer):
    c, spec = _begin(h, _ALL_TO_ALL, call, 0)
    if c == 0:
        return LATER
    rank, size = load_word(c, at.RANK), load_word(c, at.SIZE)
    nbytes = _list_split(c, at.GIVES, data, sizes)
    _list_split(c, at.TAKES, out, sizes + 8 * size)
    own_fits = load_word(sizes, rank) == load_word(sizes, size + rank)
    if not own_fits or not v.are_apart(c, h, data, nbytes, at.TAKES, False):
        return r.give_up(h)
    return run_exchange(h, c, _ALL_TO_ALL, spec, 0)


_FUNCTIONS: dict[int, Callable[..., Any]] = {
    signature.code_of("barrier"): barrier_call, _ALL_REDUCE: all_reduce_call, _REDUCE: reduce_call, _SCAN: scan_call,
    _EXSCAN: exscan_call, _BROADCAST: broadcast_call, _REDUCE_SCATTER: reduce_scatter_call,
    _ALL_GATHER: all_gather_call, _GATHER: gather_call, _SCATTER: scatter_call, _ALL_TO_ALL: all_to_all_call,
    REDUCE_SCATTER_SPLIT: reduce_scatter_split_call,
    SPLIT: all_to_all_split_call, SEND: send_call, RECV: receive_call, POST_SEND: post_send_call,
    POST_RECV: post_receive_call, WAIT: wait_call, TEST: test_call, WAIT_ANY: wait_any_call,
}  # fmt: skip
_WORDS = ("int64",) * 6
NATIVE_CALLS = {op: function.__name__.removesuffix("_call") for op, function in _FUNCTIONS.items()}
"""Names of the native calls, by the numbers of operations in kernels/c_entries.py."""


class _NativeCall:
    """A native call with the part of an entry's interface that `Calls.resume` uses."""

    def __init__(self, op: int) -> None:
        self.name = NATIVE_CALLS[op]
        signature = f"int64({', '.join(_WORDS)})"
        self.address = c_function(
            _FUNCTIONS[op], signature, f"{self.name} for compiled callers", NJIT, failing=True
        )
        self.call = ctypes.CFUNCTYPE(*[ctypes.c_int64] * (1 + len(_WORDS)))(self.address)


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
