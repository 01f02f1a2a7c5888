"""A call as plans see it: who takes part and how many bytes, but no arrays; and the limits that plans keep to."""

from __future__ import annotations

from typing import NamedTuple

from .table import FIRST_ARRAY, FRAMES, Place

MEET_RANKS = 16
"""Up to so many ranks everybody sends its header to everybody, and small data with it; more ranks meet in steps."""


class Limits(NamedTuple):
    """What a group's engine can do, in bytes.

    Attributes:
        payload: may be attached to a header; 0 where nothing may.
        frame_stride: from one rank's payload in FRAMES to the next one's.
        segment: of what travels between two ranks before it is reduced.
        at_once: bytes of all segments that a rank receives in one phase; segments shrink to keep to it.
        peers: with how many others a rank exchanges data in one phase.
    """

    payload: int
    frame_stride: int
    segment: int = 256 << 10
    at_once: int = 8 << 20
    peers: int = 16


def default_limits(size: int) -> Limits:
    """Limits for a group of `size` ranks: payloads of at most 64 KiB in all, but at least 2 KiB to each peer."""
    payload = max(2 << 10, (64 << 10) // (size - 1) // 64 * 64) if 1 < size <= MEET_RANKS else 0
    return Limits(payload, payload)


class Shape(NamedTuple):
    """One rank's view of a call.

    Attributes:
        operation: a name of signature.OPERATIONS, from all_reduce to barrier.
        size, rank: of the group.
        nbytes: all_reduce, reduce, scan, exscan, broadcast: (bytes of the array,); reduce_scatter: of each block;
            all_gather: of each out; gather and scatter: of each out or block on the root, (bytes of the own
            array,) elsewhere; all_to_all: of each out, then of each block; barrier: ().
        limits: of the group; the same on all ranks, as is all that follows.
        itemsize: bytes of what is reduced, 1 where nothing is.
        root: of broadcast, reduce, gather and scatter.
        ordered: whether the reduction must combine the ranks in order (it does not commute, or rounds so
            coarsely that the order shows).
        even: gather and scatter: this rank knows that all ranks' arrays have as many bytes as its own.
    """

    operation: str
    size: int
    rank: int
    nbytes: tuple[int, ...]
    limits: Limits
    itemsize: int = 1
    root: int = 0
    ordered: bool = False
    even: bool = False

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


def array(index: int) -> int:
    """The buffer that is the call's array number `index`."""
    return FIRST_ARRAY + index


def framed(shape: Shape, rank: int) -> Place:
    """Where that lies which a rank attached to its header."""
    return FRAMES, rank * shape.limits.frame_stride
