"""The sizes of a call, which the ranks compare: the bytes that each rank sends to and expects from each other rank."""

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
    """The sizes of one rank's call, which it sends to the others.

    Attributes:
        shape: bytes that this rank contributes; MIXED if its blocks for the ranks differ in size.
        gives: the bytes that this rank sends to each rank; zeros if comparing `shape` is enough.
        takes: the bytes that this rank expects from each rank.
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
