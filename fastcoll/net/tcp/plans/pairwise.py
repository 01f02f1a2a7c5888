"""What travels with the headers of the meeting, and what every rank sends directly to every other without reducing it.

Small calls are over with the meeting, to which all their data is attached. Each pair decides by itself whether its data
travels so, since a rank may not know what others get: both ranks of a pair know how many bytes are between them. A plan
may have both.

Ranks take their peers in rotated order, `Limits.peers` of them at a time, so that no rank is sent to by all.
"""

from __future__ import annotations

from .plan import Plan, Rows
from .shape import Shape, array, sizes_of


def attached(shape: Shape) -> Plan:
    """The plan of a call of which every payload fits; reductions combine the ranks in order, in one pass."""
    if shape.operation == "all_gather":
        return exchange(shape)
    rows, scatters = Rows(), shape.operation == "reduce_scatter"
    own = shape.nbytes[shape.rank if scatters else 0]
    x = {"all_reduce": 0, "broadcast": 0, "reduce_scatter": 1 + shape.rank}.get(shape.operation, 1)
    takers, givers = shape.takers_and_givers()
    for peer in takers:
        given = (1 + peer, shape.nbytes[peer]) if scatters else (x, own)
        rows.payload(peer, (array(given[0]), 0), given[1])
    if givers:
        operands = [(array(x), 0) if peer == shape.rank else shape.framed(peer) for peer in givers]
        rows.fold(0, (array(0), 0), own, operands)
    return rows.plan()


def exchange(shape: Shape) -> Plan:
    """all_gather, gather, scatter and all_to_all: each rank's part or block to whoever gets it."""
    rows, size, payload = Rows(), shape.size, shape.limits.payload
    _, gives, takes = sizes_of(shape)
    # Ranks have an out, and a block or part, for each rank or one of each.
    outs = {"scatter": 1, "gather": size if shape.is_root else 0}.get(shape.operation, size)
    several = shape.operation == "all_to_all" or (shape.operation == "scatter" and shape.is_root)

    def phase(step: int) -> int:
        """The phase in which a rank sends to the one that is `step` further."""
        return (step % size - 1) // shape.limits.peers

    for peer in (shape.rank, *shape.others):
        out, x = (array(peer if outs > 1 else 0), 0), (array(outs + (peer if several else 0)), 0)
        if peer == shape.rank:
            rows.copy(0, out, x, takes[peer])
            continue
        if gives[peer] <= payload:
            rows.payload(peer, x, gives[peer])
        else:
            rows.send(phase(peer - shape.rank), peer, x, gives[peer])
        if takes[peer] <= payload:
            rows.copy(0, out, shape.framed(peer), takes[peer])
        else:
            rows.recv(phase(shape.rank - peer), peer, out, takes[peer])
    return rows.plan()
