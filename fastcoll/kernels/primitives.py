"""What kernels are made of: words at integer addresses, shared or private, calls by address, the processor's clock.

And what core/signature.py and core/partition.py say of sizes, compiled.

Kernels take addresses only, so one compiled kernel serves every dtype. LLVM hoists plain loads out of spin loops, so
every word that another process writes goes through `load_acquire`, and every word that publishes data through
`store_release`. Addresses must be multiples of 8.
"""

from __future__ import annotations

import os

import numpy as np

from ..compiler import llvm
from ..compiler.jit import external, inlined, instruction
from ..compiler.llvm import pointer
from ..core import signature

# ---- private words --------------------------------------------------------------------------------------


@instruction("int64")
def word_at(builder, address):
    """The 64-bit field at an address."""
    return builder.load(pointer(builder, address))


@instruction("int64")
def half_word_at(builder, address):
    """The 32-bit field at an address, without its sign."""
    return builder.zext(builder.load(pointer(builder, address, llvm.HALF_WORD)), llvm.WORD)


@instruction("void")
def _store(builder, address, value):
    builder.store(value, pointer(builder, address))


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


def cells_of(table: np.ndarray) -> memoryview:
    """The words of a table one after the other: Python reads and writes one in a third of NumPy's time."""
    return memoryview(table.reshape(-1))  # type: ignore[arg-type]


# ---- shared words ---------------------------------------------------------------------------------------


@instruction("int64")
def load_acquire(builder, address):
    """The word at `address`; what its writer stored before is visible after."""
    return builder.load_atomic(pointer(builder, address), "acquire", 8)


@instruction("void")
def store_release(builder, address, value):
    """Write the word at `address`; all earlier writes are visible to whoever reads it."""
    builder.store_atomic(value, pointer(builder, address), "release", 8)


@instruction("boolean")
def swap_if_equal(builder, address, expected, value):
    """Write `value` to the word at `address` if it holds `expected`; whether it did. Acquires what it took."""
    found = builder.cmpxchg(pointer(builder, address), expected, value, "acq_rel", "monotonic")
    return builder.extract_value(found, 1)


_pthread_self = external("pthread_self", "int64()")


@inlined
def this_thread():
    """A number for the calling thread, never 0: what `threading.get_ident()` returns."""
    return _pthread_self()


# ---- the processor, and calls by address ------------------------------------------------------------------

IS_X86 = os.uname().machine == "x86_64"


@instruction("void")
def pause(builder):
    """Tell the core that this is a spin loop (x86 `pause`, Arm `yield`)."""
    if IS_X86:
        builder.call(llvm.function(builder, "llvm.x86.sse2.pause", llvm.VOID), [])
    else:
        builder.asm(llvm.ir.FunctionType(llvm.VOID, []), "yield", "", [], side_effect=True)


@instruction("int64")
def ticks(builder):
    """The processor's clock, for comparing durations on one machine, in an unknown unit; takes about 10 ns."""
    return builder.call(llvm.function(builder, "llvm.readcyclecounter", llvm.WORD), [])


@instruction("void")
def call_reducer(builder, function, op, dst, srcs, n, count):
    """Call the compiled reducer at address `function` (see kernels/reduce.py) with the other arguments."""
    kind = llvm.ir.FunctionType(llvm.VOID, [llvm.WORD] * 5)
    builder.call(pointer(builder, function, kind), [op, dst, srcs, n, count])


@instruction("int64")
def call_foreign(builder, function, a, b, c):
    """Call `int function(void *a, void *b, void *c)` of a C library; an address and an int64 are passed alike."""
    kind = llvm.ir.FunctionType(llvm.HALF_WORD, [llvm.WORD] * 3)
    return builder.sext(builder.call(pointer(builder, function, kind), [a, b, c]), llvm.WORD)


# ---- pure functions of core/, compiled ---------------------------------------------------------------------

_STEP, _FIRST, _SECOND = map(np.uint64, (signature.STEP, signature.FIRST, signature.SECOND))
_30, _27, _31, _32 = map(np.uint64, (30, 27, 31, 32))


@inlined
def weigh(src, dst, nbytes):
    """A pseudo-random number for "rank src gives rank dst so many bytes"."""
    mixed = np.uint64(nbytes + 1) * _STEP + (np.uint64(src) << _32) + np.uint64(dst)
    mixed = (mixed ^ (mixed >> _30)) * _FIRST
    mixed = (mixed ^ (mixed >> _27)) * _SECOND
    return np.int64(mixed ^ (mixed >> _31))


@inlined
def balance(rank, size, gives, takes):
    """The balance of tables of `size` words, at addresses, of what this rank gives and what it expects."""
    total = np.int64(0)
    for peer in range(size):
        given = load_word(gives, peer)
        taken = load_word(takes, peer)
        if peer != rank and given >= 0:
            total += weigh(rank, peer, given)
        if peer != rank and taken >= 0:
            total -= weigh(peer, rank, taken)
    return total


@inlined
def shape_of(sizes, size):
    """One number that tells a table of `size` words from others: their sum when all are equal, else negative."""
    first = load_word(sizes, 0)
    even = True
    total = np.int64(0)
    mixed = np.int64(0)
    for peer in range(size):
        nbytes = load_word(sizes, peer)
        even &= nbytes == first
        total += nbytes
        mixed += weigh(peer, peer, nbytes)
    return total if even else -1 - (mixed & 0x3FFFFFFFFFFFFFFF)


@inlined
def start_of(total, parts, k, unit):
    """Where part k of `total` begins if all are equally long, in whole units, but for the last ones."""
    return min(total, k * -(-total // (parts * unit)) * unit)
