"""Every rank directly with every other, each reducing a block: reductions in rank order, with no byte too many.

A block's operands are combined in the order 0..n-1 in one pass, so results have the same bits as those of ranks
that share memory, on every rank. Blocks travel in segments; while segment k travels, segment
k-1 is reduced and then sent on with it, while it is in the cache.
"""

from __future__ import annotations

from collections.abc import Sequence

from ....core.partition import Segments, Span, even
from .parts import segments
from .shape import Shape, array
from .table import SCRATCH, Place, Plan, Rows


class _Reduction:
    """A reduce_scatter whose results go further: rank r receives block r of all ranks.

    Segments of others land in SCRATCH, in two sets that take turns.

    Args:
        sources: where this rank's own block r begins, as a buffer and a span.
    """

    def __init__(self, shape: Shape, sources: Sequence[int], blocks: Sequence[Span]) -> None:
        self.shape = shape
        self._sources, self._blocks = sources, blocks
        self.segments = segments(blocks, shape.itemsize, shape.limits, 2 * (shape.size - 1))
        self.landing = 2 * shape.size * self.segments.nbytes

    def collect(self, rows: Rows, k: int) -> None:
        """Phase k: segment k of each block goes to its rank."""
        own = self.segments.of(self._blocks[self.shape.rank], k)
        for peer in self.shape.others:
            span = self.segments.of(self._blocks[peer], k)
            rows.send(k, peer, (self._sources[peer], span.offset), span.nbytes)
            rows.recv(k, peer, self._landing(k, peer), own.nbytes)

    def fold(self, rows: Rows, k: int, place: Place) -> None:
        """Phase k + 1: reduce segment k of this rank's block."""
        rank = self.shape.rank
        own = self.segments.of(self._blocks[rank], k)
        operands = [
            (self._sources[rank], own.offset) if other == rank else self._landing(k, other)
            for other in range(self.shape.size)
        ]
        rows.fold(k + 1, place, own.nbytes, operands)

    def _landing(self, k: int, peer: int) -> Place:
        return SCRATCH, (k % 2 * self.shape.size + peer) * self.segments.nbytes


def reduce_scatter(shape: Shape) -> Plan:
    """Each rank receives all of its block and reduces it: n - 1 blocks in and out."""
    rows = Rows()
    blocks = [Span(0, nbytes) for nbytes in shape.nbytes]
    reduction = _Reduction(shape, [array(1 + rank) for rank in range(shape.size)], blocks)
    for k in range(reduction.segments.number):
        reduction.collect(rows, k)
        reduction.fold(rows, k, (array(0), reduction.segments.of(blocks[shape.rank], k).offset))
    return rows.plan("direct", reduction.landing)


def all_reduce(shape: Shape) -> Plan:
    """As reduce_scatter, and each rank sends every other what it has reduced: 2 (n - 1)/n of the array in and out."""
    if shape.size == 2:
        return _all_reduce_of_two(shape)
    rows, x = Rows(), array(0)
    blocks = even(shape.total, shape.size, shape.itemsize)
    reduction = _Reduction(shape, [x] * shape.size, blocks)
    for k in range(reduction.segments.number):
        reduction.collect(rows, k)
        reduction.fold(rows, k, (x, reduction.segments.of(blocks[shape.rank], k).offset))
        _spread(shape, rows, k + 1, blocks, reduction.segments)
    return rows.plan("direct", reduction.landing)


def _spread(shape: Shape, rows: Rows, phase: int, blocks: Sequence[Span], parts: Segments) -> None:
    """Send the segment that was reduced last to all others, and receive theirs."""
    own = parts.of(blocks[shape.rank], phase - 1)
    for peer in shape.others:
        theirs = parts.of(blocks[peer], phase - 1)
        rows.send(phase, peer, (array(0), own.offset), own.nbytes)
        rows.recv(phase, peer, (array(0), theirs.offset), theirs.nbytes)


