"""What a rank does in a collective over shared GPU memory, as data: moves, folds, and when it waits for all ranks.

A call is a sequence of *steps*. Before step k a rank writes its slot of step k; at the step it says so and waits until
every rank has; after it, it reads its peers' slots of step k. Step 0 is the meeting, where the calls are compared.

Slots. A rank has four: step 0 of calls of even and of odd number, later steps of even and of odd number.
Why a slot may be written again. What is written after step k is read after step k + 1 or later, so a rank may write
what no peer reads between steps k and k + 1. Between these a peer reads slots of step k, and the next one to be written
is that of step k + 1, another one. The next call's step 0 is written by whoever has ended a call, while peers may still
read any slot of that call, but none of the other parity's step 0.
Where ranks take different numbers of steps, one that has taken its last says LAST, which counts as every later step.
`tests/gpu/simulated_ipc_model.py` runs them in every order of steps, `tests/gpu/test_ipc_schedules.py` every one.

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
from itertools import pairwise
from math import lcm
from typing import NamedTuple

from ...core.partition import Span, segments, start_of

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


def share_of(slot: int, parts: int, itemsize: int) -> int:
    """Bytes of each of `parts` equal parts of a slot: whole elements; 0 if not one fits."""
    most = slot // parts
    unit = lcm(itemsize, ALIGNMENT)
    return most // unit * unit or most // itemsize * itemsize


def is_one_shot(size: int, nbytes: int) -> bool:
    """Whether an all_reduce of so many bytes among so many ranks goes one-shot."""
    return size <= 2 or any(size <= most and nbytes < limit for most, limit in ONE_SHOT_BELOW)


def _chunks(nbytes: int, most: int) -> list[Span]:
    """One at least, as a call without data meets too."""
    return segments(nbytes, most) or [Span(0, 0)]


class _Part(NamedTuple):
    """An input put into this rank's slot, or a part of some ranks' slots, moved or reduced into an output."""

    array: int  # number of the input or output; of the own input where slots are reduced, into output 0
    offset: int  # in the slots
    nbytes: int  # of the whole array
    ranks: Sequence[int] = ()  # whose slots; one where they are moved


def _in_chunks(
    rank: int, chunk: int, puts: Sequence[_Part], moved: Sequence[_Part] = (), reduced: Sequence[_Part] = ()
) -> Schedule:
    """Before step k chunk k of each put, after it chunk k of what is moved and reduced."""
    items: list[Move | Fold | Step] = []
    longest = max((x.nbytes for x in (*puts, *moved, *reduced)), default=0)
    for k, (at, _) in enumerate(_chunks(longest, chunk)):
        for x in puts:
            place = Place(SLOT + k, rank, x.offset)
            items.append(Move(place, Place(IN, x.array, at), min(chunk, x.nbytes - at)))
        items.append(Step(k))
        for x in moved:
            place = Place(SLOT + k, x.ranks[0], x.offset)
            items.append(Move(Place(OUT, x.array, at), place, min(chunk, x.nbytes - at)))
        for x in reduced:
            srcs = _sources(rank, x.ranks, k, x.offset, Place(IN, x.array, at))
            items.append(Fold(Place(OUT, 0, at), srcs, min(chunk, x.nbytes - at)))
    return _filled(items)


def _sources(rank: int, ranks: Sequence[int], step: int, offset: int, own: Place) -> tuple[Place, ...]:
    """The same part of some ranks' slots, but this rank's input where it lies."""
    return tuple(own if r == rank else Place(SLOT + step, r, offset) for r in ranks)


def _filled(items: Sequence[Move | Fold | Step]) -> Schedule:
    """Without what moves nothing."""
    return tuple(
        x for x in items if isinstance(x, Step) or (x.nbytes > 0 and (isinstance(x, Move) or x.srcs))
    )


def _own(out: int, block: int, nbytes: int) -> Schedule:
    """A rank's block for itself."""
    return _filled([Move(Place(OUT, out, 0), Place(IN, block, 0), nbytes)])


def _peers(rank: int, size: int) -> list[int]:
    return [peer for peer in range(size) if peer != rank]


def one_shot(
    rank: int, size: int, nbytes: int, itemsize: int, slot: int, readers: Sequence[int] | None = None
) -> Schedule:
    """All_reduce or reduce: every rank, or `readers`, folds the slots of all."""
    readers = range(size) if readers is None else readers
    puts = [_Part(0, 0, nbytes)] * any(reader != rank for reader in readers)
    reduced = [_Part(0, 0, nbytes, range(size))] * (rank in readers)
    return _in_chunks(rank, share_of(slot, 1, itemsize), puts, (), reduced)


