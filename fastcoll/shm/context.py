"""A group's private context: the table of words that its kernels read and keep their state in."""

from __future__ import annotations

import numpy as np

from ..kernels import waiting
from ..kernels.pointers import address_of
from . import rounds
from .layout import Layout

BUDGET = 50_000_000  # ns that a kernel may wait before Python looks at signals, deadlines and peers

# Polls before yielding when every rank has a core of its own: 20 to 50 us, longer than any peer's lag
# in a tight loop (Zen 5: 15 ns a pause). Oversubscribed, a spinning rank steals the very core that its
# peer needs: 4 ranks on 2 cores take 3.4 us yielding at once and 25 us after 1000 spins.
_DEDICATED = (2000, 200)
_OVERSUBSCRIBED = (0, 1000)

# Up to this many bytes every rank reduces everything (one synchronisation); beyond, each its slice
# (two, but less to read). By number of ranks; docs/architecture.md has the measurement.
_ONE_SHOT = ((2, 1 << 62), (4, 32 << 10), (8, 16 << 10), (16, 8 << 10), (1 << 30, 4 << 10))


def patience(ranks: int, cores: int) -> tuple[int, int]:
    """Spins and yields before sleeping, for so many ranks on so many cores."""
    return _DEDICATED if ranks <= cores else _OVERSUBSCRIBED


class Context:
    """The context of one rank, and typed access to the words that Python needs."""

    def __init__(self, base: int, layout: Layout, rank: int, cores: int) -> None:
        words = np.zeros(rounds.CONTEXT_WORDS + layout.size, np.int64)
        words[rounds.RANK] = rank
        words[rounds.SIZE] = layout.size
        words[rounds.SECTIONS] = base + layout.section(0)
        words[rounds.STRIDE] = layout.stride
        words[rounds.SLOTS_AT] = layout.slots_at
        words[rounds.SLOT] = layout.slot
        words[rounds.SEEN] = 1
        words[rounds.LATE] = -1
        words[rounds.ONE_SHOT] = next(limit for ranks, limit in _ONE_SHOT if layout.size <= ranks)
        spins, yields = patience(layout.size, cores)
        words[rounds.PATIENCE + waiting.SPINS] = spins
        words[rounds.PATIENCE + waiting.YIELDS] = yields
        words[rounds.PATIENCE + waiting.BUDGET] = BUDGET
        self.words = words
        self.address = address_of(words)

    def __getitem__(self, index: int) -> int:
        return int(self.words[index])
