"""The meeting of a group over several nodes: the ranks of a node meet in shared memory, and one rank a node goes out.

A *line* is a header in memory that the ranks of a node share, with space for data behind it. Each rank has one, which
it alone writes, and the node has one more for the result, which its first rank writes. The first word of a line is the
number of the call. It is written last, with release semantics, so a reader that finds the number of its call also finds
that call's header.

    1. Each rank posts its header in its line.
    2. The node's first rank waits for the lines of all, and combines their headers (combine.py).
    3. The first ranks of all nodes exchange these headers over TCP, in ceil(log2 nodes) rounds (circulant.py), and
       combine them in the order of the nodes. More than GATHERED nodes combine them on their way instead.
    4. The first rank posts the combination of all headers in the result's line, for which the others wait.

One copy of each line suffices. A rank posts the header of its next call after it has read this call's result, which is
posted after all lines of this call were read. The next result is posted after all ranks of the node have begun the next
call, and so have read this one.

*Carried* data. A small call needs no second exchange, because the headers carry its data: at most CARRIED bytes, those
of the array or of all blocks together. Whoever combines two headers also reduces the data behind them. In a call that
only moves data, each rank puts its data at their place among zeros, and the reduction is a bitwise OR. Every rank
combines in the same order, first inside each node and then the nodes, so all get the same bits. If calls differ, the
data means nothing, and no rank uses it. All messages have the same size, so ranks whose calls differ still meet.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from ....core.partition import Span
from .circulant import COMBINED, COMBINING, combine_among, gather_spans, gathered_before, known_before
from .plan import FRAMES, SCRATCH, Plan, Rows
from .shape import HEADER_BYTES, CallShape, array

GATHERED = 16
"""Largest number of nodes whose headers carry data. In the last round, a first rank sends half of all headers."""
CARRIED = 1024 - HEADER_BYTES
CARRYING = frozenset({"all_reduce", "reduce", "broadcast", "all_gather", "reduce_scatter"})
"""Kinds whose data headers can carry: all ranks know all sizes."""


def combine_by_nodes(nodes: Sequence[Sequence[int]], rank: int, header: int) -> Plan:
    """Give all ranks the combination of all headers, of `header` bytes each, with the data behind them.

    At the beginning, a rank has its own header in FRAMES. The plan needs no connections except between first ranks.

    Args:
        nodes: the ranks of each node. A rank's line has the number of its place there; the result's comes last.
    """
    number, node = next((number, node) for number, node in enumerate(nodes) if rank in node)
    firsts, gathers = [each[0] for each in nodes], len(nodes) <= GATHERED
    rows, place, own, total = Rows(), node.index(rank), (FRAMES, rank * header), (SCRATCH, COMBINED)
    rows.post(0, place, own, header)
    if place > 0:
        rows.wait_for(0, len(node), total, header)
        return rows.plan(COMBINING * header)
    of_nodes = [Span((COMBINING + len(node) - 1 + each) * header, header) for each in range(len(nodes))]
    here = (SCRATCH, of_nodes[number].offset) if gathers else total
    rows.copy(1, here, own, header)
    for line in range(1, len(node)):
        landing = SCRATCH, (COMBINING + line - 1) * header
        rows.wait_for(0, line, landing, header)
        rows.fold(1, here, header, [here, landing])
    if gathers:
        end = gather_spans(rows, number, of_nodes, SCRATCH, 1, firsts)
        rows.copy(end, total, (SCRATCH, of_nodes[0].offset), header)
        for each in of_nodes[1:]:
            rows.fold(end, total, header, [total, (SCRATCH, each.offset)])
    else:
        end = combine_among(rows, firsts, number, header, 1)
    rows.post(end, len(node), total, header)
    return rows.plan(of_nodes[-1].offset + header)


def nodes_before(count: int) -> list[int]:
    """Return the number of nodes whose headers a first rank has before each round: its own and those after it."""
    return gathered_before(count) if count <= GATHERED else known_before(count)


def is_carried(shape: CallShape) -> bool:
    """Return whether the headers of a call carry its data.

    Ordered reductions are left out, because the order of the nodes may not be that of the ranks.
    """
    return shape.operation in CARRYING and shape.total <= shape.limits.carried and not shape.ordered


def carried(shape: CallShape) -> Plan:
    """Plan a call whose headers carry its data: this rank adds its data to its header, and then copies the result."""
    rows, operation, total = Rows(), shape.operation, shape.total
    blocks = [
        *accumulate(shape.nbytes, initial=0)
    ]  # where each rank's block is in the data; the end of the last

    def give(index: int, offset: int, nbytes: int) -> None:
        rows.payload(shape.rank, (array(index), 0), nbytes, offset)

    def take(index: int, offset: int, nbytes: int) -> None:
        rows.copy(0, (array(index), 0), (SCRATCH, COMBINED + HEADER_BYTES + offset), nbytes)

    if operation == "all_gather":
        give(shape.size, blocks[shape.rank], shape.nbytes[shape.rank])
        for rank, nbytes in enumerate(shape.nbytes):
            take(rank, blocks[rank], nbytes)
    elif operation == "reduce_scatter":
        for rank, nbytes in enumerate(shape.nbytes):
            give(1 + rank, blocks[rank], nbytes)
        take(0, blocks[shape.rank], shape.nbytes[shape.rank])
    else:
        if operation != "broadcast" or shape.is_root:
            give(1 if operation == "reduce" else 0, 0, total)
        if operation == "all_reduce" or shape.is_root == (operation == "reduce"):
            take(0, 0, total)
    return rows.plan(carried=total)
