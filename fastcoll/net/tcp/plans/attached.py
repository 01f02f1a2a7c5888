"""Small calls: all data travels with the headers of the meeting, so that the meeting is the whole call.

Reductions combine the ranks in order, on every rank that has the result, in one pass.
"""

from __future__ import annotations

from collections.abc import Callable

from .shape import Shape, array, framed
from .table import Place, Plan, Rows


def plan(shape: Shape) -> Plan:
    """The plan of a call of which every payload fits."""
    rows = Rows()
    _BUILDERS[shape.operation](shape, rows)
    return rows.plan("attached")


def _all_reduce(shape: Shape, rows: Rows) -> None:
    x = (array(0), 0)
    for peer in shape.others:
        rows.payload(peer, x, shape.total)
    rows.fold(0, x, shape.total, operands(shape, x, range(shape.size)))


def _reduce(shape: Shape, rows: Rows) -> None:
    out, x = (array(0), 0), (array(1), 0)
    if shape.is_root:
        rows.fold(0, out, shape.total, operands(shape, x, range(shape.size)))
    else:
        rows.payload(shape.root, x, shape.total)


def _scan(shape: Shape, rows: Rows) -> None:
    out, x = (array(0), 0), (array(1), 0)
    for peer in range(shape.rank + 1, shape.size):
        rows.payload(peer, x, shape.total)
    ranks = range(shape.rank + (shape.operation == "scan"))
    if ranks:
        rows.fold(0, out, shape.total, operands(shape, x, ranks))


def _reduce_scatter(shape: Shape, rows: Rows) -> None:
    for peer in shape.others:
        rows.payload(peer, (array(1 + peer), 0), shape.nbytes[peer])
    own = (array(1 + shape.rank), 0)
    ranks = range(shape.size)
    rows.fold(0, (array(0), 0), shape.nbytes[shape.rank], operands(shape, own, ranks))


def operands(shape: Shape, own: Place, ranks: range) -> list[Place]:
    """What each of `ranks` contributes to a reduction, in order."""
    return [own if rank == shape.rank else framed(shape, rank) for rank in ranks]


def _broadcast(shape: Shape, rows: Rows) -> None:
    x = (array(0), 0)
    if not shape.is_root:
        rows.copy(0, x, framed(shape, shape.root), shape.total)
        return
    for peer in shape.others:
        rows.payload(peer, x, shape.total)


def _all_gather(shape: Shape, rows: Rows) -> None:
    x = (array(shape.size), 0)
    for peer in shape.others:
        rows.payload(peer, x, shape.nbytes[shape.rank])
        rows.copy(0, (array(peer), 0), framed(shape, peer), shape.nbytes[peer])
    rows.copy(0, (array(shape.rank), 0), x, shape.nbytes[shape.rank])


_BUILDERS: dict[str, Callable[[Shape, Rows], None]] = {
    "all_reduce": _all_reduce,
    "reduce": _reduce,
    "scan": _scan,
    "exscan": _scan,
    "reduce_scatter": _reduce_scatter,
    "broadcast": _broadcast,
    "all_gather": _all_gather,
}
