"""The collectives as functions, named and called as in torch.distributed.

An array is any object that can be used without a copy: NumPy's arrays, and arrays with DLPack or the buffer protocol.
Results are written into the arrays that are passed. All ranks of the group must make the same calls in the same order;
if they do not, every rank raises MismatchError before data moves.

The docstring of `all_reduce` describes `op`, `group`, `async_op`, results and errors for all functions. The overloads
give type checkers the type of the result for each value of `async_op`. They ignore one case: a rank outside the group
gets None instead of a Work.

The functions do little work, because all work here adds to the latency of the smallest operations. For example, `src`
and `dst` are not converted to group ranks in the default group, where they equal the global ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias, TypeVar, overload

from ..core.operands import positive_seconds
from ..core.reduce_op import ReduceOp
from ..core.work import Async, Sync, Timeout, Work
from ..errors import UsageError
from ..job.groups import Group, group_rank, groups, member_of


class _Immutable(Protocol):
    """The type of JAX's arrays, for type checkers. A call that changes its array in place returns a new JAX array."""

    @property
    def sharding(self) -> Any: ...


_J = TypeVar("_J", bound=_Immutable)
Root: TypeAlias = int | None
Arrays: TypeAlias = Sequence[Any]
Tree: TypeAlias = dict[Any, Any] | list[Any] | tuple[Any, ...]
Splits: TypeAlias = Sequence[int] | None


@overload
def all_reduce(tensor: _J, op: ReduceOp = ..., group: Group = ..., async_op: Sync = ...,
    travel: str | None = ..., lost: Any = ...) -> _J: ...  # fmt: skip
@overload
def all_reduce(tensor: Tree, op: ReduceOp = ..., group: Group = ..., async_op: Sync = ...) -> Any: ...
@overload
def all_reduce(tensor: Any, op: ReduceOp = ..., group: Group = ..., async_op: Sync = ...,
    travel: str | None = ..., lost: Any = ...) -> None: ...  # fmt: skip
@overload
def all_reduce(tensor: Any, op: ReduceOp = ..., group: Group = ..., async_op: Async = ...,
    travel: str | None = ..., lost: Any = ...) -> Work: ...  # fmt: skip
@overload
def all_reduce(tensor: Any, op: ReduceOp = ..., group: Group = ..., async_op: bool = ...,
    travel: str | None = ..., lost: Any = ...) -> Any: ...  # fmt: skip
def all_reduce(
    tensor: Any,
    op: ReduceOp = ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
    travel: str | None = None,  # not keyword-only: that would make each call slower
    lost: Any = None,
) -> Any:
    """Reduce an array over all ranks; every rank gets the result in place, with the same bits.

    Args:
        tensor: an array with the same dtype and number of elements on all ranks. Or a dict, list or tuple of arrays,
            nested to any depth, with any dtypes, and with the same structure on all ranks; if it contains immutable
            arrays (JAX's), the result is a new dict, list or tuple.
        op: a predefined ReduceOp, ReduceOp.PREMUL_SUM(factor) or ReduceOp.custom(function).
        group: from `new_group`; None: the default group. On a rank outside the group the call only warns.
        async_op: return a Work at once; do not use the arrays until its `wait()` has returned.
        travel: for float32, and SUM or AVG: "bfloat16", "float16" or "int8" (a block of 256 elements shares a scale).
            Between nodes, elements travel in this type, and are added in float32. Inside a node, float32 is used as it
            is, because that is faster. docs/operations.md has the bound of the error.
        lost: with `travel`, an ndarray like `tensor`, initially zeros, which the caller keeps from call to call: what
            rounding took from this rank's elements. It is added to them in the next call (error feedback).

    Returns:
        None, or a new array if `tensor` is immutable (JAX's); with `async_op` a Work.

    Raises:
        UsageError: an argument is wrong (ArrayError if it is an array), or the ranks' calls differ (MismatchError); the
            group stays usable.
        GroupError: a rank died (PeerDiedError), or did not call in time (CollectiveTimeoutError); the group has failed.

    Examples:
        >>> x = np.full(3, dist.get_rank() + 1.0)
        >>> dist.all_reduce(x)  # two ranks: array([3., 3., 3.])
    """
    if group is None and travel is None and lost is None:  # as fast as without the last two arguments
        return groups.world.fast.all_reduce(tensor, op, async_op)
    g = groups.world if group is None else member_of(group, "all_reduce")
    if g is None:
        return None
    if travel is None and lost is None:
        return g.fast.all_reduce(tensor, op, async_op)
    return g.all_reduce_narrow(tensor, op, async_op, travel, lost)