def _all_reduce_of_two(shape: Shape) -> Plan:
    """Two ranks: each reduces one half as it arrives, without scratch."""
    rows, x, peer = Rows(), array(0), 1 - shape.rank
    blocks = even(shape.total, 2, shape.itemsize)
    parts = segments(blocks, shape.itemsize, shape.limits, 1)
    for k in range(parts.number):
        own, theirs = (parts.of(blocks[rank], k) for rank in (shape.rank, peer))
        rows.send(k, peer, (x, theirs.offset), theirs.nbytes)
        rows.reduce(k, peer, (x, own.offset), own.nbytes, left=peer < shape.rank)
        rows.send(k + 1, peer, (x, own.offset), own.nbytes)
        rows.recv(k + 1, peer, (x, theirs.offset), theirs.nbytes)
    return rows.plan("direct")


def reduce(shape: Shape) -> Plan:
    """As reduce_scatter, and each rank sends the root what it has reduced: 2 (n - 1)/n of the array into the root."""
    rows, x = Rows(), array(1)
    blocks = even(shape.total, shape.size, shape.itemsize)
    reduction = _Reduction(shape, [x] * shape.size, blocks)
    parts = reduction.segments
    for k in range(parts.number):
        reduction.collect(rows, k)
        own = parts.of(blocks[shape.rank], k)
        place = (array(0), own.offset) if shape.is_root else (SCRATCH, reduction.landing)
        reduction.fold(rows, k, place)
        if not shape.is_root:
            rows.send(k + 1, shape.root, place, own.nbytes)
            continue
        for peer in shape.others:
            theirs = parts.of(blocks[peer], k)
            rows.recv(k + 1, peer, (array(0), theirs.offset), theirs.nbytes)
    return rows.plan("direct", reduction.landing + parts.nbytes)


def reduce_to_root(shape: Shape) -> Plan:
    """The root receives everything and reduces it: for two ranks, where no other way moves less."""
    rows, x = Rows(), array(1)
    blocks = [Span(0, shape.total)]
    parts = segments(blocks, shape.itemsize, shape.limits, shape.size - 1)
    for k in range(parts.number):
        span = parts.of(blocks[0], k)
        if not shape.is_root:
            rows.send(k, shape.root, (x, span.offset), span.nbytes)
            continue
        operands = [
            (x, span.offset) if rank == shape.rank else (SCRATCH, (k % 2 * shape.size + rank) * parts.nbytes)
            for rank in range(shape.size)
        ]
        for peer in shape.others:
            rows.recv(k, peer, operands[peer], span.nbytes)
        rows.fold(k + 1, (array(0), span.offset), span.nbytes, operands)
    return rows.plan("to the root", 2 * shape.size * parts.nbytes if shape.is_root else 0)


def broadcast(shape: Shape) -> Plan:
    """The root sends each other rank a block, which that sends on to the rest: all links carry at most the array."""
    rows, x = Rows(), array(0)
    takers = [rank for rank in range(shape.size) if rank != shape.root]
    blocks = dict(zip(takers, even(shape.total, len(takers), shape.itemsize), strict=True))
    parts = segments(list(blocks.values()), shape.itemsize, shape.limits, shape.size - 1)
    for k in range(parts.number):
        for taker, block in blocks.items():
            span = parts.of(block, k)
            _hand_over(shape, rows, k, taker, (x, span.offset), span.nbytes, takers)
    return rows.plan("direct")


def _hand_over(
    shape: Shape, rows: Rows, k: int, taker: int, place: Place, nbytes: int, takers: Sequence[int]
) -> None:
    """A segment goes from the root to its taker in phase k, and from there to all others in the next."""
    if shape.is_root:
        rows.send(k, taker, place, nbytes)
    elif shape.rank != taker:
        rows.recv(k + 1, taker, place, nbytes)
    else:
        rows.recv(k, shape.root, place, nbytes)
        for peer in shape.others:
            if peer in takers:
                rows.send(k + 1, peer, place, nbytes)
