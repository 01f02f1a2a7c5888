"""A call as plans see it: who takes part and how many bytes, but no arrays; and the limits that plans keep to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ....core.partition import Segments, Span
from ....core.sizes import Sizes, sizes_of
from .plan import FIRST_ARRAY, FRAMES, SCRATCH, Location

HEADER_BYTES = 64  # of the meeting: a cache line, so that what follows is aligned
MEET_RANKS = 16
"""Up to so many ranks everybody sends its header to everybody, and small data with it; more ranks meet in steps."""


class Limits(NamedTuple):
    """What a group's engine can do, in bytes."""

    payload: int  # may be attached to a header; 0 where nothing may
    segment: int = 256 << 10  # of what travels between two ranks before it is reduced
    at_once: int = 8 << 20  # of all segments that a rank receives in one phase; segments shrink to keep to it
    peers: int = 16  # with how many others a rank exchanges data in one phase

    @property
    def stride(self) -> int:
        """From one rank's payload in FRAMES to the next one's: a frame is a header with a payload."""
        return HEADER_BYTES + self.payload


def default_limits(size: int) -> Limits:
    """Limits for a group of `size` ranks: payloads of at most 64 KiB in all, but at least 2 KiB to each peer."""
    return Limits(max(2 << 10, (64 << 10) // (size - 1) // 64 * 64) if 1 < size <= MEET_RANKS else 0)


class CallShape(NamedTuple):
    """One rank's view of a call.

    Attributes:
        operation: a kind of core/operations.py that every backend carries out.
        size, rank: of the group.
        nbytes: all_reduce, reduce, scan, exscan, broadcast: (bytes of the array,); reduce_scatter: of each block;
            all_gather: of each out; gather and scatter: of each out or block on the root, (bytes of the own
            array,) elsewhere; all_to_all: of each out, then of each block; barrier: ().
        limits: of the group; the same on all ranks, as is all that follows.
        itemsize: bytes of what is reduced, 1 where nothing is.
        root: of broadcast, reduce, gather and scatter.
        ordered: whether the reduction must combine the ranks in order (it does not commute, or rounds so
            coarsely that the order shows).
    """

    operation: str
    size: int
    rank: int
    nbytes: tuple[int, ...]
    limits: Limits
    itemsize: int = 1
    root: int = 0
    ordered: bool = False

    @property
    def total(self) -> int:
        """Bytes of the array, where the operation has one; of all arrays else."""
        return sum(self.nbytes)

    @property
    def is_root(self) -> bool:
        return self.rank == self.root

    @property
    def others(self) -> list[int]:
        """All other ranks, the next one first, so that not all ranks begin with the same one."""
        return [(self.rank + step) % self.size for step in range(1, self.size)]

    def sizes(self) -> Sizes:
        """What the ranks compare of the sizes."""
        return sizes_of(self.operation, self.size, self.rank, self.nbytes, self.root)

    def takers_and_givers(self) -> tuple[Sequence[int], Sequence[int]]:
        """Where all ranks' whole arrays count: whom a rank's goes to, and whose are combined or copied there."""
        rank, size = self.rank, self.size
        found: dict[str, tuple[Sequence[int], Sequence[int]]] = {
            "reduce": ([], range(size)) if self.is_root else ([self.root], []),
            "broadcast": (self.others, []) if self.is_root else ([], [self.root]),
            "refused": (self.others, []),
            "scan": (range(rank + 1, size), range(rank + 1)),
            "exscan": (range(rank + 1, size), range(rank)),
        }
        return found.get(self.operation, (self.others, range(size)))

    def segments(self, blocks: Sequence[Span], at_once: int) -> Segments:
        """Segments of equal size for blocks of which a rank receives `at_once` at the same time."""
        most = min(self.limits.segment, self.limits.at_once // max(at_once, 1))
        return Segments.of_blocks(blocks, most, self.itemsize)

    def landing(self, k: int, peer: int, parts: Segments) -> Location:
        """Where segment k of a peer lands, in one of two sets in SCRATCH that take turns."""
        return SCRATCH, (k % 2 * self.size + peer) * parts.nbytes

    def operands(self, own: Location, k: int, parts: Segments) -> list[Location]:
        """Segment k of all ranks, this rank's own and what has landed."""
        return [own if peer == self.rank else self.landing(k, peer, parts) for peer in range(self.size)]

    def framed(self, rank: int) -> Location:
        """Where that lies which a rank attached to its header."""
        return FRAMES, rank * self.limits.stride


def array(index: int) -> int:
    """The buffer that is the call's array number `index`."""
    return FIRST_ARRAY + index