@overload
def broadcast(tensor: _J, src: Root = ..., group: Group = ..., async_op: Sync = ...,
    group_src: Root = ...) -> _J: ...  # fmt: skip
@overload
def broadcast(tensor: Tree, src: Root = ..., group: Group = ..., async_op: Sync = ...,
    group_src: Root = ...) -> Any: ...  # fmt: skip
@overload
def broadcast(tensor: Any, src: Root = ..., group: Group = ..., async_op: Sync = ...,
    group_src: Root = ...) -> None: ...  # fmt: skip
@overload
def broadcast(tensor: Any, src: Root = ..., group: Group = ..., async_op: Async = ...,
    group_src: Root = ...) -> Work: ...  # fmt: skip
@overload
def broadcast(tensor: Any, src: Root = ..., group: Group = ..., async_op: bool = ...,
    group_src: Root = ...) -> Any: ...  # fmt: skip
def broadcast(
    tensor: Any, src: Root = None, group: Group = None, async_op: bool = False, group_src: Root = None
) -> Any:
    """Copy the array of rank `src` into the arrays of all ranks.

    Args:
        tensor: an array with the same fixed-size dtype and number of elements on all ranks. Or a dict, list or tuple
            of arrays, as for `all_reduce`.
        src, group_src: the root, as a global rank or as a rank in the group; give one.
        group, async_op, result and errors: as for `all_reduce`.
    """
    g = groups.world if group is None else member_of(group, "broadcast")
    if g is None:
        return None
    if group_src is not None or src is None or g is not groups.world:
        with g.preparing("broadcast"):
            src = group_rank(g, "src", src, group_src)
    return g.fast.broadcast(tensor, src, async_op)


@overload
def reduce(tensor: _J, dst: Root = ..., op: ReduceOp = ..., group: Group = ..., async_op: Sync = ...,
    group_dst: Root = ...) -> _J: ...  # fmt: skip
@overload
def reduce(tensor: Any, dst: Root = ..., op: ReduceOp = ..., group: Group = ..., async_op: Sync = ...,
    group_dst: Root = ...) -> None: ...  # fmt: skip
@overload
def reduce(tensor: Any, dst: Root = ..., op: ReduceOp = ..., group: Group = ..., async_op: Async = ...,
    group_dst: Root = ...) -> Work: ...  # fmt: skip
@overload
def reduce(tensor: Any, dst: Root = ..., op: ReduceOp = ..., group: Group = ..., async_op: bool = ...,
    group_dst: Root = ...) -> Any: ...  # fmt: skip
def reduce(
    tensor: Any,
    dst: Root = None,
    op: ReduceOp = ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
    group_dst: Root = None,
) -> Any:
    """Reduce an array over all ranks into the array of rank `dst`; the arrays of other ranks do not change.

    Args:
        tensor: an array with the same dtype and number of elements on all ranks.
        dst, group_dst: the root, as a global rank or as a rank in the group; give one.
        op, group, async_op, result and errors: as for `all_reduce`.
    """
    g = groups.world if group is None else member_of(group, "reduce")
    if g is None:
        return None
    if group_dst is not None or dst is None or g is not groups.world:
        with g.preparing("reduce"):
            dst = group_rank(g, "dst", dst, group_dst)
    return g.fast.reduce(tensor, dst, op, async_op)


@overload
def scan(tensor: _J, op: ReduceOp = ..., group: Group = ..., async_op: Sync = ...) -> _J: ...
@overload
def scan(tensor: Any, op: ReduceOp = ..., group: Group = ..., async_op: Sync = ...) -> None: ...
@overload
def scan(tensor: Any, op: ReduceOp = ..., group: Group = ..., async_op: Async = ...) -> Work: ...
@overload
def scan(tensor: Any, op: ReduceOp = ..., group: Group = ..., async_op: bool = ...) -> Any: ...
def scan(tensor: Any, op: ReduceOp = ReduceOp.SUM, group: Group = None, async_op: bool = False) -> Any:
    """Compute the inclusive prefix reduction, in place: rank r gets the reduction over ranks 0..r.

    Args:
        tensor: an array with the same dtype and number of elements on all ranks.
        op, group, async_op, result and errors: as for `all_reduce`.

    Examples:
        >>> x = np.ones(1)
        >>> dist.scan(x)  # rank r: array([r + 1.])
    """
    g = groups.world if group is None else member_of(group, "scan")
    return None if g is None else g.fast.scan(tensor, op, async_op)


