"""Algorithms around the ring: each rank exchanges data only with its two neighbours.

These algorithms move the fewest bytes, but the number of steps grows with n. The reduction of a block goes around the
ring and ends with the rank that gets the block, so the order of the operands differs between blocks. All ranks get the
same bits.

Patarasuk and Yuan: Bandwidth optimal all-reduce algorithms for clusters of workstations, JPDC 69 (2009).
"""

from __future__ import annotations

from collections.abc import Sequence

from ....core.partition import Span, even
from .plan import SCRATCH, Location, Plan, Rows
from .shape import CallShape, array


def all_reduce(shape: CallShape) -> Plan:
    """Reduce, then gather.

    One half of the array goes around the ring in each direction. Takes 2 (n - 1) steps; each rank sends and receives
    2 (n - 1)/n of the array.
    """
    rows, size, rank, x = Rows(), shape.size, shape.rank, array(0)
    for half, direction in zip(even(shape.total, 2, shape.itemsize), (1, -1), strict=True):
        blocks = [
            Span(half.offset + start, nbytes) for start, nbytes in even(half.nbytes, size, shape.itemsize)
        ]
        above, below = (rank + direction) % size, (rank - direction) % size
        for step in range(size - 1):
            sent, received = (blocks[(rank - direction * k) % size] for k in (step, step + 1))
            rows.send(step, above, (x, sent.offset), sent.nbytes)
            rows.reduce(step, below, (x, received.offset), received.nbytes, left=True)
        # Now each rank has the result of the block of its neighbour `above`.
        for step in range(size - 1):
            sent, received = (blocks[(rank - direction * k) % size] for k in (step - 1, step))
            rows.send(size - 1 + step, above, (x, sent.offset), sent.nbytes)
            rows.recv(size - 1 + step, below, (x, received.offset), received.nbytes)
    return rows.plan()


def reduce_scatter(shape: CallShape) -> Plan:
    """Reduce and scatter in n - 1 steps.

    Each rank sends and receives n - 1 blocks. Partial results use two blocks of scratch.
    """
    rows = Rows()
    sources = [(array(1 + rank), 0) for rank in range(shape.size)]
    _reduce_through(shape, rows, sources, shape.nbytes, (array(0), 0))
    return rows.plan(2 * max(shape.nbytes))


def reduce(shape: CallShape) -> Plan:
    """Reduce and scatter, then send the blocks to the root.

    Takes n - 1 steps, and then n - 1 receives on the root.
    """
    rows, size, rank = Rows(), shape.size, shape.rank
    blocks = even(shape.total, size, shape.itemsize)
    longest, own = blocks[0].nbytes, blocks[rank]
    result = (array(0), own.offset) if shape.is_root else (SCRATCH, 2 * longest)
    sources = [(array(1), block.offset) for block in blocks]
    _reduce_through(shape, rows, sources, [block.nbytes for block in blocks], result)
    if not shape.is_root:
        phase = size - 1 + ((shape.root - rank) % size - 1) // shape.limits.peers
        rows.send(phase, shape.root, result, own.nbytes)
        return rows.plan(3 * longest)
    for step in range(1, size):
        peer = (rank - step) % size
        phase = size - 1 + (step - 1) // shape.limits.peers
        rows.recv(phase, peer, (array(0), blocks[peer].offset), blocks[peer].nbytes)
    return rows.plan(2 * longest)


def _reduce_through(
    shape: CallShape, rows: Rows, sources: Sequence[Location], nbytes: Sequence[int], result: Location
) -> None:
    """Reduce in phases 0 to n - 1, without writing into `sources`.

    Block `rank` of the result is written to `result`.
    """
    size, rank = shape.size, shape.rank
    stride = max(nbytes)
    partial = sources[(rank - 1) % size]
    for step in range(size - 1):
        sent, received = (rank - step - 1) % size, (rank - step - 2) % size
        landing = (SCRATCH, step % 2 * stride)
        rows.send(step, (rank + 1) % size, partial, nbytes[sent])
        rows.recv(step, (rank - 1) % size, landing, nbytes[received])
        goal = result if received == rank else landing
        rows.fold(step + 1, goal, nbytes[received], [landing, sources[received]])
        partial = landing


def all_gather(shape: CallShape) -> Plan:
    """Gather complete blocks in both directions at once.

    Takes n/2 steps; each rank sends and receives n - 1 blocks.
    """
    rows, rank = Rows(), shape.rank
    rows.copy(0, (array(rank), 0), (array(shape.size), 0), shape.nbytes[rank])
    gather_around(rows, rank, [(array(each), 0) for each in range(shape.size)], shape.nbytes)
    return rows.plan()


def gather_around(
    rows: Rows, rank: int, locations: Sequence[Location], nbytes: Sequence[int], first: int = 0
) -> None:
    """From phase `first` on, send the contents of all locations to all ranks.

    At the beginning, each rank has only the contents of its own location.
    """
    size = len(locations)
    for direction, steps in ((1, size // 2), (-1, (size - 1) // 2)):
        for step in range(steps):
            sent, received = (rank - direction * step) % size, (rank - direction * (step + 1)) % size
            rows.send(first + step, (rank + direction) % size, locations[sent], nbytes[sent])
            rows.recv(first + step, (rank - direction) % size, locations[received], nbytes[received])
