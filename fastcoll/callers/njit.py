"""fastcoll's functions inside numba.njit: the same names and arguments, in nopython code.

Each overload checks the arguments' types, refuses wrong types by TypingError, and returns the function that is
compiled. That function packs arrays that are not contiguous, calls the C entry point (kernels/c_entries.py), and raises
the exception of the call, if there is one. If arguments have wrong values, such as sizes that do not fit, the function
calls the C entry point with the operation REFUSED, so that the peers get an error too.

Importing this module registers the overloads. Numba imports the module through an entry point when it first compiles a
use of fastcoll (fastcoll_autoload.py), so neither `import numba` nor `import fastcoll` takes longer for it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import types
from numba.core.errors import TypingError
from numba.core.registry import cpu_target
from numba.extending import overload, overload_method, register_jitable
from numba.np.numpy_support import as_dtype

from ..api import collectives, p2p
from ..core import signature
from ..core.operands import ANY_TAG, LARGEST_TAG
from ..core.reduce_op import ReduceOp
from ..errors import UsageError
from ..job import groups
from ..kernels import c_entries as d
from ..p2p.pipe import ANY
from ..p2p.transfers import DTYPE_BITS
from . import descriptors
from .descriptors import INVALID_TAG
from .keywords import refuse_lost
from .numba_cache import lock_caches
from .numba_types import (
    ANY_SENDER,
    NO_SENDER,
    Raised,
    call_c_entry,
    data_and_owner,
    descriptor_of,
    held,
    integer_of,
    is_none,
    know_dtype,
    new_work,
    op_word_of,
    refresh,
    word,
    words_of,
)
from .numba_types import work as work_type

_OP_SHIFT, _FOREIGN = signature.OP_SHIFT, descriptors.FOREIGN
_SIZE, _RANK, _RANKS = d.SIZE, d.RANK, d.RANKS
_SPLIT, _SEND, _RECV, _REFUSED, _SPLITS = d.SPLIT, d.SEND, d.RECV, signature.REFUSED, descriptors.SPLITS
_REDUCE_SCATTER_SPLIT = d.REDUCE_SCATTER_SPLIT
_POST_SEND, _POST_RECV, _WAIT, _TEST, _WAIT_ANY = d.POST_SEND, d.POST_RECV, d.WAIT, d.TEST, d.WAIT_ANY
_BARRIER = signature.code_of("barrier")
_BARRIER_WORD = signature.encode("barrier")
_SUM = ReduceOp.SUM

lock_caches()


# ---- shared by all functions ------------------------------------------------------------------------------


@register_jitable
def _descriptor(group):
    descriptor = descriptor_of(group)
    if descriptor == 0:
        raise ImportError("fastcoll could not be imported; the error was printed")
    return descriptor


@register_jitable
def _done(found):
    if found < 0:
        raise Raised
    return found


@register_jitable
def _size(descriptor):
    """Return the number of ranks; -1 if this process is not in the group.

    If the descriptor has no group, a call of operation 0 enters the current world, or raises an error.
    """
    if word(descriptor, _SIZE) == 0:
        _done(call_c_entry(descriptor, 0, None, None, 0, 0, 0))
    return word(descriptor, _SIZE)


@register_jitable
def _expect(descriptor, code, count, expected):
    """Refuse the call if its second array's number of elements is not as expected.

    Args:
        count, expected: the actual and the right number.
    """
    if count != expected and word(descriptor, _SIZE) > 0:
        _done(call_c_entry(descriptor, _REFUSED, None, None, count, code, expected))


@register_jitable
def _to_group_rank(descriptor, rank):
    """Return the group rank of a global rank; _FOREIGN + rank outside the group."""
    ranks = word(descriptor, _RANKS)
    if ranks == 0:
        return rank
    for k in range(word(descriptor, _SIZE)):
        if word(ranks, k) == rank:
            return k
    return _FOREIGN + rank


@register_jitable
def _to_global_rank(descriptor, rank):
    """Return the global rank of a group rank; -1 if this process is not in the group."""
    if word(descriptor, _SIZE) < 0:
        return -1
    return rank if word(descriptor, _RANKS) == 0 else word(word(descriptor, _RANKS), rank)


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


def _packing(x: types.Array) -> tuple[Any, Any]:
    """Return a function that makes an array's memory contiguous and aligned, and one that writes results back.

    The first function returns the memory for the C entry point, its size in bytes, and the array to write back to. An
    overload that has called it must not use the array itself afterwards: only then does Numba omit the two atomic
    instructions that count a reference to the array. In a world of one rank they would take half of the time of a call.
    The reference is not needed, because the overload's caller holds one.
    """
    if x.layout == "C":
        return (_in_place_memory, _leave) if x.aligned else (_copied, _put)
    return _packed, _put


def _array(x: Any, name: str, writes: bool) -> Any:
    """Return an array argument's NumPy dtype; refuse other types, and read-only arrays that the call writes."""
    if not isinstance(x, types.Array):
        raise TypingError(f"{name} is of type {x}; inside njit fastcoll takes arrays")
    if writes and not x.mutable:
        raise TypingError(f"{name} is a read-only array, and is written to")
    return as_dtype(x.dtype)