@overload
def exscan(tensor: _J, op: ReduceOp = ..., group: Group = ..., async_op: Sync = ...) -> _J: ...
@overload
def exscan(tensor: Any, op: ReduceOp = ..., group: Group = ..., async_op: Sync = ...) -> None: ...
@overload
def exscan(tensor: Any, op: ReduceOp = ..., group: Group = ..., async_op: Async = ...) -> Work: ...
@overload
def exscan(tensor: Any, op: ReduceOp = ..., group: Group = ..., async_op: bool = ...) -> Any: ...
def exscan(tensor: Any, op: ReduceOp = ReduceOp.SUM, group: Group = None, async_op: bool = False) -> Any:
    """Compute the exclusive prefix reduction, in place: rank r gets the reduction over ranks 0..r-1.

    Rank 0's array is unchanged.

    Args:
        tensor: an array with the same dtype and number of elements on all ranks.
        op, group, async_op, result and errors: as for `all_reduce`.
    """
    g = groups.world if group is None else member_of(group, "exscan")
    return None if g is None else g.fast.exscan(tensor, op, async_op)


@overload
def all_gather(tensor_list: Arrays, tensor: Any, group: Group = ..., async_op: Sync = ...) -> None: ...
@overload
def all_gather(tensor_list: Arrays, tensor: Any, group: Group = ..., async_op: Async = ...) -> Work: ...
@overload
def all_gather(tensor_list: Arrays, tensor: Any, group: Group = ..., async_op: bool = ...) -> Work | None: ...
@overload
def all_gather(
    tensor_list: Any, tensor: None = ..., group: Group = ..., async_op: Sync = ...
) -> list[Any]: ...
@overload
def all_gather(tensor_list: Any, tensor: None = ..., group: Group = ..., async_op: Async = ...) -> Work: ...
def all_gather(tensor_list: Any, tensor: Any = None, group: Group = None, async_op: bool = False) -> Any:
    """Gather the arrays of all ranks on every rank: the array of rank r goes to `tensor_list[r]`.

    `all_gather(tensor)` returns a list of new arrays, which may have different shapes, because the ranks first exchange
    the shapes. The new arrays are torch's or JAX's if `tensor` is, else NumPy's. Dtypes and numbers of dimensions must
    agree on all ranks, or all ranks raise MismatchError.

    Args:
        tensor_list: one array for each rank, of `tensor`'s dtype; their shapes may differ.
        tensor: this rank's array; any fixed-size dtype.
        group, async_op and errors: as for `all_reduce`.

    Examples:
        >>> parts = [np.empty(2) for _ in range(dist.get_world_size())]
        >>> dist.all_gather(parts, np.full(2, float(dist.get_rank())))
        >>> of_all = dist.all_gather(np.arange(dist.get_rank()))
    """
    g = groups.world if group is None else member_of(group, "all_gather")
    return None if g is None else g.fast.all_gather(tensor_list, tensor, async_op)


@overload
def all_gather_into_tensor(output_tensor: Any, input_tensor: Any, group: Group = ...,
    async_op: Sync = ...) -> None: ...  # fmt: skip
@overload
def all_gather_into_tensor(output_tensor: Any, input_tensor: Any, group: Group = ...,
    async_op: Async = ...) -> Work: ...  # fmt: skip
@overload
def all_gather_into_tensor(output_tensor: Any, input_tensor: Any, group: Group = ...,
    async_op: bool = ...) -> Work | None: ...  # fmt: skip
def all_gather_into_tensor(
    output_tensor: Any, input_tensor: Any, group: Group = None, async_op: bool = False
) -> Work | None:
    """Gather the arrays of all ranks on every rank, in one array in the order of the ranks.

    Args:
        output_tensor: an array of `input_tensor`'s dtype with world_size times as many elements. It may have the shape
            of the concatenated or of the stacked arrays.
        input_tensor: an array with the same dtype and number of elements on all ranks.
        group, async_op and errors: as for `all_reduce`.
    """
    g = groups.world if group is None else member_of(group, "all_gather_into_tensor")
    return None if g is None else g.fast.all_gather_single(output_tensor, input_tensor, async_op)


