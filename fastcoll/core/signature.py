"""The signature of a collective call, which ranks compare before data moves, and the error for signatures that differ.

A signature is three words:

    call     bits 0-7 operation, 8-15 dtype, 16-31 reduce operation, 32-47 root, 48-60 detail, 61 COALESCED, 62 UNEVEN
    shape    the number of bytes that a rank contributes; if UNEVEN is set, ranks may have different shapes
    balance  a hash of the sizes that the rank sends minus a hash of the sizes that it expects; if all sizes match, the
             sum of all ranks' balances is 0

All fields except the detail can be decoded, so an error can show what each rank called. The detail is a checksum of
values that do not fit in the other fields: a dtype that is not in the table `_DTYPES`, and the arrays of a coalesced
call (one call on a list of arrays). The checksum of a coalesced call has more bits than the detail field. Its upper
bits are in the root's field if the operation reduces, and else in the reduce operation's field.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..errors import MismatchError, encodable
from .gate import Gate
from .operations import BLOCKS_TO_ONE, KINDS, OPERATIONS, WORD, Kind
from .reduce_op import CUSTOM, NAMES, ReduceOp
from .travel import TRAVELS

_CODES = {name: code for code, name in enumerate(OPERATIONS)}
_DTYPES = (
    "none bool int8 uint8 int16 uint16 int32 uint32 int64 uint64 float16 bfloat16 float32 float64 "
    "complex64 complex128"
).split()
_OTHER_DTYPE = 0x80
_OTHER_BITS = 0x3FFF
_DETAIL = 0x1FFF

REFUSED = _CODES["refused"]
"""The call word that a rank publishes for a call that it has refused; it matches no operation's call word."""

COALESCED = 1 << 61
UNEVEN = 1 << 62
OP_SHIFT = 16
ROOT_SHIFT = 32
_DETAIL_SHIFT = 48

SHAPES = (-1,)
"""The `parts` of the all_gather of int64 in which ranks exchange the shapes of the arrays that they gather next."""


class Signature(NamedTuple):
    """The three words that a rank publishes for its call."""

    call: int
    shape: int
    balance: int = 0


# ---- the call word -------------------------------------------------------------------------------------


def code_of(operation: str) -> int:
    """Return an operation's number."""
    return _CODES[operation]


def encode(
    operation: str,
    dtype: np.dtype[Any] | None = None,
    *,
    op: ReduceOp | None = None,
    parts: Sequence[int] = (),
) -> int:
    """Return the call word without the root.

    Args:
        parts: for a coalesced call, its arrays' sizes or other numbers in which ranks must agree.
    """
    kind, code = KINDS[operation], dtype_code(dtype)
    checksum = zlib.crc32(repr(list(parts)).encode()) if parts else 0
    return (
        _CODES[operation]
        | (code & 0xFF) << 8
        | (op.code if op is not None else 0) << OP_SHIFT
        | ((code >> 8 ^ checksum) & _DETAIL) << _DETAIL_SHIFT
        | (checksum >> 13 & 0xFFFF) << _spare_shift(kind)
        | (COALESCED if parts else 0)
        | (UNEVEN if kind.uneven else 0)
    )


def _spare_shift(kind: Kind) -> int:
    """Return the position of the field that a coalesced call of this kind does not use."""
    return ROOT_SHIFT if kind.reduces else OP_SHIFT


def dtype_code(dtype: np.dtype[Any] | None) -> int:
    """Encode a dtype in 22 bits: its index in a table, or a checksum of its description with bit 7 set."""
    if dtype is None:
        return 0
    if dtype.isnative and dtype.name in _DTYPES:
        return _DTYPES.index(dtype.name)
    checksum = zlib.crc32(_canonical(dtype).encode())
    return _OTHER_DTYPE | checksum & 0x7F | (checksum >> 7 & _OTHER_BITS) << 8


def _canonical(dtype: np.dtype[Any]) -> str:
    """Return a text that is equal for equal dtypes. Their `repr` may differ, for example in metadata."""
    if dtype.subdtype is not None:
        return f"({_canonical(dtype.subdtype[0])}, {dtype.subdtype[1]})"
    if dtype.fields is None:
        return f"{dtype.name} {dtype.str}"
    fields = ((name, dtype.fields[name]) for name in dtype.names or ())
    inner = ", ".join(f"{name!r} at {field[1]}: {_canonical(field[0])}" for name, field in fields)
    return f"{{{inner}; {dtype.itemsize}}}"


