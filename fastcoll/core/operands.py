"""Checks of a call's arguments: numbers, arrays that must fit together, and the division of arrays among ranks.

These are pure functions. They run before the call is published, so no data moves if they refuse the call.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Sequence
from datetime import timedelta
from itertools import combinations, starmap
from numbers import Real
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..arrays.arrays import ImportedArray
from ..arrays.dtypes import rounded, widened
from ..config import MOST_SECONDS
from ..errors import ArrayError, UnavailableError, UsageError
from .partition import pieces
from .reduce_op import AVG, PREMUL_SUM, ReduceOp
from .work import Timeout, seconds

Array = NDArray[Any]
# Up to 6 arrays are compared in pairs (0.2 us a pair). More are sorted by address; to read an address takes 0.8 us.
_FEW = 6
_MOST_WORK = 10_000  # `max_work` of numpy.shares_memory: candidates that it may try for two strided arrays

LARGEST_TAG = (1 << 31) - 1
ANY_TAG = -1
"""Given as the tag of a receive, it accepts messages with any tag from 0 to LARGEST_TAG."""
OBJECTS_TAG = LARGEST_TAG + 3
"""The tag of messages with objects. Their bytes are unpickled, so users cannot send arrays with this tag. The two tags
before it belong to gpu/nccl/messages.py."""

JAX_TAGS = 1 << 32
"""Added to the tags of fastcoll.jax's messages, so that none of them matches a receive posted from Python."""

_NUMBERS = frozenset(map(np.dtype, "?bBhHiIlLqQefdFD"))

WORLD_OF_ONE = "; this is a world of one: start it with -n 2, as in python -m fastcoll.launch -n 2 script.py"
"""The end of the error for a call that names another rank in a world of one rank."""


def whole(name: str, value: Any) -> int:
    """Return the argument `name`, which may be a NumPy integer, as an int, or raise UsageError."""
    try:
        return operator.index(value)
    except TypeError:
        kind = type(value).__name__
        raise UsageError(f"{name} is {value!r}, a {kind}; give a whole number, as in int(...)") from None


def wholes(name: str, values: Any) -> list[int]:
    """Return the argument `name` as a list of ints, or raise UsageError."""
    try:
        items = list(values)
    except TypeError:
        raise UsageError(f"{name} is {values!r}; give a list of whole numbers") from None
    return [whole(f"{name}[{index}]", item) for index, item in enumerate(items)]


def refuses(error: BaseException, integers: Sequence[Any]) -> bool:
    """Whether a compiled function raised `error` because one of its arguments `integers` is no 64-bit integer."""
    if not isinstance(error, TypeError | OverflowError):
        return False
    try:
        return not all(-(1 << 63) <= operator.index(number) < 1 << 63 for number in integers)
    except (TypeError, OverflowError):
        return True


def check_unused(pg_options: Any, device_id: Any) -> None:
    """Refuse any `pg_options`, and any `device_id` except None, an index, and a name such as "cpu" or "cuda:0"."""
    if pg_options is not None:
        raise UnavailableError(f"pg_options is {pg_options!r}, but no backend here has options; leave it out")
    if device_id is None or (
        isinstance(device_id, int) and not isinstance(device_id, bool) and device_id >= 0
    ):
        return
    if not re.fullmatch(r"(cpu|cuda)(:\d+)?", str(device_id)):
        raise UsageError(f"device_id is {device_id!r}; give a device as in 0 or 'cuda:0', or leave it out")


def positive_seconds(timeout: Timeout, default: float) -> float:
    """Convert a timeout, which must be greater than 0, to at most MOST_SECONDS; for None, return the default."""
    if timeout is None:
        return default
    if isinstance(timeout, Real | timedelta):
        limit = seconds(timeout, default)
        if limit > 0:
            return min(limit, MOST_SECONDS)
    raise UsageError(f"timeout is {timeout!r}; give seconds greater than 0, or a timedelta")