all_gather_single = all_gather_into_tensor


@overload
def gather(tensor: Any, gather_list: Arrays | None = ..., dst: Root = ..., group: Group = ...,
    async_op: Sync = ..., group_dst: Root = ...) -> None: ...  # fmt: skip
@overload
def gather(tensor: Any, gather_list: Arrays | None = ..., dst: Root = ..., group: Group = ...,
    async_op: Async = ..., group_dst: Root = ...) -> Work: ...  # fmt: skip
@overload
def gather(tensor: Any, gather_list: Arrays | None = ..., dst: Root = ..., group: Group = ...,
    async_op: bool = ..., group_dst: Root = ...) -> Work | None: ...  # fmt: skip
def gather(
    tensor: Any,
    gather_list: Arrays | None = None,
    dst: Root = None,
    group: Group = None,
    async_op: bool = False,
    group_dst: Root = None,
) -> Work | None:
    """Gather the arrays of all ranks on rank `dst`.

    Args:
        tensor: this rank's array; any fixed-size dtype.
        gather_list: on `dst` one array for each rank, whose shapes may differ; None on other ranks.
        dst, group_dst: the root, as a global rank or as a rank in the group; give at most one; default: global rank 0.
        group, async_op and errors: as for `all_reduce`.
    """
    g = groups.world if group is None else member_of(group, "gather")
    if g is None:
        return None
    if group_dst is not None or dst is None or g is not groups.world:
        with g.preparing("gather"):
            dst = group_rank(g, "dst", dst, group_dst, 0)
    return g.fast.gather(tensor, gather_list, dst, async_op)


@overload
def gather_single(tensor: Any, gather_tensor: Any = ..., dst: Root = ..., group: Group = ...,
    async_op: Sync = ..., group_dst: Root = ...) -> None: ...  # fmt: skip
@overload
def gather_single(tensor: Any, gather_tensor: Any = ..., dst: Root = ..., group: Group = ...,
    async_op: Async = ..., group_dst: Root = ...) -> Work: ...  # fmt: skip
@overload
def gather_single(tensor: Any, gather_tensor: Any = ..., dst: Root = ..., group: Group = ...,
    async_op: bool = ..., group_dst: Root = ...) -> Work | None: ...  # fmt: skip
def gather_single(
    tensor: Any,
    gather_tensor: Any = None,
    dst: int | None = None,
    group: Group = None,
    async_op: bool = False,
    group_dst: int | None = None,
) -> Work | None:
    """Gather arrays of equal size on rank `dst`, in one array in the order of the ranks.

    Args:
        tensor: this rank's array, with the same fixed-size dtype and number of elements on all ranks.
        gather_tensor: on `dst` an array of `tensor`'s dtype with world_size times as many elements; None elsewhere.
        dst, group_dst: the root, as a global rank or as a rank in the group; give at most one; default: global rank 0.
        group, async_op and errors: as for `all_reduce`.
    """
    g = groups.world if group is None else member_of(group, "gather_single")
    if g is None:
        return None
    if group_dst is not None or dst is None or g is not groups.world:
        with g.preparing("gather_single"):
            dst = group_rank(g, "dst", dst, group_dst, 0)
    return g.fast.gather_single(tensor, gather_tensor, dst, async_op)


gather_into_tensor = gather_single


@overload
def scatter(tensor: _J, scatter_list: Arrays | None = ..., src: Root = ..., group: Group = ...,
    async_op: Sync = ..., group_src: Root = ...) -> _J: ...  # fmt: skip
@overload
def scatter(tensor: Any, scatter_list: Arrays | None = ..., src: Root = ..., group: Group = ...,
    async_op: Sync = ..., group_src: Root = ...) -> None: ...  # fmt: skip
@overload
def scatter(tensor: Any, scatter_list: Arrays | None = ..., src: Root = ..., group: Group = ...,
    async_op: Async = ..., group_src: Root = ...) -> Work: ...  # fmt: skip
@overload
def scatter(tensor: Any, scatter_list: Arrays | None = ..., src: Root = ..., group: Group = ...,
    async_op: bool = ..., group_src: Root = ...) -> Any: ...  # fmt: skip