def _called(name: str, x: Any, async_op: Any, writes: bool = True, what: str = "tensor") -> tuple[int, int]:
    """Return an operation's code, and its call word without the reduce operation."""
    _check_synchronous(async_op)
    dtype = _array(x, what, writes)
    return signature.code_of(name), _or_typing_error(lambda: descriptors.call_word(name, dtype))


def _or_typing_error(make: Callable[[], int]) -> int:
    try:
        return make()
    except UsageError as error:
        raise TypingError(str(error)) from None


def _check_synchronous(async_op: Any) -> None:
    _callable_here()
    value = getattr(async_op, "value", getattr(async_op, "literal_value", async_op))
    if value is not False:
        raise TypingError("async_op inside njit: calls there are synchronous; call it outside to get a Work")


def _callable_here() -> None:
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


def _one_of(what: str, rank: Any, group_rank: Any, default: bool = False) -> bool:
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
def _peer(descriptor, rank, group_rank, by_group):
    return integer_of(group_rank) if by_group else _to_group_rank(descriptor, integer_of(rank))


def _check_same_dtype(x: Any, y: Any, name: str, other: str) -> None:
    if isinstance(y, types.Array) and x.dtype != y.dtype:
        raise TypingError(f"{name} is {x.dtype}, {other} is {y.dtype}; they must be the same")


# ---- parts of different sizes -----------------------------------------------------------------------------


@register_jitable
def _split(descriptor, code, table, sizes, rows, nbytes):
    """Write each block's size in bytes into the table; refuse sizes that do not fit."""
    total, fits, width = np.int64(0), len(sizes) == len(table), nbytes // max(1, rows)
    for k in range(len(sizes)):
        size = np.int64(sizes[k])
        total += size
        fits &= 0 <= size <= rows
        if fits:
            table[k] = size * width
    if not (fits and total == rows) and word(descriptor, _SIZE) > 0:
        _done(call_c_entry(descriptor, _REFUSED, None, None, total, code | _SPLITS, rows))


