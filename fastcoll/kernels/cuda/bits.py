"""float32 and its bits, float16 by the processor, bfloat16 by integers, and products that are not fused.

Every NaN is rounded to one quiet NaN, as on the CPU (kernels/half.py).
"""

from __future__ import annotations

import numpy as np
from numba import types

from .toolkit import SIMULATED, device

_HALF_NAN, _BFLOAT_NAN = 0x7E00, 0x7FC0

if SIMULATED:

    def _bits(x):
        return np.float32(x).view(np.uint32)

    def _float(bits):
        return np.uint32(bits).view(np.float32)

    def widen_float16(bits):
        return np.float32(np.uint16(bits).view(np.float16))

    def _round_float16(x):
        return np.float16(x).view(np.uint16)

    def product32(a, b):
        return a * b

    product64 = product32

    def lane_of(kind):
        dtype = np.dtype(str(kind))
        return lambda word: np.int64(word).reshape(1).view(dtype)[0]

else:
    from numba.cuda import libdevice

    @device
    def _bits(x):
        return types.uint32(libdevice.float_as_int(x))

    @device
    def _float(bits):
        return libdevice.int_as_float(types.int32(bits))

    @device
    def widen_float16(bits):
        return libdevice.half2float(types.int16(bits))

    @device
    def _round_float16(x):
        return types.uint16(libdevice.float2half_rn(x))

    @device
    def product32(a, b):
        return libdevice.fmul_rn(a, b)

    @device
    def product64(a, b):
        return libdevice.dmul_rn(a, b)

    def lane_of(kind):
        """A function that makes a number of a Numba type, uint16 or a float, of the low bits of a word."""
        if kind == types.float64:
            return device(lambda word: libdevice.longlong_as_double(word))
        if kind == types.float32:
            return device(lambda word: _float(types.uint32(word)))
        return device(lambda word: kind(word))


@device
def round_float16(x):
    """The nearest float16, ties to even, as bits."""
    return _round_float16(x) if x == x else types.uint16(_HALF_NAN)


@device
def widen_bfloat16(bits):
    """A bfloat16 as a float32."""
    return _float(types.uint32(types.uint32(bits) << 16))


@device
def round_bfloat16(x):
    """The nearest bfloat16, ties to even, as bits."""
    bits = _bits(x)
    return types.uint16((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) if x == x else types.uint16(_BFLOAT_NAN)
