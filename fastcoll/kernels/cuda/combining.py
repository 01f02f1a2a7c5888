"""The layout of a dtype's elements in device memory and registers, and the operations on them.

| dtype             | lanes in memory      | computed as           |
|-------------------|----------------------|-----------------------|
| ints, floats      | one                  | the same              |
| complex           | two floats           | the same              |
| bool              | a uint8              | 0 or 1                |
| float16, bfloat16 | a uint16             | float32, rounded once |

A *group* is the tuple of an element's lanes. The functions that this file makes take and return groups. So reducers.py
does not distinguish dtypes of one lane from those of two. An operation may be a user's function. For structured dtypes,
which have no lanes, `records_kernel` makes the complete kernel.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from math import prod
from typing import Any, NamedTuple

import numpy as np
from numba import from_dtype, types

from ...core.reduce_op import AVG, BAND, BOR, BXOR, LAND, LOR, LXOR, MAX, MIN, PRODUCT, SUM
from ..custom import plain_function
from . import accesses as bits
from .kernel import SIMULATED, cuda, device


class DeviceElement(NamedTuple):
    """The facts about a dtype that kernels need.

    `widen` converts a group from memory to registers, `narrow` converts it back; None: no conversion.
    """

    lane: Any  # Numba's type of a lane in memory
    computed: Any  # Numba's type of a lane in registers
    lanes: int = 1  # lanes of an element
    widen: Callable[..., Any] | None = None  # from memory to registers
    narrow: Callable[..., Any] | None = None


def element_of(dtype: np.dtype[Any]) -> DeviceElement:
    """Return the DeviceElement of a numeric dtype."""
    if dtype.name in _HALVES:
        widen, narrow = (_each(function) for function in _HALVES[dtype.name])
        return DeviceElement(types.uint16, types.float32, 1, widen, narrow)
    if dtype.kind == "b":
        return DeviceElement(types.uint8, types.uint8, widen=_truth)
    if dtype.kind == "c":
        part = types.float32 if dtype.itemsize == 8 else types.float64
        return DeviceElement(part, part, lanes=2)
    kind = getattr(types, f"{'uint' if dtype.kind == 'u' else 'int'}{dtype.itemsize * 8}", None)
    kind = getattr(types, f"float{dtype.itemsize * 8}") if dtype.kind == "f" else kind
    return DeviceElement(kind, kind)


_HALVES = {
    "float16": (bits.widen_float16, bits.round_float16),
    "bfloat16": (bits.widen_bfloat16, bits.round_bfloat16),
}


def _each(function: Callable[..., Any]) -> Any:
    return device(lambda a: (function(a[0]),))


@device
def _truth(a):
    """Return 1 for any byte except 0."""
    return (types.uint8(1 if a[0] != 0 else 0),)


def combination(code: int, element: DeviceElement, kind: str) -> Any:
    """Return the function that combines two groups by a predefined operation.

    An operation that is not in the tables below, such as PREMUL_SUM, is computed as SUM.

    Args:
        kind: the dtype's kind; "f" for bfloat16.
    """
    if kind == "c":
        if code == PRODUCT:
            return _multiply_complex(element.computed)
        return device(lambda a, b: (a[0] + b[0], a[1] + b[1]))
    table, wrapped = _BOOL if kind == "b" else _NUMBERS, element.computed
    scalar = device(table.get(code, table[SUM]))
    return device(lambda a, b: (wrapped(scalar(a[0], b[0])),))  # Numba computes small integers with 64 bits


def _multiply_complex(part: Any) -> Any:
    times = bits.product32 if part == types.float32 else bits.product64

    @device
    def multiply(a, b):
        return times(a[0], b[0]) - times(a[1], b[1]), times(a[0], b[1]) + times(a[1], b[0])

    return multiply


def _either(a, b):
    return a | b


def _both(a, b):
    return a & b


# MIN and MAX choose like `numpy.minimum` and `numpy.maximum`: of two equal numbers they choose the first, and of a
# number and a NaN the NaN.
_NUMBERS: dict[int, Callable[..., Any]] = {
    SUM: lambda a, b: a + b,
    PRODUCT: lambda a, b: a * b,
    MIN: lambda a, b: a if a <= b or a != a else b,
    MAX: lambda a, b: a if a >= b or a != a else b,
    BAND: _both,
    BOR: _either,
    BXOR: lambda a, b: a ^ b,
    LAND: lambda a, b: 1 if a != 0 and b != 0 else 0,
    LOR: lambda a, b: 1 if a != 0 or b != 0 else 0,
    LXOR: lambda a, b: 1 if (a != 0) != (b != 0) else 0,
}
_BOOL: dict[int, Callable[..., Any]] = {
    **dict.fromkeys((SUM, MAX, BOR, LOR), _either),
    **dict.fromkeys((PRODUCT, MIN, BAND, LAND), _both),
    **dict.fromkeys((BXOR, LXOR), lambda a, b: a ^ b),
}


def ending(code: int, element: DeviceElement, n: int) -> Any:
    """Return the function to apply to the combined group: for AVG a division by n, else None."""
    if code != AVG:
        return None
    kind = element.computed
    if isinstance(kind, types.Float):
        divisor = kind(n)
        if element.lanes == 2:
            return device(lambda a: (kind(a[0] / divisor), kind(a[1] / divisor)))
        return device(lambda a: (kind(a[0] / divisor),))
    wide = types.int64 if kind.signed else types.uint64
    number, up = wide(n), wide(n - 1 if kind.signed else 0)
    none = wide(0)
    # Truncate towards zero: the floor for positive numbers, the ceiling for negative ones.
    return device(lambda a: (kind((wide(a[0]) + (up if a[0] < 0 else none)) // number),))


# ---- users' functions ------------------------------------------------------------------------------------


def combination_by(function: Callable[[Any, Any], Any], element: DeviceElement, kind: str) -> Any:
    """Return the function that combines two groups by a user's function of two scalars.

    The user's function gets booleans for bool (`kind` "b"), complex numbers for complex dtypes ("c"), and float32 for
    float16 and bfloat16. Its result is converted to the dtype as in an assignment.
    """
    scalar, part = device(plain_function(function)), element.computed
    if kind == "b":
        combine = device(lambda a, b: (part(1 if scalar(a[0] != 0, b[0] != 0) else 0),))
    elif kind == "c":
        number = types.complex64 if part == types.float32 else types.complex128

        @device
        def combine(a, b):
            value = number(scalar(number(complex(a[0], a[1])), number(complex(b[0], b[1]))))
            return value.real, value.imag

    else:
        combine = device(lambda a, b: (part(scalar(a[0], b[0])),))
    if not SIMULATED:
        # Compile `combine` now, before the functions that call it. If a user's function has an error, Numba would else
        # find it while it compiles these nested callers. It would try each of them twice, which takes a minute.
        combine.compile_device((types.UniTuple(part, element.lanes),) * 2)
    return combine


def records_kernel(function: Callable[[Any, Any], Any], dtype: np.dtype[Any]) -> Any:
    """Return a kernel like those of reducers.py that reduces one record at a time.

    The user's function gets private copies of the records, which it may modify. The copies' fields are aligned even if
    those in memory are not, because numba-cuda compiles only aligned fields. (Numba's simulator does not align local
    arrays.)
    """
    private = aligned(dtype)
    record, size = from_dtype(private), dtype.itemsize
    combine = device(plain_function(function))
    bytes_of = [*byte_pairs(dtype, private)]
    read, write = _copy(bytes_of, True), _copy(bytes_of, False)
    # Numba's arrays of records have the fields as attributes; make NumPy's have them too.
    named = (lambda array: array.view(np.recarray)) if SIMULATED else device(lambda array: array)

    def reduce(dst, head, packs, count, srcs):
        taken = named(cuda.local.array(1, record) if SIMULATED else cuda.local.array(1, record, 16))
        new = named(cuda.local.array(1, record) if SIMULATED else cuda.local.array(1, record, 16))
        index = cuda.grid(1)
        while index < count:
            at = index * size
            read(taken, srcs[0] + at)
            for source in range(1, len(srcs)):
                read(new, srcs[source] + at)
                taken[0] = combine(taken[0], new[0])
            write(taken, dst + at)
            index += cuda.gridsize(1)

    return reduce


def aligned(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return a dtype with the same fields, each of them aligned, also those of records inside."""
    if dtype.subdtype is not None:
        return np.dtype((aligned(dtype.subdtype[0]), dtype.subdtype[1]))
    if dtype.names is None:
        return dtype
    return np.dtype([(name, aligned(dtype[name])) for name in dtype.names], align=True)


