"""What to say when the ranks' calls do not match: what each rank called, or whose sizes differ."""

from __future__ import annotations

from collections.abc import Sequence

from . import calls
from .errors import MismatchError

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
