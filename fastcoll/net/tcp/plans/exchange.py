"""Every rank directly with every other: operations that only move data. No byte takes a detour.

gather, scatter and all_to_all decide for each pair by itself whether its data travels with the header, since a rank
may not know what others get: both ranks of a pair know how many bytes are between them. A plan may have both.

Ranks take their peers in rotated order, `Limits.peers` of them at a time, so that no rank is sent to by all.
"""

from __future__ import annotations

from .shape import Shape, array, framed
from .table import Place, Plan, Rows


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
        rows.copy(0, place, framed(shape, peer), nbytes)
    else:
        rows.recv(_phase(shape, shape.rank - peer), peer, place, nbytes)


def _phase(shape: Shape, step: int) -> int:
    """The phase in which a rank sends to the one that is `step` further."""
    return (step % shape.size - 1) // shape.limits.peers
