"""torch.distributed's functions for processes with several GPUs: each rank gives a list of arrays, one a GPU.

The lists are equally long on all ranks. On one GPU they may hold several arrays of it, and arrays in host memory work
too. All have one dtype and number of elements. The first array's GPU is the one that talks to other ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .reduce_op import ReduceOp
from .registry import Group, group_rank, member_of
from .work import Work


def all_reduce_multigpu(
    tensor_list: Sequence[Any], op: ReduceOp = ReduceOp.SUM, group: Group = None, async_op: bool = False
) -> Any:
    """Reduce over all arrays of all ranks; all of them get the result.

    Arrays are combined in the order of the list, and then of the ranks. AVG divides by the number of ranks and then
    by that of arrays.

    Example:
        >>> xs = [cupy.ones(3), cupy.ones(3)]
        >>> dist.all_reduce_multigpu(xs)  # two ranks: four arrays, each becomes [4, 4, 4]
    """
    g = member_of(group, "all_reduce_multigpu")
    if g is None:
        return None
    from .gpu import multi

    return multi.all_reduce(g, tensor_list, op, async_op)


def reduce_multigpu(
    tensor_list: Sequence[Any],
    dst: int,
    op: ReduceOp = ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
    dst_tensor: int = 0,
) -> Any:
    """Reduce over all arrays of all ranks into `tensor_list[dst_tensor]` of rank `dst`; all others stay as they are."""
    g = member_of(group, "reduce_multigpu")
    if g is None:
        return None
    from .gpu import multi

    return multi.reduce(g, tensor_list, group_rank(g, "dst", dst, None), op, dst_tensor, async_op)


def broadcast_multigpu(
    tensor_list: Sequence[Any], src: int, group: Group = None, async_op: bool = False, src_tensor: int = 0
) -> Any:
    """Copy `tensor_list[src_tensor]` of rank `src` into all arrays of all ranks."""
    g = member_of(group, "broadcast_multigpu")
    if g is None:
        return None
    from .gpu import multi

    return multi.broadcast(g, tensor_list, group_rank(g, "src", src, None), src_tensor, async_op)


def all_gather_multigpu(
    output_tensor_lists: Sequence[Sequence[Any]],
    input_tensor_list: Sequence[Any],
    group: Group = None,
    async_op: bool = False,
) -> Work | None:
    """Every rank gets the arrays of all, on each of its GPUs.

    Args:
        output_tensor_lists: a list for each input array, on whose GPU its arrays are. Array j of rank r, of n a rank,
            goes to item r * n + j of each list.
        input_tensor_list: what this rank gives.
    """
    g = member_of(group, "all_gather_multigpu")
    if g is None:
        return None
    from .gpu import multi

    return multi.all_gather(g, output_tensor_lists, input_tensor_list, async_op)
