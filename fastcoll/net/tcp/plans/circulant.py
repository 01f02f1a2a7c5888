"""Reductions and gathering in log2 n rounds for any n, each block moving as often as it must.

Ranks form a circle. To gather, a rank that has the blocks of h ranks from itself on gets those of the next h from the
rank h further. To reduce and scatter, the same happens backwards: partial results of h blocks go to the rank h further.
A block's operands are combined around the circle, ending with its own rank: the order differs from block to
block, but all ranks get the same bits.

Headers of calls are combined in as many rounds, each of the same few bytes. A rank that has the combination of h ranks
from itself on, and that of all of these but itself, gets the combination of the next h, or h - 1, so that it comes to n
exactly: no header is combined twice, as their balances are added up.

Bar-Noy, Kipnis, Schieber: An optimal algorithm for computing census functions in message-passing systems, Parallel
Processing Letters 3 (1993); Bruck and others: Efficient algorithms for all-to-all communications in multiport
message-passing systems, IEEE TPDS 8 (1997); Träff: Optimal, Non-pipelined Reduce-scatter and Allreduce Algorithms,
arXiv:2410.14234 (2024).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

from ....core.partition import Span, even
from .plan import FRAMES, SCRATCH, Plan, Rows
from .shape import CallShape, array


def _rounds(size: int) -> list[tuple[int, int]]:
    """(h, how many blocks move) of the rounds of gathering."""
    return [(1 << k, min(1 << k, size - (1 << k))) for k in range((size - 1).bit_length())]


def all_reduce(shape: CallShape) -> Plan:
    """reduce_scatter, then all_gather, in place: 2 log2 n rounds, 2 (n - 1)/n of the array in and out."""
    rows, x, size, rank = Rows(), array(0), shape.size, shape.rank
    blocks = even(shape.total, size, shape.itemsize)
    rounds = _rounds(size)
    for phase, (step, count) in enumerate(reversed(rounds)):
        for span in _around(blocks, rank + step, count):
            rows.send(phase, (rank + step) % size, (x, span.offset), span.nbytes)
        for span in _around(blocks, rank, count):
            rows.reduce(phase, (rank - step) % size, (x, span.offset), span.nbytes, left=True)
    gather_spans(rows, rank, blocks, x, len(rounds))
    return rows.plan()


def _growth(size: int) -> list[tuple[int, int]]:
    """Of each round of a meeting, of how many ranks one knows before and after it: twice as many, or one less."""
    known = [size]
    while known[0] > 1:
        known.insert(0, (known[0] + 1) // 2)
    return list(pairwise(known))


def known_before(size: int) -> list[int]:
    """Of how many ranks, from itself on, a rank knows before each phase of `combine_headers`."""
    return [before for before, _ in _growth(size)]


COMBINED = 0
"""Offset in SCRATCH of what `combine_headers` comes to."""


def combine_headers(size: int, rank: int, header: int) -> Plan:
    """Let all ranks have the combination of all headers, of `header` bytes, of which each has its own in FRAMES."""
    rows = Rows()
    total, others, *landing = ((SCRATCH, COMBINED + slot * header) for slot in range(4))
    rows.copy(0, total, (FRAMES, rank * header), header)
    for phase, (before, after) in enumerate(_growth(size)):
        doubles, got = after == 2 * before, landing[phase % 2]
        step = before if doubles else before - 1
        rows.send(phase, (rank - step) % size, total if doubles else others, header)
        rows.recv(phase, (rank + step) % size, got, header)
        rows.fold(phase + 1, others, header, [others, got] if before > 1 else [got])
        rows.fold(phase + 1, total, header, [total, got])
    return rows.plan(4 * header)


def gather_headers(size: int, rank: int, header: int) -> Plan:
    """Let all ranks have the headers of all, one after the other in FRAMES; among the peers of `combine_headers`."""
    rows, blocks = Rows(), [Span(each * header, header) for each in range(size)]
    for phase, (before, after) in enumerate(_growth(size)):
        skips = 2 * before - after  # 1 where the giver's own header is known
        for span in _around(blocks, rank + skips, after - before):
            rows.send(phase, (rank - before + skips) % size, (FRAMES, span.offset), span.nbytes)
        for span in _around(blocks, rank + before, after - before):
            rows.recv(phase, (rank + before - skips) % size, (FRAMES, span.offset), span.nbytes)
    return rows.plan()


def gather_spans(rows: Rows, rank: int, blocks: Sequence[Span], buffer: int, first: int) -> None:
    """From phase `first` on, let all ranks have all blocks of a buffer, of which each has its own."""
    size = len(blocks)
    for phase, (step, count) in enumerate(_rounds(size), first):
        for span in _around(blocks, rank, count):
            rows.send(phase, (rank - step) % size, (buffer, span.offset), span.nbytes)
        for span in _around(blocks, rank + step, count):
            rows.recv(phase, (rank + step) % size, (buffer, span.offset), span.nbytes)


def _around(blocks: Sequence[Span], first: int, count: int) -> list[Span]:
    """The bytes of some blocks on the circle, adjacent ones together: three spans at most."""
    found: list[Span] = []
    for index in range(first, first + count):
        block = blocks[index % len(blocks)]
        if found and found[-1].offset + found[-1].nbytes == block.offset:
            block = Span(found[-1].offset, found.pop().nbytes + block.nbytes)
        found.append(block)
    return found


def reduce_scatter(shape: CallShape) -> Plan:
    """log2 n rounds, n - 1 blocks in and out, by way of a copy of all blocks."""
    rows, size, rank = Rows(), shape.size, shape.rank
    borders = _borders(shape)
    for index in range(size):
        block = (rank + index) % size
        rows.copy(0, (SCRATCH, borders[index]), (array(1 + block), 0), shape.nbytes[block])
    # The copies are in phase 0, so that rounds begin with the next one: a receive may not meet them.
    for phase, (step, count) in enumerate(reversed(_rounds(size)), 1):
        given = borders[step + count] - borders[step]
        rows.send(phase, (rank + step) % size, (SCRATCH, borders[step]), given)
        rows.reduce(phase, (rank - step) % size, (SCRATCH, 0), borders[count], left=True)
    rows.copy(len(_rounds(size)) + 1, (array(0), 0), (SCRATCH, 0), shape.nbytes[rank])
    return rows.plan(borders[-1])


def all_gather(shape: CallShape) -> Plan:
    """log2 n rounds, n - 1 parts in and out, by way of scratch."""
    rows, size, rank = Rows(), shape.size, shape.rank
    borders, rounds = _borders(shape), _rounds(size)
    rows.copy(0, (SCRATCH, 0), (array(size), 0), shape.nbytes[rank])
    for phase, (step, count) in enumerate(rounds):
        rows.send(phase, (rank - step) % size, (SCRATCH, 0), borders[count])
        got = borders[step + count] - borders[step]
        rows.recv(phase, (rank + step) % size, (SCRATCH, borders[step]), got)
    for index in range(size):
        source = (rank + index) % size
        rows.copy(len(rounds), (array(source), 0), (SCRATCH, borders[index]), shape.nbytes[source])
    return rows.plan(borders[-1])


def _borders(shape: CallShape) -> list[int]:
    """Where the block of each rank begins in scratch, this rank's first, and where the last one ends."""
    around = shape.nbytes[shape.rank :] + shape.nbytes[: shape.rank]
    return list(accumulate(around, initial=0))
