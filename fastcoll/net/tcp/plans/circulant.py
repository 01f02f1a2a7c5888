"""Reductions and gathering in log2 n rounds for any n, with the least traffic.

Ranks form a circle. Before a round of gathering, a rank has h blocks: its own and those of the h - 1 ranks after it. In
the round, it receives the next h blocks from the rank h places further around the circle. To reduce and scatter, the
same rounds run backwards: a rank sends partial results of h blocks to the rank h places further. The operands of a
block are combined in the order around the circle that ends with the rank that gets the block. So the order differs
between blocks, but all ranks get the same bits.

The headers of a call (combine.py) are combined in as many rounds; each message has the size of one header. A rank keeps
two combinations: one of the headers of h ranks, which are this rank and the h - 1 ranks after it; and one of the same
headers without its own. In each round, it receives a combination of the next h headers, or of the next h - 1. So after
the last round, a rank has combined exactly n headers, and none of them twice. This matters because the balances of
headers are added up.

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
    """Return h and the number of blocks that a rank receives, for each round."""
    return [(1 << k, min(1 << k, size - (1 << k))) for k in range((size - 1).bit_length())]


def all_reduce(shape: CallShape) -> Plan:
    """Do a reduce_scatter, then an all_gather, in place.

    Takes 2 log2 n rounds; each rank sends and receives 2 (n - 1)/n of the array.
    """
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
    """Return how many headers a rank has before and after each round.

    The rounds are those of `combine_headers`. After a round, a rank has twice as many headers as before, or one less
    than twice as many.
    """
    known = [size]
    while known[0] > 1:
        known.insert(0, (known[0] + 1) // 2)
    return list(pairwise(known))


def known_before(size: int) -> list[int]:
    """Return how many headers a rank has before each phase of `combine_headers`.

    They are its own header and those of the ranks after it.
    """
    return [before for before, _ in _growth(size)]


def gathered_before(size: int) -> list[int]:
    """Return how many blocks a rank has before each phase of `gather_spans`: its own and those after it."""
    return [step for step, _ in _rounds(size)]


COMBINED, COMBINING = 0, 4
"""Offset in SCRATCH of the result of `combine_headers`, and how many headers SCRATCH must have room for."""


def combine_headers(size: int, rank: int, header: int) -> Plan:
    """Give all ranks the combination of all headers, of `header` bytes each.

    At the beginning, a rank has its own header in FRAMES.
    """
    rows = Rows()
    rows.copy(0, (SCRATCH, COMBINED), (FRAMES, rank * header), header)
    combine_among(rows, range(size), rank, header)
    return rows.plan(COMBINING * header)


def combine_among(rows: Rows, ranks: Sequence[int], place: int, header: int, first: int = 0) -> int:
    """From phase `first` on, give all `ranks` the combination of their headers.

    At the beginning, this rank, which is `ranks[place]`, has its header at COMBINED.

    Returns:
        The phase in whose local rows the combination is complete.
    """
    size = len(ranks)
    total, others, *landing = ((SCRATCH, COMBINED + slot * header) for slot in range(COMBINING))
    for phase, (before, after) in enumerate(_growth(size), first):
        doubles, got = after == 2 * before, landing[phase % 2]
        step = before if doubles else before - 1
        rows.send(phase, ranks[(place - step) % size], total if doubles else others, header)
        rows.recv(phase, ranks[(place + step) % size], got, header)
        rows.fold(phase + 1, others, header, [others, got] if before > 1 else [got])
        rows.fold(phase + 1, total, header, [total, got])
    return first + len(_growth(size))


def gather_headers(size: int, rank: int, header: int) -> Plan:
    """Give all ranks all headers, which are stored one after the other in FRAMES.

    Uses the same connections as `combine_headers`.
    """
    rows, blocks = Rows(), [Span(each * header, header) for each in range(size)]
    for phase, (before, after) in enumerate(_growth(size)):
        skips = 2 * before - after  # 1: the receiver already has the sender's own header
        for span in _around(blocks, rank + skips, after - before):
            rows.send(phase, (rank - before + skips) % size, (FRAMES, span.offset), span.nbytes)
        for span in _around(blocks, rank + before, after - before):
            rows.recv(phase, (rank + before - skips) % size, (FRAMES, span.offset), span.nbytes)
    return rows.plan()


def gather_spans(
    rows: Rows, place: int, blocks: Sequence[Span], buffer: int, first: int, ranks: Sequence[int] = ()
) -> int:
    """From phase `first` on, give all `ranks`, by default those of the group, all blocks of a buffer.

    At the beginning, each rank has only its own block. This rank is `ranks[place]`.

    Returns:
        The phase in whose local rows all blocks are there.
    """
    size = len(blocks)
    ranks, rounds = ranks or range(size), _rounds(size)
    for phase, (step, count) in enumerate(rounds, first):
        for span in _around(blocks, place, count):
            rows.send(phase, ranks[(place - step) % size], (buffer, span.offset), span.nbytes)
        for span in _around(blocks, place + step, count):
            rows.recv(phase, ranks[(place + step) % size], (buffer, span.offset), span.nbytes)
    return first + len(rounds)


def _around(blocks: Sequence[Span], first: int, count: int) -> list[Span]:
    """Return the spans of `count` blocks on the circle, with adjacent spans merged.

    The result has at most three spans.
    """
    found: list[Span] = []
    for index in range(first, first + count):
        block = blocks[index % len(blocks)]
        if found and found[-1].offset + found[-1].nbytes == block.offset:
            block = Span(found[-1].offset, found.pop().nbytes + block.nbytes)
        found.append(block)
    return found


def reduce_scatter(shape: CallShape) -> Plan:
    """Reduce and scatter in log2 n rounds, through a copy of all blocks.

    Each rank sends and receives n - 1 blocks.
    """
    rows, size, rank = Rows(), shape.size, shape.rank
    borders = _borders(shape)
    for index in range(size):
        block = (rank + index) % size
        rows.copy(0, (SCRATCH, borders[index]), (array(1 + block), 0), shape.nbytes[block])
    # The copies are in phase 0. The rounds begin in phase 1, because no receive may write what a copy of the same phase
    # reads or writes.
    for phase, (step, count) in enumerate(reversed(_rounds(size)), 1):
        sent = borders[step + count] - borders[step]
        rows.send(phase, (rank + step) % size, (SCRATCH, borders[step]), sent)
        rows.reduce(phase, (rank - step) % size, (SCRATCH, 0), borders[count], left=True)
    rows.copy(len(_rounds(size)) + 1, (array(0), 0), (SCRATCH, 0), shape.nbytes[rank])
    return rows.plan(borders[-1])


def all_gather(shape: CallShape) -> Plan:
    """Gather in log2 n rounds through scratch; each rank sends and receives n - 1 blocks."""
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
    """Return where each rank's block begins in scratch, and where the last one ends.

    The first block is that of this rank.
    """
    around = shape.nbytes[shape.rank :] + shape.nbytes[: shape.rank]
    return list(accumulate(around, initial=0))
