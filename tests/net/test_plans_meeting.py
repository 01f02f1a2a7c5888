"""The meeting of many ranks: every header is combined exactly once, and all headers reach all ranks if calls differ."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from fastcoll.net.tcp.plans import plan as t
from fastcoll.net.tcp.plans.circulant import COMBINED, combine_headers, gather_headers, known_before
from fastcoll.net.tcp.plans.plan import Plan
from net.simulate import check_pairs, rubbish, simulate

HEADER = 64


def meet(make: Callable[[int, int, int], Plan], size: int) -> tuple[list[Plan], list[dict[int, np.ndarray]]]:
    """Return the plans of all ranks, and their buffers afterwards; in FRAMES each begins with its header, a symbol."""
    plans = [make(size, rank, HEADER) for rank in range(size)]
    check_pairs(plans)
    frames = [rubbish(size) for _ in plans]
    for rank, mine in enumerate(frames):
        mine[rank] = chr(0x4E00 + rank)
    ranks = simulate(plans, [[] for _ in plans], itemsize=HEADER, frames=frames, capacity=2 * size)
    return plans, [rank.buffers for rank in ranks]


def headers(size: int, first: int = 0) -> str:
    return "".join(chr(0x4E00 + (first + rank) % size) for rank in range(size))


def peers(plan: Plan) -> set[int]:
    return {row[t.PEER] for row in plan.table.tolist() if row[t.KIND] in (t.SEND, t.RECV)}


@pytest.mark.parametrize("size", [*range(2, 70), 100, 127, 128, 129])
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
