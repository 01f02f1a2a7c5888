"""The building blocks of kernels.

These read and write private and shared words, call functions by address, and read the processor's clock. This file also
has the compiled versions of functions on sizes in core/signature.py and core/partition.py.

Kernels take addresses only, so one compiled kernel works for every dtype. Addresses must be multiples of 8.

A word that another thread or process writes is read with `load_acquire`, and a word that publishes data is written with
`store_release`: LLVM hoists plain loads out of spin loops, and Arm processors reorder plain accesses. On x86 both are
plain moves. They do not order everything:

- On every processor, a load may run before an earlier store. If each of two threads stores a word of its own and then
  loads the other's, both may miss the other's store. One of them sees it if each uses `swap_if_equal` and then
  `load_after_swap`, or a store and then `full_fence`.
- On Arm, plain loads may run after a later `load_acquire`. A reader that checks at the end whether the data which it
  has read were still valid calls `order_loads` before the check.
"""

from __future__ import annotations

import numpy as np

from ..compiler import llvm, processor
from ..compiler.jit import external, inlined, instruction
from ..compiler.llvm import pointer
from ..core import signature

# ---- private words --------------------------------------------------------------------------------------


@instruction("int64")
def word_at(builder, address):
    """Return the 64-bit field at an address."""
    return builder.load(pointer(builder, address))


@instruction("int64")
def half_word_at(builder, address):
    """Return the 32-bit field at an address, unsigned."""
    return builder.zext(builder.load(pointer(builder, address, llvm.HALF_WORD)), llvm.WORD)


@instruction("void")
def _store(builder, address, value):
    builder.store(value, pointer(builder, address))


@inlined
def load_word(base, index):
    """Return word `index` of the private int64 table at address `base`."""
    return word_at(base + 8 * index)


@inlined
def store_word(base, index, value):
    """Write word `index` of the private int64 table at address `base`."""
    _store(base + 8 * index, value)


def address_of(x: np.ndarray) -> int:
    """Return the address of `x`'s first element."""
    return int(x.ctypes.data)


def cells_of(table: np.ndarray) -> memoryview:
    """Return the words of a table as a flat view.

    Python reads and writes a word of it in a third of NumPy's time.
    """
    return memoryview(table.reshape(-1))  # type: ignore[arg-type]


# ---- shared words ---------------------------------------------------------------------------------------


@instruction("int64")
def load_acquire(builder, address):
    """Return the word at `address`; all earlier stores of the word's writer are then visible."""
    return builder.load_atomic(pointer(builder, address), "acquire", 8)


@instruction("void")
def store_release(builder, address, value):
    """Write the word at `address`; a reader of it sees all earlier writes of this thread."""
    builder.store_atomic(value, pointer(builder, address), "release", 8)


@instruction("boolean")
def swap_if_equal(builder, address, expected, value):
    """Write `value` to the word at `address` if it holds `expected`; return whether it did.

    On success, this thread sees all writes that were done before the replaced value was written.
    """
    found = builder.cmpxchg(pointer(builder, address), expected, value, "seq_cst", "monotonic")
    return builder.extract_value(found, 1)


@instruction("int64")
def load_after_swap(builder, address):
    """Return the word at `address`, as `load_acquire` does, but not before this thread's earlier `swap_if_equal`."""
    return builder.load_atomic(pointer(builder, address), "seq_cst", 8)


@instruction("void")
def order_loads(builder):
    """Let all earlier loads of this thread come before all its later loads and stores; no instruction on x86."""
    builder.fence("acquire")


@instruction("void")
def full_fence(builder):
    """Let all earlier loads and stores of this thread come before all its later ones."""
    builder.fence("seq_cst")


_pthread_self = external("pthread_self", "int64()")


@inlined
def this_thread():
    """Return a number for the calling thread, never 0: the result of `threading.get_ident()`."""
    return _pthread_self()


# ---- the processor, and calls by address ------------------------------------------------------------------


@instruction("void")
def pause(builder):
    """Wait some 10 ns in a spin loop."""
    processor.emit_pause(builder)


@instruction("int64")
def ticks(builder):
    """Return the processor's clock in an unknown unit, at most some nanoseconds; takes about 10 ns.

    Only for comparing durations on one machine.
    """
    return processor.emit_ticks(builder)


@instruction("void")
def call_reducer(builder, function, op, dst, srcs, n, count):
    """Call the compiled reducer at address `function` (see kernels/reduce.py)."""
    kind = llvm.ir.FunctionType(llvm.VOID, [llvm.WORD] * 5)
    builder.call(pointer(builder, function, kind), [op, dst, srcs, n, count])


@instruction("int64")
def call_foreign(builder, function, a, b, c):
    """Call `int function(void *a, void *b, void *c)` of a C library.

    C functions get an int64 in the same way as an address.
    """
    kind = llvm.ir.FunctionType(llvm.HALF_WORD, [llvm.WORD] * 3)
    return builder.sext(builder.call(pointer(builder, function, kind), [a, b, c]), llvm.WORD)


# ---- pure functions of core/, compiled ---------------------------------------------------------------------

_STEP, _FIRST, _SECOND = map(np.uint64, (signature.STEP, signature.FIRST, signature.SECOND))
_30, _27, _31, _32 = map(np.uint64, (30, 27, 31, 32))


@inlined
def weigh(src, dst, nbytes):
    """Return a pseudo-random number for "rank `src` gives rank `dst` `nbytes` bytes"."""
    mixed = np.uint64(nbytes + 1) * _STEP + (np.uint64(src) << _32) + np.uint64(dst)
    mixed = (mixed ^ (mixed >> _30)) * _FIRST
    mixed = (mixed ^ (mixed >> _27)) * _SECOND
    return np.int64(mixed ^ (mixed >> _31))


@inlined
def balance(rank, size, gives, takes):
    """Return the balance of the bytes that this rank gives and expects.

    core/signature.py explains balances.

    Args:
        gives, takes: addresses of tables of `size` words.
    """
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
    """Return a number that identifies a table of `size` words.

    It is their sum if all are equal, else negative.
    """
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
    """Return the start of part k of `total`.

    All parts have the same length, a multiple of `unit`, except the last ones, which may be shorter or empty.
    """
    return min(total, k * -(-total // (parts * unit)) * unit)
