"""How ranks that share memory of GPUs keep in step: kernels of one block, between those that move and reduce data.

Every rank runs the same, each in a stream of its own:

    meet(page, number, call, shape, balance)      begin a call: say what it is, wait for all ranks, compare
    announce(page, number, call, shape, balance)  the first part of it alone
    step(page, word)                              say that the next part is written, wait for all ranks
    say(page, offset, value)                      write a word into every rank's page, wait for nobody

`word` is call number << STEP_BITS | step. A thread serves a peer; more peers than threads take turns. page.py has
the words. After a wait that was given up (STOP) and after a mismatch, which all ranks find alike, nothing is said any
more: so no peer takes for complete what is not.

What precedes a kernel in its stream is visible to what follows a peer's kernel that has waited for it. PTX's memory
model (PTX ISA, "Memory Consistency Model") orders what a thread wrote before a release of system scope, or what happens
before it in its stream, before whatever reads the word with an acquire of system scope, and before what follows that in
the reader's stream. NVVM and ptxas move neither: both are volatile and clobber memory. Addresses are of device memory,
also a peer's that is mapped here, or of pinned host memory; multiples of 8.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from functools import cache
from typing import Any

from llvmlite import ir
from numba import types

from ...core.signature import UNEVEN
from . import page as at
from .kernel import SIMULATED, Kernel, cuda, device

# Numba takes numbers from globals, and not from modules among them.
_DEAD, _SIZE, _RANK, _CONTROL, _PEERS = at.DEAD, at.SIZE, at.RANK, at.CONTROL, at.PEERS
_LINES, _LINE, _RANK_BYTES, _STEP, _STEP_BITS = at.LINES, at.LINE, at.RANK_BYTES, at.STEP, at.STEP_BITS
_SEQUENCE, _CALL, _SHAPE, _BALANCE, _LINE_WORDS = at.SEQUENCE, at.CALL, at.SHAPE, at.BALANCE, at.LINE_WORDS
_STOP, _STOPPED, _WHY, _ARRIVED, _SAID = at.STOP, at.STOPPED, at.WHY, at.ARRIVED, at.SAID
_BALANCE_MASK, _GAVE_UP, _MISMATCH = at.BALANCE_MASK, at.GAVE_UP, at.MISMATCH

POISON = 1 << 62
"""More than any word says; the host writes it where nobody shall wait any more."""

_SPINS = 64
"""Polls of a word before the one of the stop word, which lies in host memory and takes a microsecond or two."""

_NAP_NANOSECONDS = 100
"""Between two polls of a word in the GPU's own memory."""

if SIMULATED:
    # Python reads and writes 8 bytes at once, and x86 keeps the order of stores.
    def load_acquire(address):
        return ctypes.c_int64.from_address(int(address)).value

    def store_release(address, value):
        ctypes.c_int64.from_address(int(address)).value = int(value)

    load_relaxed, store_relaxed = load_acquire, store_release

    def nap():
        time.sleep(5e-5)

else:
    from numba.cuda.extending import intrinsic

    _WORD = ir.IntType(64)

    def _load(how: str) -> Any:
        @intrinsic
        def load(typing_context, address):
            def emit(context, builder, signature, args):
                kind = ir.FunctionType(_WORD, [_WORD])
                return builder.asm(kind, f"ld.{how}.sys.u64 $0, [$1];", "=l,l,~{memory}", args, True)

            return types.int64(types.int64), emit

        return load

    def _store(how: str) -> Any:
        @intrinsic
        def store(typing_context, address, value):
            def emit(context, builder, signature, args):
                kind = ir.FunctionType(ir.VoidType(), [_WORD, _WORD])
                builder.asm(kind, f"st.{how}.sys.u64 [$0], $1;", "l,l,~{memory}", args, True)
                return context.get_dummy_value()

            return types.void(types.int64, types.int64), emit

        return store

    load_acquire, store_release = _load("acquire"), _store("release")
    load_relaxed, store_relaxed = _load("relaxed"), _store("relaxed")

    @intrinsic
    def nap(typing_context):
        def emit(context, builder, signature, args):
            kind = ir.FunctionType(ir.VoidType(), [])
            builder.asm(kind, f"nanosleep.u32 {_NAP_NANOSECONDS};", "", [], True)
            return context.get_dummy_value()

        return types.void(), emit


@device
def wait_for(address, want, stop):
    """Wait until the word is at least `want`; False: it is POISON, or has not come and the word at `stop` is not 0."""
    polls = 0
    word = load_acquire(address)
    while word < want:
        polls += 1
        if polls % _SPINS == 0 and load_relaxed(stop) != 0:
            return False
        nap()
        word = load_acquire(address)
    return word < POISON


