"""The collectives as functions, named and called as in torch.distributed.

An array is anything that can be adopted without a copy (NumPy, or any array that speaks DLPack or the buffer
protocol); the result is written into the arrays that were given. All ranks of the group make the same calls in the
same order. Where they do not, every rank raises MismatchError before data moves.

What all of them share is explained by `all_reduce` alone: `op`, `group`, `async_op`, what is returned and raised. The
overloads are for type checkers: what `async_op` makes of the result. That a rank outside the group gets None instead of
a Work is left to the reader.

The functions do little themselves, since they are on the way of the smallest messages: a rank of the default
group is its global rank, and is handed on without a look.
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
    """An array of JAX, as type checkers can tell it from others: calls in place return a new one."""

    @property
    def sharding(self) -> Any: ...


_J = TypeVar("_J", bound=_Immutable)
Root: TypeAlias = int | None
Arrays: TypeAlias = Sequence[Any]
Tree: TypeAlias = dict[Any, Any] | list[Any] | tuple[Any, ...]
Splits: TypeAlias = Sequence[int] | None


@overload
def all_reduce(tensor: _J, op: ReduceOp = ..., group: Group = ..., async_op: Sync = ...) -> _J: ...
@overload
def all_reduce(tensor: Tree, op: ReduceOp = ..., group: Group = ..., async_op: Sync = ...) -> Any: ...
@overload
def all_reduce(tensor: Any, op: ReduceOp = ..., group: Group = ..., async_op: Sync = ...) -> None: ...
@overload
def all_reduce(tensor: Any, op: ReduceOp = ..., group: Group = ..., async_op: Async = ...) -> Work: ...
@overload
def all_reduce(tensor: Any, op: ReduceOp = ..., group: Group = ..., async_op: bool = ...) -> Any: ...
def all_reduce(tensor: Any, op: ReduceOp = ReduceOp.SUM, group: Group = None, async_op: bool = False) -> Any:
    """Reduce an array over all ranks; every rank gets the result in place, with the same bits.

    Args:
        tensor: same dtype and number of elements on all ranks. Or a dict, list or tuple of arrays, of several dtypes
            and nested as it may be, of the same structure on all ranks; with immutable arrays (JAX's) in it, a new
            one is returned.
        op: a predefined ReduceOp, ReduceOp.PREMUL_SUM(factor) or ReduceOp.custom(function).
        group: from `new_group`; None is the world. A rank outside it is warned, and does nothing.
        async_op: return a Work at once, not None when done; the arrays belong to it until its `wait()` returns.

    Returns:
        None, or a new array in place of an immutable one (JAX's); with `async_op` a Work.

    Raises:
        UsageError: a wrong argument (ArrayError: array), or calls that differ (MismatchError); the group stays usable.
        GroupError: a rank died (PeerDiedError), or came too late (CollectiveTimeoutError); the group has failed.

    Example:
        >>> x = np.full(3, dist.get_rank() + 1.0)
        >>> dist.all_reduce(x)  # two ranks: array([3., 3., 3.])
    """
    g = groups.world if group is None else member_of(group, "all_reduce")
    return None if g is None else g.fast.all_reduce(tensor, op, async_op)


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
    """Copy the array of rank `src` into everybody's.

    Args:
        tensor: same dtype and number of elements on all ranks; any fixed-size dtype. Or a dict, list or tuple of
            arrays, as for `all_reduce`.
        src, group_src: whose array, as a global rank or as a rank in the group; give one.
        group, async_op, and what it returns and raises: as for `all_reduce`.
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
    """Reduce an array over all ranks into that of rank `dst`; the others' stay as they are.

    Args:
        tensor: same dtype and number of elements on all ranks.
        dst, group_dst: who gets the result, as a global rank or as a rank in the group; give one.
        op, group, async_op, and what it returns and raises: as for `all_reduce`.
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
    """Inclusive prefix reduction, in place: rank r gets the reduction over ranks 0..r.

    Args:
        tensor: same dtype and number of elements on all ranks.
        op, group, async_op, and what it returns and raises: as for `all_reduce`.

    Example:
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
    """Exclusive prefix reduction, in place: rank r gets ranks 0..r-1; rank 0's array stays as it is.

    Args:
        tensor: same dtype and number of elements on all ranks.
        op, group, async_op, and what it returns and raises: as for `all_reduce`.
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
    """Every rank gets the arrays of all: rank r's goes to `tensor_list[r]`.

    `all_gather(tensor)` returns a list of new arrays of the same dtype and library (NumPy's for most): the ranks tell
    one another their shapes first. Dtypes and numbers of dimensions must agree, or all ranks get a MismatchError.

    Args:
        tensor_list: one array a rank, of `tensor`'s dtype; shapes may differ from rank to rank.
        tensor: this rank's array; any fixed-size dtype.
        group, async_op, and what it raises: as for `all_reduce`.

    Example:
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
    """Every rank gets the arrays of all, one after the other in one array.

    Args:
        output_tensor: `input_tensor`'s dtype and world_size times its elements, concatenated or stacked.
        input_tensor: same number of elements on all ranks.
        group, async_op, and what it raises: as for `all_reduce`.
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
    """Rank `dst` gets the arrays of all.

    Args:
        tensor: this rank's array; any fixed-size dtype.
        gather_list: on `dst` one array a rank, shapes may differ; None elsewhere.
        dst, group_dst: who gets them, as a global rank or as a rank in the group; give one; none: global rank 0.
        group, async_op, and what it raises: as for `all_reduce`.
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
    """`gather` of arrays of one size into one array.

    Args:
        tensor: this rank's array; same size and any fixed-size dtype on all ranks.
        gather_tensor: on `dst` n times the elements of `tensor`, rank after rank, and its dtype; None elsewhere.
        dst, group_dst: who gets them, as a global rank or as a rank in the group; give one; none: global rank 0.
        group, async_op, and what it raises: as for `all_reduce`.
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
    """Rank r gets `scatter_list[r]` of rank `src`.

    Args:
        tensor: receives; any fixed-size dtype.
        scatter_list: on `src` one array a rank, shapes may differ; None elsewhere.
        src, group_src: whose list, as a global rank or as a rank in the group; give one; none: global rank 0.
        group, async_op, and what it returns and raises: as for `all_reduce`.
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
    """`scatter` of the equal parts of one array.

    Args:
        tensor: receives; same size and any fixed-size dtype on all ranks.
        scatter_tensor: on `src` n times the elements of `tensor`, rank after rank, and its dtype; None elsewhere.
        src, group_src: whose array, as a global rank or as a rank in the group; give one; none: global rank 0.
        group, async_op, and what it returns and raises: as for `all_reduce`.
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
        output: dtype and number of elements of `input_list[rank]`.
        input_list: one array a rank; shapes may differ from item to item.
        op, group, async_op, and what it raises: as for `all_reduce`.
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
        output: of `input`'s dtype, with the elements of this rank's part.
        input: same dtype and number of elements on all ranks.
        op, group, async_op, and what it raises: as for `all_reduce`.
        input_split_sizes: rows of each rank's part along `input`'s first dimension, the same on all ranks, as the
            counts of MPI's Reduce_scatter; 0 is allowed. None: equal parts.

    Example:
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
    """Send item p to rank p, and receive item r from rank r.

    Args:
        output_tensor_list, input_tensor_list: one array a rank, all of one dtype; all shapes may differ.
        group, async_op, and what it raises: as for `all_reduce`.
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
    """Cut `input` along its first dimension, send part p to rank p, and join what comes in `output`.

    Args:
        output, input: of one dtype.
        output_split_sizes, input_split_sizes: rows of each part; None: equal parts.
        group, async_op, and what it raises: as for `all_reduce`.

    Example:
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
    """`all_reduce` of several arrays of one dtype at the price of one.

    Args:
        tensors: same dtype and numbers of elements on all ranks. An array that is given several times is reduced once.
        op, group, async_op, and what it raises: as for `all_reduce`.
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
    """`all_gather` of several arrays of one dtype at the price of one.

    Args:
        output_tensor_lists: array k of rank r goes to `output_tensor_lists[k][r]`.
        input_tensor_list: this rank's arrays.
        group, async_op, and what it raises: as for `all_reduce`.
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
    """Wait until every rank of the group has called.

    Args:
        group, async_op, and what it raises: as for `all_reduce`.
        device_ids: must be None; no backend here works on devices.
        timeout: seconds or timedelta; None: the group's own.
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
    """A barrier with a timeout of its own, which names the ranks that did not come. It matches no `barrier`.

    Args:
        group, and what it raises: as for `all_reduce`.
        timeout: seconds or timedelta, greater than 0; None: the group's own.
        wait_all_ranks: makes no difference; every missing rank is named in any case.
    """
    g = groups.world if group is None else member_of(group, "monitored_barrier")
    if g is not None:
        with g.preparing("monitored_barrier"):
            limit = positive_seconds(timeout, g.timeout)
        g.fast.monitored_barrier(limit)
