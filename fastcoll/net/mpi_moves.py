"""Moving blocks between the ranks of a communicator: MPI's collective operations, or messages where they can't.

A block is an address and a number of bytes. MPI's operations take counts and displacements of 31 bits, so a rank's
blocks must lie *near* one another, within 2 GiB of address space; otherwise all ranks exchange messages of at
most 1 GiB. All ranks must choose alike, so each tells whether its blocks are near when the call begins.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

from ..operands import Array
from .mpi_kernels import BUSY, address
from .mpi_library import Library
from .mpi_requests import Requests

Block = tuple[int, int]
"""Address and bytes."""

LARGEST = 1 << 30
"""Bytes of a message; MPI counts to 2**31 - 1."""
REACH = (1 << 31) - 1
"""How far apart the ends of near blocks may be."""


def blocks_of(arrays: Sequence[Array]) -> list[Block]:
    """The arrays' blocks; they must be contiguous."""
    return [(address.call(x), x.nbytes) for x in arrays]


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
    """

    def __init__(
        self, library: Library, comm: Any, requests: Requests, tag: int, look: Callable[[], None]
    ) -> None:
        self.size, self.rank = comm.size, comm.rank
        self._library = library
        self._comm = comm
        self._requests = requests
        self._tag = tag
        self._look = look

    def broadcast(self, block: Block, root: int, keep: Any) -> None:
        """The root's block to all."""
        with self._library.lock:
            posted = [self._comm.Ibcast(self._bytes(piece), root) for piece in pieces(block)]
        self._finish(posted, keep)

    def exchange(self, gives: Sequence[Block], takes: Sequence[Block], near: bool, keep: Any) -> None:
        """Block `gives[r]` to each rank r, `takes[r]` from it; they may not overlap."""
        if not near:
            self._by_messages(gives, takes, keep)
            return
        with self._library.lock:
            posted = self._comm.Ialltoallv(self._vector(gives), self._vector(takes))
        self._finish([posted], keep)

    def all_gather(self, takes: Sequence[Block], x: Block, near: bool, keep: Any) -> None:
        """Everybody's x to `takes` of all; x may be `takes[rank]`."""
        copy(x, takes[self.rank])
        if not near:
            self._by_messages([x] * self.size, takes, keep)
            return
        with self._library.lock:
            posted = self._comm.Iallgatherv(self._library.MPI.IN_PLACE, self._vector(takes))
        self._finish([posted], keep)

    def gather(self, takes: Sequence[Block], x: Block, root: int, near: bool, keep: Any) -> None:
        """Everybody's x to `takes` of the root (elsewhere empty); there x may be `takes[rank]`."""
        here = self.rank == root
        if here:
            copy(x, takes[root])
        nothing = [(0, 0)] * self.size
        if not near:
            gives = [x if rank == root else (0, 0) for rank in range(self.size)]
            self._by_messages(gives, takes if here else nothing, keep)
            return
        with self._library.lock:
            mine = self._library.MPI.IN_PLACE if here else self._bytes(x)
            posted = self._comm.Igatherv(mine, self._vector(takes) if here else None, root)
        self._finish([posted], keep)

    def scatter(self, x: Block, gives: Sequence[Block], root: int, near: bool, keep: Any) -> None:
        """`gives` of the root (elsewhere empty), each to its rank's x, which there may be `gives[rank]`."""
        here = self.rank == root
        if here:
            copy(gives[root], x)
        nothing = [(0, 0)] * self.size
        if not near:
            takes = [x if rank == root else (0, 0) for rank in range(self.size)]
            self._by_messages(gives if here else nothing, takes, keep)
            return
        with self._library.lock:
            mine = self._library.MPI.IN_PLACE if here else self._bytes(x)
            posted = self._comm.Iscatterv(self._vector(gives) if here else None, mine, root)
        self._finish([posted], keep)

    def _by_messages(self, gives: Sequence[Block], takes: Sequence[Block], keep: Any) -> None:
        peers = [(self.rank + step) % self.size for step in range(1, self.size)]
        if gives[self.rank][0] and takes[self.rank][0]:
            copy(gives[self.rank], takes[self.rank])
        comm, tag = self._comm, self._tag
        with self._library.lock:
            posted = [comm.Irecv(self._bytes(b), peer, tag) for peer in peers for b in pieces(takes[peer])]
            posted += [comm.Isend(self._bytes(b), peer, tag) for peer in peers for b in pieces(gives[peer])]
        self._finish(posted, keep)

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


def copy(source: Block, target: Block) -> None:
    """Copy within this process; they are the same block, or apart."""
    if source[0] != target[0]:
        ctypes.memmove(target[0], source[0], source[1])


def pieces(block: Block) -> list[Block]:
    """The block as messages of at most LARGEST bytes."""
    begin, nbytes = block
    return [(begin + start, min(LARGEST, nbytes - start)) for start in range(0, nbytes, LARGEST)]