@device
def _line(page, rank, number):
    return page + _LINES + _RANK_BYTES * rank + _LINE * (number % 2)


@device
def _mine_at(page, peer):
    """Where this rank's words lie in a peer's page."""
    return load_relaxed(page + _PEERS + 8 * peer) + _LINES + _RANK_BYTES * load_relaxed(page + _RANK)


@device
def _tell_line(page, peer, number, call, shape, balance):
    line = _mine_at(page, peer) + _LINE * (number % 2)
    store_relaxed(line + _CALL, call)
    store_relaxed(line + _SHAPE, shape)
    store_relaxed(line + _BALANCE, balance)
    store_release(line + _SEQUENCE, number)


@device
def _wait(page, word, want):
    """Wait for a word that a peer writes into this page; False: in vain."""
    if wait_for(word, want, load_relaxed(page + _CONTROL) + _STOP):
        return True
    store_relaxed(page + _DEAD, 1)
    return False


@device
def _tell_host(page, number, why):
    control = load_relaxed(page + _CONTROL)
    store_relaxed(control + _WHY, why)
    store_release(control + _STOPPED, number)


@device
def _agree(page, number, call, shape):
    """Whether all ranks' lines of a call match."""
    same, balance = True, 0
    for peer in range(load_relaxed(page + _SIZE)):
        line = _line(page, peer, number)
        same = same and load_relaxed(line + _CALL) == call
        same = same and (load_relaxed(line + _SHAPE) == shape or call & UNEVEN != 0)
        balance += load_relaxed(line + _BALANCE)
    return same and balance & _BALANCE_MASK == 0


@device
def _mismatch(page, number):
    """Say nothing any more, and tell the host what every rank called."""
    store_relaxed(page + _DEAD, 1)
    said = load_relaxed(page + _CONTROL) + _SAID
    for peer in range(load_relaxed(page + _SIZE)):
        line = _line(page, peer, number)
        for word in range(_LINE_WORDS):
            store_relaxed(said + 8 * (_LINE_WORDS * peer + word), load_relaxed(line + 8 * word))
    _tell_host(page, number, _MISMATCH)


def meet(page, number, call, shape, balance):
    """Begin a call."""
    thread, size = cuda.threadIdx.x, load_relaxed(page + _SIZE)
    dead = load_relaxed(page + _DEAD)
    cuda.syncthreads()  # every thread has read DEAD before one writes it
    peer = thread
    while dead == 0 and peer < size:
        _tell_line(page, peer, number, call, shape, balance)
        peer += cuda.blockDim.x
    peer = thread
    while dead == 0 and peer < size:
        if _wait(page, _line(page, peer, number) + _SEQUENCE, number):
            store_relaxed(load_relaxed(page + _CONTROL) + _ARRIVED + 8 * peer, number)
        peer += cuda.blockDim.x
    cuda.syncthreads()
    if dead == 0 and thread == 0:
        if load_relaxed(page + _DEAD) != 0:
            _tell_host(page, number, _GAVE_UP)
        elif not _agree(page, number, call, shape):
            _mismatch(page, number)


def announce(page, number, call, shape, balance):
    """Say what the call is, which `meet` repeats."""
    dead, size = load_relaxed(page + _DEAD), load_relaxed(page + _SIZE)
    peer = cuda.threadIdx.x
    while dead == 0 and peer < size:
        _tell_line(page, peer, number, call, shape, balance)
        peer += cuda.blockDim.x


def step(page, word):
    """Go on to the next step of a call."""
    thread, size = cuda.threadIdx.x, load_relaxed(page + _SIZE)
    dead = load_relaxed(page + _DEAD)
    cuda.syncthreads()
    peer = thread
    while dead == 0 and peer < size:
        store_release(_mine_at(page, peer) + _STEP, word)
        peer += cuda.blockDim.x
    peer = thread
    while dead == 0 and peer < size:
        _wait(page, page + _LINES + _RANK_BYTES * peer + _STEP, word)
        peer += cuda.blockDim.x
    cuda.syncthreads()
    if dead == 0 and thread == 0 and load_relaxed(page + _DEAD) != 0:
        _tell_host(page, word >> _STEP_BITS, _GAVE_UP)


def say(page, offset, value):
    """Write a word of this rank's in every rank's page."""
    dead, size = load_relaxed(page + _DEAD), load_relaxed(page + _SIZE)
    peer = cuda.threadIdx.x
    while dead == 0 and peer < size:
        store_release(_mine_at(page, peer) + offset, value)
        peer += cuda.blockDim.x


@cache
def compiled(kernel: Callable[..., None]) -> Any:
    """One of the kernels above, for launches of one block: `compiled(step)(1, stream, page, word)`."""
    return Kernel(kernel, kernel.__code__.co_argcount, ())
