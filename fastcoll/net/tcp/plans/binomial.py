"""Rooted operations among many ranks: binomial trees for small data, and broadcasts of large arrays.

Ranks are numbered from the root, which is number 0. Before step k of a reduction, a rank whose number is an odd
multiple of 2**k has combined its own array and those of the next 2**k - 1 ranks. In step k, it sends the result to the
rank whose number is 2**k lower. In step k of a broadcast, each of the first 2**k ranks sends to the rank whose number
is 2**k higher. A scatter runs the steps of a reduction backwards.
"""

from __future__ import annotations

from ....core.partition import Span, even
from .circulant import gather_spans
from .plan import SCRATCH, Plan, Rows
from .ring import gather_around
from .shape import CallShape, array


def _steps(size: int) -> int:
    return (size - 1).bit_length()


def _number(shape: CallShape) -> int:
    return (shape.rank - shape.root) % shape.size


def broadcast(shape: CallShape) -> Plan:
    """Broadcast in a binomial tree; each step moves the complete array."""
    rows, x, number = Rows(), (array(0), 0), _number(shape)
    for step in range(_steps(shape.size)):
        other = number ^ 1 << step
        peer = (other + shape.root) % shape.size
        if number < 1 << step and other < shape.size:
            rows.send(step, peer, x, shape.total)
        elif number >> step == 1:
            rows.recv(step, peer, x, shape.total)
    return rows.plan()


def reduce(shape: CallShape) -> Plan:
    """Reduce in a binomial tree; each step moves the complete array.

    Arrays are combined in the order of the numbers, which begins with the root of the tree. In an ordered call, the
    root of the tree is rank 0, so this is rank order; rank 0 then sends the result to the root of the call.
    """
    rows, x, total = Rows(), (array(1), 0), shape.total
    head = 0 if shape.ordered else shape.root
    number, steps = (shape.rank - head) % shape.size, _steps(shape.size)
    result = (array(0), 0) if shape.rank == head == shape.root else (SCRATCH, 2 * total)
    current = x
    for step in range(steps):
        other = number ^ 1 << step
        peer, landing = (other + head) % shape.size, (SCRATCH, step % 2 * total)
        if number >> step & 1:
            rows.send(step, peer, current, total)
            break
        if other < shape.size:
            rows.recv(step, peer, landing, total)
            rows.fold(step + 1, result, total, [current, landing])
            current = result
    if head != shape.root and shape.rank == head:
        rows.send(steps, shape.root, current, total)
    elif head != shape.root and shape.is_root:
        rows.recv(steps, head, (array(0), 0), total)
    return rows.plan(3 * total)


def chain(shape: CallShape) -> Plan:
    """Broadcast along a chain: each rank sends every segment on to the next rank.

    Each link carries the array once. The last rank of the chain receives a segment n - 2 steps after the second rank
    has received it.
    """
    rows, number, complete = Rows(), _number(shape), Span(0, shape.total)
    segments = shape.segments([complete], 1)
    for k in range(segments.number):
        span = segments.of(complete, k)
        location, phase = (array(0), span.offset), k + number
        if number:
            rows.recv(phase - 1, (shape.rank - 1) % shape.size, location, span.nbytes)
        if number < shape.size - 1:
            rows.send(phase, (shape.rank + 1) % shape.size, location, span.nbytes)
    return rows.plan()


def scatter_ring(shape: CallShape) -> Plan:
    """Scatter blocks down a binomial tree, then gather around the ring.

    Takes log2 n + n/2 steps, and moves the array twice. The algorithm is by van de Geijn and others: see Thakur,
    Rabenseifner, Gropp, IJHPCA 19 (2005).
    """
    rows, blocks = _scattered(shape)
    locations = [(array(0), block.offset) for block in blocks]
    gather_around(rows, shape.rank, locations, [block.nbytes for block in blocks], _steps(shape.size))
    return rows.plan()


def scatter_circulant(shape: CallShape) -> Plan:
    """Scatter blocks down a binomial tree, then gather as in circulant.py.

    Takes 2 log2 n steps, and moves the array twice.
    """
    rows, blocks = _scattered(shape)
    gather_spans(rows, shape.rank, blocks, array(0), _steps(shape.size))
    return rows.plan()


def _scattered(shape: CallShape) -> tuple[Rows, list[Span]]:
    """Return the rows that scatter array 0 down the tree, and the block of each rank."""
    rows, number, steps = Rows(), _number(shape), _steps(shape.size)
    blocks = even(shape.total, shape.size, shape.itemsize)
    for step in range(steps):
        other, phase = number ^ 1 << step, steps - 1 - step
        taker, peer = max(number, other), (other + shape.root) % shape.size
        if handed := blocks[taker : taker + (1 << step)]:
            location, nbytes = (array(0), handed[0].offset), sum(block.nbytes for block in handed)
            if number == taker:
                rows.recv(phase, peer, location, nbytes)
                break
            rows.send(phase, peer, location, nbytes)
    return rows, [blocks[(rank - shape.root) % shape.size] for rank in range(shape.size)]
