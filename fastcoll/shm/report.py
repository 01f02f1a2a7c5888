"""The call under way in words: what it is, who has not arrived, and why calls do not match.

Everything is read from the call lines, which stay as they are until every rank has compared them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..core import signature
from ..core.operands import Array
from ..errors import MismatchError
from . import layout, words
from .context import Context
from .segment import Segment


class Report:
    """What one rank can say about its group's current call. Nothing here blocks but `mismatch`."""

    def __init__(
        self, segment: Segment, context: Context, rank: int, ranks: Sequence[int], group: str
    ) -> None:
        self._segment = segment
        self._context = context
        self._rank = rank
        self._ranks = ranks
        self._group = group

    def doing(self, entry: str) -> str:
        """The call under way, for messages; `entry` is its name while it has not been published."""
        number = self._context[words.CALLS]
        line = self._line(self._rank)
        told = line[layout.SEQUENCE] == number
        what = signature.describe(int(line[layout.CALL]), int(line[layout.SHAPE])) if told else entry
        return f"{what}, call {number} of group {self._group!r}"

    def late(self) -> list[int]:
        """The group ranks that have not arrived at the call under way, or else whom the kernel waits for."""
        number = self._context[words.CALLS]
        late = [rank for rank in self._everybody() if self._line(rank)[layout.SEQUENCE] < number]
        waits_for = late or [self._context[words.LATE]]
        return [rank for rank in waits_for if rank != self._rank]

    def mismatch(self, share: signature.Share, refusal: str) -> MismatchError:
        """What each rank called. Every rank of a mismatch is here, so they can tell one another more.

        Args:
            refusal: why this rank's call was refused, if it was.
        """
        number = self._context[words.CALLS]
        sizes = self._context.table(words.GIVES + 1), self._context.table(words.TAKES + 1)
        heads = [self._call_and_shape(rank) for rank in self._everybody()]
        if error := signature.refused(heads, self._ranks, refusal, share, number, self._group):
            return error

        def tables() -> Sequence[signature.Sizes]:
            return [(gives, takes) for gives, takes in share(np.array(sizes, np.int64)).tolist()]

        in_symmetric = signature.OPERATIONS[heads[0][0] & 0xFF].startswith("symmetric:")
        describe = describe_places if in_symmetric else signature.describe_sizes
        text = signature.describe_mismatch(heads, self._ranks, tables, describe)
        return signature.mismatch(text, number, self._group)

    def _everybody(self) -> range:
        return range(self._segment.layout.size)

    def _line(self, rank: int) -> Array:
        """The words of a rank's line of the current call."""
        start = self._segment.word(rank, layout.LINE * (self._context[words.CALLS] % 2))
        return self._segment.words[start : start + layout.PAYLOAD]

    def _call_and_shape(self, rank: int) -> tuple[int, int]:
        line = self._line(rank)
        return int(line[layout.CALL]), int(line[layout.SHAPE])


def describe_places(tables: Sequence[signature.Sizes], ranks: Sequence[int]) -> str:
    """Where in symmetric memory each rank's array lies, which it says instead of sizes (symmetric_reduce.py)."""
    places = [(gives[0], gives[1]) for gives, _ in tables]
    names = {memory: f"array {number}" for number, memory in enumerate(dict.fromkeys(m for m, _ in places))}
    said = [
        f"rank {rank} gave what begins {offset} bytes into symmetric {names[memory]}"
        for rank, (memory, offset) in zip(ranks, places, strict=True)
    ]
    return "; ".join([*said[:8], "give the same slice of the same symmetric array on all ranks"])
