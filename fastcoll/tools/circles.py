"""Deadlocks among waiting ranks: the waits that cannot end, and cycles of ranks.

Cycles are strongly connected components, found by two depth-first searches (Kosaraju's algorithm).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Set
from typing import Protocol


class AwaitsRanks(Protocol):
    """A wait for ranks: for all of `late`, or for any one of them."""

    @property
    def late(self) -> tuple[int, ...]: ...

    @property
    def any(self) -> bool: ...


def hopeless(waits: Mapping[int, Iterable[AwaitsRanks]]) -> set[int]:
    """Return the ranks whose waits cannot end, even if all ranks that do not wait go on."""
    stuck = set(waits)

    def goes_on(rank: int) -> bool:
        return all(
            (any if wait.any else all)(other not in stuck for other in wait.late) for wait in waits[rank]
        )

    while freed := {rank for rank in stuck if goes_on(rank)}:
        stuck -= freed
    return stuck


def circles(waits: Mapping[int, Set[int]]) -> list[list[int]]:
    """Return the maximal sets of ranks that wait for one another, sorted; also ranks that wait for themselves.

    `waits` has, for each rank that waits, the ranks for which it waits.
    """
    seen = set[int]()
    finished = [rank for start in waits for rank in _finished(start, waits, seen)]
    waited_by: dict[int, set[int]] = {rank: set() for rank in waits}
    for rank, late in waits.items():
        for other in late & waits.keys():
            waited_by[other].add(rank)
    seen, found = set[int](), []
    for start in reversed(finished):
        component = sorted(_finished(start, waited_by, seen))
        if len(component) > 1 or start in waits[start] & {*component}:
            found.append(component)
    return sorted(found)


def _finished(start: int, edges: Mapping[int, Set[int]], seen: set[int]) -> Iterator[int]:
    """Yield the ranks that a search from `start` reaches, in post-order, without those in `seen`; extend `seen`."""
    path = [] if start in seen else [(start, iter(edges[start] & edges.keys()))]
    seen.add(start)
    while path:
        node, rest = path[-1]
        following = next((other for other in rest if other not in seen), None)
        if following is None:
            path.pop()
            yield node
        else:
            seen.add(following)
            path.append((following, iter(edges[following] & edges.keys())))
