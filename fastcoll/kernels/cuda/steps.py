"""Synchronisation of ranks that share GPU memory: kernels of one block.

They run between the kernels that move and reduce data. Every rank launches the same kernels, on a stream of its own:

    meet(page, number, call, shape, balance)      begin a call: publish its signature, wait for all ranks, compare
    announce(page, number, call, shape, balance)  publish the signature, as `meet` does
    step(page, word)                              publish that the next slot is written, wait for all ranks
    publish(page, offset, value)                  write a word into every rank's page, without waiting

`page` is the address of this rank's page, whose words page.py describes. `word` is call number << STEP_BITS | step.
Each thread serves a peer; with more peers than threads, a thread serves several in turn.

Invariant: a rank that has given up a wait (STOP) or found a mismatch publishes nothing afterwards. So no peer takes
incomplete data for complete. All ranks find a mismatch in the same call.

Suppose that work in one rank's stream writes memory, a later kernel in this stream publishes a word, and a kernel in a
peer's stream waits for the word. Then work that follows that kernel in the peer's stream sees the written memory. PTX's
memory model (PTX ISA, "Memory Consistency Model") guarantees this: writes before a release of system scope, in the
thread or earlier in its stream, happen before reads that follow an acquire of system scope of the same word, in the
thread or later in its stream. NVVM and ptxas move neither the release nor the acquire, because both are volatile and
clobber memory.

Every address is a multiple of 8. It is in device memory of this rank, in a peer's device memory that is mapped here, or
in pinned host memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache
from typing import Any

from llvmlite import ir
from numba import types

from ...compiler.elements import WORD
from ...core.signature import UNEVEN
from .. import shared_words
from . import page as at
from .kernel import SIMULATED, Kernel, cuda, device, instruction

POISON = 1 << 62
"""More than any published value; the host writes it to words to end the waits for them."""

_SPINS = 64
"""Polls of a word between two polls of STOP, which take a microsecond or two each: STOP is in host memory."""

_NAP_NANOSECONDS = 100
"""Sleep between two polls of a word in the GPU's own memory."""

if SIMULATED:

    def load_acquire(address):
        return shared_words.read.call(int(address))

    def store_release(address, value):
        shared_words.publish.call(int(address), int(value))

    load_relaxed, store_relaxed = load_acquire, store_release

    def nap():
        time.sleep(5e-5)

else:
    _LOAD = ir.FunctionType(WORD, [WORD])
    _STORE = ir.FunctionType(ir.VoidType(), [WORD, WORD])

    @instruction(types.int64)
    def load_acquire(builder, address):
        return builder.asm(_LOAD, "ld.acquire.sys.u64 $0, [$1];", "=l,l,~{memory}", [address], True)

    @instruction(types.int64)
    def load_relaxed(builder, address):
        return builder.asm(_LOAD, "ld.relaxed.sys.u64 $0, [$1];", "=l,l,~{memory}", [address], True)

    @instruction(types.void)
    def store_release(builder, address, value):
        builder.asm(_STORE, "st.release.sys.u64 [$0], $1;", "l,l,~{memory}", [address, value], True)

    @instruction(types.void)
    def store_relaxed(builder, address, value):
        builder.asm(_STORE, "st.relaxed.sys.u64 [$0], $1;", "l,l,~{memory}", [address, value], True)

    @instruction(types.void)
    def nap(builder):
        builder.asm(ir.FunctionType(ir.VoidType(), []), f"nanosleep.u32 {_NAP_NANOSECONDS};", "", [], True)


@device
def wait_for(address, want, stop):
    """Wait until the word is at least `want`.

    Returns:
        False if the word is POISON, or if the word at `stop` is not 0 before the wait has ended.
    """
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
    return page + at.LINES + at.RANK_BYTES * rank + at.LINE * (number % 2)


@device
def _mine_at(page, peer):
    """Return the address of this rank's words in a peer's page."""
    return load_relaxed(page + at.PEERS + 8 * peer) + at.LINES + at.RANK_BYTES * load_relaxed(page + at.RANK)


@device
def _publish_line(page, peer, number, call, shape, balance):
    line = _mine_at(page, peer) + at.LINE * (number % 2)
    store_relaxed(line + at.CALL, call)
    store_relaxed(line + at.SHAPE, shape)
    store_relaxed(line + at.BALANCE, balance)
    store_release(line + at.SEQUENCE, number)


