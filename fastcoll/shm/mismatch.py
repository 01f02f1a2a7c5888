"""When sizes do not fit: every rank tells the others what it gives and takes, and all find the pairs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from .layout import REASON, REASON_BYTES
from .segment import Segment

Sizes = tuple[Sequence[int], Sequence[int]]


def share_sizes(segment: Segment, rank: int, sizes: Sizes, barrier: Callable[[], None]) -> list[Sizes]:
    """Every rank's sizes, exchanged through the text areas of the control pages; collective.

    Empty when there are more ranks than the areas have room for (64).
    """
    n = segment.layout.size
    if 16 * n <= REASON_BYTES:
        segment.write_text(rank, REASON, np.array(sizes, np.int64).tobytes())
    barrier()
    if 16 * n > REASON_BYTES:
        return []
    start = [segment.word(r, REASON) for r in range(n)]
    tables = [segment.words[s : s + 2 * n].reshape(2, n).tolist() for s in start]
    return [(gives, takes) for gives, takes in tables]


def describe_sizes(tables: Sequence[Sizes], ranks: Sequence[int]) -> str:
    """The pairs of ranks whose sizes differ: `rank 0 gives rank 1 8 bytes, which expects 12`."""
    differences = [
        f"rank {ranks[src]} gives rank {ranks[dst]} {gives[dst]} bytes, which expects {tables[dst][1][src]}"
        for src, (gives, _) in enumerate(tables)
        for dst in range(len(tables))
        if gives[dst] != tables[dst][1][src]
    ]
    return "; ".join(differences[:8]) or "what ranks give and what others expect differ"
