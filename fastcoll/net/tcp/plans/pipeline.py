"""Broadcasts of large arrays to many ranks."""

from __future__ import annotations

from ....core.partition import Span, even
from .circulant import gather_spans
from .parts import segments
from .shape import Shape, array
from .table import Plan, Rows


def chain(shape: Shape) -> Plan:
    """Segments go from rank to rank, all links at work: the array once through each, n - 2 segments' delay."""
    rows, number = Rows(), (shape.rank - shape.root) % shape.size
    whole = Span(0, shape.total)
    parts = segments([whole], shape.itemsize, shape.limits, 1)
    for k in range(parts.number):
        span = parts.of(whole, k)
        place, phase = (array(0), span.offset), k + number
        if number:
            rows.recv(phase - 1, (shape.rank - 1) % shape.size, place, span.nbytes)
        if number < shape.size - 1:
            rows.send(phase, (shape.rank + 1) % shape.size, place, span.nbytes)
    return rows.plan("chain")


def scatter_ring(shape: Shape) -> Plan:
    """Blocks go down a binomial tree, then around the ring, both ways: log2 n + n/2 steps, the array twice.

    Van de Geijn and others: see Thakur, Rabenseifner, Gropp, IJHPCA 19 (2005).
    """
    rows, blocks, steps = _scattered(shape)
    for way, turns in ((1, shape.size // 2), (-1, (shape.size - 1) // 2)):
        for turn in range(turns):
            given, taken = (blocks[(shape.rank - way * k) % shape.size] for k in (turn, turn + 1))
            to, source = (shape.rank + way) % shape.size, (shape.rank - way) % shape.size
            rows.send(steps + turn, to, (array(0), given.offset), given.nbytes)
            rows.recv(steps + turn, source, (array(0), taken.offset), taken.nbytes)
    return rows.plan("scatter and ring")


def scatter_circulant(shape: Shape) -> Plan:
    """Blocks go down a binomial tree, then to all as in circulant.py: 2 log2 n steps, the array twice."""
    rows, blocks, steps = _scattered(shape)
    gather_spans(shape, rows, blocks, steps)
    return rows.plan("scatter and circulant")


def _scattered(shape: Shape) -> tuple[Rows, list[Span], int]:
    """The rows by which each rank gets a block, the block of each rank, and how many phases that takes."""
    rows = Rows()
    blocks = even(shape.total, shape.size, shape.itemsize)
    steps = (shape.size - 1).bit_length()
    _scatter(shape, rows, blocks, steps)
    return rows, [blocks[(rank - shape.root) % shape.size] for rank in range(shape.size)], steps


def _scatter(shape: Shape, rows: Rows, blocks: list[Span], steps: int) -> None:
    """Rank `number` from the root gets block `number`, and those of the ranks below it in the tree."""
    number = (shape.rank - shape.root) % shape.size
    for step in range(steps):
        other, phase = number ^ 1 << step, steps - 1 - step
        taker = max(number, other)
        peer = (other + shape.root) % shape.size
        handed = blocks[taker : taker + (1 << step)]
        if handed:
            place, nbytes = (array(0), handed[0].offset), sum(block.nbytes for block in handed)
            if number == taker:
                rows.recv(phase, peer, place, nbytes)
                break
            rows.send(phase, peer, place, nbytes)
