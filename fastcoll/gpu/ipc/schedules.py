"""Schedules: data that describes a rank's copies, reductions and waits in a collective over shared GPU memory.

A call is a sequence of *steps*. Before step k a rank writes its slot (a buffer that the peers read) of step k. In step
k it publishes that the slot is written, and waits until every rank has published step k. After the step it reads its
peers' slots of step k. Step 0 is also called the meeting: in it, the ranks compare their calls.

Slots. A rank has four slots. Two are for step 0: one for calls with an even number, one for calls with an odd number.
The other two are for later steps: one for even steps, one for odd steps.

Invariant: no rank writes a slot that a peer still reads. A rank publishes step k only after it has read the slots of
step k - 1. When a rank has completed step k, all ranks have published step k. So its peers read only slots of step k
until they publish step k + 1. Meanwhile the rank writes its slot of step k + 1, which is a different one. After its
last step, a rank writes its slot of step 0 of the next call. Its peers may still read slots of the current call, but
step 0 of the current call uses the slot of the other parity. The slot that the rank writes was last read in the call
before the current one. All ranks have left that call, because they have met in the current one.

If ranks take different numbers of steps, a rank that has taken its last step publishes LAST_STEP, which counts as every
later step. `tests/gpu/simulated_ipc_model.py` runs schedules in every order of steps, and
`tests/gpu/test_ipc_schedules.py` runs every schedule.

A BlockLocation (kind, which, offset) is a place in an array or a slot. If `kind` is IN or OUT, `which` is the index of
the input or output array. If `kind` is SLOT + k, the place is in the slot of step k of rank `which`. Addresses are
filled in when a schedule is queued. Sizes and offsets are in bytes.

One-shot: every rank reads all inputs, in one exchange. Two-shot: each rank reduces its block, then all ranks gather the
blocks. This takes two exchanges, but a rank reads only 2/size as many bytes. The choice between them (ONE_SHOT_BELOW)
was not measured on hardware; it follows other projects. vLLM (csrc/custom_all_reduce.cuh, for GPUs that all reach one
another) uses one-shot always with 2 ranks, below 512 KiB with up to 4, and below 256 KiB with up to 8; TensorRT-LLM's
customAllReduceKernels choose in a similar way. Both support at most 8 ranks; for more, 128 KiB continues their series.
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
"""Pairs (ranks, bytes): with at most `ranks` ranks, an all_reduce of fewer than `bytes` bytes is one-shot."""

ALIGNMENT = 128
"""Alignment of blocks in a slot, if the element size allows it; it suits cache lines and 16-byte accesses."""


class BlockLocation(NamedTuple):
    kind: int
    which: int
    offset: int


class Move(NamedTuple):
    """Copy bytes."""

    dst: BlockLocation
    src: BlockLocation
    nbytes: int


class ReduceStep(NamedTuple):
    """Reduce sources, in rank order."""

    dst: BlockLocation
    srcs: tuple[BlockLocation, ...]
    nbytes: int


class Step(NamedTuple):
    """Publish a step and wait for all ranks; step 0 is the meeting."""

    number: int


class Last(NamedTuple):
    """Publish that this rank takes no more steps in this call."""


Schedule = tuple[Move | ReduceStep | Step | Last, ...]


def slot_of(call: int, step: int) -> int:
    """Return the index of the slot that a step of a call uses."""
    return call % 2 if step == 0 else 2 + step % 2


def share_of(slot: int, parts: int, itemsize: int) -> int:
    """Return the bytes of each of `parts` equal blocks of a slot.

    A block holds complete elements. The result is 0 if not even one fits.
    """
    most = slot // parts
    unit = lcm(itemsize, ALIGNMENT)
    return most // unit * unit or most // itemsize * itemsize


def is_one_shot(size: int, nbytes: int) -> bool:
    """Return whether an all_reduce of `nbytes` bytes among `size` ranks is one-shot."""
    return size <= 2 or any(size <= most and nbytes < limit for most, limit in ONE_SHOT_BELOW)


def _chunks(nbytes: int, most: int) -> list[Span]:
    """Split `nbytes` into segments. There is at least one, because a call without data takes step 0, too."""
    return segments(nbytes, most) or [Span(0, 0)]


class _Part(NamedTuple):
    """An input that this rank copies into its slot, or data that it reads from ranks' slots into an output.

    Data from slots is moved (copied), or reduced together with the rank's own input.
    """

    # The index of the input or output. In a reduction: the index of the rank's own input; output 0 gets the result.
    array: int
    offset: int  # offset in the slots
    nbytes: int  # bytes of the complete array
    ranks: Sequence[int] = ()  # the ranks whose slots are read; exactly one in a move


def _in_chunks(
    rank: int, chunk: int, puts: Sequence[_Part], moved: Sequence[_Part] = (), reduced: Sequence[_Part] = ()
) -> Schedule:
    """Split a call into steps. Segment k is put into the slot before step k, and moved or reduced after it."""
    items: list[Move | ReduceStep | Step] = []
    longest = max((x.nbytes for x in (*puts, *moved, *reduced)), default=0)
    for k, (at, _) in enumerate(_chunks(longest, chunk)):
        for x in puts:
            slot_block = BlockLocation(SLOT + k, rank, x.offset)
            items.append(Move(slot_block, BlockLocation(IN, x.array, at), min(chunk, x.nbytes - at)))
        items.append(Step(k))
        for x in moved:
            slot_block = BlockLocation(SLOT + k, x.ranks[0], x.offset)
            items.append(Move(BlockLocation(OUT, x.array, at), slot_block, min(chunk, x.nbytes - at)))
        for x in reduced:
            srcs = _sources(rank, x.ranks, k, x.offset, BlockLocation(IN, x.array, at))
            items.append(ReduceStep(BlockLocation(OUT, 0, at), srcs, min(chunk, x.nbytes - at)))
    return _filled(items)


def _sources(
    rank: int, ranks: Sequence[int], step: int, offset: int, own: BlockLocation
) -> tuple[BlockLocation, ...]:
    """Return where a block is in the slots of `ranks`; for this rank, `own`, where it is in the input."""
    return tuple(own if r == rank else BlockLocation(SLOT + step, r, offset) for r in ranks)


def _filled(items: Sequence[Move | ReduceStep | Step]) -> Schedule:
    """Drop moves and reductions of no data."""
    return tuple(
        x for x in items if isinstance(x, Step) or (x.nbytes > 0 and (isinstance(x, Move) or x.srcs))
    )


def _own(out: int, block: int, nbytes: int) -> Schedule:
    """Return the move of a rank's own block from its input to its output."""
    return _filled([Move(BlockLocation(OUT, out, 0), BlockLocation(IN, block, 0), nbytes)])


