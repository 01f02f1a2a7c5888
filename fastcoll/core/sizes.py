"""The sizes of a call between ranks, in bytes: what each rank gives to and takes from each, for all to compare."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeVar

from .operations import BLOCKS_TO_BLOCKS, KINDS

X = TypeVar("X")


def sized(kind: str, outputs: Sequence[X], inputs: Sequence[X]) -> Sequence[X]:
    """Of the arrays of a call (core/operation.py), those whose sizes count."""
    if KINDS[kind].form == BLOCKS_TO_BLOCKS:
        return (*outputs, *inputs)
    return outputs or inputs if KINDS[kind].takes_blocks else inputs or outputs


class Sizes(NamedTuple):
    """The sizes of a rank's call, which it sends to the others so that all can compare them."""

    shape: int  # bytes that this rank contributes, MIXED if it gives the ranks blocks of different sizes
    gives: tuple[int, ...]  # bytes for each rank, zeros where `shape` says everything
    takes: tuple[int, ...]  # and expected from each


MIXED = -1


def sizes_of(kind: str, size: int, rank: int, nbytes: tuple[int, ...], root: int) -> Sizes:
    """The sizes of a call of the group rank `rank`, whose arrays that count (`sized`) have `nbytes`."""
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
