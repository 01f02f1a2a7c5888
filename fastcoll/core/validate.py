"""The border of collectives: arguments become an Operation on adopted arrays, or are refused before a peer hears of it.

Each function takes the group and the caller's arguments. Names in errors are those of torch.distributed's functions:
`root` is src or dst there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import ArrayError, UsageError
from ..interop.arrays import Adopted
from .operands import apart, check_apart, check_dtypes, check_fit, equal_blocks, parts_along_rows, scaled
from .operation import Operation
from .reduce_op import ReduceOp

if TYPE_CHECKING:
    from .group import ProcessGroup


class Request(NamedTuple):
    """A call that is right on this rank.

    Attributes:
        owners: what finishes the outputs.
        target: where the only output goes in the end, if it is a scaled copy.
    """

    operation: Operation
    owners: Sequence[Adopted]
    target: Any = None


def _arrays(items: Sequence[Adopted]) -> tuple[Any, ...]:
    return tuple(item.array for item in items)


def all_reduce(group: ProcessGroup, tensor: Any, op: ReduceOp) -> Request:
    x = group.adopt(tensor, writable=True, renew=True)
    source, plain = scaled(x.array, op)
    target = None if source is x.array else x.array
    return Request(Operation("all_reduce", (source,), (source,), plain), (x,), target)


def reduce(group: ProcessGroup, tensor: Any, root: Any, op: ReduceOp) -> Request:
    root = group.checked_rank("dst", root)
    x = group.adopt(tensor, writable=group.rank == root, renew=True)
    source, plain = scaled(x.array, op)
    return Request(Operation("reduce", (x.array,), (source,), plain, root), (x,))


def scan(group: ProcessGroup, tensor: Any, op: ReduceOp, kind: str = "scan") -> Request:
    x = group.adopt(tensor, writable=True, renew=True)
    source, plain = scaled(x.array, op)
    return Request(Operation(kind, (x.array,), (source,), plain), (x,))


def exscan(group: ProcessGroup, tensor: Any, op: ReduceOp) -> Request:
    return scan(group, tensor, op, "exscan")


def reduce_scatter(group: ProcessGroup, output: Any, input_list: Any, op: ReduceOp) -> Request:
    out = group.adopt(output, writable=True, what="output")
    blocks = group.adopt_list(input_list, group.size, writable=False, what="input_list")
    check_fit("output", out.array, f"input_list[{group.rank}]", blocks[group.rank].array)
    check_dtypes("input_list", blocks, out.array)
    return _reduce_scatter(group, out, _arrays(blocks), op)


def reduce_scatter_single(group: ProcessGroup, output: Any, input: Any, op: ReduceOp) -> Request:
    out = group.adopt(output, writable=True, what="output")
    x = group.adopt(input, writable=False, what="input")
    return _reduce_scatter(group, out, equal_blocks("input", x.array, "output", out.array, group.size), op)


def _reduce_scatter(group: ProcessGroup, out: Adopted, blocks: Sequence[Any], op: ReduceOp) -> Request:
    pairs = [scaled(block, op) for block in blocks]
    sources = apart([source for source, _ in pairs], [out.array], own=group.rank)
    return Request(Operation("reduce_scatter", (out.array,), tuple(sources), pairs[0][1]), (out,))


def broadcast(group: ProcessGroup, tensor: Any, root: Any) -> Request:
    root = group.checked_rank("src", root)
    x = group.adopt(tensor, writable=group.rank != root, renew=True)
    return Request(Operation("broadcast", (x.array,), (x.array,), root=root), (x,))


def all_gather(group: ProcessGroup, output_list: Any, tensor: Any) -> Request:
    outs = group.adopt_list(output_list, group.size, writable=True, what="tensor_list")
    x = group.adopt(tensor, writable=False)
    check_fit("tensor", x.array, f"tensor_list[{group.rank}]", outs[group.rank].array)
    check_dtypes("tensor_list", outs, x.array)
    return _all_gather(group, outs, _arrays(outs), x.array)


def all_gather_single(group: ProcessGroup, output: Any, input: Any) -> Request:
    out = group.adopt(output, writable=True, what="output_tensor")
    x = group.adopt(input, writable=False, what="input_tensor")
    outs = equal_blocks("output_tensor", out.array, "input_tensor", x.array, group.size)
    return _all_gather(group, (out,), outs, x.array)


def _all_gather(group: ProcessGroup, owners: Sequence[Adopted], outs: Sequence[Any], x: Any) -> Request:
    (source,) = apart([x], outs, own=group.rank)
    return Request(Operation("all_gather", tuple(outs), (source,)), owners)


def gather(group: ProcessGroup, tensor: Any, output_list: Any, root: Any) -> Request:
    root = group.checked_rank("dst", root)
    x = group.adopt(tensor, writable=False)
    outs = _on_root(group, output_list, root, writable=True, what="gather_list")
    if group.rank == root:
        check_fit("tensor", x.array, f"gather_list[{root}]", outs[root].array)
        check_dtypes("gather_list", outs, x.array)
    (source,) = apart([x.array], _arrays(outs), own=root)
    return Request(Operation("gather", _arrays(outs), (source,), root=root), outs)


def scatter(group: ProcessGroup, tensor: Any, input_list: Any, root: Any) -> Request:
    root = group.checked_rank("src", root)
    out = group.adopt(tensor, writable=True, renew=True)
    blocks = _on_root(group, input_list, root, writable=False, what="scatter_list")
    if group.rank == root:
        check_fit("tensor", out.array, f"scatter_list[{root}]", blocks[root].array)
        check_dtypes("scatter_list", blocks, out.array)
    sources = apart(_arrays(blocks), [out.array], own=root)
    return Request(Operation("scatter", (out.array,), tuple(sources), root=root), (out,))


def _on_root(group: ProcessGroup, items: Any, root: int, *, writable: bool, what: str) -> Sequence[Adopted]:
    """The list that only the root gives; elsewhere an empty one."""
    if group.rank == root:
        if items is None:
            raise UsageError(
                f"{what} is None on the root (group rank {root}); give a list of {group.size} arrays"
            )
        return group.adopt_list(items, group.size, writable=writable, what=what)
    if items:
        raise UsageError(
            f"{what} must be None or empty on rank {group.rank}; only the root (rank {root}) gives it"
        )
    return ()


def all_to_all(group: ProcessGroup, output_list: Any, input_list: Any) -> Request:
    given, taken, here = "input_tensor_list", "output_tensor_list", group.rank
    outs = group.adopt_list(output_list, group.size, writable=True, what=taken)
    blocks = group.adopt_list(input_list, group.size, writable=False, what=given)
    check_fit(f"{taken}[{here}]", outs[here].array, f"{given}[{here}]", blocks[here].array)
    for name, items in ((taken, outs), (given, blocks)):
        check_dtypes(name, items, blocks[0].array)
    return _all_to_all(outs, _arrays(outs), _arrays(blocks))


def all_to_all_single(
    group: ProcessGroup, output: Any, input: Any, output_splits: Any, input_splits: Any
) -> Request:
    out = group.adopt(output, writable=True, what="output")
    x = group.adopt(input, writable=False, what="input")
    if out.array.dtype != x.array.dtype:
        raise ArrayError(f"output is {out.array.dtype}, input is {x.array.dtype}; they must be the same")
    outs = parts_along_rows("output", out.array, output_splits, group.size)
    blocks = parts_along_rows("input", x.array, input_splits, group.size)
    here = group.rank
    check_fit(f"output part {here}", outs[here], f"input part {here}", blocks[here])
    return _all_to_all((out,), outs, blocks)


def _all_to_all(owners: Sequence[Adopted], outs: Sequence[Any], blocks: Sequence[Any]) -> Request:
    return Request(Operation("all_to_all", tuple(outs), tuple(apart(blocks, outs))), owners)


def all_reduce_coalesced(group: ProcessGroup, tensors: Any, op: ReduceOp) -> Request:
    xs = _of_one_dtype(group, tensors, writable=True, what="tensors")
    arrays = _arrays(xs)
    return Request(Operation("all_reduce_coalesced", arrays, arrays, op), xs)


def all_gather_coalesced(group: ProcessGroup, output_lists: Any, tensors: Any) -> Request:
    given, taken = "input_tensor_list", "output_tensor_lists"
    xs = _of_one_dtype(group, tensors, writable=False, what=given)
    if not isinstance(output_lists, Sequence) or len(output_lists) != len(xs):
        raise UsageError(
            f"{taken} must be a list of {len(xs)} lists of arrays, one for each array of {given}"
        )
    lists = [
        group.adopt_list(outs, group.size, writable=True, what=f"{taken}[{k}]")
        for k, outs in enumerate(output_lists)
    ]
    for k, (outs, x) in enumerate(zip(lists, xs, strict=True)):
        check_dtypes(f"{taken}[{k}]", outs, x.array)
        check_fit(f"{given}[{k}]", x.array, f"{taken}[{k}][{group.rank}]", outs[group.rank].array)
    owners = [out for outs in lists for out in outs]
    check_apart(owners, taken, group.size)
    return Request(Operation("all_gather_coalesced", _arrays(owners), _arrays(xs)), owners)


def _of_one_dtype(group: ProcessGroup, tensors: Any, *, writable: bool, what: str) -> list[Adopted]:
    if not isinstance(tensors, Sequence):
        raise UsageError(f"{what} is of type {type(tensors).__name__}; give a list of arrays")
    if not tensors:
        raise UsageError(f"{what} is empty; give at least one array")
    xs = group.adopt_list(tensors, len(tensors), writable=writable, what=what)
    check_dtypes(what, xs, xs[0].array)
    return xs
