"""Calls of C functions of other libraries, by their addresses, from kernels."""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

_WORD = ir.IntType(64)

yield_core = types.ExternalFunction("sched_yield", types.int32())


@intrinsic
def call_foreign(typing_context, function, a, b, c):
    """Call `int function(void *a, void *b, void *c)`; an address and an int64 are passed alike."""

    def emit(context, builder, signature, args):
        kind = ir.FunctionType(ir.IntType(32), [_WORD] * 3)
        result = builder.call(builder.inttoptr(args[0], kind.as_pointer()), args[1:])
        return builder.sext(result, _WORD)

    return types.int64(*[types.int64] * 4), emit
