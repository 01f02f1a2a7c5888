"""Reductions over MPI: MPI moves the data, our compiled reducers combine it where it lies, in rank order.

MPI's own reductions promise neither an order nor the same bits on all ranks, and lack dtypes and operations. So
a small array goes to all ranks, which all reduce the same; a larger one is cut into a slice for each rank,
which gets it from all, reduces it and gives it to all (as the direct algorithm of Rabenseifner 2004 does for large
arrays): each rank sends and receives 2 (n - 1) / n times the array, as by a ring. Longer arrays go by segments.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .memory import Block, Memory, Reducing
from .moves import Moves

# On a 2-core AMD EPYC (MPICH 5.0.2, Open MPI 5.0.11, one node): two ranks take 56 us for 128 KiB gathered and 58 to 65
# sliced, 20 and 30 us for 4 KiB; with four ranks all are in favour of gathering. 64 MiB take 7.4 ms in segments of
# 4 MiB, 7.9 in those of 2 or 8, 9.0 to 9.5 in those of 1 or 16.
GATHERED = 256 << 10
"""Bytes of all ranks' arrays together up to which everybody gets them all."""
SEGMENT = 4 << 20
"""Bytes of an array that are under way at one time."""


class Reductions:
    """Reductions of the ranks of a group; every method is collective.

    Args:
        moves: the group's.
        memory: where the arrays lie.
    """

    def __init__(self, moves: Moves, memory: Memory) -> None:
        self._moves = moves
        self._memory = memory
        self.fold = memory.fold
        self._size, self._rank = moves.size, moves.rank
        self._scratch: Any = None

    def all_reduce(self, how: Reducing, x: Block, keep: Any) -> None:
        """In place."""
        self._in_segments(how, x, x, None, keep)

    def reduce(self, how: Reducing, out: Block, x: Block, root: int, keep: Any) -> None:
        """Into the root's out, which may be x."""
        self._in_segments(how, out, x, root, keep)

    def _in_segments(self, how: Reducing, out: Block, x: Block, root: int | None, keep: Any) -> None:
        if x[1] * self._size <= GATHERED:
            sources = self._gathered(x, root, keep)
            if root in (None, self._rank):
                self.fold(how, out[0], sources, x[1])
            return
        for start, slices in _segments(x[1], self._size, how.itemsize):
            mine = self._reduced_slice(how, x[0] + start, out[0] + start, slices, root, keep)
            takes = [(out[0] + start + first, nbytes) for first, nbytes in slices]
            if root is None:
                self._moves.all_gather(takes, mine, True, keep)
            else:
                self._moves.gather(takes if self._rank == root else [], mine, root, True, keep)

    def _reduced_slice(
        self, how: Reducing, x: int, out: int, slices: Sequence[Block], root: int | None, keep: Any
    ) -> Block:
        """Get this rank's slice of a segment from all ranks and reduce it: to `out` where that is wanted."""
        first, nbytes = slices[self._rank]
        sources = self._exchanged(x, slices, self._room(self._size * nbytes), keep)
        target = out + first if root in (None, self._rank) else sources[self._rank - 1]
        self.fold(how, target, sources, nbytes)
        return target, nbytes

    def _exchanged(self, x: int, slices: Sequence[Block], room: int, keep: Any) -> list[int]:
        """This rank's slice of all ranks: its own where it is, the others' in the room."""
        first, nbytes = slices[self._rank]
        gives = [(x + place, count) for place, count in slices]
        return self._collected(gives, nbytes, x + first, True, room, keep)

    def _collected(
        self, gives: list[Block], nbytes: int, own: int, near: bool, room: int, keep: Any
    ) -> list[int]:
        """Exchange blocks; the addresses of those that came to this rank, its own being where it was."""
        takes = [(room + rank * nbytes, nbytes) for rank in range(self._size)]
        gives[self._rank] = takes[self._rank] = (0, 0)
        self._moves.exchange(gives, takes, near, (keep, self._scratch))
        return [own if rank == self._rank else room + rank * nbytes for rank in range(self._size)]

    def _gathered(self, x: Block, root: int | None, keep: Any) -> list[int]:
        """The addresses of all ranks' arrays, on the root or everywhere."""
        room = self._room(self._size * x[1])
        takes = [(room + rank * x[1], x[1]) for rank in range(self._size)]
        if root is None:
            self._moves.all_gather(takes, x, True, (keep, self._scratch))
        else:
            self._moves.gather(takes, x, root, True, (keep, self._scratch))
        return [address for address, _ in takes]

    def scan(self, how: Reducing, out: Block, x: Block, exclusive: bool, keep: Any) -> None:
        """Reduction over ranks 0..rank, or 0..rank-1 (rank 0's out stays), into out, which may be x."""
        last = self._rank + (not exclusive)
        if x[1] * self._size <= GATHERED:
            sources = self._gathered(x, None, keep)
            if last:
                self.fold(how, out[0], sources[:last], x[1])
            return
        for start, slices in _segments(x[1], self._size, how.itemsize):
            nbytes = slices[self._rank][1]
            room = self._room(2 * self._size * nbytes)
            sources = self._exchanged(x[0] + start, slices, room, keep)
            gives = [(room + (self._size + rank) * nbytes, nbytes) for rank in range(self._size)]
            for rank in range(self._size):
                if many := rank + (not exclusive):
                    self.fold(how, gives[rank][0], sources[:many], nbytes)
            takes = [(out[0] + start + first, count) for first, count in slices]
            if exclusive:
                gives[0] = (0, 0)
                takes = takes if self._rank else [(0, 0)] * self._size
            self._moves.exchange(gives, takes, True, (keep, self._scratch))

    def reduce_scatter(
        self, how: Reducing, out: Block, blocks: Sequence[Block], near: bool, keep: Any
    ) -> None:
        """Block `rank` of all ranks into out, which may be blocks[rank]."""
        rounds = max(1, -(-sum(nbytes for _, nbytes in blocks) // SEGMENT))
        for turn in range(rounds):
            parts = [_part(nbytes // how.itemsize, turn, rounds, how.itemsize) for _, nbytes in blocks]
            gives = [
                (address + first, nbytes) for (address, _), (first, nbytes) in zip(blocks, parts, strict=True)
            ]
            first, nbytes = parts[self._rank]
            room = self._room(self._size * nbytes)
            sources = self._collected(gives, nbytes, blocks[self._rank][0] + first, near, room, keep)
            self.fold(how, out[0] + first, sources, nbytes)

    def _room(self, nbytes: int) -> int:
        """The address of so much scratch memory, whose contents are lost with the next call of this."""
        room, self._scratch = self._memory.scratch(nbytes)
        return room


def _segments(nbytes: int, ranks: int, itemsize: int) -> list[tuple[int, list[Block]]]:
    """Where each segment begins, and the slice of each rank in it: where that begins, and its bytes."""
    step = max(SEGMENT // itemsize, 1) * itemsize
    return [
        (
            start,
            [_part(min(step, nbytes - start) // itemsize, rank, ranks, itemsize) for rank in range(ranks)],
        )
        for start in range(0, nbytes, step)
    ]


def _part(count: int, index: int, parts: int, itemsize: int) -> Block:
    """Part `index` of `count` elements cut into `parts`: where it begins, and its bytes."""
    first, last = count * index // parts, count * (index + 1) // parts
    return first * itemsize, (last - first) * itemsize