def checked_tag(tag: Any) -> int:
    """Return a send's tag, or raise UsageError."""
    number = _integer_tag(tag)
    if not 0 <= number <= LARGEST_TAG:
        which = " (ANY_TAG, which is for receives)" if number == ANY_TAG else ""
        raise UsageError(f"tag is {number}{which}; tags are integers from 0 to 2**31 - 1")
    return number


def checked_receive_tag(tag: Any) -> int:
    """Return a receive's tag, which may also be ANY_TAG, or raise UsageError."""
    return ANY_TAG if _integer_tag(tag) == ANY_TAG else checked_tag(tag)


def wildcard_of(tag: int) -> int:
    """Return the wildcard tag with which a receive accepts messages that have `tag`.

    No wildcard accepts messages of objects, or control messages of arrays on GPUs; for them, return the tag itself.
    """
    if tag <= LARGEST_TAG:
        return ANY_TAG
    return ANY_TAG - JAX_TAGS if tag >= JAX_TAGS else tag


def checked_rank(name: str, rank: Any, size: int, group: str) -> int:
    """Return the argument `name` as a rank of a group, or raise UsageError."""
    try:
        number = operator.index(rank)
    except TypeError as error:
        raise UsageError(f"{name} is {rank!r}; give a rank as an integer") from error
    if not 0 <= number < size:
        hint = WORLD_OF_ONE if size == 1 and group == "WORLD" else ""
        raise UsageError(f"{name} is {number}; the group {group} has ranks 0..{size - 1}{hint}")
    return number


def _integer_tag(tag: Any) -> int:
    try:
        return operator.index(tag)
    except TypeError as error:
        raise UsageError(f"tag is {tag!r}; give an integer") from error


# ---- arrays -------------------------------------------------------------------------------------------------


def is_plain(x: Any) -> bool:
    """Whether an array can be used in place: contiguous, aligned and writable."""
    return type(x) is np.ndarray and bool(x.flags.carray)


def is_message(tensor: Any, peer: Any, tag: Any, size: int) -> bool:
    """Whether these arguments of a message are valid in a group of `size` ranks, without any further check."""
    return (
        is_plain(tensor)
        and tensor.dtype in _NUMBERS
        and type(peer) is type(tag) is int
        and 0 <= peer < size
        and 0 <= tag <= LARGEST_TAG
    )


def scaled(x: Array, op: ReduceOp) -> tuple[Array, ReduceOp]:
    """Return the array and op to reduce with: for PREMUL_SUM a scaled copy and SUM, else both arguments unchanged.

    An array on a GPU is returned unchanged also for PREMUL_SUM, since the DeviceCarrier scales it.
    """
    if not isinstance(op, ReduceOp):
        raise UsageError(f"op is {op!r}; give a fastcoll.ReduceOp, e.g. ReduceOp.SUM")
    if op.code != PREMUL_SUM:
        return x, op
    dtype = x.dtype
    if dtype.kind not in "fc" and dtype.name != "bfloat16":
        raise ArrayError(f"PREMUL_SUM takes float and complex arrays, got {dtype}; scale it beforehand")
    if np.iscomplexobj(op.factor) and dtype.kind != "c":
        raise UsageError(
            f"PREMUL_SUM's factor is {op.factor!r}, and the array is {dtype}; give a real number"
        )
    try:
        factor = np.array(op.factor, dtype if dtype.kind in "fc" else np.float32)
    except (OverflowError, TypeError, ValueError) as error:
        raise UsageError(f"PREMUL_SUM's factor {op.factor!r:.80} is no number of {dtype}: {error}") from error
    if type(x) is not np.ndarray:
        return x, op
    if dtype.name == "bfloat16":
        return rounded(widened(x) * widened(rounded(factor, dtype)), dtype), ReduceOp.SUM
    return np.asarray(x * factor, dtype), ReduceOp.SUM


def arrays_of(items: Sequence[ImportedArray]) -> tuple[Array, ...]:
    return tuple(item.array for item in items)


