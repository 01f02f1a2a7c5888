"""What a rank tells the others of the sizes of its call, so that all can compare them."""

from __future__ import annotations

from typing import NamedTuple

from .plans.shape import Shape

MIXED = -1
"""The shape of a call with blocks of different sizes."""


class Sizes(NamedTuple):
    """What stands in a header.

    Attributes:
        shape: bytes that this rank contributes, MIXED if it gives the ranks blocks of different sizes.
        gives, takes: bytes for, and expected from, each rank; zeros where `shape` says everything.
    """

    shape: int
    gives: tuple[int, ...]
    takes: tuple[int, ...]


def sizes_of(call: Shape) -> Sizes:
    """The sizes of a call, whose `nbytes` are those of plans/shape.py."""
    n, rank, root, nbytes = call.size, call.rank, call.root, call.nbytes
    nothing = (0,) * n
    own = tuple(nbytes[0] if r == root else 0 for r in range(n)) if nbytes else nothing
    if call.operation == "reduce_scatter":
        shape = sum(nbytes) if len(set(nbytes)) == 1 else MIXED
        return Sizes(shape, nbytes, (nbytes[rank],) * n)
    if call.operation == "all_gather":
        return Sizes(nbytes[rank], (nbytes[rank],) * n, nbytes)
    if call.operation == "all_to_all":
        return Sizes(sum(nbytes[n:]), nbytes[n:], nbytes[:n])
    if call.operation == "gather":
        gives = tuple(nbytes[rank] if r == root else 0 for r in range(n)) if call.is_root else own
        return Sizes(sum(gives), gives, nbytes if call.is_root else nothing)
    if call.operation == "scatter":
        takes = tuple(nbytes[rank] if r == root else 0 for r in range(n)) if call.is_root else own
        return Sizes(sum(nbytes) if call.is_root else 0, nbytes if call.is_root else nothing, takes)
    return Sizes(call.total, nothing, nothing)
