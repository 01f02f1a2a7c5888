"""Functions that import and check the array arguments of collectives; group.py has the checks of a single line."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from ..arrays.arrays import ImportedArray, import_list
from ..errors import ArrayError, UsageError
from . import operands
from .operands import Array, arrays_of
from .operation import Call, Operation
from .refusals import Preparing
from .work import Work


class Caller(Protocol):
    """The part of ProcessGroup (group.py) that this file and trees.py use to check, plan and run a call."""

    fast: Any
    ranks: tuple[int, ...]
    rank: int

    @property
    def size(self) -> int: ...

    def import_array(
        self, x: Any, *, writable: bool, what: str = "tensor", functional: bool = False
    ) -> ImportedArray: ...

    def import_list(self, xs: Sequence[Any], n: int, *, writable: bool, what: str) -> list[ImportedArray]: ...

    def checked_rank(self, what: str, rank: Any) -> int: ...

    def preparing(self, name: str) -> Preparing: ...

    def planned(self, operation: Operation, timeout: float | None = None) -> Call: ...

    def run(self, name: str, call: Call, owners: Sequence[ImportedArray], async_op: bool) -> Work | None: ...


def on_root(
    group: Caller, given: Any, root: int, own: ImportedArray, *, writable: bool, what: str
) -> tuple[Sequence[ImportedArray], tuple[Any, ...]]:
    """Import the argument that only the root gives: a list of arrays, or one array of equal blocks.

    Args:
        given: the argument.
        own: this rank's other array, imported; its size must fit this rank's block, and all dtypes must be equal.
        what: the argument's name. If the name ends with "_list", the argument must be a list.

    Returns:
        On the root, the imported arrays, and one block for each rank; on other ranks, two empty sequences.
    """
    is_list = what.endswith("_list")
    if group.rank != root:
        if given if is_list else given is not None:
            expected = "None or empty" if is_list else "None"
            raise UsageError(
                f"{what} must be {expected} on rank {group.ranks[group.rank]}; only the root (rank "
                f"{group.ranks[root]}) gives it"
            )
        return (), ()
    if given is None:
        cure = f"a list of {group.size} arrays" if is_list else f"{group.size} times the elements of tensor"
        raise UsageError(f"{what} is None on the root (rank {group.ranks[root]}); give {cure}")
    if not is_list:
        single = group.import_array(given, writable=writable, what=what)
        return (single,), operands.equal_blocks(what, single.array, "tensor", own.array, group.size)
    items = group.import_list(given, group.size, writable=writable, what=what)
    operands.check_fit("tensor", own.array, f"{what}[{root}]", items[root].array)
    operands.check_dtypes(what, items, own.array)
    return items, arrays_of(items)


def of_one_dtype(group: Caller, tensors: Any, *, writable: bool, what: str) -> list[ImportedArray]:
    """Import a list of arrays, which must have the same dtype and must not be empty."""
    if not isinstance(tensors, Sequence):
        raise UsageError(f"{what} is of type {type(tensors).__name__}; give a list of arrays")
    if not tensors:
        raise UsageError(f"{what} is empty; give at least one array")
    xs = import_list(tensors, len(tensors), writable=writable, what=what, import_array=group.import_array)
    operands.check_dtypes(what, xs, xs[0].array)
    return xs


def gathered_lists(
    group: Caller, output_lists: Any, xs: Sequence[ImportedArray], given: str, taken: str
) -> list[ImportedArray]:
    """Import `output_lists`: for each array of `xs`, a list of one output for each rank.

    Args:
        given, taken: the names of the arguments that have `xs` and `output_lists`, for error texts.
    """
    if not isinstance(output_lists, Sequence) or len(output_lists) != len(xs):
        raise UsageError(
            f"{taken} must be a list of {len(xs)} lists of arrays, one for each array of {given}"
        )
    owners = []
    for k, (lists, x) in enumerate(zip(output_lists, xs, strict=True)):
        outs = group.import_list(lists, group.size, writable=True, what=f"{taken}[{k}]")
        operands.check_dtypes(f"{taken}[{k}]", outs, x.array)
        operands.check_fit(f"{given}[{k}]", x.array, f"{taken}[{k}][{group.rank}]", outs[group.rank].array)
        owners += outs
    operands.check_apart(owners, taken, group.size)
    return owners


def rows_for_ranks(
    group: Caller,
    output: ImportedArray,
    input: ImportedArray,
    output_sizes: Sequence[int] | None,
    input_sizes: Sequence[int] | None,
) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
    """Divide the arrays of all_to_all_single along their first dimension, into a block for each rank."""
    if output.array.dtype != input.array.dtype:
        raise ArrayError(
            f"output is {output.array.dtype}, input is {input.array.dtype}; they must be the same"
        )
    outs = operands.parts_along_rows("output", output.array, output_sizes, group.size)
    blocks = operands.parts_along_rows("input", input.array, input_sizes, group.size)
    here = group.rank
    operands.check_fit(f"output part {here}", outs[here], f"input part {here}", blocks[here])
    whole = operands.apart([input.array], [output.array])[0]
    if whole is not input.array:  # they share memory
        blocks = operands.parts_along_rows("input", whole, input_sizes, group.size)
    return tuple(outs), tuple(blocks)