@register_jitable
def _split_equally(descriptor, code, table, sizes, rows, nbytes):
    _split(descriptor, code, table, np.full(len(table), rows // len(table)), rows, nbytes)


@register_jitable
def _split_as_given(descriptor, code, table, sizes, rows, nbytes):
    if len(sizes) == 0:
        _split_equally(descriptor, code, table, sizes, rows, nbytes)
    else:
        _split(descriptor, code, table, sizes, rows, nbytes)


def _splitting(sizes: Any, name: str, *arrays: Any) -> Any:
    """Return the function that writes split sizes of this type into a table.

    Args:
        arrays: the types of the arrays that will be divided.
    """
    if any(array.ndim == 0 for array in arrays):
        raise TypingError(f"{name} divides arrays along their first dimension; give arrays that have one")
    if is_none(sizes) or sizes == types.Tuple(()):
        return _split_equally
    if not isinstance(getattr(sizes, "dtype", None), types.Integer) or getattr(sizes, "ndim", 1) != 1:
        raise TypingError(f"split sizes are of type {sizes}; give a tuple, a list or an array of integers")
    return _split_as_given


# ---- reductions -------------------------------------------------------------------------------------------


def _in_place(name: str, tensor: Any, async_op: Any) -> Any:
    code, base = _called(name, tensor, async_op)
    pack, put = _packing(tensor)

    def impl(tensor, op=_SUM, group=None, async_op=False):
        know_dtype(tensor)
        x, nbytes, back = pack(tensor)
        call = base | op_word_of(op) << _OP_SHIFT
        _done(call_c_entry(_descriptor(group), code, x, None, nbytes, call, 0))
        put(back, x)

    return impl


@overload(collectives.all_reduce)
def _all_reduce(tensor, op=_SUM, group=None, async_op=False):
    return _in_place("all_reduce", tensor, async_op)


@overload(collectives.scan)
def _scan(tensor, op=_SUM, group=None, async_op=False):
    return _in_place("scan", tensor, async_op)


@overload(collectives.exscan)
def _exscan(tensor, op=_SUM, group=None, async_op=False):
    return _in_place("exscan", tensor, async_op)


@overload(collectives.reduce)
def _reduce(tensor, dst=None, op=_SUM, group=None, async_op=False, group_dst=None):
    code, base = _called("reduce", tensor, async_op)
    by_group = _one_of("dst", dst, group_dst)
    pack, put = _packing(tensor)

    def impl(tensor, dst=None, op=_SUM, group=None, async_op=False, group_dst=None):
        know_dtype(tensor)
        x, nbytes, back = pack(tensor)
        descriptor, call = _descriptor(group), base | op_word_of(op) << _OP_SHIFT
        _done(
            call_c_entry(descriptor, code, x, None, nbytes, call, _peer(descriptor, dst, group_dst, by_group))
        )
        put(back, x)

    return impl


@overload(collectives.reduce_scatter_tensor)
def _reduce_scatter_tensor(output, input, op=_SUM, group=None, async_op=False, input_split_sizes=None):
    code, base = _called("reduce_scatter", output, async_op, what="output")
    _array(input, "input", False)
    _check_same_dtype(output, input, "output", "input")
    (pack, put), (pack_input, _) = _packing(output), _packing(input)
    if not is_none(input_split_sizes):
        list_sizes = _splitting(input_split_sizes, "reduce_scatter_tensor", input)

        def split(output, input, op=_SUM, group=None, async_op=False, input_split_sizes=None):
            know_dtype(output)
            length = len(input)
            (x, nbytes, _), (out, room, back) = pack_input(input), pack(output)
            descriptor, call = _descriptor(group), base | op_word_of(op) << _OP_SHIFT
            size = max(1, _size(descriptor))
            table = np.empty(size + 1, np.int64)
            list_sizes(descriptor, code, table[:size], input_split_sizes, length, nbytes)
            table[size] = room
            _done(call_c_entry(descriptor, _REDUCE_SCATTER_SPLIT, x, out, table, call, 0))
            put(back, out)

        return split

    def impl(output, input, op=_SUM, group=None, async_op=False, input_split_sizes=None):
        know_dtype(output)
        count, whole = output.size, input.size
        (x, _, _), (out, nbytes, back) = pack_input(input), pack(output)
        descriptor, call = _descriptor(group), base | op_word_of(op) << _OP_SHIFT
        _expect(descriptor, code, whole, _size(descriptor) * count)
        _done(call_c_entry(descriptor, code, x, out, nbytes, call, 0))
        put(back, out)

    return impl


# ---- movement ---------------------------------------------------------------------------------------------


@overload(collectives.broadcast)
def _broadcast(tensor, src=None, group=None, async_op=False, group_src=None):
    code, base = _called("broadcast", tensor, async_op)
    by_group = _one_of("src", src, group_src)
    pack, put = _packing(tensor)

    def impl(tensor, src=None, group=None, async_op=False, group_src=None):
        know_dtype(tensor)
        x, nbytes, back = pack(tensor)
        descriptor = _descriptor(group)
        _done(
            call_c_entry(descriptor, code, x, None, nbytes, base, _peer(descriptor, src, group_src, by_group))
        )
        put(back, x)

    return impl


@overload(collectives.all_gather_into_tensor)
def _all_gather_into_tensor(output_tensor, input_tensor, group=None, async_op=False):
    code, base = _called("all_gather", output_tensor, async_op, what="output_tensor")
    _array(input_tensor, "input_tensor", False)
    _check_same_dtype(output_tensor, input_tensor, "output_tensor", "input_tensor")
    (pack, put), (pack_input, _) = _packing(output_tensor), _packing(input_tensor)

    def impl(output_tensor, input_tensor, group=None, async_op=False):
        know_dtype(output_tensor)
        count, whole = input_tensor.size, output_tensor.size
        (x, nbytes, _), (out, _, back) = pack_input(input_tensor), pack(output_tensor)
        descriptor = _descriptor(group)
        _expect(descriptor, code, whole, _size(descriptor) * count)
        _done(call_c_entry(descriptor, code, x, out, nbytes, base, 0))
        put(back, out)

    return impl


@overload(collectives.gather_single)
def _gather_single(tensor, gather_tensor=None, dst=None, group=None, async_op=False, group_dst=None):
    code, base = _called("gather", tensor, async_op, writes=False)
    by_group, is_given = _one_of("dst", dst, group_dst, True), not is_none(gather_tensor)
    pack_input, _ = _packing(tensor)
    if not is_given:

        def alone(tensor, gather_tensor=None, dst=None, group=None, async_op=False, group_dst=None):
            know_dtype(tensor)
            count = tensor.size
            x, nbytes, _ = pack_input(tensor)
            descriptor = _descriptor(group)
            size, root = _size(descriptor), _peer(descriptor, dst, group_dst, by_group)
            _expect(descriptor, code, 0, (size if root == word(descriptor, _RANK) else 0) * max(1, count))
            _done(call_c_entry(descriptor, code, x, None, nbytes, base, root))

        return alone
    _array(gather_tensor, "gather_tensor", True)
    _check_same_dtype(tensor, gather_tensor, "tensor", "gather_tensor")
    pack, put = _packing(gather_tensor)

    def impl(tensor, gather_tensor=None, dst=None, group=None, async_op=False, group_dst=None):
        know_dtype(tensor)
        count, whole = tensor.size, gather_tensor.size
        (x, nbytes, _), (out, _, back) = pack_input(tensor), pack(gather_tensor)
        descriptor = _descriptor(group)
        size, root = _size(descriptor), _peer(descriptor, dst, group_dst, by_group)
        _expect(descriptor, code, whole, size * count if root == word(descriptor, _RANK) else whole)
        _done(call_c_entry(descriptor, code, x, out, nbytes, base, root))
        if root == word(descriptor, _RANK):
            put(back, out)

    return impl


@overload(collectives.scatter_single)
def _scatter_single(tensor, scatter_tensor=None, src=None, group=None, async_op=False, group_src=None):
    code, base = _called("scatter", tensor, async_op)
    by_group, is_given = _one_of("src", src, group_src, True), not is_none(scatter_tensor)
    pack, put = _packing(tensor)
    if not is_given:

        def alone(tensor, scatter_tensor=None, src=None, group=None, async_op=False, group_src=None):
            know_dtype(tensor)
            count = tensor.size
            out, nbytes, back = pack(tensor)
            descriptor = _descriptor(group)
            size, root = _size(descriptor), _peer(descriptor, src, group_src, by_group)
            _expect(descriptor, code, 0, (size if root == word(descriptor, _RANK) else 0) * max(1, count))
            _done(call_c_entry(descriptor, code, None, out, nbytes, base, root))
            put(back, out)

        return alone
    _array(scatter_tensor, "scatter_tensor", False)
    _check_same_dtype(tensor, scatter_tensor, "tensor", "scatter_tensor")
    pack_input, _ = _packing(scatter_tensor)

    def impl(tensor, scatter_tensor=None, src=None, group=None, async_op=False, group_src=None):
        know_dtype(tensor)
        count, whole = tensor.size, scatter_tensor.size
        (out, nbytes, back), (x, _, _) = pack(tensor), pack_input(scatter_tensor)
        descriptor = _descriptor(group)
        size, root = _size(descriptor), _peer(descriptor, src, group_src, by_group)
        _expect(descriptor, code, whole, size * count if root == word(descriptor, _RANK) else whole)
        _done(call_c_entry(descriptor, code, x, out, nbytes, base, root))
        put(back, out)

    return impl


@overload(collectives.all_to_all_single)
def _all_to_all_single(
    output, input, output_split_sizes=None, input_split_sizes=None, group=None, async_op=False
):
    code, base = _called("all_to_all", output, async_op, what="output")
    _array(input, "input", False)
    _check_same_dtype(output, input, "output", "input")
    outputs, inputs = (
        _splitting(sizes, "all_to_all_single", output, input)
        for sizes in (output_split_sizes, input_split_sizes)
    )
    (pack, put), (pack_input, _) = _packing(output), _packing(input)
    if not (is_none(output_split_sizes) and is_none(input_split_sizes)):

        def split(output, input, output_split_sizes=None, input_split_sizes=None, group=None, async_op=False):
            know_dtype(output)
            given, taken = len(input), len(output)
            (x, nbytes, _), (out, room, back) = pack_input(input), pack(output)
            descriptor = _descriptor(group)
            size = max(1, _size(descriptor))
            table = np.empty(2 * size, np.int64)
            inputs(descriptor, code, table[:size], input_split_sizes, given, nbytes)
            outputs(descriptor, code, table[size:], output_split_sizes, taken, room)
            _done(call_c_entry(descriptor, _SPLIT, x, out, table, base, 0))
            put(back, out)

        return split

    def impl(output, input, output_split_sizes=None, input_split_sizes=None, group=None, async_op=False):
        know_dtype(output)
        given, taken, taken_rows = input.size, output.size, len(output)
        (x, nbytes, _), (out, _, back) = pack_input(input), pack(output)
        descriptor = _descriptor(group)
        size = max(1, _size(descriptor))
        _expect(descriptor, code, taken, given)
        _expect(descriptor, code, taken_rows, taken_rows // size * size)
        _done(call_c_entry(descriptor, code, x, out, nbytes // size, base, 0))
        put(back, out)

    return impl


# ---- barrier, messages, ranks -------------------------------------------------------------------------------


@overload(collectives.barrier)
def _barrier(group=None, async_op=False, device_ids=None, timeout=None):
    _check_synchronous(async_op)
    if not (is_none(device_ids) and is_none(timeout)):
        raise TypingError(
            "barrier inside njit takes neither device_ids nor a timeout; the group's own timeout holds"
        )

    def impl(group=None, async_op=False, device_ids=None, timeout=None):
        _done(call_c_entry(_descriptor(group), _BARRIER, None, None, 0, _BARRIER_WORD, 0))

    return impl


def _message(tensor: Any, writes: bool) -> int:
    _callable_here()
    dtype = _array(tensor, "tensor", writes)
    return _or_typing_error(lambda: descriptors.message_word(0, dtype))


@register_jitable
def _kind(kind, tag):
    """Return a message's `call` word with this tag.

    Tags above LARGEST_TAG are invalid, because they are the library's own.
    """
    return kind | (integer_of(tag) if ANY_TAG <= tag <= LARGEST_TAG else INVALID_TAG) << DTYPE_BITS


@overload(p2p.send)
def _send(tensor, dst=None, group=None, tag=0, group_dst=None):
    kind, by_group = _message(tensor, False), _one_of("dst", dst, group_dst)
    pack, _ = _packing(tensor)

    def impl(tensor, dst=None, group=None, tag=0, group_dst=None):
        know_dtype(tensor)
        x, nbytes, _ = pack(tensor)
        descriptor = _descriptor(group)
        peer = _peer(descriptor, dst, group_dst, by_group)
        _done(call_c_entry(descriptor, _SEND, x, None, nbytes, _kind(kind, tag), peer))

    return impl


@overload(p2p.recv)
def _recv(tensor, src=None, group=None, tag=0, group_src=None):
    kind, by_group = _message(tensor, True), _one_of("src", src, group_src, True)
    any_rank = is_none(src) and is_none(group_src)
    pack, put = _packing(tensor)

    def impl(tensor, src=None, group=None, tag=0, group_src=None):
        know_dtype(tensor)
        x, nbytes, back = pack(tensor)
        descriptor = _descriptor(group)
        peer = ANY if any_rank else _peer(descriptor, src, group_src, by_group)
        found = _done(call_c_entry(descriptor, _RECV, x, None, nbytes, _kind(kind, tag), peer))
        put(back, x)
        return _to_global_rank(descriptor, found)

    return impl


# ---- nonblocking messages -----------------------------------------------------------------------------


@register_jitable
def _itself(x):
    return x


@register_jitable
def _copy_of(x):
    return np.ascontiguousarray(x).copy()


@register_jitable
def _sent(descriptor, x, kind, peer):
    """Post a message; return the number of its request, which keeps the array alive."""
    nbytes = x.size * x.itemsize
    data, owner = held(x)
    return _done(call_c_entry(descriptor, _POST_SEND, data, owner, nbytes, kind, peer))


@overload(p2p.isend)
def _isend(tensor, dst=None, group=None, tag=0, group_dst=None):
    kind, by_group = _message(tensor, False), _one_of("dst", dst, group_dst)
    is_plain = tensor.layout == "C" and tensor.aligned
    contiguous = _itself if is_plain else _copy_of

    def impl(tensor, dst=None, group=None, tag=0, group_dst=None):
        know_dtype(tensor)
        descriptor = _descriptor(group)
        peer = _peer(descriptor, dst, group_dst, by_group)
        return new_work(descriptor, _sent(descriptor, contiguous(tensor), _kind(kind, tag), peer), NO_SENDER)

    return impl


@overload(p2p.irecv)
def _irecv(tensor, src=None, group=None, tag=0, group_src=None):
    kind, by_group = _message(tensor, True), _one_of("src", src, group_src, True)
    any_rank = is_none(src) and is_none(group_src)
    if tensor.layout != "C" or not tensor.aligned:
        raise TypingError(f"irecv inside njit receives into contiguous arrays, not {tensor}; copy from one")

    def impl(tensor, src=None, group=None, tag=0, group_src=None):
        know_dtype(tensor)
        descriptor = _descriptor(group)
        peer = ANY if any_rank else _peer(descriptor, src, group_src, by_group)
        nbytes = tensor.size * tensor.itemsize
        data, owner = held(tensor)
        number = _done(call_c_entry(descriptor, _POST_RECV, data, owner, nbytes, _kind(kind, tag), peer))
        sender = (
            ANY_SENDER if any_rank else _to_global_rank(descriptor, peer) if by_group else integer_of(src)
        )
        return new_work(descriptor, number, sender)

    return impl


@overload(p2p.sendrecv)
def _sendrecv(input, dst, output, src=None, group=None, send_tag=0, recv_tag=0):
    def impl(input, dst, output, src=None, group=None, send_tag=0, recv_tag=0):
        sent = p2p.isend(input, dst, group, send_tag)
        source = p2p.recv(output, src, group, recv_tag)
        _wait(sent)
        return source

    return impl


@register_jitable
def _wait(work):
    """Wait for a request; return the sender's rank in the group."""
    descriptor, number, _ = words_of(work)
    return _done(call_c_entry(descriptor, _WAIT, number, None, 0, 0, 0)) if number else 0


@overload_method(type(work_type), "wait")
def _work_wait(work, timeout=None):
    if not is_none(timeout):
        raise TypingError("wait inside njit takes no timeout; the group's own timeout holds")

    def impl(work, timeout=None):
        _wait(work)
        return True

    return impl


@overload_method(type(work_type), "is_completed")
def _work_is_completed(work):
    def impl(work):
        descriptor, number, _ = words_of(work)
        return number == 0 or _done(call_c_entry(descriptor, _TEST, number, None, 0, 0, 0)) != 0

    return impl


@overload_method(type(work_type), "source_rank")
def _work_source_rank(work):
    def impl(work):
        descriptor, _, sender = words_of(work)
        found = _wait(work)
        if sender == ANY_SENDER:
            return _to_global_rank(descriptor, found)
        return sender if sender >= 0 else -1

    return impl


def _requests(works: Any) -> None:
    if getattr(works, "dtype", None) != work_type:
        raise TypingError(f"works are of type {works}; give a list or tuple of what isend and irecv return")


@overload(p2p.waitall)
def _waitall(works):
    _requests(works)

    def impl(works):
        for work in works:
            _wait(work)

    return impl


@overload(p2p.waitany)
def _waitany(works):
    _requests(works)

    def impl(works):
        count = len(works)
        if count == 0:
            raise ValueError("waitany: there is no operation; give at least one Work")
        table, descriptor = np.empty(2 * count, np.int64), np.int64(0)
        for index in range(count):
            descriptor, number, _ = words_of(works[index])
            if number == 0:
                return index
            table[index], table[count + index] = number, descriptor
        return _done(call_c_entry(descriptor, _WAIT_ANY, table, None, count, 0, 0))

    return impl


@overload(groups.get_rank)
def _get_rank(group=None):
    def impl(group=None):
        descriptor = _descriptor(group)
        _size(descriptor)
        return word(descriptor, _RANK)

    return impl


@overload(groups.get_world_size)
def _get_world_size(group=None):
    def impl(group=None):
        return _size(_descriptor(group))

    return impl


# ---- functions that compiled code cannot call ---------------------------------------------------------------

_INSTEAD = {
    collectives.all_gather: "all_gather_into_tensor, which takes one array with a block for each rank",
    collectives.gather: "gather_single, which takes one array with a block for each rank",
    collectives.scatter: "scatter_single, which takes one array with a block for each rank",
    collectives.reduce_scatter: "reduce_scatter_tensor, which takes one array with a block for each rank",
    collectives.all_to_all: "all_to_all_single, which takes one array with a block for each rank",
    p2p.batch_isend_irecv: "isend and irecv, and waitall",
}


def _refuse(function: Any, instead: str) -> None:
    @overload(function)
    def refused(*args: Any, **kwargs: Any) -> None:
        raise TypingError(f"{function.__name__} cannot be called inside njit; use {instead}")


for _function, _instead in _INSTEAD.items():
    _refuse(_function, _instead)

refresh()
