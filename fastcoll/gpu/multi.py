"""Collectives on several arrays of each rank: on several GPUs, on one, or on the host; multigpu.py says what they do.

A rank reduces its arrays in the order of the list into memory of its own, makes one ordinary call of its group with
that, and hands out the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..core.group import ProcessGroup
from ..core.operands import check_apart
from ..core.partition import pieces
from ..core.reduce_op import AVG, ReduceOp
from ..core.work import Work
from ..errors import UsageError
from ..interop.arrays import Adopted
from .movers import Mover
from .several import Several, check_alike


def all_reduce(group: ProcessGroup, tensors: Sequence[Any], op: ReduceOp, async_op: bool) -> Any:
    if _length("tensor_list", tensors) == 1:
        return group.all_reduce(tensors[0], op, async_op)
    items = _adopted(group, tensors, "tensor_list")
    mine = Several(group, items, "tensor_list")
    total = mine.room(mine.arrays[0].size)
    return mine.run(
        "all_reduce_multigpu",
        lambda mover: mover.fold(total, mine.arrays, op),
        lambda: mine.carrier._plan_all_reduce(total, mine.left_of(op)),
        lambda mover: _hand_out(mover, total, op, mine.arrays, len(items)),
        items,
        async_op,
    )


def reduce(
    group: ProcessGroup, tensors: Sequence[Any], root: int, op: ReduceOp, place: int, async_op: bool
) -> Any:
    root = group.checked_rank("root", root)
    place = _index("dst_tensor", place, _length("tensor_list", tensors))
    if len(tensors) == 1:
        return group.reduce(tensors[0], root, op, async_op)
    written = [place] if group.rank == root else []
    items = _adopted(group, tensors, "tensor_list", written)
    mine = Several(group, items, "tensor_list")
    total = mine.room(mine.arrays[0].size)
    return mine.run(
        "reduce_multigpu",
        lambda mover: mover.fold(total, mine.arrays, op),
        lambda: mine.carrier._plan_reduce(total, total, mine.left_of(op), root),
        lambda mover: _hand_out(mover, total, op, [mine.arrays[k] for k in written], len(items)),
        [items[k] for k in written],
        async_op,
    )


def broadcast(group: ProcessGroup, tensors: Sequence[Any], root: int, place: int, async_op: bool) -> Any:
    root = group.checked_rank("root", root)
    place = _index("src_tensor", place, _length("tensor_list", tensors))
    if len(tensors) == 1:
        return group.broadcast(tensors[0], root, async_op)
    here = group.rank == root
    written = [k for k in range(len(tensors)) if not here or k != place]
    items = _adopted(group, tensors, "tensor_list", written)
    mine = Several(group, items, "tensor_list")
    value = mine.room(mine.arrays[0].size)

    def before(mover: Mover) -> None:
        if here:
            mover.copy(value, mine.arrays[place])

    return mine.run(
        "broadcast_multigpu",
        before,
        lambda: mine.carrier._plan_broadcast(value, root),
        lambda mover: _hand_out(mover, value, ReduceOp.SUM, [mine.arrays[k] for k in written], 1),
        [items[k] for k in written],
        async_op,
    )


def all_gather(
    group: ProcessGroup, lists: Sequence[Sequence[Any]], tensors: Sequence[Any], async_op: bool
) -> Work | None:
    many = _length("input_tensor_list", tensors)
    if len(lists) != many:
        raise UsageError(f"output_tensor_lists has {len(lists)} lists for {many} input tensors")
    items = _adopted(group, tensors, "input_tensor_list", ())
    mine = Several(group, items, "input_tensor_list")
    outs = [
        group.adopt_list(outputs, group.size * many, writable=True, what=f"output_tensor_lists[{k}]")
        for k, outputs in enumerate(lists)
    ]
    for k, outputs in enumerate(outs):
        check_alike(f"output_tensor_lists[{k}]", outputs, mine.arrays[0], "input_tensor_list[0]")
    size = mine.arrays[0].size
    everything = mine.room(group.size * many * size)
    ranks = pieces(everything, [many * size] * group.size)
    slots = pieces(everything, [size] * group.size * many)

    def before(mover: Mover) -> None:
        for slot, x in zip(slots[group.rank * many :], mine.arrays, strict=False):
            mover.copy(slot, x)

    def after(mover: Mover) -> None:
        for outputs in outs:
            for out, slot in zip(outputs, slots, strict=True):
                mover.copy(out.array, slot)

    return mine.run(
        "all_gather_multigpu",
        before,
        lambda: mine.carrier._plan_all_gather(ranks, ranks[group.rank], [size] * many),
        after,
        [out for outputs in outs for out in outputs],
        async_op,
    )


def _length(what: str, tensors: Any) -> int:
    if not isinstance(tensors, list | tuple) or not tensors:
        raise UsageError(f"{what} must be a list of arrays, one at least")
    return len(tensors)


def _index(name: str, index: int, length: int) -> int:
    if not 0 <= index < length:
        raise UsageError(f"{name} is {index}; tensor_list has {length} arrays, counted from 0")
    return index


def _adopted(
    group: ProcessGroup, tensors: Sequence[Any], what: str, written: Sequence[int] | None = None
) -> list[Adopted]:
    """The arrays of a list.

    Args:
        written: places of those that the call writes; None for all.
    """
    items = [
        group.adopt(x, writable=written is None or k in written, what=f"{what}[{k}]")
        for k, x in enumerate(tensors)
    ]
    if written is None:
        check_apart(items, what)
    return items


def _hand_out(mover: Mover, total: Any, op: ReduceOp, outs: Sequence[Any], many: int) -> None:
    if op.code == AVG and many > 1 and outs:
        mover.divide(total, many)
    for out in outs:
        mover.copy(out, total)
