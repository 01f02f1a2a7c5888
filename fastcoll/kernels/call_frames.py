"""XLA's call frames: how a compiled JAX program calls this package.

The frames are defined in xla/ffi/api/c_api.h, version 0. XLA calls one C function, `handle`, for all calls in all
programs. A call has a number, the only attribute in the frame, and may have a line of words in `LINES`. Python executes
a call the first time, and then writes its line (jax/xla_frames.py), if the C entry point can execute it from then on:

    DESCRIPTOR        address of the group descriptor (c_entries.py); 0: Python executes the call
    OP, CALL, PEER    arguments of the C entry point
    ITEM, BLOCKS      bytes of an element, and a number: `nbytes` is the array's size in bytes divided by BLOCKS
    FORM              which arrays of the frame the entry point gets: one of the forms below

If a call has no line, the Python function ASK gets the frame and executes the call. If the C entry point has stored an
exception, the function KEPT makes an XLA error from it. If ASK, KEPT or TORN itself raises an exception, TORN makes an
XLA error from that. These are the structs of a frame; the constants below are offsets in bytes:

    XLA_FFI_CallFrame   size, extension, api, context, stage, args (5 words), rets (5 words), attrs (6 words), future
    args, rets          size, extension, count, types, pointers to buffers
    attrs               size, extension, count, types, pointers to names, pointers to values; sorted by name
    XLA_FFI_Buffer      size, extension, dtype (32 bits), data, number of dimensions, pointer to dimensions
"""

from __future__ import annotations

from functools import cache

import numpy as np

from ..compiler import llvm
from ..compiler.jit import NJIT, c_function, inlined, instruction, kernel
from ..compiler.machine_code import OWN_SYMBOLS
from .c_entries import (
    C_ENTRY,
    RAISED,
    call_with,
    drop,
    ensure,
    keep_error,
    new_integer,
    own_words,
    release,
    value_of,
)
from .copy import copy
from .primitives import address_of, load_acquire, load_word, word_at

EXTENSION, API, STAGE, ARGS, RETS, ATTRS = 8, 16, 32, 40, 80, 120
COUNT, POINTERS = 16, 32  # in args and rets
NAMES, VALUES = 32, 40  # in attrs
DTYPE, DATA, NDIM, DIMS = 16, 24, 32, 40
SCALAR = 8  # in a value

DESCRIPTOR, OP, CALL, PEER, ITEM, BLOCKS, FORM, _SPARE = range(8)
IN_PLACE, APART, GIVEN, TAKEN, NO_ARRAY = range(5)
"""Forms. IN_PLACE: the result, after the argument is copied to it. APART: argument and result. GIVEN: the argument.
TAKEN: the result. NO_ARRAY: no array."""

MOST = 1 << 14
"""The number of lines. Python executes the calls with higher numbers. Pages without used lines take no memory."""
LINES = np.zeros((1 + MOST, 8), np.int64)
"""The line of call k is LINES[1 + k]. LINES[0] has Python's functions ASK, KEPT and TORN, and a dict, ERRORS."""
ASK, KEPT, TORN, ERRORS = range(4)
_SYMBOL = "fastcoll.lines"
OWN_SYMBOLS[_SYMBOL] = address_of(LINES)


@instruction("int64")
def _lines(builder):
    return builder.ptrtoint(llvm.function(builder, _SYMBOL, llvm.VOID), llvm.WORD)


@instruction("int64")
def _enter(builder, c_entry, descriptor, op, data, out, nbytes, call, peer):
    kind = llvm.ir.FunctionType(llvm.WORD, [llvm.WORD] * 7)
    return builder.call(llvm.pointer(builder, c_entry, kind), [descriptor, op, data, out, nbytes, call, peer])


@kernel
def _ask(lines, which, frame):
    """Call a Python function with a frame; return 0, or the address of an XLA error.

    A signal handler may raise before the function's first line or after its last one. Then there is no answer, and
    without an error XLA would use the result array, which has no result. So TORN makes an XLA error from the exception.
    If another exception interrupts TORN, TORN is called again.
    """
    state, room = ensure(), own_words()
    given = new_integer(frame)
    answer = call_with(load_word(lines, which), given)
    while answer == 0:
        keep_error(load_word(lines, ERRORS), room)
        answer = call_with(load_word(lines, TORN), given)
    value = value_of(answer)
    drop(answer)
    drop(given)
    release(state)
    return value


@inlined
def _buffer(arguments):
    """Return the first buffer of args or rets."""
    return word_at(word_at(arguments + POINTERS))


@inlined
def _number(frame):
    """Return the number of the call."""
    return word_at(word_at(word_at(word_at(frame + ATTRS + VALUES)) + SCALAR))


def handle(frame):
    """Execute the call of an XLA frame; return 0, or the address of an XLA error."""
    lines = _lines()
    if word_at(frame + EXTENSION) != 0:
        return _ask(lines, ASK, frame)
    number = _number(frame)
    if number < 0 or number >= MOST:
        return _ask(lines, ASK, frame)
    line = lines + 64 * (1 + number)
    descriptor = load_acquire(line)
    if descriptor == 0:
        return _ask(lines, ASK, frame)
    form = load_word(line, FORM)
    data, out, nbytes = 0, 0, 0
    if form != NO_ARRAY:
        x = _buffer(frame + (RETS if form == TAKEN else ARGS))
        data, nbytes = word_at(x + DATA), load_word(line, ITEM)
        for k in range(word_at(x + NDIM)):
            nbytes *= load_word(word_at(x + DIMS), k)
        nbytes //= load_word(line, BLOCKS)
    if form == APART:
        out = word_at(_buffer(frame + RETS) + DATA)
    elif form == IN_PLACE:
        given, data = data, word_at(_buffer(frame + RETS) + DATA)
        if given != data:
            copy(data, given, nbytes)
    c_entry = load_word(descriptor, C_ENTRY)
    done = _enter(
        c_entry,
        descriptor,
        load_word(line, OP),
        data,
        out,
        nbytes,
        load_word(line, CALL),
        load_word(line, PEER),
    )
    return _ask(lines, KEPT, frame) if done == RAISED else 0


@cache
def handler_address() -> int:
    """Return the address of `handle`, compiled or loaded."""
    return c_function(handle, "int64(int64)", "calls from JAX", NJIT)
