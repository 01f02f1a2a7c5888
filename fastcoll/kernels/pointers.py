"""Plain words at integer addresses: kernels take addresses only, so one compiled kernel serves every dtype."""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from .jit import inlined
from .pyobjects import word_at

_WORD = ir.IntType(64)


@intrinsic
def _store(typing_context, address, value):
    def emit(context, builder, signature, args):
        builder.store(args[1], builder.inttoptr(args[0], _WORD.as_pointer()))
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
