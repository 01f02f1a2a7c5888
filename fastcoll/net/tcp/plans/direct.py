"""Plans in which each rank exchanges data with every other; and small calls, whose data travels with the headers.

A small call is complete after the meeting: all its data is attached to the headers. In calls that only move blocks,
each pair of ranks decides for itself whether to attach its blocks: both ranks of a pair know how many bytes move
between them, but may not know how many move between others. In a larger call, each rank begins with a different peer,
and exchanges data with at most `Limits.peers` peers at a time, so that not all ranks send to the same rank at once.

A reduction combines its operands in the order 0..n-1 in one pass, so every rank gets the same bits as over shared
memory. Blocks travel in segments. While segment k travels, segment k-1 is reduced, and its result is sent in the same
phase, while the result is in the cache.
"""

from __future__ import annotations

from collections.abc import Sequence

from ....core.partition import Segments, Span, even
from .plan import SCRATCH, Location, Plan, Rows
from .shape import CallShape, array


def attached(shape: CallShape) -> Plan:
    """Plan a call whose data fits behind the headers.

    Reductions combine the operands in rank order, in one pass.
    """
    if shape.operation == "all_gather":
        return exchange(shape)
    rows, scatters = Rows(), shape.operation == "reduce_scatter"
    own = shape.nbytes[shape.rank if scatters else 0]
    x = {"all_reduce": 0, "broadcast": 0, "refused": 0, "reduce_scatter": 1 + shape.rank}.get(
        shape.operation, 1
    )
    takers, givers = shape.takers_and_givers()
    for peer in takers:
        given = (1 + peer, shape.nbytes[peer]) if scatters else (x, own)
        rows.payload(peer, (array(given[0]), 0), given[1])
    if givers:
        operands = [(array(x), 0) if peer == shape.rank else shape.framed(peer) for peer in givers]
        rows.fold(0, (array(0), 0), own, operands)
    return rows.plan()


def exchange(shape: CallShape) -> Plan:
    """Plan an all_gather, gather, scatter or all_to_all: send each block to its rank."""
    rows, size, payload = Rows(), shape.size, shape.limits.payload
    _, gives, takes = shape.sizes()
    # There is either one output, or one for each rank; and either one input, or one for each rank.
    outs = {"scatter": 1, "gather": size if shape.is_root else 0}.get(shape.operation, size)
    several = shape.operation == "all_to_all" or (shape.operation == "scatter" and shape.is_root)

    def phase(step: int) -> int:
        """Return the phase in which a rank sends to the rank that is `step` ranks further."""
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


def _reduce_segment(
    shape: CallShape,
    rows: Rows,
    k: int,
    segments: Segments,
    blocks: Sequence[Span],
    sources: Sequence[int],
    goal: Location | None = None,
) -> Span:
    """Send segment k of each block to its rank, and reduce it there.

    The segment is sent in phase k and reduced in phase k + 1. `sources` are the arrays that hold the blocks. The result
    goes to `goal`, or to the same span of array 0. Returns this rank's span.
    """
    own = segments.of(blocks[shape.rank], k)
    for peer in shape.others:
        span = segments.of(blocks[peer], k)
        rows.send(k, peer, (sources[peer], span.offset), span.nbytes)
        rows.recv(k, peer, shape.landing(k, peer, segments), own.nbytes)
    operands = shape.operands((sources[shape.rank], own.offset), k, segments)
    rows.fold(k + 1, goal or (array(0), own.offset), own.nbytes, operands)
    return own


def reduce_scatter(shape: CallShape) -> Plan:
    """Let each rank receive its block from all ranks and reduce it.

    Each rank sends and receives n - 1 blocks.
    """
    rows, size = Rows(), shape.size
    blocks = [Span(0, nbytes) for nbytes in shape.nbytes]
    segments = shape.segments(blocks, 2 * (size - 1))
    for k in range(segments.number):
        _reduce_segment(shape, rows, k, segments, blocks, [array(1 + rank) for rank in range(size)])
    return rows.plan(2 * size * segments.nbytes)


def all_reduce(shape: CallShape) -> Plan:
    """Reduce and scatter, then send each result to all ranks.

    Each rank sends and receives 2 (n - 1)/n of the array.
    """
    rows, size, x = Rows(), shape.size, array(0)
    blocks = even(shape.total, size, shape.itemsize)
    if size == 2:  # each rank reduces one half as it arrives, without scratch
        peer, segments = 1 - shape.rank, shape.segments(blocks, 1)
        for k in range(segments.number):
            own, theirs = (segments.of(blocks[rank], k) for rank in (shape.rank, peer))
            rows.send(k, peer, (x, theirs.offset), theirs.nbytes)
            rows.reduce(k, peer, (x, own.offset), own.nbytes, left=peer < shape.rank)
            rows.send(k + 1, peer, (x, own.offset), own.nbytes)
            rows.recv(k + 1, peer, (x, theirs.offset), theirs.nbytes)
        return rows.plan()
    segments = shape.segments(blocks, 2 * (size - 1))
    for k in range(segments.number):
        own = _reduce_segment(shape, rows, k, segments, blocks, [x] * size)
        for peer in shape.others:
            theirs = segments.of(blocks[peer], k)
            rows.send(k + 1, peer, (x, own.offset), own.nbytes)
            rows.recv(k + 1, peer, (x, theirs.offset), theirs.nbytes)
    return rows.plan(2 * size * segments.nbytes)