def _peers(rank: int, size: int) -> list[int]:
    return [peer for peer in range(size) if peer != rank]


def one_shot(
    rank: int, size: int, nbytes: int, itemsize: int, slot: int, readers: Sequence[int] | None = None
) -> Schedule:
    """Return the schedule of an all_reduce or reduce: every rank, or each of `readers`, reduces all slots."""
    readers = range(size) if readers is None else readers
    puts = [_Part(0, 0, nbytes)] * any(reader != rank for reader in readers)
    reduced = [_Part(0, 0, nbytes, range(size))] * (rank in readers)
    return _in_chunks(rank, share_of(slot, 1, itemsize), puts, (), reduced)


def two_shot(rank: int, size: int, nbytes: int, itemsize: int, slot: int) -> Schedule:
    """Return the schedule of an all_reduce in two exchanges.

    Each rank reduces its block of every segment into its slot; all ranks copy the block from there.
    """
    items: list[Move | ReduceStep | Step] = []
    unit = lcm(itemsize, ALIGNMENT)
    for k, (at, part) in enumerate(_chunks(nbytes, share_of(slot, size, itemsize) * size)):
        starts = [start_of(part, size, r, unit) for r in range(size + 1)]
        slices = [Span(low, high - low) for low, high in pairwise(starts)]
        for r in _peers(rank, size):
            low, length = slices[r]
            items.append(Move(BlockLocation(SLOT + 2 * k, rank, low), BlockLocation(IN, 0, at + low), length))
        items.append(Step(2 * k))
        low, length = slices[rank]
        srcs = _sources(rank, range(size), 2 * k, low, BlockLocation(IN, 0, at + low))
        items.append(ReduceStep(BlockLocation(SLOT + 2 * k + 1, rank, low), srcs, length))
        items.append(Step(2 * k + 1))
        for r, (low, length) in enumerate(slices):
            items.append(
                Move(BlockLocation(OUT, 0, at + low), BlockLocation(SLOT + 2 * k + 1, r, low), length)
            )
    return _filled(items)


