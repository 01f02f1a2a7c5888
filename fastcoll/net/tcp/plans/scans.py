"""Prefix reductions: rank r gets the reduction of ranks 0..r (scan) or 0..r-1 (exscan, where rank 0 gets nothing)."""

from __future__ import annotations

from ....core.partition import Span, even
from .parts import segments
from .shape import Shape, array
from .table import SCRATCH, Place, Plan, Rows


def upwards(shape: Shape) -> Plan:
    """Each rank sends its array to all higher ones, which combine what they have got in rank order, in one pass.

    For two ranks, where no other way moves less.
    """
    rows, parts = Rows(), segments([Span(0, shape.total)], shape.itemsize, shape.limits, shape.size - 1)
    for k in range(parts.number):
        span = parts.of(Span(0, shape.total), k)
        x = (array(1), span.offset)
        landing = [(SCRATCH, (k % 2 * shape.size + rank) * parts.nbytes) for rank in range(shape.rank)]
        for peer in range(shape.rank + 1, shape.size):
            rows.send(k, peer, x, span.nbytes)
        for peer in range(shape.rank):
            rows.recv(k, peer, landing[peer], span.nbytes)
        operands = [*landing, x] if shape.operation == "scan" else landing
        if operands:
            rows.fold(k + 1, (array(0), span.offset), span.nbytes, operands)
    return rows.plan("upwards", 2 * shape.size * parts.nbytes if shape.rank else 0)


def direct(shape: Shape) -> Plan:
    """Rank j receives block j of all ranks, reduces all its prefixes, and sends rank i the one that i needs.

    At most 2 (n - 1)/n of the array in and out. Prefixes combine ranks in order; each is made in one pass over its
    operands when the call is ordered, so that it is rounded once, and from the one before it else.
    """
    rows = Rows()
    blocks = even(shape.total, shape.size, shape.itemsize)
    parts = segments(blocks, shape.itemsize, shape.limits, 3 * shape.size)
    for k in range(parts.number):
        spans = [parts.of(block, k) for block in blocks]
        _collect(shape, rows, k, spans, parts.nbytes)
        _fold_prefixes(shape, rows, k, spans[shape.rank], parts.nbytes)
        _hand_out(shape, rows, k, spans, parts.nbytes)
    return rows.plan("direct", 3 * shape.size * parts.nbytes)


def _collect(shape: Shape, rows: Rows, k: int, spans: list[Span], stride: int) -> None:
    """Phase k: who has a prefix to make for somebody gets segment k of its block from all that count."""
    for peer in shape.others:
        if _counts(shape, shape.rank):
            rows.send(k, peer, (array(1), spans[peer].offset), spans[peer].nbytes)
        if _counts(shape, peer):
            rows.recv(k, peer, _landing(shape, k, peer, stride), spans[shape.rank].nbytes)


def _counts(shape: Shape, rank: int) -> bool:
    """Whether any prefix has a rank's contribution."""
    return shape.operation == "scan" or rank < shape.size - 1


def _fold_prefixes(shape: Shape, rows: Rows, k: int, span: Span, stride: int) -> None:
    """Phase k + 1: the prefix for each rank, this rank's own last, since its array may be what is written."""
    inclusive = shape.operation == "scan"
    operands = [
        (array(1), span.offset) if rank == shape.rank else _landing(shape, k, rank, stride)
        for rank in range(shape.size)
    ]
    for rank in range(0 if inclusive else 1, shape.size):
        first = 0 if inclusive else 1
        sources = operands[: rank + inclusive]
        if not shape.ordered and rank > first:
            sources = [_prefix(shape, rank - 1, stride), sources[-1]]
        rows.fold(k + 1, _prefix(shape, rank, stride), span.nbytes, sources)
    if inclusive or shape.rank:
        rows.copy(k + 1, (array(0), span.offset), _prefix(shape, shape.rank, stride), span.nbytes)


def _hand_out(shape: Shape, rows: Rows, k: int, spans: list[Span], stride: int) -> None:
    """Phase k + 1: the prefixes go to their ranks."""
    for peer in shape.others:
        if shape.operation == "scan" or peer:
            rows.send(k + 1, peer, _prefix(shape, peer, stride), spans[shape.rank].nbytes)
        if shape.operation == "scan" or shape.rank:
            rows.recv(k + 1, peer, (array(0), spans[peer].offset), spans[peer].nbytes)


def _landing(shape: Shape, k: int, peer: int, stride: int) -> Place:
    return SCRATCH, (k % 2 * shape.size + peer) * stride


def _prefix(shape: Shape, rank: int, stride: int) -> Place:
    return SCRATCH, (2 * shape.size + rank) * stride
