"""Symmetric arrays: ordinary ndarrays that the other ranks of the node can read and write in place.

`empty` and `zeros` are collective. What the others do here is one-sided: a rank reads or writes a peer's array
(`peer`, `put`, `get`) without the peer's help, and says so by a `signal`, for which the peer can `wait`. Between
writing and reading the same elements there must be a signal, a barrier or another collective.

`rank` is a global rank, `group_rank` a rank inside the array's group. Give one of the two.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from .arrays.arrays import Array
from .core.backend import SymmetricMemory, memory_of
from .core.group import ProcessGroup
from .core.operands import positive_seconds, whole, wholes
from .core.work import Timeout
from .errors import ArrayError, UsageError
from .job.groups import Group, member_of

__all__ = ["empty", "get", "is_symmetric", "peer", "put", "signal", "wait", "zeros"]


def empty(shape: int | Sequence[int], dtype: DTypeLike = np.float64, group: Group = None) -> Any:
    """An array of which every rank of the group has its own, in memory that all of them share; collective.

    It is freed on this rank with the last array that leads into it, also after the group was destroyed.

    Args:
        shape, dtype: the same on all ranks; any dtype of a fixed size.

    Returns:
        An ndarray, C-contiguous; None outside the group.

    Raises:
        MismatchError: shape or dtype differ; says which rank asked for what.
        ResourceError: /dev/shm is too small; on all ranks.
        UnavailableError: the group's backend has no shared memory.

    Example:
        >>> x = fastcoll.symmetric.empty(1 << 20, np.float32)
        >>> x[:] = fastcoll.get_rank()
        >>> fastcoll.all_reduce(x)  # as ever, but nothing is staged
    """
    return _allocate(member_of(group, "symmetric.empty"), shape, dtype)


def zeros(shape: int | Sequence[int], dtype: DTypeLike = np.float64, group: Group = None) -> Any:
    """As `empty`, and every element is 0."""
    # The system clears memory before it gives it to a process.
    return _allocate(member_of(group, "symmetric.zeros"), shape, dtype)


def is_symmetric(x: Any) -> bool:
    """Whether x is a symmetric array or a view of one, of this rank or of a peer."""
    return isinstance(x, np.ndarray) and memory_of(x) is not None


def peer(x: Array, rank: int | None = None, *, group_rank: int | None = None) -> Array:
    """The same part of another rank's array: a view that can be written, with x's shape, dtype and strides.

    Args:
        x: a symmetric array or any view of one.
    """
    memory, target_rank = _memory_and_rank(x, rank, group_rank)
    return memory.peer(x, target_rank)


def put(x: Array, value: Any, rank: int | None = None, *, group_rank: int | None = None) -> None:
    """Write `value` to where x is in another rank's array; x itself stays as it is.

    Args:
        value: an array of x's shape and dtype.
    """
    memory, target_rank = _memory_and_rank(x, rank, group_rank)
    _copy(memory, memory.peer(x, target_rank), _checked_like("value", value, x))


def get(
    x: Array, rank: int | None = None, out: Array | None = None, *, group_rank: int | None = None
) -> Array:
    """Read what x is in another rank's array.

    Args:
        out: where to put it, perhaps x itself; None: in a new, ordinary array.

    Returns:
        `out`, or the new array.
    """
    memory, target_rank = _memory_and_rank(x, rank, group_rank)
    source = memory.peer(x, target_rank)
    target = np.empty(x.shape, x.dtype) if out is None else _checked_like("out", out, x)
    if not target.flags.writeable:
        raise ArrayError("out is read-only; give an array that can be written")
    _copy(memory, target, source)
    return target


def signal(x: Array, rank: int | None = None, channel: int = 0, *, group_rank: int | None = None) -> None:
    """Tell a rank that something is ready: what was written before is there for it after its `wait`.

    Signals of one rank to another on one channel of one array are counted: each `wait` takes one.
    """
    memory, target_rank = _memory_and_rank(x, rank, group_rank)
    memory.signal(target_rank, _checked_channel(memory, channel))


def wait(
    x: Array,
    rank: int | None = None,
    channel: int = 0,
    timeout: Timeout = None,
    *,
    group_rank: int | None = None,
) -> None:
    """Take one signal from a rank; blocks until there is one.

    Args:
        timeout: seconds or a timedelta; None for the group's own.

    Raises:
        CollectiveTimeoutError, PeerDiedError, AbortedError: there will be none; the group has failed then.
    """
    memory, target_rank = _memory_and_rank(x, rank, group_rank)
    limit = None if timeout is None else positive_seconds(timeout, 0.0)
    memory.wait(target_rank, _checked_channel(memory, channel), limit)


def _allocate(g: ProcessGroup | None, shape: int | Sequence[int], dtype: DTypeLike) -> Any:
    if g is None:
        return None
    with g.preparing("symmetric.empty"):
        try:
            kind: np.dtype[Any] = np.dtype(dtype)
        except TypeError as error:
            raise ArrayError(f"dtype is {dtype!r}, which is none ({error}); give e.g. np.float32") from error
        if kind.hasobject or kind.itemsize == 0 or kind.subdtype is not None:
            raise ArrayError(
                f"dtype is {kind!r}; give one whose elements have a fixed size and are no objects"
            )
        sizes = tuple(wholes("shape", shape) if np.iterable(shape) else [whole("shape", shape)])
        if any(size < 0 for size in sizes):
            raise UsageError(f"shape is {shape}; no size may be negative")
    label = f"shape {sizes} of {str(kind) if kind.isbuiltin else repr(kind)}"
    return g.backend.symmetric_memory(g, math.prod(sizes) * kind.itemsize, label).array(sizes, kind)


def _memory_and_rank(x: Any, rank: int | None, group_rank: int | None) -> tuple[SymmetricMemory, int]:
    """What x leads into, and the group rank that is meant."""
    memory = memory_of(x) if isinstance(x, np.ndarray) else None
    if memory is None:
        raise UsageError(
            f"x is an ordinary {type(x).__name__}; give an array of symmetric.empty, or a view of one"
        )
    if (rank is None) == (group_rank is None):
        raise UsageError(
            f"rank={rank} and group_rank={group_rank}; give one of rank (in the world) and group_rank"
        )
    if rank is not None and whole("rank", rank) not in memory.ranks:
        raise UsageError(f"rank is {rank}; the array's group has the ranks {list(memory.ranks)}")
    found = memory.ranks.index(rank) if rank is not None else whole("group_rank", group_rank)
    if not 0 <= found < len(memory.ranks):
        raise UsageError(f"group_rank is {found}; the array's group has 0..{len(memory.ranks) - 1}")
    return memory, found


def _checked_like(what: str, value: Any, x: Array) -> Array:
    if not isinstance(value, np.ndarray):
        raise ArrayError(
            f"{what} is a {type(value).__name__}; give an ndarray of shape {x.shape} and {x.dtype}"
        )
    if value.shape != x.shape or value.dtype != x.dtype:
        raise ArrayError(
            f"{what} has shape {value.shape} of {value.dtype}, x has {x.shape} of {x.dtype}; they must be the same"
        )
    return value


def _copy(memory: SymmetricMemory, dst: Array, src: Array) -> None:
    if not (dst.flags.c_contiguous and src.flags.c_contiguous) or np.may_share_memory(dst, src):
        # Packed first, so that what goes between the ranks is one copy, and so that overlaps come out right.
        packed = src.copy(order="C")
        if not dst.flags.c_contiguous:
            memory.copy(packed, packed)
            dst[...] = packed
            return
        src = packed
    memory.copy(dst, src)


def _checked_channel(memory: SymmetricMemory, channel: int) -> int:
    number = whole("channel", channel)
    if not 0 <= number < memory.channels:
        raise UsageError(f"channel is {number}; there are 0..{memory.channels - 1}")
    return number
