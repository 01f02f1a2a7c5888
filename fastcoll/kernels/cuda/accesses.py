"""Loads and stores of several lanes at addresses of device memory; and the bits of floats.

    load(address) -> lanes          store(address, lanes)

A lane is one number of an element: combining.py lists the lanes of each dtype. `accesses` makes `load` and `store` for
a lane's type. An access of 16 bytes is one instruction, `ld.global.v4.u32` or `v2.u64`, and needs an address that is a
multiple of 16. It is written in PTX, because LLVM splits vectors of small integers. The compiler may move and merge the
loads, because no kernel reads what it has written. So these loads cannot be used to wait for a peer's word.

A GPU has instructions that convert float16; integer instructions convert bfloat16. `product32` and `product64` are
products that the compiler does not fuse with additions. In float16 and bfloat16, every NaN is rounded to one quiet NaN,
as on the CPU (compiler/elements.py).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils

from ...compiler.elements import WORD
from ...compiler.llvm import pointer
from .kernel import SIMULATED, device, instruction

VECTOR = 16
"""Bytes of the widest access."""

Accesses = tuple[Callable[..., Any], Callable[..., Any]]

_ADDRESS = "{{ .reg .u64 a; cvta.to.global.u64 a, ${}; "


def size_of(kind: Any) -> int:
    """Return the bytes of a lane of a Numba number type."""
    return int(kind.bitwidth) // 8


def _llvm_type(kind: Any) -> Any:
    if isinstance(kind, types.Float):
        return ir.FloatType() if kind.bitwidth == 32 else ir.DoubleType()
    return ir.IntType(int(kind.bitwidth))


@cache
def accesses(kind: Any, lanes: int, wide: bool) -> Accesses:
    """Return `load` and `store` of `lanes` successive numbers of a type.

    Args:
        wide: whether one instruction accesses all of them; they are VECTOR bytes together.
    """
    if SIMULATED:
        return _simulated(kind, lanes, wide)
    return _compiled(kind, lanes, _Words(kind) if wide else _Scalars(kind))


def _simulated(kind: Any, lanes: int, wide: bool) -> Accesses:
    dtype = np.dtype(str(kind))
    alignment = VECTOR if wide else dtype.itemsize
    memory = ctypes.c_ubyte * (lanes * dtype.itemsize)

    def view(address):
        assert address % alignment == 0, f"an access of {alignment} bytes at {address:#x}"
        return np.frombuffer(memoryview(memory.from_address(int(address))), dtype)

    def load(address):
        return tuple(view(address))

    def store(address, values):
        assert all(type(value) is dtype.type for value in values), f"{values} stored as {dtype}"
        view(address)[:] = values

    return load, store


def _compiled(kind: Any, lanes: int, memory: _Words | _Scalars) -> Accesses:
    pack = types.UniTuple(kind, lanes)

    @instruction(pack, types.int64)
    def load(builder, address):
        return cgutils.pack_array(builder, memory.load(builder, address, lanes))

    @instruction(types.void, types.int64, pack)
    def store(builder, address, values):
        memory.store(builder, address, [builder.extract_value(values, lane) for lane in range(lanes)])

    return load, store


class _Scalars:
    """Loads and stores numbers one by one."""

    def __init__(self, kind: Any) -> None:
        self._lane, self._size = _llvm_type(kind), size_of(kind)

    def load(self, builder: Any, address: Any, lanes: int) -> list[Any]:
        return [builder.load(self._pointer(builder, address, lane)) for lane in range(lanes)]

    def store(self, builder: Any, address: Any, values: list[Any]) -> None:
        for lane, value in enumerate(values):
            builder.store(value, self._pointer(builder, address, lane))

    def _pointer(self, builder: Any, address: Any, lane: int) -> Any:
        return pointer(builder, builder.add(address, WORD(lane * self._size)), self._lane)


class _Words:
    """Loads and stores VECTOR bytes at once.

    They are in two 64-bit registers for 8-byte numbers, else in four 32-bit registers.
    """

    def __init__(self, kind: Any) -> None:
        self._kind, self._lane = _llvm_type(kind), ir.IntType(int(kind.bitwidth))
        self._word = ir.IntType(max(32, self._lane.width))
        self._count = VECTOR * 8 // self._word.width
        self._suffix = f"v{self._count}.u{self._word.width}"
        self._register = "l" if self._word.width == 64 else "r"

    def load(self, builder: Any, address: Any, lanes: int) -> list[Any]:
        n = self._count
        targets = ", ".join(f"${i}" for i in range(n))
        code = _ADDRESS.format(n) + f"ld.global.{self._suffix} {{{targets}}}, [a]; }}"
        words = ir.FunctionType(ir.LiteralStructType([self._word] * n), [address.type])
        constraints = ",".join([f"={self._register}"] * n + ["l"])
        loaded = builder.asm(words, code, constraints, [address], False)
        values = []
        for i in range(lanes):  # lowest address first
            word, shift = divmod(i * self._lane.width, self._word.width)
            value = builder.lshr(builder.extract_value(loaded, word), ir.Constant(self._word, shift))
            values.append(builder.bitcast(builder.trunc(value, self._lane), self._kind))
        return values

    def store(self, builder: Any, address: Any, values: list[Any]) -> None:
        n = self._count
        wide = [builder.zext(builder.bitcast(value, self._lane), self._word) for value in values]
        words, each = [], len(wide) // n
        for first in range(0, len(wide), each):
            word = wide[first]
            for i in range(1, each):
                shift = ir.Constant(self._word, i * self._lane.width)
                word = builder.or_(word, builder.shl(wide[first + i], shift))
            words.append(word)
        sources = ", ".join(f"${i + 1}" for i in range(n))
        code = _ADDRESS.format(0) + f"st.global.{self._suffix} [a], {{{sources}}}; }}"
        kind = ir.FunctionType(ir.VoidType(), [address.type, *[self._word] * n])
        constraints = ",".join(["l"] + [self._register] * n + ["~{memory}"])
        builder.asm(kind, code, constraints, [address, *words], True)


# ---- bits ------------------------------------------------------------------------------------------------

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
        """Return a function that converts the low bits of a word to a Numba type: uint16 or a float."""
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
        """Return a function that converts the low bits of a word to a Numba type: uint16 or a float."""
        if kind == types.float64:
            return device(lambda word: libdevice.longlong_as_double(word))
        if kind == types.float32:
            return device(lambda word: _float(types.uint32(word)))
        return device(lambda word: kind(word))


@device
def round_float16(x):
    """Round to the nearest float16, ties to even; return its bits."""
    return _round_float16(x) if x == x else types.uint16(_HALF_NAN)


@device
def widen_bfloat16(bits):
    """Convert bfloat16 bits to float32."""
    return _float(types.uint32(types.uint32(bits) << 16))


@device
def round_bfloat16(x):
    """Round to the nearest bfloat16, ties to even; return its bits."""
    bits = _bits(x)
    return types.uint16((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) if x == x else types.uint16(_BFLOAT_NAN)