def itemsize_of(code: int) -> int:
    """Return the size of an element in bytes, from a dtype's code; 0 if the dtype is not in the table."""
    name = _DTYPES[code & 0xFF] if 0 < code & 0xFF < len(_DTYPES) else ""
    return np.dtype(name.replace("bfloat16", "uint16")).itemsize if name else 0


OBJECT_SIZES = np.dtype([("fastcoll: sizes of objects", np.int64)])
OBJECT_BYTES = np.dtype([("fastcoll: bytes of objects", np.uint8)])
"""The dtypes of the arrays that collectives of objects move. No user's array has these dtypes, so the signatures of a
call on arrays and of a call on objects differ. Error texts show them as "objects"."""

_OBJECTS = {
    dtype_code(dtype) & (_DETAIL << 8 | 0xFF): dtype.itemsize for dtype in (OBJECT_SIZES, OBJECT_BYTES)
}

_TRAVELS = {dtype_code(travel.items) & (_DETAIL << 8 | 0xFF): travel.name for travel in TRAVELS.values()}


def operation_of(call: int) -> str:
    """Return the name of the operation in a call word, with `_coalesced` if the call has several arrays."""
    code = call & 0xFF
    name = OPERATIONS[code] if code < len(OPERATIONS) else f"operation {code}"
    return f"{name}_coalesced" if call & COALESCED else name


def describe(call: int, shape: int, ranks: Sequence[int] = ()) -> str:
    """Format a call for error texts, for example `all_reduce(float32, 3 elements, op=SUM)`.

    A `call` of 0 means that the rank has not published its call yet. `ranks` are the global ranks of the group's
    members; without them, the root is shown as a rank in the group.
    """
    if not call:
        return "a call that is not published yet"
    symmetric, _, operation = operation_of(call & ~COALESCED).rpartition(":")
    kind = KINDS.get(operation, Kind(WORD))
    if operation in ("barrier", "monitored_barrier", "refused"):
        return "a call that was refused" if operation == "refused" else f"{operation}()"
    if call == _SHAPES_CALL:
        return "all_gather(tensor) without a list"
    code, detail = call >> 8 & 0xFF, call >> _DETAIL_SHIFT & _DETAIL
    dtype = _DTYPES[code] if code < len(_DTYPES) else f"another dtype ({detail << 8 | code:#x})"
    parts = [dtype, f"{shape} bytes" if shape >= 0 else "blocks of different sizes"]
    if (travel := _TRAVELS.get(detail << 8 | code)) is not None:
        parts = [f"float32 that travels as {travel}", f"{shape // 4} elements"]
    itemsize = _OBJECTS.get(detail << 8 | code)
    if itemsize is not None:
        several = itemsize > 1 and shape >= 0 and not call & UNEVEN
        parts = [f"{shape // itemsize} objects" if several else "objects"]
    elif call & UNEVEN:
        del parts[1]
    elif shape >= 0 and (itemsize := itemsize_of(code)):
        parts[1] = f"{shape // itemsize} elements"
    if kind.reduces and (redop := call >> OP_SHIFT & 0xFFFF):
        parts.append("op=" + (NAMES[redop] if redop < CUSTOM else f"custom {redop - CUSTOM:#x}"))
    if kind.root:
        root = call >> ROOT_SHIFT & 0xFFFF  # a peer's call word may have any root
        parts.append(f"root={ranks[root] if root < len(ranks) else root}")
    if symmetric:
        parts.append("in symmetric memory")
    if call & COALESCED:
        operation += "_coalesced"
        checksum = (call >> _spare_shift(kind) & 0xFFFF) << 13 | detail
        parts.append(f"arrays of checksum {checksum:#x}")
    return f"{operation}({', '.join(parts)})"


def describe_message(code: int, nbytes: int) -> str:
    """Format what a message or an array holds, for example `(float32, 3 elements)`; `code` is that of its dtype."""
    call = (code & 0xFF) << 8 | (code >> 8 & _DETAIL) << _DETAIL_SHIFT
    return describe(call, nbytes).removeprefix("none")


_SHAPES_CALL = encode("all_gather", np.dtype(np.int64), parts=SHAPES)


