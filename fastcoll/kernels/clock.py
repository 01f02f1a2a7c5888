"""The processor's own clock, for comparing durations on one machine; its unit is unknown but constant."""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic


@intrinsic
def ticks(typing_context):
    """The time now, in ticks since some moment; takes about 10 ns."""

    def emit(context, builder, signature, args):
        kind = ir.FunctionType(ir.IntType(64), [])
        read = cgutils.get_or_insert_function(builder.module, kind, "llvm.readcyclecounter")
        return builder.call(read, [])

    return types.int64(), emit
