"""What a rank does in a collective over shared GPU memory, as data: moves, folds, and when it waits for all ranks.

A call is a sequence of *steps*. Before step k a rank writes its slot of step k; at the step it says so and waits until
every rank has; after it, it reads its peers' slots of step k. Step 0 is the meeting, where the calls are compared.

Slots. A rank has four: step 0 of calls of even and of odd number, later steps of even and of odd number.
Why a slot may be written again. What is written after step k is read after step k + 1 or later, so a rank may write
what no peer reads between steps k and k + 1. Between these a peer reads slots of step k, and the next one to be written
is that of step k + 1, another one. The next call's step 0 is written by whoever has ended a call, while peers may still
read any slot of that call, but none of the other parity's step 0.
Where ranks take different numbers of steps, one that has taken its last says LAST, which counts as every later step.
`tests/gpu/test_ipc_model.py` explores them, `tests/gpu/test_ipc_schedules.py` runs every one and looks for races.

Places are (kind, which, offset in bytes): input or output array `which`, or `SLOT + step`'s slot of rank `which`.
Addresses come in when a schedule is queued. Sizes and offsets are bytes.

One-shot: every rank reads all inputs, one exchange. Two-shot: each reduces its slice, then all gather; two exchanges,
2/size of the bytes. No size here is measured by fastcoll on hardware. vLLM (csrc/custom_all_reduce.cuh, for GPUs that
all reach one another) takes one-shot with 2 ranks always, with up to 4 below 512 KiB, with up to 8 below 256 KiB;
TensorRT-LLM's customAllReduceKernels choose alike. More than 8 ranks are no case of theirs: 128 KiB goes on with their
series.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import lcm
from typing import NamedTuple

IN, OUT, SLOT = 0, 1, 2
SLOTS = 4

ONE_SHOT_BELOW = ((4, 512 << 10), (8, 256 << 10), (64, 128 << 10))
"""(ranks at most, bytes)."""

ALIGNMENT = 128
"""Of parts of a slot, where elements allow it: whole cache lines, and the 16 bytes of the kernels' accesses."""


class Place(NamedTuple):
    kind: int
    which: int
    offset: int


class Move(NamedTuple):
    """Copy bytes."""

    dst: Place
    src: Place
    nbytes: int


class Fold(NamedTuple):
    """Reduce sources, in rank order."""

    dst: Place
    srcs: tuple[Place, ...]
    nbytes: int


class Step(NamedTuple):
    """Go on to a step; 0 is the meeting."""

    number: int


class Last(NamedTuple):
    """Take no more steps in this call."""


Schedule = tuple[Move | Fold | Step | Last, ...]


def slot_of(call: int, step: int) -> int:
    """Which slot a step of a call uses."""
    return call % 2 if step == 0 else 2 + step % 2


