"""What kernels are made of: words at integer addresses, shared or private, calls by address, the processor's clock.

Kernels take addresses only, so one compiled kernel serves every dtype. LLVM hoists plain loads out of spin loops, so
every word that another process writes goes through `load_acquire`, and every word that publishes data through
`store_release`. Addresses must be multiples of 8.
"""

from __future__ import annotations

import platform

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from .jit import inlined
from .pyobjects import word_at

_WORD = ir.IntType(64)


def _pointer(builder, address):
    return builder.inttoptr(address, _WORD.as_pointer())


@intrinsic
def _store(typing_context, address, value):
    def emit(context, builder, signature, args):
        builder.store(args[1], _pointer(builder, args[0]))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), emit


@inlined
def load_word(base, index):
    """Word `index` of the private int64 table at address `base`."""
    return word_at(base + 8 * index)


@inlined
def store_word(base, index, value):
    """Write word `index` of the private int64 table at address `base`."""
    _store(base + 8 * index, value)


def address_of(x: np.ndarray) -> int:
    """The address of `x`'s first element."""
    return int(x.ctypes.data)


# ---- shared words ---------------------------------------------------------------------------------------


@intrinsic
def load_acquire(typing_context, address):
    """The word at `address`; what its writer stored before is visible after."""

    def emit(context, builder, signature, args):
        return builder.load_atomic(_pointer(builder, args[0]), "acquire", 8)

    return types.int64(types.int64), emit


@intrinsic
def store_release(typing_context, address, value):
    """Write the word at `address`; all earlier writes are visible to whoever reads it."""

    def emit(context, builder, signature, args):
        builder.store_atomic(args[1], _pointer(builder, args[0]), "release", 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), emit


@intrinsic
def swap_if_equal(typing_context, address, expected, value):
    """Write `value` to the word at `address` if it holds `expected`; whether it did. Acquires what it took."""

    def emit(context, builder, signature, args):
        pointer = _pointer(builder, args[0])
        return builder.extract_value(builder.cmpxchg(pointer, args[1], args[2], "acq_rel", "monotonic"), 1)

    return types.boolean(types.int64, types.int64, types.int64), emit


_pthread_self = types.ExternalFunction("pthread_self", types.int64())


@inlined
def this_thread():
    """A number for the calling thread, never 0: what `threading.get_ident()` returns."""
    return _pthread_self()


@intrinsic
def pause(typing_context):
    """Tell the core that this is a spin loop (x86 `pause`, Arm `yield`)."""

    def emit(context, builder, signature, args):
        if platform.machine() in ("x86_64", "AMD64"):
            hint = ir.FunctionType(ir.VoidType(), [])
            builder.call(cgutils.get_or_insert_function(builder.module, hint, "llvm.x86.sse2.pause"), [])
        else:
            builder.asm(ir.FunctionType(ir.VoidType(), []), "yield", "", [], side_effect=True)
        return context.get_dummy_value()

    return types.void(), emit


# ---- calls by address, and the clock ---------------------------------------------------------------------


@intrinsic
def call_reducer(typing_context, function, op, dst, srcs, n, count):
    """Call the compiled reducer at address `function` (see kernels/reduce.py) with the other arguments."""

    def emit(context, builder, signature, args):
        kind = ir.FunctionType(ir.VoidType(), [_WORD] * 5)
        builder.call(builder.inttoptr(args[0], kind.as_pointer()), args[1:])
        return context.get_dummy_value()

    return types.void(*[types.int64] * 6), emit


@intrinsic
def call_foreign(typing_context, function, a, b, c):
    """Call `int function(void *a, void *b, void *c)`; an address and an int64 are passed alike."""

    def emit(context, builder, signature, args):
        kind = ir.FunctionType(ir.IntType(32), [_WORD] * 3)
        result = builder.call(builder.inttoptr(args[0], kind.as_pointer()), args[1:])
        return builder.sext(result, _WORD)

    return types.int64(*[types.int64] * 4), emit


@intrinsic
def ticks(typing_context):
    """The time now, in ticks since some moment; takes about 10 ns."""

    def emit(context, builder, signature, args):
        kind = ir.FunctionType(ir.IntType(64), [])
        read = cgutils.get_or_insert_function(builder.module, kind, "llvm.readcyclecounter")
        return builder.call(read, [])

    return types.int64(), emit
