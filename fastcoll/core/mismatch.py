"""What to say when the ranks' calls do not match: what each rank called, or whose sizes differ."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import MismatchError
from . import calls

_NOTE_BYTES = 1024

Share = Callable[[NDArray[Any]], NDArray[Any]]
"""Every rank's array, row by row, where each gives one of the same size; all ranks of a mismatch call it together."""

Sizes = tuple[Sequence[int], Sequence[int]]
"""Bytes that a rank gives to and takes from each rank; -1 where there is no message."""


def mismatch(text: str, number: int, group: str) -> MismatchError:
    """The error of every rank; `text` says who called what."""
    return MismatchError(
        f"the ranks' calls do not match (call {number} of group {group!r}): {text}; "
        "all ranks must make the same calls in the same order"
    )


def comparable(said: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """The (call, shape) of all ranks, without the shapes if ranks may differ in them."""
    uneven = all(call & calls.UNEVEN for call, _ in said)
    return [(call, 0) for call, _ in said] if uneven else list(said)


def operation_of(said: Sequence[tuple[int, int]]) -> str:
    """The operation that all ranks called."""
    return calls.OPERATIONS[said[0][0] & 0xFF]


def describe_sizes(tables: Sequence[Sizes], ranks: Sequence[int]) -> str:
    """The pairs of ranks whose sizes differ: `rank 0 gives rank 1 8 bytes, which expects 12`."""
    differences = [
        f"rank {ranks[src]} gives rank {ranks[dst]} {gives[dst]} bytes, which expects {tables[dst][1][src]}"
        for src, (gives, _) in enumerate(tables)
        for dst in range(len(tables))
        if gives[dst] != tables[dst][1][src]
    ]
    return "; ".join(differences[:8]) or "what ranks give and what others expect differ"


def refused(
    said: Sequence[tuple[int, int]], ranks: Sequence[int], own: str, share: Share, number: int, group: str
) -> MismatchError | None:
    """The error of every rank where some ranks' calls were refused: what they say, and what the others called.

    Args:
        said: the (call, shape) of all ranks.
        own: what this rank says, if its call was refused.
    """
    there = [rank for rank, (call, _) in enumerate(said) if call == calls.REFUSED]
    if not there:
        return None
    note = np.zeros(_NOTE_BYTES, np.uint8)
    data = np.frombuffer(own.encode()[:_NOTE_BYTES], np.uint8)
    note[: data.size] = data
    notes = share(note)
    told = [notes[rank].tobytes().rstrip(b"\0").decode(errors="replace") for rank in there[:8]]
    others = [rank for rank in range(len(said)) if rank not in there]
    text = calls.describe_differences([said[rank] for rank in others], [ranks[rank] for rank in others])
    return MismatchError(f"{'; '.join(told)}; {text} (call {number} of group {group!r}); no data was moved")