def reduce_scatter(rank: int, size: int, sizes: Sequence[int], itemsize: int, slot: int) -> Schedule:
    """Return the schedule: rank r reduces block r of all ranks' slots.

    Args:
        sizes: bytes of the blocks.
    """
    share = share_of(slot, size, itemsize)
    puts = [_Part(r, r * share, sizes[r]) for r in _peers(rank, size)]
    return _in_chunks(rank, share, puts, (), [_Part(rank, rank * share, sizes[rank], range(size))])


def scan(rank: int, size: int, nbytes: int, itemsize: int, slot: int, exclusive: bool) -> Schedule:
    """Return the schedule: rank r reduces the slots of ranks 0..r, or 0..r-1."""
    puts = [_Part(0, 0, nbytes)] * (rank < size - 1)
    reduced = [_Part(0, 0, nbytes, range(rank if exclusive else rank + 1))]
    return _in_chunks(rank, share_of(slot, 1, itemsize), puts, (), reduced)


def broadcast(rank: int, size: int, nbytes: int, slot: int, root: int) -> Schedule:
    """Return the schedule in which all ranks copy the root's slot."""
    if rank == root:
        return _in_chunks(rank, slot, [_Part(0, 0, nbytes)] * (size > 1))
    return _in_chunks(rank, slot, (), [_Part(0, 0, nbytes, (root,))])


def all_gather(rank: int, size: int, sizes: Sequence[int], slot: int) -> Schedule:
    """Return the schedule in which every rank copies the slots of all ranks.

    Args:
        sizes: bytes of the outputs.
    """
    puts = [_Part(0, 0, sizes[rank])] * (size > 1)
    moved = [_Part(r, 0, sizes[r], (r,)) for r in _peers(rank, size)]
    return *_own(rank, 0, sizes[rank]), *_in_chunks(rank, slot, puts, moved)


# In the next three kinds a rank knows only its own sizes, so ranks may take different numbers of steps.


def gather(rank: int, size: int, sizes: Sequence[int], slot: int, root: int) -> Schedule:
    """Return the schedule in which the root copies the slots of all ranks.

    Args:
        sizes: on the root, the bytes of its outputs; on other ranks, only the bytes of the input.
    """
    if rank != root:
        return *_in_chunks(rank, slot, [_Part(0, 0, sizes[0])]), Last()
    moved = [_Part(r, 0, sizes[r], (r,)) for r in _peers(rank, size)]
    return *_own(root, 0, sizes[root]), *_in_chunks(rank, slot, (), moved), Last()


def scatter(rank: int, size: int, sizes: Sequence[int], slot: int, root: int) -> Schedule:
    """Return the schedule: rank r copies block r of the root's slot.

    Args:
        sizes: on the root, the bytes of its blocks; on other ranks, only the bytes of the output.
    """
    share = share_of(slot, size, 1)
    if rank != root:
        return *_in_chunks(rank, share, (), [_Part(0, rank * share, sizes[0], (root,))]), Last()
    puts = [_Part(r, r * share, sizes[r]) for r in _peers(rank, size)]
    return *_own(0, root, sizes[root]), *_in_chunks(rank, share, puts), Last()


def all_to_all(rank: int, size: int, gives: Sequence[int], takes: Sequence[int], slot: int) -> Schedule:
    """Return the schedule: rank r copies block r of all slots.

    Args:
        gives, takes: bytes of the rank's blocks and of its outputs.
    """
    share, peers = share_of(slot, size, 1), _peers(rank, size)
    puts = [_Part(r, r * share, gives[r]) for r in peers]
    moved = [_Part(r, rank * share, takes[r], (r,)) for r in peers]
    return *_own(rank, rank, takes[rank]), *_in_chunks(rank, share, puts, moved), Last()