def apart(inputs: Sequence[Array], outs: Sequence[Array], own: int = -1) -> tuple[Array, ...]:
    """Return the inputs, with a copy instead of each input that shares memory with an output.

    The input and the output of rank `own` may be the same memory. Index k of `inputs` or `outs` belongs to rank k; if
    there is only one, it belongs to rank `own`. If an array is on a GPU, no array is copied.
    """
    if any(type(x) is not np.ndarray for x in (*inputs, *outs)):
        return tuple(inputs)

    def of_own_rank(index: int, arrays: Sequence[Array]) -> bool:
        return own >= 0 and (len(arrays) == 1 or index == own)

    def clash(k: int, x: Array) -> bool:
        return any(
            not (of_own_rank(k, inputs) and of_own_rank(j, outs) and x.ctypes.data == out.ctypes.data)
            for j, out in enumerate(outs)
            if np.may_share_memory(x, out)
        )

    return tuple(x.copy() if clash(k, x) else x for k, x in enumerate(inputs))


def distinct(items: Sequence[ImportedArray]) -> list[ImportedArray]:
    """Return each array once, in order, for calls that may list an array twice because both get the same result."""
    first: dict[tuple[Any, ...], ImportedArray] = {}
    for k, item in enumerate(items):
        first.setdefault(_whole_place(item.target, k), item)
    return list(first.values())


def check_apart(outs: Sequence[ImportedArray], name: str, each: int = 0, once: bool = False) -> None:
    """Refuse outputs that share memory, since it would be undefined which result stays there.

    If an output is a packed copy of the caller's array, the caller's array is checked. Strided arrays on GPUs are not
    checked.

    Args:
        name: the argument's name, for the error text.
        each: the length of each inner list if the argument is a list of lists.
        once: whether the same array may be listed several times (see `distinct`).
    """
    on_host = all(type(out.target) is np.ndarray for out in outs)
    pairs = combinations([out.target for out in outs], 2)
    if on_host and len(outs) <= _FEW and not any(starmap(np.may_share_memory, pairs)):
        return
    spans = sorted((*_extent(out.target), k) for k, out in enumerate(outs))
    open_ones: list[tuple[int, int]] = []  # (end, index) of earlier arrays that end after this one's start
    for low, high, k in spans:
        if low == high:
            continue
        open_ones = [(end, j) for end, j in open_ones if end > low]
        for _, j in open_ones:
            one, other = outs[j].target, outs[k].target
            if _share(one, other) and not (once and _whole_place(one, j) == _whole_place(other, k)):
                places = [f"[{i // each}][{i % each}]" if each else f"[{i}]" for i in sorted((j, k))]
                raise ArrayError(
                    f"{name}{places[0]} and {name}{places[1]} share memory, and different results go to them; give "
                    "each its own memory"
                )
        open_ones.append((high, k))


def _extent(x: Any) -> tuple[int, int]:
    """Return the first address of an array and the address after its end.

    The two are equal if the array is empty or its address is not known.
    """
    if isinstance(x, np.ndarray):
        if x.size == 0:
            return 0, 0
        if x.flags.c_contiguous:
            address = x.__array_interface__["data"][0]
            return address, address + x.nbytes
        reach = [(length - 1) * step for length, step in zip(x.shape, x.strides, strict=True)]
        low = x.__array_interface__["data"][0]
        return low + sum(min(r, 0) for r in reach), low + sum(max(r, 0) for r in reach) + x.itemsize
    address = getattr(x, "address", 0)
    return address, address + getattr(x, "nbytes", 0)


def _whole_place(x: Any, index: int) -> tuple[Any, ...]:
    """Return a key that is equal for arrays with the same memory in the same order.

    The key of an empty array is its `index`, which no other array has.
    """
    if x.size == 0:
        return (index,)
    if not isinstance(x, np.ndarray):
        return x.device, x.address, x.dtype, x.size
    steps = () if x.flags.c_contiguous else (x.shape, x.strides)
    return x.ctypes.data, x.dtype, x.size, *steps