def describe_differences(calls: Sequence[tuple[int, int]], ranks: Sequence[int]) -> str:
    """Format the call of each rank, equal calls together: `ranks 0, 2 called barrier(); rank 1 called ...`."""
    groups: dict[tuple[int, int], list[int]] = {}
    for rank, call in zip(ranks, calls, strict=True):
        groups.setdefault(call, []).append(rank)
    return "; ".join(
        f"rank{'s' if len(members) > 1 else ''} {', '.join(map(str, members))} called {describe(*call, ranks)}"
        for call, members in groups.items()
    )


# ---- sizes ---------------------------------------------------------------------------------------------

Sizes = tuple[Sequence[int], Sequence[int]]
"""The bytes that a rank sends to each rank, and the bytes that it expects from each rank; -1: nothing is sent."""

# Steele, Lea, Flood: Fast splittable pseudorandom number generators, OOPSLA 2014 (splitmix64).
STEP, FIRST, SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_WORD = (1 << 64) - 1


def weigh(src: int, dst: int, nbytes: int) -> int:
    """Return a hash of the three numbers as a signed 64-bit word. kernels/primitives.py has the same, compiled."""
    mixed = ((nbytes + 1) * STEP + (src << 32) + dst) & _WORD
    mixed = (mixed ^ (mixed >> 30)) * FIRST & _WORD
    mixed = (mixed ^ (mixed >> 27)) * SECOND & _WORD
    return _signed(mixed ^ (mixed >> 31))


def balance(rank: int, gives: Sequence[int], takes: Sequence[int]) -> int:
    """Return the balance of a rank's sizes, as a signed 64-bit word.

    The balance is the sum of the hashes of the sizes that the rank sends, minus the sum of the hashes of the sizes that
    it expects. If all sizes agree, the balances of all ranks add up to 0 modulo 2**64. If sizes differ, this happens
    only in one of 2**64 cases.
    """
    given = sum(weigh(rank, peer, n) for peer, n in enumerate(gives) if peer != rank and n >= 0)
    taken = sum(weigh(peer, rank, n) for peer, n in enumerate(takes) if peer != rank and n >= 0)
    return _signed(given - taken)


def shape_of(sizes: Sequence[int]) -> int:
    """Return one number by which ranks compare lists of sizes: the sum if all are equal, else a negative hash."""
    if len(set(sizes)) == 1:
        return sum(sizes)
    return -1 - (sum(weigh(peer, peer, n) for peer, n in enumerate(sizes)) & (1 << 62) - 1)


def _signed(word: int) -> int:
    return ((word + (1 << 63)) & _WORD) - (1 << 63)


# ---- comparing, and the error ----------------------------------------------------------------------------

Head = tuple[int, int]
"""The call word and the shape of one rank."""

Gather = Callable[[NDArray[Any], NDArray[Any]], object]
"""A function that does an all_gather: on all ranks, each rank's second argument becomes a row of the first argument."""

NOTE_BYTES = 1024
_MOST_TABLES = 256  # ranks; in larger groups the tables of sizes are too large to gather for an error text


def _from_all(own: NDArray[Any], size: int, gather: Gather) -> NDArray[Any]:
    everybody = np.empty((size, *own.shape), own.dtype)
    gather(everybody, own)
    return everybody


def write_note(text: str, note: NDArray[Any]) -> None:
    """Write a text into `note`, an array of NOTE_BYTES zeros; cut off a longer text."""
    data = np.frombuffer(encodable(text).encode()[:NOTE_BYTES], np.uint8)
    note[: data.size] = data


def gather_texts(text: str, size: int, gather: Gather) -> list[str]:
    """Gather one text of at most NOTE_BYTES from each rank. Collective."""
    note = np.zeros(NOTE_BYTES, np.uint8)
    write_note(text, note)
    notes = _from_all(note, size, gather)
    return [row.tobytes().rstrip(b"\0").decode(errors="replace") for row in notes]


def comparable(heads: Sequence[Head]) -> list[Head]:
    """Return the heads of all ranks. If ranks may have different shapes, the shape in each head is replaced by 0."""
    uneven = all(call & UNEVEN for call, _ in heads)
    return [(call, 0) for call, _ in heads] if uneven else list(heads)


def mismatch(text: str, number: int, group: str) -> MismatchError:
    """Make the error that every rank raises; `text` describes the calls of all ranks."""
    return MismatchError(
        f"the ranks' calls do not match (call {number} of group {group!r}): {text}; "
        "all ranks must make the same calls in the same order"
    )


