"""The fingerprint of a collective call: two words that travel with its first message and are compared.

    call   bits 0-7 operation, 8-15 dtype, 16-31 reduce operation, 32-47 root, 48-60 detail, 61 COALESCED, 62 UNEVEN
    shape  bytes that a rank contributes; ranks may differ in it when UNEVEN is set

All fields but the detail can be read back, so that an error can show what each rank called. The detail is
a checksum of what has no field: a dtype that is not in the table, and how a coalesced call is divided. A coalesced
call's checksum goes on in the field that its operation has no use for: the root's, or the reduce operation's.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from .reduce_op import CUSTOM, NAMES, ReduceOp

OPERATIONS = (
    "none all_reduce reduce scan exscan reduce_scatter broadcast all_gather gather scatter all_to_all barrier "
    "message symmetric.empty symmetric:all_reduce refused"
).split()
_CODES = {name: code for code, name in enumerate(OPERATIONS)}
_DTYPES = (
    "none bool int8 uint8 int16 uint16 int32 uint32 int64 uint64 float16 bfloat16 float32 float64 "
    "complex64 complex128"
).split()
_OTHER_DTYPE = 0x80
_OTHER_BITS = 0x3FFF
_DETAIL = 0x1FFF
_REDUCING = ("all_reduce", "reduce", "scan", "exscan", "reduce_scatter")
_ROOTED = ("reduce", "broadcast", "gather", "scatter")
_UNEVEN = ("all_gather", "gather", "scatter", "all_to_all")  # ranks may differ in what they contribute

REFUSED = _CODES["refused"]
"""The call word of a call that was refused where it was made, and matches no other."""

_COALESCED = 1 << 61
UNEVEN = 1 << 62
OP_SHIFT = 16
ROOT_SHIFT = 32
_DETAIL_SHIFT = 48

SHAPES = (-1,)
"""The `parts` of the all_gather of int64 by which ranks tell the shapes of what they gather next."""


def code_of(operation: str) -> int:
    """An operation's number."""
    return _CODES[operation]


def encode(
    operation: str,
    dtype: np.dtype[Any] | None = None,
    *,
    op: ReduceOp | None = None,
    parts: Sequence[int] = (),
) -> int:
    """The call word, without the root; `parts`: of a coalesced call, its arrays' sizes or what else must agree."""
    code = dtype_code(dtype)
    checksum = zlib.crc32(repr(list(parts)).encode()) if parts else 0
    return (
        _CODES[operation]
        | (code & 0xFF) << 8
        | (op.code if op is not None else 0) << OP_SHIFT
        | ((code >> 8 ^ checksum) & _DETAIL) << _DETAIL_SHIFT
        | (checksum >> 13 & 0xFFFF) << _spare_shift(operation)
        | (_COALESCED if parts else 0)
        | (UNEVEN if operation in _UNEVEN else 0)
    )


def _spare_shift(operation: str) -> int:
    """Where the field lies that a coalesced call of this operation has no use for."""
    return ROOT_SHIFT if operation in _REDUCING else OP_SHIFT


def dtype_code(dtype: np.dtype[Any] | None) -> int:
    """22 bits for a dtype: its place in a table, or a checksum of its description with bit 7 set."""
    if dtype is None:
        return 0
    if dtype.isnative and dtype.name in _DTYPES:
        return _DTYPES.index(dtype.name)
    checksum = zlib.crc32(repr(dtype).encode())
    return _OTHER_DTYPE | checksum & 0x7F | (checksum >> 7 & _OTHER_BITS) << 8


OBJECT_SIZES = np.dtype([("fastcoll: sizes of objects", np.int64)])
OBJECT_BYTES = np.dtype([("fastcoll: bytes of objects", np.uint8)])
"""What collectives of objects move: no user's array matches it, and messages call it objects."""

_OBJECTS = {
    dtype_code(dtype) & (_DETAIL << 8 | 0xFF): dtype.itemsize for dtype in (OBJECT_SIZES, OBJECT_BYTES)
}


def describe(call: int, shape: int) -> str:
    """A call for people to read, as in `all_reduce(float32, 12 bytes, op=SUM)`."""
    name = OPERATIONS[call & 0xFF] if call & 0xFF < len(OPERATIONS) else f"operation {call & 0xFF}"
    symmetric, _, operation = name.rpartition(":")
    if operation in ("barrier", "refused"):
        return "barrier()" if operation == "barrier" else "a call that was refused"
    if call == _SHAPES_CALL:
        return "all_gather(tensor) without a list"
    code, detail = call >> 8 & 0xFF, call >> _DETAIL_SHIFT & _DETAIL
    dtype = _DTYPES[code] if code < len(_DTYPES) else f"another dtype ({detail << 8 | code:#x})"
    parts = [dtype, f"{shape} bytes" if shape >= 0 else "blocks of different sizes"]
    itemsize = _OBJECTS.get(detail << 8 | code)
    if itemsize is not None:
        several = itemsize > 1 and shape >= 0 and not call & UNEVEN
        parts = [f"{shape // itemsize} objects" if several else "objects"]
    elif call & UNEVEN:
        del parts[1]
    elif shape >= 0 and 0 < code < len(_DTYPES):
        parts[1] = f"{shape // np.dtype(_itemsize_name(dtype)).itemsize} elements"
    if operation in _REDUCING and (redop := call >> OP_SHIFT & 0xFFFF):
        parts.append("op=" + (NAMES[redop] if redop < CUSTOM else f"custom {redop - CUSTOM:#x}"))
    if operation in _ROOTED:
        parts.append(f"root={call >> ROOT_SHIFT & 0xFFFF}")
    if symmetric:
        parts.append("in symmetric memory")
    if call & _COALESCED:
        operation += "_coalesced"
        checksum = (call >> _spare_shift(operation) & 0xFFFF) << 13 | detail
        parts.append(f"arrays of checksum {checksum:#x}")
    return f"{operation}({', '.join(parts)})"


_SHAPES_CALL = encode("all_gather", np.dtype(np.int64), parts=SHAPES)


def _itemsize_name(name: str) -> str:
    return "uint16" if name == "bfloat16" else name


def describe_differences(calls: Sequence[tuple[int, int]], ranks: Sequence[int]) -> str:
    """Who called what, equal calls together: `ranks 0, 2: barrier(); rank 1: ...`."""
    groups: dict[tuple[int, int], list[int]] = {}
    for rank, call in zip(ranks, calls, strict=True):
        groups.setdefault(call, []).append(rank)
    return "; ".join(
        f"rank{'s' if len(members) > 1 else ''} {', '.join(map(str, members))} called {describe(*call)}"
        for call, members in groups.items()
    )
