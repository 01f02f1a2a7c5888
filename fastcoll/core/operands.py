"""The arguments of one call: whether plain ones are what they must be, whether arrays fit together, and how these are
divided among ranks.

Pure functions, for arrays that were adopted; what they refuse is refused before any peer hears of the call.
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
from ..errors import ArrayError, UnavailableError, UsageError
from .partition import pieces
from .reduce_op import AVG, PREMUL_SUM, ReduceOp
from .work import Timeout, seconds

Array = NDArray[Any]
_FEW = 6  # arrays that are compared two by two, which takes 0.2 us each; to ask for an address takes 0.8
_MOST_WORK = 10_000  # candidates that NumPy looks at for whether two strided arrays share memory

LARGEST_TAG = (1 << 31) - 1
ANY_TAG = -1
"""The tag of a receive that takes messages with any user's tag."""
OBJECTS_TAG = LARGEST_TAG + 3
"""Of messages with objects: what they hold is unpickled, so no array that a user sends may come among them. The two
before it are those of gpu/nccl/messages.py."""

JAX_TAGS = 1 << 32
"""Added to the tags of messages of fastcoll.jax, so that they and those of Python never match."""

_NUMBERS = frozenset(map(np.dtype, "?bBhHiIlLqQefdFD"))

WORLD_OF_ONE = "; this is a world of one: start it with -n 2, as in python -m fastcoll.launch -n 2 script.py"
"""What ends the message about another rank where there is none."""


def whole(name: str, value: Any) -> int:
    """The whole number that the argument `name` is, NumPy's kinds of integers among them, or a UsageError."""
    try:
        return operator.index(value)
    except TypeError:
        kind = type(value).__name__
        raise UsageError(f"{name} is {value!r}, a {kind}; give a whole number, as in int(...)") from None


def wholes(name: str, values: Any) -> list[int]:
    """The whole numbers in the argument `name`, or a UsageError."""
    try:
        items = list(values)
    except TypeError:
        raise UsageError(f"{name} is {values!r}; give a list of whole numbers") from None
    return [whole(f"{name}[{index}]", item) for index, item in enumerate(items)]


def refuses(error: BaseException, integers: Sequence[Any]) -> bool:
    """Whether an entry itself raised the error, over an argument that is no integer of 64 bits."""
    if not isinstance(error, TypeError | OverflowError):
        return False
    try:
        return not all(-(1 << 63) <= operator.index(number) < 1 << 63 for number in integers)
    except (TypeError, OverflowError):
        return True


def check_unused(pg_options: Any, device_id: Any) -> None:
    """Refuse options, which no backend has, and what is no index, no "cpu" or "cuda:0" as text or as torch's device."""
    if pg_options is not None:
        raise UnavailableError(f"pg_options is {pg_options!r}, but no backend here has options; leave it out")
    if device_id is None or (
        isinstance(device_id, int) and not isinstance(device_id, bool) and device_id >= 0
    ):
        return
    if not re.fullmatch(r"(cpu|cuda)(:\d+)?", str(device_id)):
        raise UsageError(f"device_id is {device_id!r}; give a device as in 0 or 'cuda:0', or leave it out")


def positive_seconds(timeout: Timeout, default: float) -> float:
    """A timeout, which must be greater than 0, as seconds; None is the default."""
    if timeout is None:
        return default
    if isinstance(timeout, Real | timedelta):
        limit = seconds(timeout, default)
        if limit > 0:
            return limit
    raise UsageError(f"timeout is {timeout!r}; give seconds greater than 0, or a timedelta")


def checked_tag(tag: Any) -> int:
    """The tag, if it is one."""
    number = _integer_tag(tag)
    if not 0 <= number <= LARGEST_TAG:
        which = " (ANY_TAG, which is for receives)" if number == ANY_TAG else ""
        raise UsageError(f"tag is {number}{which}; tags are integers from 0 to 2**31 - 1")
    return number


def checked_receive_tag(tag: Any) -> int:
    """Return a receive's tag: a valid tag, or ANY_TAG."""
    return ANY_TAG if _integer_tag(tag) == ANY_TAG else checked_tag(tag)


def wildcard_of(tag: int) -> int:
    """Return the wildcard tag whose receives take messages with `tag`.

    Objects, and announcements of arrays on GPUs, have no wildcard: the result is the tag itself.
    """
    if tag <= LARGEST_TAG:
        return ANY_TAG
    return ANY_TAG - JAX_TAGS if tag >= JAX_TAGS else tag


def _integer_tag(tag: Any) -> int:
    try:
        return operator.index(tag)
    except TypeError as error:
        raise UsageError(f"tag is {tag!r}; give an integer") from error


# ---- arrays -------------------------------------------------------------------------------------------------


def is_plain(x: Any) -> bool:
    """Whether an array may be used as it lies: contiguous, aligned and writable."""
    return type(x) is np.ndarray and bool(x.flags.carray)


def is_message(tensor: Any, peer: Any, tag: Any, size: int) -> bool:
    """Whether these are a message's arguments, in a group of `size` ranks, and need no closer look."""
    return (
        is_plain(tensor)
        and tensor.dtype in _NUMBERS
        and type(peer) is type(tag) is int
        and 0 <= peer < size
        and 0 <= tag <= LARGEST_TAG
    )


