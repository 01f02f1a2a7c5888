"""What travels with the headers of the meeting, and what every rank sends directly to every other without reducing it.

Small calls are over with the meeting, to which all their data is attached. gather, scatter and all_to_all decide for
each pair by itself whether its data travels so, since a rank may not know what others get: both ranks of a pair know
how many bytes are between them. A plan may have both.

Ranks take their peers in rotated order, `Limits.peers` of them at a time, so that no rank is sent to by all.
"""

from __future__ import annotations

from .plan import Place, Plan, Rows
from .shape import Shape, array


def attached(shape: Shape) -> Plan:
    """The plan of a call of which every payload fits; reductions combine the ranks in order, in one pass."""
    rows, size, rank, root = Rows(), shape.size, shape.rank, [shape.root]
    contribution = {"all_reduce": 0, "broadcast": 0, "all_gather": size, "reduce_scatter": 1 + rank}
    x = contribution.get(shape.operation, 1)
    own = shape.nbytes[rank] if shape.operation in ("reduce_scatter", "all_gather") else shape.total
    takers, givers = {
        "reduce": ([], range(size)) if shape.is_root else (root, []),
        "broadcast": (shape.others, []) if shape.is_root else ([], root),
        "scan": (range(rank + 1, size), range(rank + 1)),
        "exscan": (range(rank + 1, size), range(rank)),
    }.get(shape.operation, (shape.others, range(size)))
    operands = [(array(x), 0) if peer == rank else shape.framed(peer) for peer in givers]
    for peer in takers:
        if shape.operation == "reduce_scatter":
            rows.payload(peer, (array(1 + peer), 0), shape.nbytes[peer])
        else:
            rows.payload(peer, (array(x), 0), own)
    if shape.operation == "all_gather":
        for peer, source in enumerate(operands):
            rows.copy(0, (array(peer), 0), source, shape.nbytes[peer])
    elif operands:
        rows.fold(0, (array(0), 0), own, operands)
    return rows.plan("attached")


def all_gather(shape: Shape) -> Plan:
    """Each rank sends its part to every other; n - 1 parts in and out."""
    rows = Rows()
    x, own = (array(shape.size), 0), shape.nbytes[shape.rank]
    rows.copy(0, (array(shape.rank), 0), x, own)
    for step in range(1, shape.size):
        to, source = (shape.rank + step) % shape.size, (shape.rank - step) % shape.size
        rows.send(_phase(shape, step), to, x, own)
        rows.recv(_phase(shape, step), source, (array(source), 0), shape.nbytes[source])
    return rows.plan("direct")


def gather(shape: Shape) -> Plan:
    """The root receives every other rank's part from it."""
    rows = Rows()
    if not shape.is_root:
        _give(shape, rows, shape.root, (array(0), 0), shape.nbytes[0])
        return rows.plan("direct")
    rows.copy(0, (array(shape.rank), 0), (array(shape.size), 0), shape.nbytes[shape.rank])
    for peer in shape.others:
        _take(shape, rows, peer, (array(peer), 0), shape.nbytes[peer])
    return rows.plan("direct")


def scatter(shape: Shape) -> Plan:
    """The root sends every other rank its block."""
    rows = Rows()
    if not shape.is_root:
        _take(shape, rows, shape.root, (array(0), 0), shape.nbytes[0])
        return rows.plan("direct")
    rows.copy(0, (array(0), 0), (array(1 + shape.rank), 0), shape.nbytes[shape.rank])
    for peer in shape.others:
        _give(shape, rows, peer, (array(1 + peer), 0), shape.nbytes[peer])
    return rows.plan("direct")


def all_to_all(shape: Shape) -> Plan:
    """Every rank sends every other its block."""
    rows = Rows()
    outs, blocks = shape.nbytes[: shape.size], shape.nbytes[shape.size :]
    rows.copy(0, (array(shape.rank), 0), (array(shape.size + shape.rank), 0), outs[shape.rank])
    for peer in shape.others:
        _give(shape, rows, peer, (array(shape.size + peer), 0), blocks[peer])
        _take(shape, rows, peer, (array(peer), 0), outs[peer])
    return rows.plan("direct")


def _give(shape: Shape, rows: Rows, peer: int, place: Place, nbytes: int) -> None:
    if nbytes <= shape.limits.payload:
        rows.payload(peer, place, nbytes)
    else:
        rows.send(_phase(shape, peer - shape.rank), peer, place, nbytes)


def _take(shape: Shape, rows: Rows, peer: int, place: Place, nbytes: int) -> None:
    if nbytes <= shape.limits.payload:
        rows.copy(0, place, shape.framed(peer), nbytes)
    else:
        rows.recv(_phase(shape, shape.rank - peer), peer, place, nbytes)


def _phase(shape: Shape, step: int) -> int:
    """The phase in which a rank sends to the one that is `step` further."""
    return (step % shape.size - 1) // shape.limits.peers
