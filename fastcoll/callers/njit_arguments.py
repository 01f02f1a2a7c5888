"""What fastcoll's functions inside numba.njit share: checks of types, packed arrays, ranks, results of calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import types
from numba.core.errors import TypingError
from numba.core.registry import cpu_target
from numba.extending import register_jitable
from numba.np.numpy_support import as_dtype

from ..core import signature
from ..errors import UsageError
from ..kernels import c_entries as d
from . import descriptors
from .keywords import refuse_lost
from .numba_types import (
    Raised,
    call_c_entry,
    data_and_owner,
    descriptor_of,
    integer_of,
    is_none,
    word,
)

_SIZE, _RANKS = d.SIZE, d.RANKS
_FOREIGN, _REFUSED = descriptors.FOREIGN, signature.REFUSED


@register_jitable
def checked_descriptor(group):
    """Return the address of a group's descriptor; raise ImportError if there is none."""
    descriptor = descriptor_of(group)
    if descriptor == 0:
        raise ImportError("fastcoll could not be imported; the error was printed")
    return descriptor


@register_jitable
def result_of(found):
    """Return what the C entry point has returned, or raise the call's exception."""
    if found < 0:
        raise Raised
    return found


@register_jitable
def size_of(descriptor):
    """Return the number of ranks; -1 if this process is not in the group.

    If the descriptor has no group, a call of operation 0 enters the current world, or raises an error.
    """
    if word(descriptor, _SIZE) == 0:
        result_of(call_c_entry(descriptor, 0, None, None, 0, 0, 0))
    return word(descriptor, _SIZE)


@register_jitable
def expect(descriptor, code, count, expected):
    """Refuse the call if its second array's number of elements is not as expected.

    Args:
        count, expected: the actual and the right number.
    """
    if count != expected and word(descriptor, _SIZE) > 0:
        result_of(call_c_entry(descriptor, _REFUSED, None, None, count, code, expected))


@register_jitable
def to_group_rank(descriptor, rank):
    """Return the group rank of a global rank; _FOREIGN + rank outside the group."""
    ranks = word(descriptor, _RANKS)
    if ranks == 0:
        return rank
    for k in range(word(descriptor, _SIZE)):
        if word(ranks, k) == rank:
            return k
    return _FOREIGN + rank


@register_jitable
def to_global_rank(descriptor, rank):
    """Return the global rank of a group rank; -1 if this process is not in the group."""
    if word(descriptor, _SIZE) < 0:
        return -1
    ranks = word(descriptor, _RANKS)  # read once: another thread may end the group now
    return rank if ranks == 0 else word(ranks, rank)


@register_jitable
def _in_place_memory(x):
    return data_and_owner(x), x.size * x.itemsize, None


@register_jitable
def _leave(to, x):
    pass


@register_jitable
def _packed(x):
    return np.ascontiguousarray(x), x.size * x.itemsize, x


@register_jitable
def _copied(x):
    return x.copy(), x.size * x.itemsize, x


@register_jitable
def _put(to, x):
    to[...] = x


def packing(x: types.Array) -> tuple[Any, Any]:
    """Return a function that makes an array's memory contiguous and aligned, and one that writes results back.

    The first function returns the memory for the C entry point, its size in bytes, and the array to write back to. An
    overload that has called it must not use the array itself afterwards: only then does Numba omit the two atomic
    instructions that count a reference to the array. In a world of one rank they would take half of the time of a call.
    The reference is not needed, because the overload's caller holds one.
    """
    if x.layout == "C":
        return (_in_place_memory, _leave) if x.aligned else (_copied, _put)
    return _packed, _put


def array_dtype(x: Any, name: str, writes: bool) -> Any:
    """Return an array argument's NumPy dtype; refuse other types, and read-only arrays that the call writes."""
    if not isinstance(x, types.Array):
        raise TypingError(f"{name} is of type {x}; inside njit fastcoll takes arrays")
    if writes and not x.mutable:
        raise TypingError(f"{name} is a read-only array, and is written to")
    return as_dtype(x.dtype)


def code_and_word(
    name: str, x: Any, async_op: Any, writes: bool = True, what: str = "tensor"
) -> tuple[int, int]:
    """Return an operation's code, and its call word without the reduce operation."""
    check_synchronous(async_op)
    dtype = array_dtype(x, what, writes)
    return signature.code_of(name), or_typing_error(lambda: descriptors.call_word(name, dtype))


def or_typing_error(make: Callable[[], int]) -> int:
    """Return the result of `make`; raise a UsageError of it as a TypingError, which Numba reports."""
    try:
        return make()
    except UsageError as error:
        raise TypingError(str(error)) from None


def check_synchronous(async_op: Any) -> None:
    """Refuse calls that return a Work, and those that `check_callable_here` refuses."""
    check_callable_here()
    value = getattr(async_op, "value", getattr(async_op, "literal_value", async_op))
    if value is not False:
        raise TypingError("async_op inside njit: calls there are synchronous; call it outside to get a Work")


def check_callable_here() -> None:
    """Refuse calls whose keywords Numba would lose, and calls in a parallel loop.

    Numba compiles the body of such a loop as a function, which is recognised by its name.
    """
    frames = cpu_target.typing_context.callstack
    if len(frames) > 0:
        refuse_lost(frames[0].func_id.code)  # the calling function
    if any(frame.func_id.func_name.startswith("__numba_parfor_gufunc") for frame in frames):
        raise TypingError(
            "a call inside numba.prange: ranks must make the same calls in the same order, which threads do not; call "
            "it outside the loop"
        )


def is_by_group(what: str, rank: Any, group_rank: Any, default: bool = False) -> bool:
    """Return whether `group_{what}` is given instead of `{what}`.

    Refuse a call that gives both.

    As in torch, `{what}` is a global rank and `group_{what}` is a rank in the group.

    Args:
        default: whether both may be missing.
    """
    if not is_none(rank) and not is_none(group_rank):
        raise TypingError(f"{what} and group_{what} are both given; give one of them")
    if is_none(rank) and is_none(group_rank) and not default:
        raise TypingError(f"{what} is missing; give {what} (a global rank) or group_{what} (a group rank)")
    for each in (rank, group_rank):
        kind = types.unliteral(each) if isinstance(each, types.Type) else types.int64
        if not is_none(each) and not isinstance(kind, types.Integer | types.Omitted):
            raise TypingError(f"{what} is of type {each}; give a rank as an integer")
    return not is_none(group_rank)


@register_jitable
def group_rank_of(descriptor, rank, group_rank, by_group):
    """Return the group rank that a call gives, by `group_rank` or else by the global `rank`."""
    return integer_of(group_rank) if by_group else to_group_rank(descriptor, integer_of(rank))


def check_same_dtype(x: Any, y: Any, name: str, other: str) -> None:
    if isinstance(y, types.Array) and x.dtype != y.dtype:
        raise TypingError(f"{name} is {x.dtype}, {other} is {y.dtype}; they must be the same")
