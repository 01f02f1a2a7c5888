"""Recursive doubling and halving: log2 n steps with partners at distances 1, 2, 4, ... .

Where n is no power of two, the first ranks are joined in pairs: the even one hands its array to the odd one and gets
the result back in the end. So every partial result covers adjacent ranks, and operands are combined in rank order;
which ones are combined first depends on n. Both partners combine the same operands in the same way: all ranks have
the same bits.

Thakur, Rabenseifner, Gropp: Optimization of Collective Communication Operations in MPICH, IJHPCA 19 (2005).
"""

from __future__ import annotations

from ....core.partition import Span
from .shape import Shape, array
from .table import SCRATCH, Place, Plan, Rows


class Halves:
    """The ranks that take part, a power of two of them; the others are joined to the rank after them.

    Attributes:
        steps: log2 of how many take part.
    """

    def __init__(self, size: int) -> None:
        self.steps = size.bit_length() - 1
        self._joined = size - (1 << self.steps)

    def is_joined(self, rank: int) -> bool:
        """Whether a rank leaves its part to the next one."""
        return rank < 2 * self._joined and rank % 2 == 0

    def has_joined(self, rank: int) -> bool:
        """Whether a rank works for the one before it as well."""
        return rank < 2 * self._joined and rank % 2 == 1

    def partner(self, rank: int, step: int) -> int:
        """With whom a rank exchanges in a step."""
        number = rank // 2 if rank < 2 * self._joined else rank - self._joined
        other = number ^ 1 << step
        return 2 * other + 1 if other < self._joined else other + self._joined


def all_reduce(shape: Shape) -> Plan:
    """Recursive doubling: the whole array in each of log2 n steps."""
    rows, halves, x = Rows(), Halves(shape.size), (array(0), 0)
    last = halves.steps + 1
    if halves.is_joined(shape.rank):
        _leave_to_next(rows, shape, last)
        return rows.plan("recursive doubling")
    peers = [halves.partner(shape.rank, step) for step in range(halves.steps)]
    if halves.has_joined(shape.rank):
        rows.recv(0, shape.rank - 1, (SCRATCH, 0), shape.total)
        _combine(rows, 1, shape.total, x, (SCRATCH, 0), True)
        rows.send(last, shape.rank - 1, x, shape.total)
    for phase, peer in enumerate(peers, 1):
        landing = (SCRATCH, phase % 2 * shape.total)
        rows.send(phase, peer, x, shape.total)
        rows.recv(phase, peer, landing, shape.total)
        _combine(rows, phase + 1, shape.total, x, landing, peer < shape.rank)
    return rows.plan("recursive doubling", 2 * shape.total)


def _leave_to_next(rows: Rows, shape: Shape, last: int) -> None:
    rows.send(0, shape.rank + 1, (array(0), 0), shape.total)
    rows.recv(last, shape.rank + 1, (array(0), 0), shape.total)


def _combine(rows: Rows, phase: int, nbytes: int, x: Place, received: Place, left: bool) -> None:
    rows.fold(phase, x, nbytes, [received, x] if left else [x, received])


def halving(shape: Shape) -> Plan:
    """Recursive halving, then doubling: n/2, n/4, ... of the array in 2 log2 n steps, 2 (n - 1)/n of it in all.

    Where n is no power of two, ranks that work for two receive and send the whole array besides.
    """
    rows, halves, x = Rows(), Halves(shape.size), array(0)
    last = 2 * halves.steps + 1
    if halves.is_joined(shape.rank):
        _leave_to_next(rows, shape, last)
        return rows.plan("halving")
    if halves.has_joined(shape.rank):
        rows.reduce(0, shape.rank - 1, (x, 0), shape.total, left=True)
        rows.send(last, shape.rank - 1, (x, 0), shape.total)
    kept = Span(0, shape.total)
    for step in range(halves.steps):
        peer = halves.partner(shape.rank, step)
        kept, given = _halved(kept, shape.itemsize, peer < shape.rank)
        rows.send(step + 1, peer, (x, given.offset), given.nbytes)
        rows.reduce(step + 1, peer, (x, kept.offset), kept.nbytes, left=peer < shape.rank)
        back = last - 1 - step
        rows.send(back, peer, (x, kept.offset), kept.nbytes)
        rows.recv(back, peer, (x, given.offset), given.nbytes)
    return rows.plan("halving")


def _halved(span: Span, itemsize: int, upper: bool) -> tuple[Span, Span]:
    """The half that the lower or upper one of two partners keeps, and the other one."""
    middle = span.nbytes // itemsize // 2 * itemsize
    low, high = Span(span.offset, middle), Span(span.offset + middle, span.nbytes - middle)
    return (high, low) if upper else (low, high)


def scan(shape: Shape) -> Plan:
    """Prefix reduction: in step k every rank sends what it has to the rank 2**k further; the array log2 n times.

    Operands are combined in rank order; which ones first depends on the rank.
    Hillis and Steele: Data Parallel Algorithms, CACM 29 (1986).
    """
    rows, inclusive = Rows(), shape.operation == "scan"
    out, x, total = (array(0), 0), (array(1), 0), shape.total
    sum_place = out if inclusive else (SCRATCH, 2 * total)
    current = x
    if inclusive and shape.rank == 0:
        rows.copy(0, out, x, total)
    for step in range((shape.size - 1).bit_length()):
        below, landing = shape.rank - (1 << step), (SCRATCH, step % 2 * total)
        if shape.rank + (1 << step) < shape.size:
            rows.send(step, shape.rank + (1 << step), current, total)
        if below < 0:
            continue
        rows.recv(step, below, landing, total)
        rows.fold(step + 1, sum_place, total, [landing, current])
        if not inclusive:  # after the sum, since out may be x
            rows.fold(step + 1, out, total, [landing, out] if step else [landing])
        current = sum_place
    return rows.plan("doubling scan", 3 * total)