@device
def _wait(page, word, want):
    """Wait for a word that a peer writes into this page; False if the wait was given up."""
    if wait_for(word, want, load_relaxed(page + at.CONTROL) + at.STOP):
        return True
    store_relaxed(page + at.DEAD, 1)
    return False


@device
def _report_to_host(page, number, why):
    control = load_relaxed(page + at.CONTROL)
    store_relaxed(control + at.WHY, why)
    store_release(control + at.STOPPED, number)


@device
def _agree(page, number, call, shape):
    """Return whether all ranks' lines of a call match."""
    same, balance = True, 0
    for peer in range(load_relaxed(page + at.SIZE)):
        line = _line(page, peer, number)
        same = same and load_relaxed(line + at.CALL) == call
        same = same and (load_relaxed(line + at.SHAPE) == shape or call & UNEVEN != 0)
        balance += load_relaxed(line + at.BALANCE)
    return same and balance & at.BALANCE_MASK == 0


@device
def _mismatch(page, number):
    """Stop publishing, and report every rank's call to the host."""
    store_relaxed(page + at.DEAD, 1)
    reported = load_relaxed(page + at.CONTROL) + at.REPORTED
    for peer in range(load_relaxed(page + at.SIZE)):
        line = _line(page, peer, number)
        for word in range(at.LINE_WORDS):
            store_relaxed(reported + 8 * (at.LINE_WORDS * peer + word), load_relaxed(line + 8 * word))
    _report_to_host(page, number, at.MISMATCH)


def meet(page, number, call, shape, balance):
    """Begin a call."""
    thread, size = cuda.threadIdx.x, load_relaxed(page + at.SIZE)
    dead = load_relaxed(page + at.DEAD)
    cuda.syncthreads()  # every thread has read DEAD before any thread writes it
    peer = thread
    while dead == 0 and peer < size:
        _publish_line(page, peer, number, call, shape, balance)
        peer += cuda.blockDim.x
    peer = thread
    while dead == 0 and peer < size:
        if _wait(page, _line(page, peer, number) + at.SEQUENCE, number):
            store_relaxed(load_relaxed(page + at.CONTROL) + at.ARRIVED + 8 * peer, number)
        peer += cuda.blockDim.x
    cuda.syncthreads()
    if dead == 0 and thread == 0:
        if load_relaxed(page + at.DEAD) != 0:
            _report_to_host(page, number, at.GAVE_UP)
        elif not _agree(page, number, call, shape):
            _mismatch(page, number)


def announce(page, number, call, shape, balance):
    """Publish the call's signature early; `meet` publishes it again later."""
    dead, size = load_relaxed(page + at.DEAD), load_relaxed(page + at.SIZE)
    peer = cuda.threadIdx.x
    while dead == 0 and peer < size:
        _publish_line(page, peer, number, call, shape, balance)
        peer += cuda.blockDim.x


def step(page, word):
    """Proceed to the next step of a call."""
    thread, size = cuda.threadIdx.x, load_relaxed(page + at.SIZE)
    dead = load_relaxed(page + at.DEAD)
    cuda.syncthreads()
    peer = thread
    while dead == 0 and peer < size:
        store_release(_mine_at(page, peer) + at.STEP, word)
        peer += cuda.blockDim.x
    peer = thread
    while dead == 0 and peer < size:
        _wait(page, page + at.LINES + at.RANK_BYTES * peer + at.STEP, word)
        peer += cuda.blockDim.x
    cuda.syncthreads()
    if dead == 0 and thread == 0 and load_relaxed(page + at.DEAD) != 0:
        _report_to_host(page, word >> at.STEP_BITS, at.GAVE_UP)


def publish(page, offset, value):
    """Write a word of this rank into every rank's page."""
    dead, size = load_relaxed(page + at.DEAD), load_relaxed(page + at.SIZE)
    peer = cuda.threadIdx.x
    while dead == 0 and peer < size:
        store_release(_mine_at(page, peer) + offset, value)
        peer += cuda.blockDim.x


@cache
def compiled(kernel: Callable[..., None]) -> Any:
    """Return one of the kernels above, to be launched with one block.

    For example `compiled(step)(1, stream, page, word)`.
    """
    return Kernel(kernel, kernel.__code__.co_argcount, (), kernel.__name__)
