"""The sizes of a call, which ranks compare: the bytes that a rank sends to each rank, and expects from each rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeVar

from .operations import BLOCKS_TO_BLOCKS, KINDS

X = TypeVar("X")


def sized(kind: str, outputs: Sequence[X], inputs: Sequence[X]) -> Sequence[X]:
    """Return those arrays of a call (core/operation.py) whose sizes the ranks compare."""
    if KINDS[kind].form == BLOCKS_TO_BLOCKS:
        return (*outputs, *inputs)
    return outputs or inputs if KINDS[kind].takes_blocks else inputs or outputs


class Sizes(NamedTuple):
    """The sizes of one rank's call, which the rank sends to all others.

    Attributes:
        shape: bytes that this rank contributes. In a reduce_scatter, MIXED if this rank's blocks differ in size.
        gives: the bytes that this rank sends to each rank. Zeros if it is enough that ranks compare `shape`.
        takes: the bytes that this rank expects from each rank. Zeros in the same case.
    """

    shape: int
    gives: tuple[int, ...]
    takes: tuple[int, ...]


MIXED = -1


def sizes_of(kind: str, size: int, rank: int, nbytes: tuple[int, ...], root: int) -> Sizes:
    """Return the sizes of group rank `rank`'s call, whose arrays (those of `sized`) have `nbytes`."""
    nothing, form = (0,) * size, KINDS[kind]
    if not form.has_blocks:
        return Sizes(sum(nbytes), nothing, nothing)
    if form.form == BLOCKS_TO_BLOCKS:
        return Sizes(sum(nbytes[size:]), nbytes[size:], nbytes[:size])
    if form.root:
        all_of_root = nbytes if rank == root else nothing
        own = nbytes[rank if rank == root else 0]
        with_root = tuple(own if r == root else 0 for r in range(size))
        if form.takes_blocks:
            return Sizes(own, with_root, all_of_root)
        return Sizes(sum(all_of_root), all_of_root, with_root)
    if form.takes_blocks:
        return Sizes(nbytes[rank], (nbytes[rank],) * size, nbytes)
    shape = sum(nbytes) if len(set(nbytes)) == 1 else MIXED
    return Sizes(shape, nbytes, (nbytes[rank],) * size)