def _share(x: Any, y: Any) -> bool:
    """Whether two arrays with overlapping address ranges share memory; False if that is too hard to find out."""
    if not isinstance(x, np.ndarray):
        return bool(x.overlaps(y))
    try:
        return np.shares_memory(x, y, max_work=_MOST_WORK)  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return False


def check_fit(name: str, x: Array, other: str, y: Array) -> None:
    """Check that two arrays that hold the same data agree in dtype and number of elements."""
    _check_place(name, x, other, y)
    if x.dtype != y.dtype or x.size != y.size:
        raise UsageError(
            f"{name} ({x.dtype}, shape {x.shape}) and {other} ({y.dtype}, shape {y.shape}) "
            "must have the same dtype and number of elements"
        )


def check_dtypes(name: str, items: Sequence[ImportedArray], x: Array) -> None:
    for index, item in enumerate(items):
        _check_place(f"{name}[{index}]", item.array, "another array of the call", x)
        if item.array.dtype != x.dtype:
            raise ArrayError(
                f"{name}[{index}] is {item.array.dtype}, expected {x.dtype}, like the other arrays of the call"
            )


def _check_place(name: str, x: Array, other: str, y: Array) -> None:
    """Check that two arrays of a call are both in host memory, or both on one GPU."""
    if type(x) is not type(y) or (type(x) is not np.ndarray and x.size and y.size and x.device != y.device):
        one, two = ("the host" if type(z) is np.ndarray else f"GPU {z.device}" for z in (x, y))
        raise ArrayError(
            f"{name} is in the memory of {one}, and {other} in that of {two}; put all arrays of a call in one place"
        )


def equal_blocks(name: str, whole: Array, other: str, part: Array, n: int) -> tuple[Array, ...]:
    """Return the n equal blocks of `whole`, each as large as `part`."""
    _check_place(name, whole, other, part)
    if whole.dtype != part.dtype or whole.size != n * part.size:
        raise UsageError(
            f"{name} ({whole.dtype}, shape {whole.shape}) must have {n} times as many elements as {other} "
            f"({part.dtype}, shape {part.shape}), so {n * part.size} elements, and the same dtype"
        )
    return tuple(pieces(whole, [part.size] * n))


def parts_along_rows(name: str, x: Array, splits: Sequence[int] | None, n: int) -> list[Array]:
    """Divide x along its first dimension into n parts, which are equal if `splits` is None or empty."""
    rows = x.shape[0] if x.ndim else 1
    sizes = [] if splits is None else wholes(f"{name}_split_sizes", splits)
    if not sizes:
        if rows % n:
            raise UsageError(
                f"{name} has {rows} rows, which {n} ranks cannot share equally; give {name}_split_sizes"
            )
        sizes = [rows // n] * n
    if len(sizes) != n or min(sizes) < 0 or sum(sizes) != rows:
        raise UsageError(
            f"{name}_split_sizes is {sizes}; expected {n} sizes >= 0 that add up to the {rows} rows of {name}"
        )
    width = math.prod(x.shape[1:])
    return pieces(x, [size * width for size in sizes])


def sum_for(op: ReduceOp) -> ReduceOp:
    """Return the op for partial results that are reduced again.

    For AVG it is SUM; the caller then calls `divide` on the final sum.
    """
    return ReduceOp.SUM if op.code == AVG else op


def divide(x: Array, n: int) -> None:
    """Divide x by n in place, for AVG: integers are rounded towards zero, and 16-bit floats are divided in float32."""
    if x.dtype.kind in "iu":
        wide = x.astype(np.int32) if x.dtype.itemsize < 4 else x  # n may not fit into the dtype of x
        quotient, rest = np.divmod(wide, wide.dtype.type(n))
        x[...] = quotient + ((wide < 0) & (rest != 0)).astype(wide.dtype)
    elif x.dtype.itemsize == 2:
        x[...] = rounded(widened(x) / np.float32(n), x.dtype)
    else:
        x /= x.real.dtype.type(n)
