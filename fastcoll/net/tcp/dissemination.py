"""The plan by which many ranks bring their headers together: dissemination, in ceil(log2 n) rounds.

In round k rank r gets the headers of the 2**k ranks from r + 2**k on, which that rank has by then (Bruck et al.,
Efficient algorithms for all-to-all communications in multiport message-passing systems, 1997).
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ...core.operands import Array
from .plans.table import BUFFER, COLUMNS, FRAMES, KIND, NBYTES, OFFSET, PEER, PHASE, RECV, SEND


def dissemination(size: int, rank: int, header: int) -> Array:
    """The plan's table, for headers of `header` bytes that lie one after the other in FRAMES."""
    rows: list[list[int]] = []
    have, phase = 1, 0
    while have < size:
        count = min(have, size - have)
        below, above = (rank - have) % size, (rank + have) % size
        rows += [_row(phase, SEND, below, *run, header) for run in _runs(rank, count, size)]
        rows += [_row(phase, RECV, above, *run, header) for run in _runs(above, count, size)]
        have += count
        phase += 1
    return np.array(rows, np.int64).reshape(-1, COLUMNS)


def _runs(first: int, count: int, size: int) -> Iterator[tuple[int, int]]:
    """The ranks first, first + 1, ... modulo size, as runs (first, count) that do not wrap."""
    end = first + count
    yield first, min(end, size) - first
    if end > size:
        yield 0, end - size


def _row(phase: int, kind: int, peer: int, first: int, count: int, header: int) -> list[int]:
    row = [0] * COLUMNS
    row[PHASE], row[KIND], row[PEER] = phase, kind, peer
    row[BUFFER], row[OFFSET], row[NBYTES] = FRAMES, first * header, count * header
    return row
