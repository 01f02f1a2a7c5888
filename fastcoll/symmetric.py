"""Symmetric arrays: ordinary ndarrays that the other ranks of the node can read and write in place.

`empty` and `zeros` are collective. The other functions are one-sided: a rank reads or writes a peer's array (`peer`,
`put`, `get`) while the peer takes no part. A rank can `signal` a peer, which can `wait` for the signal. If two ranks
access the same elements, and at least one of them writes, there must be a signal, a barrier or another collective
between the two accesses.

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
    """Make an array on every rank of the group, in memory that all these ranks map; collective.

    The memory of this rank's array is freed when no array refers to it any longer, even if the group was destroyed
    before.

    Args:
        shape, dtype: the same on all ranks; any dtype of a fixed size.

    Returns:
        This rank's array, a C-contiguous ndarray; None if this rank is not in the group.

    Raises:
        MismatchError: the ranks' shapes or dtypes differ; the text names those of each rank.
        ResourceError: /dev/shm is too small; all ranks raise this error.
        UnavailableError: the group's backend has no shared memory.

    Examples:
        >>> x = fastcoll.symmetric.empty(1 << 20, np.float32)
        >>> x[:] = fastcoll.get_rank()
        >>> fastcoll.all_reduce(x)  # without staging
    """
    return _allocate(member_of(group, "symmetric.empty"), shape, dtype)


def zeros(shape: int | Sequence[int], dtype: DTypeLike = np.float64, group: Group = None) -> Any:
    """Make an array like `empty`, and fill it with zeros."""
    # Linux zeroes memory before a process can use it.
    return _allocate(member_of(group, "symmetric.zeros"), shape, dtype)


def is_symmetric(x: Any) -> bool:
    """Return whether x is a symmetric array or a view of one, of this rank or of a peer."""
    return isinstance(x, np.ndarray) and memory_of(x) is not None


def peer(x: Array, rank: int | None = None, *, group_rank: int | None = None) -> Array:
    """Return a writable view of another rank's array, with x's position, shape, dtype and strides.

    Args:
        x: a symmetric array or any view of one.
    """
    memory, target_rank = _memory_and_rank(x, rank, group_rank)
    return memory.peer(x, target_rank)


def put(x: Array, value: Any, rank: int | None = None, *, group_rank: int | None = None) -> None:
    """Write `value` into another rank's array, at the position that x has in this rank's array; x does not change.

    Args:
        value: an array of x's shape and dtype.
    """
    memory, target_rank = _memory_and_rank(x, rank, group_rank)
    _copy(memory, memory.peer(x, target_rank), _checked_like("value", value, x))


def get(
    x: Array, rank: int | None = None, out: Array | None = None, *, group_rank: int | None = None
) -> Array:
    """Read from another rank's array the elements at the position that x has in this rank's array.

    Args:
        out: the array that receives the elements; it may be x itself. None: a new, ordinary array receives them.

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
    """Send a signal to a rank, which sees all earlier writes of this rank after its `wait`.

    Signals are counted for each sender, receiver, channel and array; each `wait` consumes one signal.
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
    """Wait for a signal from a rank, and consume it.

    Args:
        timeout: seconds or a timedelta; None for the group's own.

    Raises:
        CollectiveTimeoutError, PeerDiedError, AbortedError: no signal came; the group has failed.
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
            raise ArrayError(
                f"dtype is {dtype!r}, which is no dtype ({error}); give e.g. np.float32"
            ) from error
        if kind.hasobject or kind.itemsize == 0 or kind.subdtype is not None:
            raise ArrayError(
                f"dtype is {kind!r}; give a dtype whose elements have a fixed size and are no objects"
            )
        sizes = tuple(wholes("shape", shape) if np.iterable(shape) else [whole("shape", shape)])
        if any(size < 0 for size in sizes):
            raise UsageError(f"shape is {shape}; no size may be negative")
    label = f"shape {sizes} of {str(kind) if kind.isbuiltin else repr(kind)}"
    return g.backend.symmetric_memory(g, math.prod(sizes) * kind.itemsize, label).array(sizes, kind)


def _memory_and_rank(x: Any, rank: int | None, group_rank: int | None) -> tuple[SymmetricMemory, int]:
    """Return the memory that x lies in, and the target's group rank."""
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
        # Pack first: `memory.copy` takes only contiguous arrays that do not overlap. If dst is not contiguous, NumPy
        # copies the packed array; `memory.copy` is called only for the errors that it may raise.
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