class _Rank:
    """The schedule of one rank while it is made."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.peers = [peer for peer in range(size) if peer != rank]
        self._done: list[Move | Fold | Step | Last] = []

    def move(self, dst: Place, src: Place, nbytes: int) -> None:
        if nbytes > 0:
            self._done.append(Move(dst, src, nbytes))

    def fold(self, dst: Place, srcs: Sequence[Place], nbytes: int) -> None:
        if nbytes > 0 and srcs:
            self._done.append(Fold(dst, tuple(srcs), nbytes))

    def step(self, number: int) -> None:
        self._done.append(Step(number))

    def slot(self, rank: int, step: int, offset: int = 0) -> Place:
        return Place(SLOT + step, rank, offset)

    def sources(self, step: int, offset: int, own: Place, ranks: Sequence[int] | None = None) -> list[Place]:
        """The same part of all ranks' slots, but this rank's input where it lies."""
        everybody = range(self.size) if ranks is None else ranks
        return [own if r == self.rank else self.slot(r, step, offset) for r in everybody]

    def schedule(self, last: bool = False) -> Schedule:
        return (*self._done, Last()) if last else tuple(self._done)


def share_of(slot: int, parts: int, itemsize: int) -> int:
    """Bytes of each of `parts` equal parts of a slot: whole elements; 0 if not one fits."""
    most = slot // parts
    unit = lcm(itemsize, ALIGNMENT)
    return most // unit * unit or most // itemsize * itemsize


def _rounds(nbytes: int, chunk: int) -> range:
    """One at least, as a call without data meets too."""
    return range(max(1, -(-nbytes // chunk)))


def _part(nbytes: int, chunk: int, k: int) -> int:
    """Bytes of chunk k of an array; 0 after its end."""
    return max(0, min(chunk, nbytes - k * chunk))


def is_one_shot(size: int, nbytes: int) -> bool:
    """Whether an all_reduce of so many bytes among so many ranks goes one-shot."""
    return size <= 2 or any(size <= most and nbytes < limit for most, limit in ONE_SHOT_BELOW)


def one_shot(
    rank: int, size: int, nbytes: int, itemsize: int, slot: int, readers: Sequence[int] | None = None
) -> Schedule:
    """All_reduce or reduce: every rank, or `readers`, folds the slots of all."""
    p, chunk = _Rank(rank, size), share_of(slot, 1, itemsize)
    reads = readers is None or rank in readers
    is_read = readers is None or any(reader != rank for reader in readers)
    for k in _rounds(nbytes, chunk):
        at, part = k * chunk, _part(nbytes, chunk, k)
        if is_read:
            p.move(p.slot(rank, k), Place(IN, 0, at), part)
        p.step(k)
        if reads:
            p.fold(Place(OUT, 0, at), p.sources(k, 0, Place(IN, 0, at)), part)
    return p.schedule()


def two_shot(rank: int, size: int, nbytes: int, itemsize: int, slot: int) -> Schedule:
    """All_reduce: each rank folds its slice of every chunk into its slot, from where all take it."""
    p, share = _Rank(rank, size), share_of(slot, size, itemsize)
    chunk = share * size
    for k in _rounds(nbytes, chunk):
        at, part = k * chunk, _part(nbytes, chunk, k)
        each = _slice_of(part, size, itemsize)
        sizes = [_part(part, each, r) for r in range(size)]
        for r in p.peers:
            p.move(p.slot(rank, 2 * k, r * each), Place(IN, 0, at + r * each), sizes[r])
        p.step(2 * k)
        mine = rank * each
        sources = p.sources(2 * k, mine, Place(IN, 0, at + mine))
        p.fold(p.slot(rank, 2 * k + 1, mine), sources, sizes[rank])
        p.step(2 * k + 1)
        for r in range(size):
            p.move(Place(OUT, 0, at + r * each), p.slot(r, 2 * k + 1, r * each), sizes[r])
    return p.schedule()


def _slice_of(nbytes: int, size: int, itemsize: int) -> int:
    """Bytes of all but the last slices of a chunk: whole elements, in whole lines."""
    unit = lcm(itemsize, ALIGNMENT)
    return max(1, -(-nbytes // (size * unit))) * unit


def reduce_scatter(rank: int, size: int, sizes: Sequence[int], itemsize: int, slot: int) -> Schedule:
    """Rank r folds part r of all ranks' slots; `sizes` are those of the blocks."""
    p, share = _Rank(rank, size), share_of(slot, size, itemsize)
    for k in _rounds(max(sizes), share):
        at = k * share
        for r in p.peers:
            p.move(p.slot(rank, k, r * share), Place(IN, r, at), _part(sizes[r], share, k))
        p.step(k)
        sources = p.sources(k, rank * share, Place(IN, rank, at))
        p.fold(Place(OUT, 0, at), sources, _part(sizes[rank], share, k))
    return p.schedule()