def describe_sizes(tables: Sequence[Sizes], ranks: Sequence[int]) -> str:
    """Format the pairs of ranks whose sizes differ: `rank 0 sends 8 bytes to rank 1, which expects 12`."""
    differences = [
        f"rank {ranks[src]} sends {gives[dst]} bytes to rank {ranks[dst]}, which expects {tables[dst][1][src]}"
        for src, (gives, _) in enumerate(tables)
        for dst in range(len(tables))
        if gives[dst] != tables[dst][1][src]
    ]
    return "; ".join(differences[:8]) or "the sizes that ranks send and expect differ"


def describe_blocks(tables: Sequence[Sizes], ranks: Sequence[int]) -> str:
    """Name the ranks whose blocks differ in size from those of the first rank, and the first block that differs."""
    differences = []
    for rank, (gives, _) in enumerate(tables):
        for dst, (nbytes, expected) in enumerate(zip(gives, tables[0][0], strict=True)):
            if nbytes != expected:
                differences.append(
                    f"rank {ranks[rank]} gives {nbytes} bytes for rank {ranks[dst]}, expected {expected} as rank "
                    f"{ranks[0]} gives"
                )
                break
    return "; ".join(
        [*(differences[:8] or ["the sizes differ"]), "give blocks of the same sizes on all ranks"]
    )


def describe_mismatch(
    heads: Sequence[Head],
    ranks: Sequence[int],
    tables: Callable[[], Sequence[Sizes]] = tuple,
    describe: Callable[[Sequence[Sizes], Sequence[int]], str] = describe_sizes,
) -> str:
    """Format the calls of all ranks; if these are equal, format the sizes that differ instead.

    Args:
        heads: the call word and shape of each rank.
        tables: returns the sizes of all ranks. It may gather, so either all ranks call it or none.
        describe: formats the differences in what `tables` returns.
    """
    heads = comparable(heads)
    calls, shapes = map(set, zip(*heads, strict=True))
    if len(calls) > 1:  # a peer's call word may be of no operation
        return describe_differences(heads, ranks)
    operation = OPERATIONS[heads[0][0] & 0xFF].rpartition(":")[2]
    kind = KINDS[operation]
    if kind.form == BLOCKS_TO_ONE and not kind.root and min(shapes) < 0:
        return f"{operation}: {describe_blocks(tables(), ranks)}"
    if len(set(heads)) > 1:
        return describe_differences(heads, ranks)
    return f"{operation}: {describe(tables(), ranks)}"


def difference(
    heads: Sequence[Head],
    gate: Gate,
    number: int,
    gather: Gather,
    sizes: Sizes,
    describe: Callable[[Sequence[Sizes], Sequence[int]], str] = describe_sizes,
    also: str = "",
    notes: Sequence[str] | None = None,
) -> MismatchError:
    """Make the error for a call in which ranks differ. Collective: all ranks call this with the same heads.

    If some ranks have refused their calls (refusals.py), the error has their reasons, and the calls of the other ranks.

    Args:
        heads: the call word and shape of each rank.
        gate: the group's gate; `gate.refusal` is this rank's reason if it has refused its call.
        number: the call's number in the group.
        sizes: the sizes of this rank's call.
        describe: formats the differences in the sizes of all ranks.
        also: a text about a difference that the heads do not show.
        notes: each rank's reason for refusing its call, if the caller has them; None: this function gathers them.
    """
    size, ranks = gate.size, gate.ranks

    def tables() -> Sequence[Sizes]:
        return _from_all(np.array(sizes, np.int64), size, gather).tolist() if size <= _MOST_TABLES else ()

    there = [rank for rank, (call, _) in enumerate(heads) if call == REFUSED]
    if not there:
        differences = f"{describe_differences(comparable(heads), ranks)}; {also}" if also else ""
        return mismatch(differences or describe_mismatch(heads, ranks, tables, describe), number, gate.name)
    notes = gather_texts(gate.refusal, size, gather) if notes is None else notes
    reasons = [notes[rank] for rank in there[:8]]
    others = [rank for rank in range(size) if rank not in there]
    text = describe_differences([heads[rank] for rank in others], [ranks[rank] for rank in others])
    return MismatchError(
        f"{'; '.join(reasons)}; {text} (call {number} of group {gate.name!r}); no data was moved"
    )
