"""Recursive doubling and halving: log2 n steps with partners at distances 1, 2, 4, ... .

If n is not a power of two, the first ranks form pairs. Before the steps, the even rank of a pair sends its array to the
odd rank, which takes part in the steps for both; after the steps, the even rank receives the result. So every partial
result covers adjacent ranks, and operands are combined in rank order; their grouping (which of them are combined first)
depends on n. Both partners combine the same operands in the same order, so all ranks get the same bits.

Thakur, Rabenseifner, Gropp: Optimization of Collective Communication Operations in MPICH, IJHPCA 19 (2005).
"""

from __future__ import annotations

from ....core.partition import Span, even
from .plan import SCRATCH, Plan, Rows
from .shape import CallShape, array


def _partners(size: int, rank: int) -> tuple[list[int], bool] | None:
    """Return a rank's partner in each step, and whether it acts for another rank.

    The number of ranks that take part is a power of two. Returns None for a rank that does not take part; the next rank
    acts for it.
    """
    steps = size.bit_length() - 1
    joined = size - (1 << steps)
    if rank < 2 * joined and rank % 2 == 0:
        return None
    number = rank // 2 if rank < 2 * joined else rank - joined
    others = [number ^ 1 << step for step in range(steps)]
    return [2 * other + 1 if other < joined else other + joined for other in others], rank < 2 * joined


def _leave_to_next(shape: CallShape, last: int) -> Plan:
    rows = Rows()
    rows.send(0, shape.rank + 1, (array(0), 0), shape.total)
    rows.recv(last, shape.rank + 1, (array(0), 0), shape.total)
    return rows.plan()


def all_reduce(shape: CallShape) -> Plan:
    """Do recursive doubling, which moves the complete array in each of log2 n steps."""
    rows, rank, x, last = Rows(), shape.rank, (array(0), 0), shape.size.bit_length()
    if (partners := _partners(shape.size, rank)) is None:
        return _leave_to_next(shape, last)
    peers, has_joined = partners
    if has_joined:
        rows.recv(0, rank - 1, (SCRATCH, 0), shape.total)
        rows.fold(1, x, shape.total, [(SCRATCH, 0), x])
        rows.send(last, rank - 1, x, shape.total)
    for phase, peer in enumerate(peers, 1):
        landing = (SCRATCH, phase % 2 * shape.total)
        rows.send(phase, peer, x, shape.total)
        rows.recv(phase, peer, landing, shape.total)
        rows.fold(phase + 1, x, shape.total, [landing, x] if peer < rank else [x, landing])
    return rows.plan(2 * shape.total)


def halving(shape: CallShape) -> Plan:
    """Do recursive halving, then doubling.

    The steps of halving move 1/2, 1/4, ... of the array, and those of doubling ..., 1/4, 1/2: in all, 2 (n - 1)/n of
    the array in 2 log2 n steps. If n is not a power of two, a rank that acts for another one also receives and sends
    the complete array once.
    """
    rows, rank, x, last = Rows(), shape.rank, array(0), 2 * shape.size.bit_length() - 1
    if (partners := _partners(shape.size, rank)) is None:
        return _leave_to_next(shape, last)
    peers, has_joined = partners
    if has_joined:
        rows.reduce(0, rank - 1, (x, 0), shape.total, left=True)
        rows.send(last, rank - 1, (x, 0), shape.total)
    kept = Span(0, shape.total)
    for step, peer in enumerate(peers, 1):
        halved = even(kept.nbytes, 2, shape.itemsize)
        low, high = (Span(kept.offset + start, nbytes) for start, nbytes in halved)
        kept, sent = (high, low) if peer < rank else (low, high)
        rows.send(step, peer, (x, sent.offset), sent.nbytes)
        rows.reduce(step, peer, (x, kept.offset), kept.nbytes, left=peer < rank)
        rows.send(last - step, peer, (x, kept.offset), kept.nbytes)
        rows.recv(last - step, peer, (x, sent.offset), sent.nbytes)
    return rows.plan()


def scan(shape: CallShape) -> Plan:
    """Reduce prefixes by recursive doubling.

    In step k, rank r sends its partial result to rank r + 2**k, so a rank sends the array up to log2 n times. Operands
    are combined in rank order; their grouping (which of them are combined first) depends on the rank. Hillis and
    Steele: Data Parallel Algorithms, CACM 29 (1986).
    """
    rows, inclusive = Rows(), shape.operation == "scan"
    out, x, total = (array(0), 0), (array(1), 0), shape.total
    sum_location = out if inclusive else (SCRATCH, 2 * total)
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
        rows.fold(step + 1, sum_location, total, [landing, current])
        if not inclusive:  # after the fold above, which may read x: the output may be x
            rows.fold(step + 1, out, total, [landing, out] if step else [landing])
        current = sum_location
    return rows.plan(3 * total)