def byte_pairs(
    one: np.dtype[Any], other: np.dtype[Any], at: int = 0, at_other: int = 0
) -> Iterator[tuple[int, int]]:
    """Yield the offsets of each byte in two dtypes with the same fields; bytes between fields are left out."""
    if one.subdtype is not None and other.subdtype is not None:
        parts = [(one.subdtype[0], other.subdtype[0])] * prod(one.shape)
        places = [(k * a.itemsize, k * b.itemsize) for k, (a, b) in enumerate(parts)]
    elif one.names is not None:
        parts = [(one[name], other[name]) for name in one.names]
        assert one.fields is not None
        assert other.fields is not None
        places = [(one.fields[name][1], other.fields[name][1]) for name in one.names]
    else:
        yield from ((at + i, at_other + i) for i in range(one.itemsize))
        return
    for (a, b), (here, there) in zip(parts, places, strict=True):
        yield from byte_pairs(a, b, at + here, at_other + there)


def _copy(bytes_of: list[tuple[int, int]], inwards: bool) -> Any:
    """Return a function that copies single bytes between an address and an array of one record.

    Args:
        bytes_of: for each byte the offset from the address and the offset in the array.
        inwards: whether it copies to the array.
    """
    if SIMULATED:

        def copy_simulated(array, address):
            for there, here in bytes_of:
                private, memory = array.ctypes.data + here, int(address) + there
                dst, src = (private, memory) if inwards else (memory, private)
                ctypes.memmove(dst, src, 1)

        return copy_simulated
    from llvmlite import ir
    from numba.cuda.extending import intrinsic

    byte, word = ir.IntType(8).as_pointer(), ir.IntType(64)

    @intrinsic
    def copy(typing_context, array, address):
        def emit(context, builder, signature, args):
            data = context.make_array(array)(context, builder, args[0]).data
            private, memory = builder.bitcast(data, byte), builder.inttoptr(args[1], byte)
            for offset, to in bytes_of:
                there = builder.gep(memory, [ir.Constant(word, offset)])
                here = builder.gep(private, [ir.Constant(word, to)])
                src, dst = (there, here) if inwards else (here, there)
                builder.store(builder.load(src), dst)
            return context.get_dummy_value()

        return types.void(array, types.int64), emit

    return copy