def scan(rank: int, size: int, nbytes: int, itemsize: int, slot: int, exclusive: bool) -> Schedule:
    """Rank r folds the slots of ranks 0..r, or 0..r-1."""
    p, chunk = _Rank(rank, size), share_of(slot, 1, itemsize)
    ranks = range(rank if exclusive else rank + 1)
    for k in _rounds(nbytes, chunk):
        at, part = k * chunk, _part(nbytes, chunk, k)
        if rank < size - 1:
            p.move(p.slot(rank, k), Place(IN, 0, at), part)
        p.step(k)
        p.fold(Place(OUT, 0, at), p.sources(k, 0, Place(IN, 0, at), ranks), part)
    return p.schedule()


def broadcast(rank: int, size: int, nbytes: int, slot: int, root: int) -> Schedule:
    """All take the root's slot."""
    p = _Rank(rank, size)
    for k in _rounds(nbytes, slot):
        part = _part(nbytes, slot, k)
        if rank == root and p.peers:
            p.move(p.slot(root, k), Place(IN, 0, k * slot), part)
        p.step(k)
        if rank != root:
            p.move(Place(OUT, 0, k * slot), p.slot(root, k), part)
    return p.schedule()


def all_gather(rank: int, size: int, sizes: Sequence[int], slot: int) -> Schedule:
    """All take the slots of all; `sizes` are those of the outputs."""
    p = _Rank(rank, size)
    p.move(Place(OUT, rank, 0), Place(IN, 0, 0), sizes[rank])
    for k in _rounds(max(sizes), slot):
        if p.peers:
            p.move(p.slot(rank, k), Place(IN, 0, k * slot), _part(sizes[rank], slot, k))
        p.step(k)
        for r in p.peers:
            p.move(Place(OUT, r, k * slot), p.slot(r, k), _part(sizes[r], slot, k))
    return p.schedule()


def gather(rank: int, size: int, sizes: Sequence[int], slot: int, root: int) -> Schedule:
    """The root takes the slots of all; `sizes` are those of its outputs, or of this rank's input alone."""
    p = _Rank(rank, size)
    if rank == root:
        p.move(Place(OUT, root, 0), Place(IN, 0, 0), sizes[root])
    others = [sizes[r] for r in p.peers] if rank == root else sizes
    for k in _rounds(max(others, default=0), slot):
        if rank != root:
            p.move(p.slot(rank, k), Place(IN, 0, k * slot), _part(sizes[0], slot, k))
        p.step(k)
        for r in p.peers if rank == root else ():
            p.move(Place(OUT, r, k * slot), p.slot(r, k), _part(sizes[r], slot, k))
    return p.schedule(last=True)


def scatter(rank: int, size: int, sizes: Sequence[int], slot: int, root: int) -> Schedule:
    """Rank r takes part r of the root's slot; `sizes` are those of its blocks, or of this rank's output alone."""
    p, share = _Rank(rank, size), share_of(slot, size, 1)
    if rank == root:
        p.move(Place(OUT, 0, 0), Place(IN, root, 0), sizes[root])
    others = [sizes[r] for r in p.peers] if rank == root else sizes
    for k in _rounds(max(others, default=0), share):
        for r in p.peers if rank == root else ():
            p.move(p.slot(root, k, r * share), Place(IN, r, k * share), _part(sizes[r], share, k))
        p.step(k)
        if rank != root:
            p.move(Place(OUT, 0, k * share), p.slot(root, k, rank * share), _part(sizes[0], share, k))
    return p.schedule(last=True)


def all_to_all(rank: int, size: int, gives: Sequence[int], takes: Sequence[int], slot: int) -> Schedule:
    """Rank r takes part r of all slots; `gives` and `takes` are the sizes of its blocks and outputs."""
    p, share = _Rank(rank, size), share_of(slot, size, 1)
    p.move(Place(OUT, rank, 0), Place(IN, rank, 0), takes[rank])
    most = max((max(gives[r], takes[r]) for r in p.peers), default=0)
    for k in _rounds(most, share):
        for r in p.peers:
            p.move(p.slot(rank, k, r * share), Place(IN, r, k * share), _part(gives[r], share, k))
        p.step(k)
        for r in p.peers:
            p.move(Place(OUT, r, k * share), p.slot(r, k, rank * share), _part(takes[r], share, k))
    return p.schedule(last=True)
