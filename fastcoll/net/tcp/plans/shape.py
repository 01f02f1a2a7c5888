"""The ranks and sizes of a call, from which its plans are made, and the limits of plans."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ....core.partition import Segments, Span
from ....core.sizes import Sizes, sizes_of
from .plan import FIRST_ARRAY, FRAMES, SCRATCH, Location

HEADER_BYTES = 64  # of a header in the meeting: a cache line, so that the data behind the header is aligned
MEET_RANKS = 16
"""In a group of at most this many ranks, each rank sends its header, and small data with it, to every other, unless
the ranks meet by nodes (node_meeting.py). Larger groups combine headers in rounds (combine.py)."""


class Limits(NamedTuple):
    """Limits of a group's plans, in bytes, except for `peers`."""

    payload: int  # maximum that may be attached to a header; 0: nothing is attached
    segment: int = 256 << 10  # maximum that one rank sends to another before that rank reduces it
    at_once: int = 8 << 20  # maximum of all segments received in one phase; segments are made small enough
    peers: int = 16  # maximum number of ranks with which a rank exchanges data in one phase
    carried: int = 0  # maximum that combined headers carry (node_meeting.py)
    relayed: int = (
        0  # maximum that a rank gives, or a node takes, through the first rank of its node (relayed.py)
    )

    @property
    def stride(self) -> int:
        """Bytes from one rank's payload in FRAMES to the next: a header and the data behind it."""
        return HEADER_BYTES + self.payload + self.carried


def default_limits(size: int) -> Limits:
    """Return the limits of a group of `size` ranks.

    Payloads have at most 64 KiB in all, but at least 2 KiB for each peer.
    """
    return Limits(max(2 << 10, (64 << 10) // (size - 1) // 64 * 64) if 1 < size <= MEET_RANKS else 0)


class CallShape(NamedTuple):
    """One rank's view of a call.

    Attributes:
        operation: a kind of core/operations.py that every backend carries out.
        size, rank: the number of ranks in the group, and this rank's group rank.
        nbytes: sizes in bytes. all_reduce, reduce, scan, exscan, broadcast: of the array; reduce_scatter: of each
            block; all_gather: of each output; gather, scatter: on the root, of each output or block, elsewhere, of this
            rank's array; all_to_all: of each output, then of each block; barrier: none.
        limits: the limits of the group. They and all attributes below are the same on all ranks.
        itemsize: bytes of an element; 1 if nothing is reduced.
        root: the root of a broadcast, reduce, gather or scatter.
        ordered: whether the reduction must combine the ranks in rank order (it does not commute, or rounds so
            coarsely that the order matters), and each prefix of a scan in one pass (also for averages).
        nodes: the ranks of each node, if one rank of each node passes on the data of the others (relayed.py).
    """

    operation: str
    size: int
    rank: int
    nbytes: tuple[int, ...]
    limits: Limits
    itemsize: int = 1
    root: int = 0
    ordered: bool = False
    nodes: tuple[tuple[int, ...], ...] = ()

    @property
    def total(self) -> int:
        """Bytes of the array, or of all blocks together."""
        return sum(self.nbytes)

    @property
    def is_root(self) -> bool:
        return self.rank == self.root

    @property
    def others(self) -> list[int]:
        """All other ranks, beginning with the next one.

        Each rank begins with a different peer, so not all ranks send to the same rank at once.
        """
        return [(self.rank + step) % self.size for step in range(1, self.size)]

    def sizes(self) -> Sizes:
        """Return the sizes that the meeting compares."""
        return sizes_of(self.operation, self.size, self.rank, self.nbytes, self.root)

    def takers_and_givers(self) -> tuple[Sequence[int], Sequence[int]]:
        """Return the ranks that need this rank's array, and those whose arrays this rank needs.

        The latter may include this rank itself.
        """
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
        """Divide the blocks into equal segments.

        A rank receives `at_once` segments at the same time, which limits their size.
        """
        most = min(self.limits.segment, self.limits.at_once // max(at_once, 1))
        return Segments.of_blocks(blocks, most, self.itemsize)

    def landing(self, k: int, peer: int, segments: Segments) -> Location:
        """Return where to receive segment k of a peer.

        SCRATCH has space for two segments of each peer, used alternately.
        """
        return SCRATCH, (k % 2 * self.size + peer) * segments.nbytes

    def operands(self, own: Location, k: int, segments: Segments) -> list[Location]:
        """Return segment k of all ranks: this rank's own, and those received."""
        return [own if peer == self.rank else self.landing(k, peer, segments) for peer in range(self.size)]

    def framed(self, rank: int) -> Location:
        """Return the location of the data that a rank has attached to its header."""
        return FRAMES, rank * self.limits.stride


def relay(size: int, place: int) -> int:
    """Return the buffer number of the relay memory of the rank with this place in its node."""
    return FIRST_ARRAY + 2 * size + place


def array(index: int) -> int:
    """Return the buffer number of the call's array `index`."""
    return FIRST_ARRAY + index
