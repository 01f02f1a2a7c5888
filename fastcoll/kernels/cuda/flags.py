"""Words that kernels of several processes share: loads and stores of system scope, and how a thread waits.

PTX's memory model (PTX ISA, "Memory Consistency Model") orders what a thread wrote before a release of system scope, or
what happens before it in its stream, before whatever reads the word with an acquire of system scope, and before what
follows that in the reader's stream. NVVM and ptxas move neither: both are volatile and clobber memory.
Addresses are of device memory, also a peer's that is mapped here, or of pinned host memory; multiples of 8.
"""

from __future__ import annotations

import ctypes
import time
from typing import Any

from llvmlite import ir
from numba import types

from .toolkit import SIMULATED, device

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