def scaled(x: Array, op: ReduceOp) -> tuple[Array, ReduceOp]:
    """What is really reduced: for PREMUL_SUM a scaled copy and SUM, else the array and op themselves.

    Arrays on a GPU are scaled there, by what carries the call out.
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
    """The inputs, copied where they share memory with an output.

    A single input or output is that of rank `own`, whose two arrays may be the very same memory. Arrays on a GPU stay
    as they are.
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
    """Return each array once, in order: a caller may list an array several times where it gets one result."""
    first: dict[tuple[Any, ...], ImportedArray] = {}
    for k, item in enumerate(items):
        first.setdefault(_whole_place(item.target, k), item)
    return list(first.values())


def check_apart(outs: Sequence[ImportedArray], name: str, each: int = 0, once: bool = False) -> None:
    """Refuse outputs two of which share memory: which result stays there would be a matter of chance.

    `each`: the length of each list, where `name` is a list of lists. `once`: the same array may be listed several
    times, as in `distinct`. A packed copy is checked at its target, where it is copied back to; strided arrays on GPUs
    are not checked.
    """
    on_host = all(type(out.target) is np.ndarray for out in outs)
    pairs = combinations([out.target for out in outs], 2)
    if on_host and len(outs) <= _FEW and not any(starmap(np.may_share_memory, pairs)):
        return
    spans = sorted((*_extent(out.target), k) for k, out in enumerate(outs))
    open_ones: list[tuple[int, int]] = []  # those that reach beyond where the next one begins
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
                    "each memory of its own"
                )
        open_ones.append((high, k))


def _extent(x: Any) -> tuple[int, int]:
    """The addresses that an array lies between; none if it is not known."""
    if isinstance(x, np.ndarray):
        if x.size == 0:
            return 0, 0
        reach = [(length - 1) * step for length, step in zip(x.shape, x.strides, strict=True)]
        low = x.__array_interface__["data"][0]
        return low + sum(min(r, 0) for r in reach), low + sum(max(r, 0) for r in reach) + x.itemsize
    address = getattr(x, "address", 0)
    return address, address + getattr(x, "nbytes", 0)


def _whole_place(x: Any, index: int) -> tuple[Any, ...]:
    """Return a key that two arrays share if they are the same elements in the same order; `index`: an empty array's."""
    if x.size == 0:
        return (index,)
    if not isinstance(x, np.ndarray):
        return x.device, x.address, x.dtype, x.size
    steps = () if x.flags.c_contiguous else (x.shape, x.strides)
    return x.ctypes.data, x.dtype, x.size, *steps


def _share(x: Any, y: Any) -> bool:
    """Whether two arrays whose extents meet share memory; not, where that is too hard to find out."""
    if not isinstance(x, np.ndarray):
        return bool(x.overlaps(y))
    try:
        return np.shares_memory(x, y, max_work=_MOST_WORK)  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return False


def check_fit(name: str, x: Array, other: str, y: Array) -> None:
    """Two arrays that stand for the same data must agree in dtype and number of elements."""
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
                f"{name}[{index}] is {item.array.dtype}, expected {x.dtype} as the other arrays of the call"
            )


def _check_place(name: str, x: Array, other: str, y: Array) -> None:
    """The arrays of a call lie in host memory, or all on one GPU."""
    if type(x) is not type(y) or (type(x) is not np.ndarray and x.size and y.size and x.device != y.device):
        one, two = ("the host" if type(z) is np.ndarray else f"GPU {z.device}" for z in (x, y))
        raise ArrayError(
            f"{name} is in the memory of {one}, and {other} in that of {two}; put all arrays of a call in one place"
        )


def equal_blocks(name: str, whole: Array, other: str, part: Array, n: int) -> tuple[Array, ...]:
    """The n equal blocks of `whole`, each as large as `part`."""
    _check_place(name, whole, other, part)
    if whole.dtype != part.dtype or whole.size != n * part.size:
        raise UsageError(
            f"{name} ({whole.dtype}, shape {whole.shape}) must have {n} times the elements of {other} "
            f"({part.dtype}, shape {part.shape}) and its dtype: {n * part.size} elements"
        )
    return tuple(pieces(whole, [part.size] * n))


def parts_along_rows(name: str, x: Array, splits: Sequence[int] | None, n: int) -> list[Array]:
    """The n parts of x along its first dimension."""
    rows = x.shape[0] if x.ndim else 1
    if splits is not None:
        sizes = wholes(f"{name}_split_sizes", splits)
    else:
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
    """What is reduced where partial results are reduced again: a sum, to `divide` at the end, for an average."""
    return ReduceOp.SUM if op.code == AVG else op


def divide(x: Array, n: int) -> None:
    """x /= n as AVG divides: integers towards zero, halves in float32."""
    if x.dtype.kind in "iu":
        quotient, rest = np.divmod(x, x.dtype.type(n))
        x[...] = quotient + ((x < 0) & (rest != 0)).astype(x.dtype)
    elif x.dtype.itemsize == 2:
        x[...] = rounded(widened(x) / np.float32(n), x.dtype)
    else:
        x /= x.real.dtype.type(n)