def scatter(
    tensor: Any,
    scatter_list: Arrays | None = None,
    src: Root = None,
    group: Group = None,
    async_op: bool = False,
    group_src: Root = None,
) -> Any:
    """Send `scatter_list[r]` of rank `src` to rank r, for each rank.

    Args:
        tensor: the array to receive into; any fixed-size dtype.
        scatter_list: on `src` one array for each rank, whose shapes may differ; None on other ranks.
        src, group_src: the root, as a global rank or as a rank in the group; give at most one; default: global rank 0.
        group, async_op, result and errors: as for `all_reduce`.
    """
    g = groups.world if group is None else member_of(group, "scatter")
    if g is None:
        return None
    if group_src is not None or src is None or g is not groups.world:
        with g.preparing("scatter"):
            src = group_rank(g, "src", src, group_src, 0)
    return g.fast.scatter(tensor, scatter_list, src, async_op)


@overload
def scatter_single(tensor: _J, scatter_tensor: Any = ..., src: Root = ..., group: Group = ...,
    async_op: Sync = ..., group_src: Root = ...) -> _J: ...  # fmt: skip
@overload
def scatter_single(tensor: Any, scatter_tensor: Any = ..., src: Root = ..., group: Group = ...,
    async_op: Sync = ..., group_src: Root = ...) -> None: ...  # fmt: skip
@overload
def scatter_single(tensor: Any, scatter_tensor: Any = ..., src: Root = ..., group: Group = ...,
    async_op: Async = ..., group_src: Root = ...) -> Work: ...  # fmt: skip
@overload
def scatter_single(tensor: Any, scatter_tensor: Any = ..., src: Root = ..., group: Group = ...,
    async_op: bool = ..., group_src: Root = ...) -> Any: ...  # fmt: skip
def scatter_single(
    tensor: Any,
    scatter_tensor: Any = None,
    src: int | None = None,
    group: Group = None,
    async_op: bool = False,
    group_src: int | None = None,
) -> Any:
    """Send equal blocks of an array of rank `src` to all ranks, block r to rank r.

    Args:
        tensor: the array to receive into, with the same fixed-size dtype and number of elements on all ranks.
        scatter_tensor: on `src` an array of `tensor`'s dtype with world_size times as many elements; None elsewhere.
        src, group_src: the root, as a global rank or as a rank in the group; give at most one; default: global rank 0.
        group, async_op, result and errors: as for `all_reduce`.
    """
    g = groups.world if group is None else member_of(group, "scatter_single")
    if g is None:
        return None
    if group_src is not None or src is None or g is not groups.world:
        with g.preparing("scatter_single"):
            src = group_rank(g, "src", src, group_src, 0)
    return g.fast.scatter_single(tensor, scatter_tensor, src, async_op)


@overload
def reduce_scatter(output: Any, input_list: Arrays, op: ReduceOp = ..., group: Group = ...,
    async_op: Sync = ...) -> None: ...  # fmt: skip
@overload
def reduce_scatter(output: Any, input_list: Arrays, op: ReduceOp = ..., group: Group = ...,
    async_op: Async = ...) -> Work: ...  # fmt: skip
@overload
def reduce_scatter(output: Any, input_list: Arrays, op: ReduceOp = ..., group: Group = ...,
    async_op: bool = ...) -> Work | None: ...  # fmt: skip
def reduce_scatter(
    output: Any, input_list: Arrays, op: ReduceOp = ReduceOp.SUM, group: Group = None, async_op: bool = False
) -> Work | None:
    """Reduce `input_list[r]` over all ranks into rank r's `output`.

    Args:
        output: an array with the dtype and number of elements of `input_list[rank]`.
        input_list: one array for each rank; their shapes may differ.
        op, group, async_op and errors: as for `all_reduce`.
    """
    g = groups.world if group is None else member_of(group, "reduce_scatter")
    return None if g is None else g.fast.reduce_scatter(output, input_list, op, async_op)


@overload
def reduce_scatter_tensor(output: Any, input: Any, op: ReduceOp = ..., group: Group = ...,
    async_op: Sync = ..., input_split_sizes: Splits = ...) -> None: ...  # fmt: skip
@overload
def reduce_scatter_tensor(output: Any, input: Any, op: ReduceOp = ..., group: Group = ...,
    async_op: Async = ..., input_split_sizes: Splits = ...) -> Work: ...  # fmt: skip
