"""The meeting of a group over several nodes: the ranks of a node meet in shared memory, and one rank a node goes out.

A *line* is a header in memory that the ranks of a node share. Each rank has one, which it alone writes, and the node
has one more for the result, which its first rank writes. The first word of a line is the number of the call. It is
written last, with release semantics, so a reader that finds the number of its call also finds that call's header.

    1. Each rank posts its header in its line.
    2. The node's first rank waits for the lines of all, and combines their headers (combine.py).
    3. The first ranks of all nodes combine these headers over TCP, in ceil(log2 nodes) rounds (circulant.py).
    4. The first rank posts the combination of all headers in the result's line, for which the others wait.

One copy of each line suffices. A rank posts the header of its next call after it has read this call's result, which is
posted after all lines of this call were read. The next result is posted after all ranks of the node have begun the next
call, and so have read this one.
"""

from __future__ import annotations

from collections.abc import Sequence

from .circulant import COMBINED, COMBINING, combine_among
from .plan import FRAMES, SCRATCH, Plan, Rows


def combine_by_nodes(nodes: Sequence[Sequence[int]], rank: int, header: int) -> Plan:
    """Give all ranks the combination of all headers, of `header` bytes each.

    At the beginning, a rank has its own header in FRAMES. The plan needs no connections except between first ranks.

    Args:
        nodes: the ranks of each node. A rank's line has the number of its place there; the result's comes last.
    """
    number, node = next((number, node) for number, node in enumerate(nodes) if rank in node)
    rows, place, own, total = Rows(), node.index(rank), (FRAMES, rank * header), (SCRATCH, COMBINED)
    rows.post(0, place, own, header)
    if place > 0:
        rows.wait_for(0, len(node), total, header)
        return rows.plan(COMBINING * header)
    rows.copy(1, total, own, header)
    for line in range(1, len(node)):
        landing = SCRATCH, (COMBINING + line - 1) * header
        rows.wait_for(0, line, landing, header)
        rows.fold(1, total, header, [total, landing])
    end = combine_among(rows, [each[0] for each in nodes], number, header, 1)
    rows.post(end, len(node), total, header)
    return rows.plan((COMBINING + len(node) - 1) * header)
