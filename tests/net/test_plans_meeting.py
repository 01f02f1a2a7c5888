"""The meeting of many ranks: every header is combined exactly once, and all headers reach all ranks if calls differ.

Also the meeting by nodes, in which only the first rank of each node uses connections.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from fastcoll.net.tcp.plans import plan as t
from fastcoll.net.tcp.plans.circulant import COMBINED, combine_headers, gather_headers, known_before
from fastcoll.net.tcp.plans.node_meeting import combine_by_nodes
from fastcoll.net.tcp.plans.plan import Plan
from net.simulate import check_pairs, rubbish, simulate

HEADER = 64


def meet(
    make: Callable[[int, int, int], Plan], size: int, nodes: Sequence[Sequence[int]] = ()
) -> tuple[list[Plan], list[dict[int, np.ndarray]]]:
    """Return the plans of all ranks, and their buffers afterwards; in FRAMES each begins with its header, a symbol."""
    plans = [make(size, rank, HEADER) for rank in range(size)]
    check_pairs(plans)
    frames = [rubbish(size) for _ in plans]
    for rank, mine in enumerate(frames):
        mine[rank] = chr(0x4E00 + rank)
    ranks = simulate(
        plans, [[] for _ in plans], itemsize=HEADER, frames=frames, capacity=2 * size, nodes=nodes
    )
    return plans, [rank.buffers for rank in ranks]


def headers(size: int, first: int = 0) -> str:
    return "".join(chr(0x4E00 + (first + rank) % size) for rank in range(size))


def peers(plan: Plan) -> set[int]:
    return {row[t.PEER] for row in plan.table.tolist() if row[t.KIND] in (t.SEND, t.RECV)}


@pytest.mark.parametrize("size", [*range(2, 34), 63, 64, 65, 127, 128, 129])
def test_every_header_is_combined_once_and_reaches_all_ranks_through_the_same_peers(size: int) -> None:
    plans, buffers = meet(combine_headers, size)
    rounds = (size - 1).bit_length()
    assert len(known_before(size)) == rounds
    for rank in range(size):
        assert plans[rank].table[-1, t.PHASE] == rounds, "as many rounds as it takes, then what is local"
        combined = buffers[rank][t.SCRATCH][COMBINED // HEADER]
        assert combined.translate(str.maketrans("", "", "()")) == headers(size, rank)
    gathering, buffers = meet(gather_headers, size)
    for rank in range(size):
        assert "".join(buffers[rank][t.FRAMES]) == headers(size)
        assert peers(gathering[rank]) == peers(plans[rank])


@pytest.mark.parametrize("counts", [(1, 1), (2, 2), (1, 3), (5, 1, 4), (8, 8, 8, 8), (2,) * 9, (3, 1) * 8])
@pytest.mark.parametrize("interleaved", [False, True])
def test_nodes_combine_every_header_once_through_their_first_ranks(
    counts: tuple[int, ...], interleaved: bool
) -> None:
    size, homes = sum(counts), [node for node, count in enumerate(counts) for _ in range(count)]
    if interleaved:
        homes.sort(key=lambda node: node % 2)
        homes = [*homes[::2], *homes[1::2]]
    nodes = [[rank for rank in range(size) if homes[rank] == node] for node in dict.fromkeys(homes)]
    plans, buffers = meet(lambda _, rank, header: combine_by_nodes(nodes, rank, header), size, nodes)
    firsts = {node[0] for node in nodes}
    for rank, plan in enumerate(plans):
        combined = buffers[rank][t.SCRATCH][COMBINED // HEADER]
        assert sorted(combined.translate(str.maketrans("", "", "()"))) == sorted(headers(size))
        assert peers(plan) <= firsts if rank in firsts else not peers(plan)
    rounds = (len(nodes) - 1).bit_length()
    assert max(len(peers(plan)) for plan in plans) <= 2 * rounds