@overload
def reduce_scatter_tensor(output: Any, input: Any, op: ReduceOp = ..., group: Group = ...,
    async_op: bool = ..., input_split_sizes: Splits = ...) -> Work | None: ...  # fmt: skip
def reduce_scatter_tensor(
    output: Any,
    input: Any,
    op: ReduceOp = ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
    input_split_sizes: Splits = None,
) -> Work | None:
    """Reduce `input` over all ranks, cut the result into parts, and write part r into rank r's `output`.

    Args:
        output: an array of `input`'s dtype, with as many elements as this rank's part.
        input: an array with the same dtype and number of elements on all ranks.
        op, group, async_op and errors: as for `all_reduce`.
        input_split_sizes: for each rank, the number of rows of its part along `input`'s first dimension, like the
            counts of MPI's Reduce_scatter. The list is the same on all ranks, and may have zeros. None: equal parts.

    Examples:
        >>> x, out = np.ones(5), np.empty([2, 3][dist.get_rank()])
        >>> dist.reduce_scatter_tensor(out, x, input_split_sizes=[2, 3])  # two ranks: [2. 2.] and [2. 2. 2.]
    """
    g = groups.world if group is None else member_of(group, "reduce_scatter_tensor")
    if g is None:
        return None
    return g.fast.reduce_scatter_single(output, input, op, async_op, input_split_sizes)


reduce_scatter_single = reduce_scatter_tensor


@overload
def all_to_all(output_tensor_list: Arrays, input_tensor_list: Arrays, group: Group = ...,
    async_op: Sync = ...) -> None: ...  # fmt: skip
@overload
def all_to_all(output_tensor_list: Arrays, input_tensor_list: Arrays, group: Group = ...,
    async_op: Async = ...) -> Work: ...  # fmt: skip
@overload
def all_to_all(output_tensor_list: Arrays, input_tensor_list: Arrays, group: Group = ...,
    async_op: bool = ...) -> Work | None: ...  # fmt: skip
def all_to_all(
    output_tensor_list: Arrays, input_tensor_list: Arrays, group: Group = None, async_op: bool = False
) -> Work | None:
    """Send input p to rank p, and receive output r from rank r.

    Args:
        output_tensor_list, input_tensor_list: lists with one array for each rank. All arrays have the same dtype; their
            shapes may differ.
        group, async_op and errors: as for `all_reduce`.
    """
    g = groups.world if group is None else member_of(group, "all_to_all")
    return None if g is None else g.fast.all_to_all(output_tensor_list, input_tensor_list, async_op)


@overload
def all_to_all_single(output: Any, input: Any, output_split_sizes: Splits = ...,
    input_split_sizes: Splits = ..., group: Group = ..., async_op: Sync = ...) -> None: ...  # fmt: skip
@overload
def all_to_all_single(output: Any, input: Any, output_split_sizes: Splits = ...,
    input_split_sizes: Splits = ..., group: Group = ..., async_op: Async = ...) -> Work: ...  # fmt: skip
@overload
def all_to_all_single(output: Any, input: Any, output_split_sizes: Splits = ...,
    input_split_sizes: Splits = ..., group: Group = ..., async_op: bool = ...) -> Work | None: ...  # fmt: skip
def all_to_all_single(
    output: Any,
    input: Any,
    output_split_sizes: Splits = None,
    input_split_sizes: Splits = None,
    group: Group = None,
    async_op: bool = False,
) -> Work | None:
    """Split `input` along its first dimension, send block p to rank p, and concatenate received blocks in `output`.

    Args:
        output, input: arrays of the same dtype.
        output_split_sizes, input_split_sizes: the number of rows of each block; None or an empty list: equal blocks.
        group, async_op and errors: as for `all_reduce`.

    Examples:
        >>> x = np.arange(4) + 4 * dist.get_rank()
        >>> out = np.empty_like(x)
        >>> dist.all_to_all_single(out, x)  # two ranks: [0 1 4 5] and [2 3 6 7]
    """
    g = groups.world if group is None else member_of(group, "all_to_all_single")
    if g is None:
        return None
    return g.fast.all_to_all_single(output, input, output_split_sizes, input_split_sizes, async_op)


@overload
def all_reduce_coalesced(tensors: Arrays, op: ReduceOp = ..., group: Group = ...,
    async_op: Sync = ...) -> None: ...  # fmt: skip