def two_shot(rank: int, size: int, nbytes: int, itemsize: int, slot: int) -> Schedule:
    """All_reduce: each rank folds its slice of every chunk into its slot, from where all take it."""
    items: list[Move | Fold | Step] = []
    unit = lcm(itemsize, ALIGNMENT)
    for k, (at, part) in enumerate(_chunks(nbytes, share_of(slot, size, itemsize) * size)):
        starts = [start_of(part, size, r, unit) for r in range(size + 1)]
        slices = [Span(low, high - low) for low, high in pairwise(starts)]
        for r in _peers(rank, size):
            low, length = slices[r]
            items.append(Move(Place(SLOT + 2 * k, rank, low), Place(IN, 0, at + low), length))
        items.append(Step(2 * k))
        low, length = slices[rank]
        srcs = _sources(rank, range(size), 2 * k, low, Place(IN, 0, at + low))
        items.append(Fold(Place(SLOT + 2 * k + 1, rank, low), srcs, length))
        items.append(Step(2 * k + 1))
        for r, (low, length) in enumerate(slices):
            items.append(Move(Place(OUT, 0, at + low), Place(SLOT + 2 * k + 1, r, low), length))
    return _filled(items)


def reduce_scatter(rank: int, size: int, sizes: Sequence[int], itemsize: int, slot: int) -> Schedule:
    """Rank r folds part r of all ranks' slots; `sizes` are those of the blocks."""
    share = share_of(slot, size, itemsize)
    puts = [_Part(r, r * share, sizes[r]) for r in _peers(rank, size)]
    return _in_chunks(rank, share, puts, (), [_Part(rank, rank * share, sizes[rank], range(size))])


def scan(rank: int, size: int, nbytes: int, itemsize: int, slot: int, exclusive: bool) -> Schedule:
    """Rank r folds the slots of ranks 0..r, or 0..r-1."""
    puts = [_Part(0, 0, nbytes)] * (rank < size - 1)
    reduced = [_Part(0, 0, nbytes, range(rank if exclusive else rank + 1))]
    return _in_chunks(rank, share_of(slot, 1, itemsize), puts, (), reduced)


def broadcast(rank: int, size: int, nbytes: int, slot: int, root: int) -> Schedule:
    """All take the root's slot."""
    if rank == root:
        return _in_chunks(rank, slot, [_Part(0, 0, nbytes)] * (size > 1))
    return _in_chunks(rank, slot, (), [_Part(0, 0, nbytes, (root,))])


def all_gather(rank: int, size: int, sizes: Sequence[int], slot: int) -> Schedule:
    """All take the slots of all; `sizes` are those of the outputs."""
    puts = [_Part(0, 0, sizes[rank])] * (size > 1)
    moved = [_Part(r, 0, sizes[r], (r,)) for r in _peers(rank, size)]
    return *_own(rank, 0, sizes[rank]), *_in_chunks(rank, slot, puts, moved)


# In the next three a rank knows its own sizes alone, so ranks may take different numbers of steps.


def gather(rank: int, size: int, sizes: Sequence[int], slot: int, root: int) -> Schedule:
    """The root takes the slots of all; `sizes` are those of its outputs, or of this rank's input alone."""
    if rank != root:
        return *_in_chunks(rank, slot, [_Part(0, 0, sizes[0])]), Last()
    moved = [_Part(r, 0, sizes[r], (r,)) for r in _peers(rank, size)]
    return *_own(root, 0, sizes[root]), *_in_chunks(rank, slot, (), moved), Last()


def scatter(rank: int, size: int, sizes: Sequence[int], slot: int, root: int) -> Schedule:
    """Rank r takes part r of the root's slot; `sizes` are those of its blocks, or of this rank's output alone."""
    share = share_of(slot, size, 1)
    if rank != root:
        return *_in_chunks(rank, share, (), [_Part(0, rank * share, sizes[0], (root,))]), Last()
    puts = [_Part(r, r * share, sizes[r]) for r in _peers(rank, size)]
    return *_own(0, root, sizes[root]), *_in_chunks(rank, share, puts), Last()


def all_to_all(rank: int, size: int, gives: Sequence[int], takes: Sequence[int], slot: int) -> Schedule:
    """Rank r takes part r of all slots; `gives` and `takes` are the sizes of its blocks and outputs."""
    share, peers = share_of(slot, size, 1), _peers(rank, size)
    puts = [_Part(r, r * share, gives[r]) for r in peers]
    moved = [_Part(r, rank * share, takes[r], (r,)) for r in peers]
    return *_own(rank, rank, takes[rank]), *_in_chunks(rank, share, puts, moved), Last()