def reduce(shape: CallShape) -> Plan:
    """Reduce and scatter, then send each result to the root.

    The root receives 2 (n - 1)/n of the array.
    """
    rows, size = Rows(), shape.size
    blocks = even(shape.total, size, shape.itemsize)
    segments = shape.segments(blocks, 2 * (size - 1))
    mine = (SCRATCH, 2 * size * segments.nbytes)
    for k in range(segments.number):
        goal = None if shape.is_root else mine
        own = _reduce_segment(shape, rows, k, segments, blocks, [array(1)] * size, goal)
        if not shape.is_root:
            rows.send(k + 1, shape.root, mine, own.nbytes)
            continue
        for peer in shape.others:
            theirs = segments.of(blocks[peer], k)
            rows.recv(k + 1, peer, (array(0), theirs.offset), theirs.nbytes)
    return rows.plan((2 * size + 1) * segments.nbytes)


def complete_arrays(shape: CallShape) -> Plan:
    """Send complete arrays to the ranks that combine them, each in one pass.

    Chosen for two ranks, for which no other plan moves fewer bytes.
    """
    rows, complete = Rows(), Span(0, shape.total)
    takers, givers = shape.takers_and_givers()
    segments = shape.segments([complete], shape.size - 1)
    for k in range(segments.number):
        span = segments.of(complete, k)
        operands = shape.operands((array(1), span.offset), k, segments)
        for peer in takers:
            rows.send(k, peer, operands[shape.rank], span.nbytes)
        for peer in givers:
            if peer != shape.rank:
                rows.recv(k, peer, operands[peer], span.nbytes)
        if givers:
            rows.fold(k + 1, (array(0), span.offset), span.nbytes, [operands[rank] for rank in givers])
    return rows.plan(2 * shape.size * segments.nbytes if {*givers} - {shape.rank} else 0)


def scan(shape: CallShape) -> Plan:
    """Let rank j reduce all prefixes of block j, and send each rank its prefix.

    Each rank sends and receives at most 2 (n - 1)/n of the array. The operands of a prefix are combined in rank order.
    In an ordered call, each prefix is made in one pass over its operands, so that it is rounded once; in other calls,
    it is made from the prefix before it. Rank r gets the reduction of ranks 0..r; in an exscan it gets that of 0..r-1,
    and rank 0 gets nothing.
    """
    rows, size, rank, inclusive = Rows(), shape.size, shape.rank, shape.operation == "scan"
    # The first rank that has a result, and the number of ranks whose arrays are needed:
    first, givers = (0, size) if inclusive else (1, size - 1)
    blocks = even(shape.total, size, shape.itemsize)
    segments = shape.segments(blocks, 3 * size)
    prefixes = [(SCRATCH, (2 * size + each) * segments.nbytes) for each in range(size)]
    for k in range(segments.number):
        spans = [segments.of(block, k) for block in blocks]
        own = spans[rank]
        for peer in shape.others:
            if rank < givers:
                rows.send(k, peer, (array(1), spans[peer].offset), spans[peer].nbytes)
            if peer < givers:
                rows.recv(k, peer, shape.landing(k, peer, segments), own.nbytes)
        operands = shape.operands((array(1), own.offset), k, segments)
        for each in range(first, size):
            sources = operands[: each + inclusive]
            if not shape.ordered and each > first:
                sources = [prefixes[each - 1], sources[-1]]
            rows.fold(k + 1, prefixes[each], own.nbytes, sources)
        if rank >= first:  # after all reductions, since the output may be this rank's array
            rows.copy(k + 1, (array(0), own.offset), prefixes[rank], own.nbytes)
        for peer in shape.others:
            if peer >= first:
                rows.send(k + 1, peer, prefixes[peer], own.nbytes)
            if rank >= first:
                rows.recv(k + 1, peer, (array(0), spans[peer].offset), spans[peer].nbytes)
    return rows.plan(3 * size * segments.nbytes)


def broadcast(shape: CallShape) -> Plan:
    """Send each rank a block from the root; each rank sends its block on to the others.

    In each direction, no rank's link carries more bytes than the array has.
    """
    rows = Rows()
    takers = [rank for rank in range(shape.size) if rank != shape.root]
    blocks = dict(zip(takers, even(shape.total, len(takers), shape.itemsize), strict=True))
    segments = shape.segments(list(blocks.values()), shape.size - 1)
    for k in range(segments.number):
        for taker, block in blocks.items():
            span = segments.of(block, k)
            location = (array(0), span.offset)
            if shape.is_root:
                rows.send(k, taker, location, span.nbytes)
            elif shape.rank != taker:
                rows.recv(k + 1, taker, location, span.nbytes)
            else:
                rows.recv(k, shape.root, location, span.nbytes)
                for peer in shape.others:
                    if peer != shape.root:
                        rows.send(k + 1, peer, location, span.nbytes)
    return rows.plan()
