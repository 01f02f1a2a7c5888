"""fastcoll's collectives inside numba.njit; see njit.py."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types
from numba.core.errors import TypingError
from numba.extending import overload, register_jitable

from ..api import collectives
from ..core import signature
from ..core.reduce_op import ReduceOp
from ..kernels import c_entries as d
from . import descriptors
from .njit_arguments import (
    array_dtype,
    check_same_dtype,
    check_synchronous,
    checked_descriptor,
    code_and_word,
    expect,
    group_rank_of,
    is_by_group,
    packing,
    result_of,
    size_of,
)
from .numba_types import (
    call_c_entry,
    is_none,
    know_dtype,
    op_word_of,
    word,
)

_OP_SHIFT, _REFUSED, _SPLITS = signature.OP_SHIFT, signature.REFUSED, descriptors.SPLITS
_SIZE, _RANK, _SPLIT, _REDUCE_SCATTER_SPLIT = d.SIZE, d.RANK, d.SPLIT, d.REDUCE_SCATTER_SPLIT
_BARRIER = signature.code_of("barrier")
_BARRIER_WORD = signature.encode("barrier")
_SUM = ReduceOp.SUM


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
        result_of(call_c_entry(descriptor, _REFUSED, None, None, total, code | _SPLITS, rows))


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
    code, base = code_and_word(name, tensor, async_op)
    pack, put = packing(tensor)

    def impl(tensor, op=_SUM, group=None, async_op=False):
        know_dtype(tensor)
        x, nbytes, back = pack(tensor)
        call = base | op_word_of(op) << _OP_SHIFT
        result_of(call_c_entry(checked_descriptor(group), code, x, None, nbytes, call, 0))
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
    code, base = code_and_word("reduce", tensor, async_op)
    by_group = is_by_group("dst", dst, group_dst)
    pack, put = packing(tensor)

    def impl(tensor, dst=None, op=_SUM, group=None, async_op=False, group_dst=None):
        know_dtype(tensor)
        x, nbytes, back = pack(tensor)
        descriptor, call = checked_descriptor(group), base | op_word_of(op) << _OP_SHIFT
        result_of(
            call_c_entry(
                descriptor, code, x, None, nbytes, call, group_rank_of(descriptor, dst, group_dst, by_group)
            )
        )
        put(back, x)

    return impl


@overload(collectives.reduce_scatter_tensor)
def _reduce_scatter_tensor(output, input, op=_SUM, group=None, async_op=False, input_split_sizes=None):
    code, base = code_and_word("reduce_scatter", output, async_op, what="output")
    array_dtype(input, "input", False)
    check_same_dtype(output, input, "output", "input")
    (pack, put), (pack_input, _) = packing(output), packing(input)
    if not is_none(input_split_sizes):
        list_sizes = _splitting(input_split_sizes, "reduce_scatter_tensor", input)

        def split(output, input, op=_SUM, group=None, async_op=False, input_split_sizes=None):
            know_dtype(output)
            length = len(input)
            (x, nbytes, _), (out, room, back) = pack_input(input), pack(output)
            descriptor, call = checked_descriptor(group), base | op_word_of(op) << _OP_SHIFT
            size = max(1, size_of(descriptor))
            table = np.empty(size + 1, np.int64)
            list_sizes(descriptor, code, table[:size], input_split_sizes, length, nbytes)
            table[size] = room
            result_of(call_c_entry(descriptor, _REDUCE_SCATTER_SPLIT, x, out, table, call, 0))
            put(back, out)

        return split

    def impl(output, input, op=_SUM, group=None, async_op=False, input_split_sizes=None):
        know_dtype(output)
        count, whole = output.size, input.size
        (x, _, _), (out, nbytes, back) = pack_input(input), pack(output)
        descriptor, call = checked_descriptor(group), base | op_word_of(op) << _OP_SHIFT
        expect(descriptor, code, whole, size_of(descriptor) * count)
        result_of(call_c_entry(descriptor, code, x, out, nbytes, call, 0))
        put(back, out)

    return impl


# ---- movement ---------------------------------------------------------------------------------------------


@overload(collectives.broadcast)
def _broadcast(tensor, src=None, group=None, async_op=False, group_src=None):
    code, base = code_and_word("broadcast", tensor, async_op)
    by_group = is_by_group("src", src, group_src)
    pack, put = packing(tensor)

    def impl(tensor, src=None, group=None, async_op=False, group_src=None):
        know_dtype(tensor)
        x, nbytes, back = pack(tensor)
        descriptor = checked_descriptor(group)
        result_of(
            call_c_entry(
                descriptor, code, x, None, nbytes, base, group_rank_of(descriptor, src, group_src, by_group)
            )
        )
        put(back, x)

    return impl


@overload(collectives.all_gather_into_tensor)
def _all_gather_into_tensor(output_tensor, input_tensor, group=None, async_op=False):
    code, base = code_and_word("all_gather", output_tensor, async_op, what="output_tensor")
    array_dtype(input_tensor, "input_tensor", False)
    check_same_dtype(output_tensor, input_tensor, "output_tensor", "input_tensor")
    (pack, put), (pack_input, _) = packing(output_tensor), packing(input_tensor)

    def impl(output_tensor, input_tensor, group=None, async_op=False):
        know_dtype(output_tensor)
        count, whole = input_tensor.size, output_tensor.size
        (x, nbytes, _), (out, _, back) = pack_input(input_tensor), pack(output_tensor)
        descriptor = checked_descriptor(group)
        expect(descriptor, code, whole, size_of(descriptor) * count)
        result_of(call_c_entry(descriptor, code, x, out, nbytes, base, 0))
        put(back, out)

    return impl


@register_jitable
def _checked_root(descriptor, code, rank, group_rank, by_group, whole, count):
    """Return the root of a call; refuse the call on the root if `whole` elements are not `count` for each rank."""
    size, root = size_of(descriptor), group_rank_of(descriptor, rank, group_rank, by_group)
    expect(descriptor, code, whole, size * count if root == word(descriptor, _RANK) else whole)
    return root


@overload(collectives.gather_single)
def _gather_single(tensor, gather_tensor=None, dst=None, group=None, async_op=False, group_dst=None):
    code, base = code_and_word("gather", tensor, async_op, writes=False)
    by_group, is_given = is_by_group("dst", dst, group_dst, True), not is_none(gather_tensor)
    pack_input, _ = packing(tensor)
    if not is_given:

        def alone(tensor, gather_tensor=None, dst=None, group=None, async_op=False, group_dst=None):
            know_dtype(tensor)
            count = tensor.size
            x, nbytes, _ = pack_input(tensor)
            descriptor = checked_descriptor(group)
            root = _checked_root(descriptor, code, dst, group_dst, by_group, 0, max(1, count))
            result_of(call_c_entry(descriptor, code, x, None, nbytes, base, root))

        return alone
    array_dtype(gather_tensor, "gather_tensor", True)
    check_same_dtype(tensor, gather_tensor, "tensor", "gather_tensor")
    pack, put = packing(gather_tensor)

    def impl(tensor, gather_tensor=None, dst=None, group=None, async_op=False, group_dst=None):
        know_dtype(tensor)
        count, whole = tensor.size, gather_tensor.size
        (x, nbytes, _), (out, _, back) = pack_input(tensor), pack(gather_tensor)
        descriptor = checked_descriptor(group)
        root = _checked_root(descriptor, code, dst, group_dst, by_group, whole, count)
        result_of(call_c_entry(descriptor, code, x, out, nbytes, base, root))
        if root == word(descriptor, _RANK):
            put(back, out)

    return impl


@overload(collectives.scatter_single)
def _scatter_single(tensor, scatter_tensor=None, src=None, group=None, async_op=False, group_src=None):
    code, base = code_and_word("scatter", tensor, async_op)
    by_group, is_given = is_by_group("src", src, group_src, True), not is_none(scatter_tensor)
    pack, put = packing(tensor)
    if not is_given:

        def alone(tensor, scatter_tensor=None, src=None, group=None, async_op=False, group_src=None):
            know_dtype(tensor)
            count = tensor.size
            out, nbytes, back = pack(tensor)
            descriptor = checked_descriptor(group)
            root = _checked_root(descriptor, code, src, group_src, by_group, 0, max(1, count))
            result_of(call_c_entry(descriptor, code, None, out, nbytes, base, root))
            put(back, out)

        return alone
    array_dtype(scatter_tensor, "scatter_tensor", False)
    check_same_dtype(tensor, scatter_tensor, "tensor", "scatter_tensor")
    pack_input, _ = packing(scatter_tensor)

    def impl(tensor, scatter_tensor=None, src=None, group=None, async_op=False, group_src=None):
        know_dtype(tensor)
        count, whole = tensor.size, scatter_tensor.size
        (out, nbytes, back), (x, _, _) = pack(tensor), pack_input(scatter_tensor)
        descriptor = checked_descriptor(group)
        root = _checked_root(descriptor, code, src, group_src, by_group, whole, count)
        result_of(call_c_entry(descriptor, code, x, out, nbytes, base, root))
        put(back, out)

    return impl


@overload(collectives.all_to_all_single)
def _all_to_all_single(
    output, input, output_split_sizes=None, input_split_sizes=None, group=None, async_op=False
):
    code, base = code_and_word("all_to_all", output, async_op, what="output")
    array_dtype(input, "input", False)
    check_same_dtype(output, input, "output", "input")
    outputs, inputs = (
        _splitting(sizes, "all_to_all_single", output, input)
        for sizes in (output_split_sizes, input_split_sizes)
    )
    (pack, put), (pack_input, _) = packing(output), packing(input)
    if not (is_none(output_split_sizes) and is_none(input_split_sizes)):

        def split(output, input, output_split_sizes=None, input_split_sizes=None, group=None, async_op=False):
            know_dtype(output)
            given, taken = len(input), len(output)
            (x, nbytes, _), (out, room, back) = pack_input(input), pack(output)
            descriptor = checked_descriptor(group)
            size = max(1, size_of(descriptor))
            table = np.empty(2 * size, np.int64)
            inputs(descriptor, code, table[:size], input_split_sizes, given, nbytes)
            outputs(descriptor, code, table[size:], output_split_sizes, taken, room)
            result_of(call_c_entry(descriptor, _SPLIT, x, out, table, base, 0))
            put(back, out)

        return split

    def impl(output, input, output_split_sizes=None, input_split_sizes=None, group=None, async_op=False):
        know_dtype(output)
        given, taken, taken_rows = input.size, output.size, len(output)
        (x, nbytes, _), (out, _, back) = pack_input(input), pack(output)
        descriptor = checked_descriptor(group)
        size = max(1, size_of(descriptor))
        expect(descriptor, code, taken, given)
        expect(descriptor, code, taken_rows, taken_rows // size * size)
        result_of(call_c_entry(descriptor, code, x, out, nbytes // size, base, 0))
        put(back, out)

    return impl


# ---- barrier ----------------------------------------------------------------------------------------------


@overload(collectives.barrier)
def _barrier(group=None, async_op=False, device_ids=None, timeout=None):
    check_synchronous(async_op)
    if not (is_none(device_ids) and is_none(timeout)):
        raise TypingError(
            "barrier inside njit takes neither device_ids nor a timeout; the group's own timeout holds"
        )

    def impl(group=None, async_op=False, device_ids=None, timeout=None):
        result_of(call_c_entry(checked_descriptor(group), _BARRIER, None, None, 0, _BARRIER_WORD, 0))

    return impl