@overload
def all_reduce_coalesced(tensors: Arrays, op: ReduceOp = ..., group: Group = ...,
    async_op: Async = ...) -> Work: ...  # fmt: skip
@overload
def all_reduce_coalesced(tensors: Arrays, op: ReduceOp = ..., group: Group = ...,
    async_op: bool = ...) -> Work | None: ...  # fmt: skip
def all_reduce_coalesced(
    tensors: Arrays, op: ReduceOp = ReduceOp.SUM, group: Group = None, async_op: bool = False
) -> Work | None:
    """Reduce several arrays of one dtype over all ranks, for the cost of one `all_reduce`.

    Args:
        tensors: arrays of one dtype, with the same numbers of elements on all ranks. An array that is in the list
            several times is reduced once.
        op, group, async_op and errors: as for `all_reduce`.
    """
    g = groups.world if group is None else member_of(group, "all_reduce_coalesced")
    return None if g is None else g.fast.all_reduce_coalesced(tensors, op, async_op)


@overload
def all_gather_coalesced(output_tensor_lists: Sequence[Arrays], input_tensor_list: Arrays,
    group: Group = ..., async_op: Sync = ...) -> None: ...  # fmt: skip
@overload
def all_gather_coalesced(output_tensor_lists: Sequence[Arrays], input_tensor_list: Arrays,
    group: Group = ..., async_op: Async = ...) -> Work: ...  # fmt: skip
@overload
def all_gather_coalesced(output_tensor_lists: Sequence[Arrays], input_tensor_list: Arrays,
    group: Group = ..., async_op: bool = ...) -> Work | None: ...  # fmt: skip
def all_gather_coalesced(
    output_tensor_lists: Sequence[Arrays],
    input_tensor_list: Arrays,
    group: Group = None,
    async_op: bool = False,
) -> Work | None:
    """Gather several arrays of one dtype on every rank, for the cost of one `all_gather`.

    Args:
        output_tensor_lists: array k of rank r goes to `output_tensor_lists[k][r]`.
        input_tensor_list: this rank's arrays.
        group, async_op and errors: as for `all_reduce`.
    """
    g = groups.world if group is None else member_of(group, "all_gather_coalesced")
    return (
        None if g is None else g.fast.all_gather_coalesced(output_tensor_lists, input_tensor_list, async_op)
    )


@overload
def barrier(group: Group = ..., async_op: Sync = ..., device_ids: Splits = ...,
    timeout: Timeout = ...) -> None: ...  # fmt: skip
@overload
def barrier(group: Group = ..., async_op: Async = ..., device_ids: Splits = ...,
    timeout: Timeout = ...) -> Work: ...  # fmt: skip
@overload
def barrier(group: Group = ..., async_op: bool = ..., device_ids: Splits = ...,
    timeout: Timeout = ...) -> Work | None: ...  # fmt: skip
def barrier(
    group: Group = None, async_op: bool = False, device_ids: Splits = None, timeout: Timeout = None
) -> Work | None:
    """Wait until every rank of the group has called `barrier`.

    Args:
        group, async_op and errors: as for `all_reduce`.
        device_ids: must be None; no backend uses devices for barriers.
        timeout: seconds or timedelta; None: the group's timeout.
    """
    g = groups.world if group is None else member_of(group, "barrier")
    if g is None:
        return None
    if device_ids is not None:
        with g.preparing("barrier"):
            raise UsageError(
                f"device_ids is {device_ids!r}, but the backend works on CPU arrays; leave it out"
            )
    if timeout is None:
        return g.fast.barrier(async_op)
    with g.preparing("barrier"):
        limit = positive_seconds(timeout, g.timeout)
    return g.fast.barrier(async_op, limit)


def monitored_barrier(group: Group = None, timeout: Timeout = None, wait_all_ranks: bool = False) -> None:
    """Wait for all ranks of the group, with a timeout for this call; the error names the missing ranks.

    All ranks must call this function: it does not match a `barrier` of another rank.

    Args:
        group and errors: as for `all_reduce`.
        timeout: seconds or timedelta, greater than 0; None: the group's timeout.
        wait_all_ranks: has no effect; the error always names every missing rank.
    """
    g = groups.world if group is None else member_of(group, "monitored_barrier")
    if g is not None:
        with g.preparing("monitored_barrier"):
            limit = positive_seconds(timeout, g.timeout)
        g.fast.monitored_barrier(limit)
