"""Moving blocks between the ranks of a communicator: MPI's collective operations, or messages where they can't.

A block is an address and a number of bytes. MPI's operations take counts and displacements of 31 bits, so a rank's
blocks must lie *near* one another, within 2 GiB of address space; otherwise all ranks exchange messages of at
most 1 GiB. All ranks must choose alike, so each tells whether its blocks are near when the call begins. Blocks on GPUs
always go by messages (mpi_memory.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from .kernels import BUSY
from .library import Library
from .memory import Block, Memory
from .requests import Requests

LARGEST = 1 << 30
"""Bytes of a message; MPI counts to 2**31 - 1."""
REACH = (1 << 31) - 1
"""How far apart the ends of near blocks may be."""


def are_near(blocks: Sequence[Block]) -> bool:
    """Whether MPI's collective operations can address these blocks."""
    if len(blocks) < 2:
        return all(nbytes <= REACH for _, nbytes in blocks)
    base, end = _span(blocks)
    return end - base <= REACH


def _span(blocks: Sequence[Block]) -> tuple[int, int]:
    there = [(start, start + nbytes) for start, nbytes in blocks if nbytes]
    return (min(start for start, _ in there), max(end for _, end in there)) if there else (0, 0)


class Moves:
    """Moves blocks; every method is collective, blocks until this rank's part is done, and raises what `look` raises.

    Args:
        comm: the communicator.
        tag: of messages in place of collective operations.
        look: called every 50 ms while waiting.
        memory: where the blocks lie.
    """

    def __init__(
        self,
        library: Library,
        comm: Any,
        requests: Requests,
        tag: int,
        look: Callable[[], None],
        memory: Memory,
    ) -> None:
        self.size, self.rank = comm.size, comm.rank
        self._library = library
        self._comm = comm
        self._requests = requests
        self._tag = tag
        self._look = look
        self._memory = memory

    def broadcast(self, block: Block, root: int, keep: Any) -> None:
        """The root's block to all."""
        if self._memory.on_gpu:
            self._along_tree(block, root, keep)
            return
        with self._library.lock:
            posted = [self._comm.Ibcast(self._bytes(piece), root) for piece in pieces(block)]
        self._finish(posted, keep)

    def exchange(self, gives: Sequence[Block], takes: Sequence[Block], near: bool, keep: Any) -> None:
        """Block `gives[r]` to each rank r, `takes[r]` from it; they may not overlap."""
        if not near or self._memory.on_gpu:
            self._by_messages(gives, takes, keep)
            return
        with self._library.lock:
            posted = self._comm.Ialltoallv(self._vector(gives), self._vector(takes))
        self._finish([posted], keep)

    def all_gather(self, takes: Sequence[Block], x: Block, near: bool, keep: Any) -> None:
        """Everybody's x to `takes` of all; x may be `takes[rank]`."""
        if not near or self._memory.on_gpu:
            self._by_messages([x] * self.size, takes, keep)
            return
        self._memory.copy(x, takes[self.rank])
        with self._library.lock:
            posted = self._comm.Iallgatherv(self._library.MPI.IN_PLACE, self._vector(takes))
        self._finish([posted], keep)

    def gather(self, takes: Sequence[Block], x: Block, root: int, near: bool, keep: Any) -> None:
        """Everybody's x to `takes` of the root (elsewhere empty); there x may be `takes[rank]`."""
        here = self.rank == root
        if not near or self._memory.on_gpu:
            gives = [x if rank == root else (0, 0) for rank in range(self.size)]
            self._by_messages(gives, takes if here else [(0, 0)] * self.size, keep)
            return
        if here:
            self._memory.copy(x, takes[root])
        with self._library.lock:
            mine = self._library.MPI.IN_PLACE if here else self._bytes(x)
            posted = self._comm.Igatherv(mine, self._vector(takes) if here else None, root)
        self._finish([posted], keep)

    def scatter(self, x: Block, gives: Sequence[Block], root: int, near: bool, keep: Any) -> None:
        """`gives` of the root (elsewhere empty), each to its rank's x, which there may be `gives[rank]`."""
        here = self.rank == root
        if not near or self._memory.on_gpu:
            takes = [x if rank == root else (0, 0) for rank in range(self.size)]
            self._by_messages(gives if here else [(0, 0)] * self.size, takes, keep)
            return
        if here:
            self._memory.copy(gives[root], x)
        with self._library.lock:
            mine = self._library.MPI.IN_PLACE if here else self._bytes(x)
            posted = self._comm.Iscatterv(self._vector(gives) if here else None, mine, root)
        self._finish([posted], keep)

    def _by_messages(self, gives: Sequence[Block], takes: Sequence[Block], keep: Any) -> None:
        peers = [(self.rank + step) % self.size for step in range(1, self.size)]
        if gives[self.rank][0] and takes[self.rank][0]:
            self._memory.copy(gives[self.rank], takes[self.rank])
        self._post([(peer, gives[peer]) for peer in peers], [(peer, takes[peer]) for peer in peers], keep)

    def _post(
        self, gives: Sequence[tuple[int, Block]], takes: Sequence[tuple[int, Block]], keep: Any
    ) -> None:
        """Send and receive blocks, each to or from a rank."""
        comm, tag = self._comm, self._tag
        with self._library.lock:
            posted = [comm.Irecv(self._bytes(b), peer, tag) for peer, block in takes for b in pieces(block)]
            posted += [comm.Isend(self._bytes(b), peer, tag) for peer, block in gives for b in pieces(block)]
        self._finish(posted, keep)

    def _along_tree(self, block: Block, root: int, keep: Any) -> None:
        """A broadcast along a binomial tree, each rank's block whole before it is sent on."""
        place, step = (self.rank - root) % self.size, 1
        while step < self.size and not place & step:
            step *= 2
        if place:
            self._post([], [((self.rank - step) % self.size, block)], keep)
        steps = [1 << bit for bit in range(step.bit_length() - 1)]
        children = [(self.rank + ahead) % self.size for ahead in steps if place + ahead < self.size]
        self._post([(child, block) for child in reversed(children)], [], keep)

    def _finish(self, posted: Sequence[Any], keep: Any) -> None:
        self._requests.finish(posted, self._look, BUSY, keep)

    def _bytes(self, block: Block) -> list[Any]:
        MPI = self._library.MPI
        return [MPI.buffer.fromaddress(*block), MPI.BYTE]

    def _vector(self, blocks: Sequence[Block]) -> list[Any]:
        """Blocks as MPI's operations with a `v` in their names take them."""
        MPI = self._library.MPI
        base, end = _span(blocks)
        counts = [nbytes for _, nbytes in blocks]
        places = [start - base if nbytes else 0 for start, nbytes in blocks]
        return [MPI.buffer.fromaddress(base, end - base), counts, places, MPI.BYTE]


def pieces(block: Block) -> list[Block]:
    """The block as messages of at most LARGEST bytes."""
    begin, nbytes = block
    return [(begin + start, min(LARGEST, nbytes - start)) for start in range(0, nbytes, LARGEST)]
