"""torch.distributed's functions for processes with several GPUs: each rank passes a list of arrays, one for each GPU.

The lists have the same length on all ranks, and all their arrays have the same dtype and number of elements. Several
arrays may be on one GPU or in host memory. The GPU of the first array communicates with the other ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, overload

from ..core.reduce_op import ReduceOp
from ..core.work import Async, Sync, Work
from ..job.groups import Group, group_rank, member_of


def _several() -> Any:
    from ..gpu import several  # imports Numba

    return several


@overload
def all_reduce_multigpu(tensor_list: Sequence[Any], op: ReduceOp = ..., group: Group = ...,
    async_op: Sync = ...) -> None: ...  # fmt: skip
@overload
def all_reduce_multigpu(tensor_list: Sequence[Any], op: ReduceOp = ..., group: Group = ...,
    async_op: Async = ...) -> Work: ...  # fmt: skip
@overload
def all_reduce_multigpu(tensor_list: Sequence[Any], op: ReduceOp = ..., group: Group = ...,
    async_op: bool = ...) -> Work | None: ...  # fmt: skip
def all_reduce_multigpu(
    tensor_list: Sequence[Any], op: ReduceOp = ReduceOp.SUM, group: Group = None, async_op: bool = False
) -> Any:
    """Reduce over all arrays of all ranks; every array gets the result.

    Each rank's arrays are combined in the order of its list, then the ranks' results in the order of the ranks. AVG
    divides by the number of ranks, then by the number of arrays of a rank.

    Args:
        tensor_list: one array for each GPU; all have the same dtype and number of elements, all lists the same length.
        op, group, async_op and errors: as for `all_reduce`.

    Examples:
        >>> xs = [cupy.ones(3), cupy.ones(3)]
        >>> dist.all_reduce_multigpu(xs)  # two ranks: four arrays, each becomes [4, 4, 4]
    """
    g = member_of(group, "all_reduce_multigpu")
    return None if g is None else _several().all_reduce(g, tensor_list, op, async_op)


@overload
def reduce_multigpu(tensor_list: Sequence[Any], dst: int, op: ReduceOp = ..., group: Group = ...,
    async_op: Sync = ..., dst_tensor: int = ...) -> None: ...  # fmt: skip
@overload
def reduce_multigpu(tensor_list: Sequence[Any], dst: int, op: ReduceOp = ..., group: Group = ...,
    async_op: Async = ..., dst_tensor: int = ...) -> Work: ...  # fmt: skip
@overload
def reduce_multigpu(tensor_list: Sequence[Any], dst: int, op: ReduceOp = ..., group: Group = ...,
    async_op: bool = ..., dst_tensor: int = ...) -> Work | None: ...  # fmt: skip
def reduce_multigpu(
    tensor_list: Sequence[Any],
    dst: int,
    op: ReduceOp = ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
    dst_tensor: int = 0,
) -> Any:
    """Reduce over all arrays of all ranks into `tensor_list[dst_tensor]` of rank `dst`; no other array changes.

    Args:
        tensor_list: one array for each GPU; all have the same dtype and number of elements, all lists the same length.
        dst, dst_tensor: the root's global rank, and an index in the root's list.
        op, group, async_op and errors: as for `all_reduce`.
    """
    g = member_of(group, "reduce_multigpu")
    if g is None:
        return None
    with g.preparing("reduce_multigpu"):
        root = group_rank(g, "dst", dst, None)
    return _several().reduce(g, tensor_list, root, op, dst_tensor, async_op)


@overload
def broadcast_multigpu(tensor_list: Sequence[Any], src: int, group: Group = ..., async_op: Sync = ...,
    src_tensor: int = ...) -> None: ...  # fmt: skip
@overload
def broadcast_multigpu(tensor_list: Sequence[Any], src: int, group: Group = ..., async_op: Async = ...,
    src_tensor: int = ...) -> Work: ...  # fmt: skip
@overload
def broadcast_multigpu(tensor_list: Sequence[Any], src: int, group: Group = ..., async_op: bool = ...,
    src_tensor: int = ...) -> Work | None: ...  # fmt: skip
def broadcast_multigpu(
    tensor_list: Sequence[Any], src: int, group: Group = None, async_op: bool = False, src_tensor: int = 0
) -> Any:
    """Copy `tensor_list[src_tensor]` of rank `src` into all arrays of all ranks.

    Args:
        tensor_list: one array for each GPU; all have the same dtype and number of elements, all lists the same length.
        src, src_tensor: the root's global rank, and an index in the root's list.
        group, async_op and errors: as for `all_reduce`.
    """
    g = member_of(group, "broadcast_multigpu")
    if g is None:
        return None
    with g.preparing("broadcast_multigpu"):
        root = group_rank(g, "src", src, None)
    return _several().broadcast(g, tensor_list, root, src_tensor, async_op)


@overload
def all_gather_multigpu(output_tensor_lists: Sequence[Sequence[Any]], input_tensor_list: Sequence[Any],
    group: Group = ..., async_op: Sync = ...) -> None: ...  # fmt: skip
@overload
def all_gather_multigpu(output_tensor_lists: Sequence[Sequence[Any]], input_tensor_list: Sequence[Any],
    group: Group = ..., async_op: Async = ...) -> Work: ...  # fmt: skip
@overload
def all_gather_multigpu(output_tensor_lists: Sequence[Sequence[Any]], input_tensor_list: Sequence[Any],
    group: Group = ..., async_op: bool = ...) -> Work | None: ...  # fmt: skip
def all_gather_multigpu(
    output_tensor_lists: Sequence[Sequence[Any]],
    input_tensor_list: Sequence[Any],
    group: Group = None,
    async_op: bool = False,
) -> Any:
    """Gather the arrays of all ranks on each GPU of every rank.

    Args:
        output_tensor_lists: for each input array, a list of arrays on the same GPU as that input array. With n input
            arrays on each rank, array j of rank r goes to item r * n + j of every list.
        input_tensor_list: this rank's arrays.
        group, async_op and errors: as for `all_reduce`.
    """
    g = member_of(group, "all_gather_multigpu")
    return None if g is None else _several().all_gather(g, output_tensor_lists, input_tensor_list, async_op)
