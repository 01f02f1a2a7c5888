"""Every schedule over shared GPU memory, run on host arrays, for all ranks of small worlds.

Each rank's slots are arrays of bytes. A rank may only write its own slot of the next step, and only read slots of its
last step that their owners have written. Then no order of the ranks makes it read other data.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

import numpy as np
import pytest

from fastcoll.gpu.ipc import schedules
from fastcoll.gpu.ipc.schedules import IN, OUT, SLOT, BlockLocation, Last, Move, ReduceStep, Schedule, Step

SLOT_BYTES = 4096
Array = np.ndarray
Lists = Sequence[Sequence[Array]]


class World:
    """All ranks' arrays and slots; `run` takes every rank to each step, then on to the next."""

    def __init__(self, inputs: Lists, outputs: Lists) -> None:
        self.size = len(inputs)
        self.arrays = {IN: inputs, OUT: outputs}
        self.slots: dict[tuple[int, int], Array] = {}
        self.written: dict[tuple[int, int], Array] = {}

    def run(self, made: Sequence[Schedule]) -> None:
        left = [list(plan) for plan in made]
        step = -1
        while any(left):
            for rank, items in enumerate(left):
                while items and not isinstance(items[0], Step):
                    self._do(rank, items.pop(0), step)
            step += 1
            for items in left:
                assert not items or items.pop(0) == Step(step)

    def _do(self, rank: int, item: Move | ReduceStep | Last, step: int) -> None:
        if isinstance(item, Last):
            return
        if isinstance(item, Move):
            value = self._read(rank, item.src, item.nbytes, step).copy()
        else:
            dtype = self.arrays[IN][0][0].dtype
            sources = [self._read(rank, src, item.nbytes, step).view(dtype) for src in item.srcs]
            value = np.add.reduce(sources, dtype=dtype).view(np.uint8)
        self._target(rank, item.dst, item.nbytes, step)[:] = value

    def _read(self, rank: int, location: BlockLocation, nbytes: int, step: int) -> Array:
        if location.kind < SLOT:
            return self._bytes(self.arrays[location.kind][rank][location.which], location, nbytes)
        assert location.kind == SLOT + step, "a slot of a step that is not the one taken last"
        written = self.written[location.which, step]
        assert written[location.offset : location.offset + nbytes].all(), "nobody wrote that"
        return self.slots[location.which, step][location.offset : location.offset + nbytes]

    def _target(self, rank: int, location: BlockLocation, nbytes: int, step: int) -> Array:
        if location.kind < SLOT:
            assert location.kind == OUT
            return self._bytes(self.arrays[OUT][rank][location.which], location, nbytes)
        assert location.which == rank, "a peer's slot"
        assert location.kind == SLOT + step + 1, "a slot that peers may be reading"
        assert location.offset + nbytes <= SLOT_BYTES
        slot = self.slots.setdefault((rank, step + 1), np.zeros(SLOT_BYTES, np.uint8))
        written = self.written.setdefault((rank, step + 1), np.zeros(SLOT_BYTES, bool))
        written[location.offset : location.offset + nbytes] = True
        return slot[location.offset : location.offset + nbytes]

    def _bytes(self, x: Array, location: BlockLocation, nbytes: int) -> Array:
        found = x.view(np.uint8)[location.offset : location.offset + nbytes]
        assert found.size == nbytes, "outside the array"
        return found


def numbers(*sizes: int, dtype: str = "u4", seed: int = 1) -> list[Array]:
    random = np.random.default_rng(seed)
    return [random.integers(1, 200, size).astype(dtype) for size in sizes]


def made(plan: Callable[..., Schedule], size: int, *args, **options) -> list[Schedule]:
    return [plan(rank, size, *args, SLOT_BYTES, **options) for rank in range(size)]


def check(inputs: Lists, outputs: Lists, wants: Lists, plans: Sequence[Schedule]) -> None:
    """Run the ranks' schedules, and compare their outputs."""
    World(inputs, outputs).run(plans)
    for outs, want in zip(outputs, wants, strict=True):
        assert all((x == y).all() for x, y in zip(outs, want, strict=True))


def zeros(lists: Lists) -> list[list[Array]]:
    return [[np.zeros_like(x) for x in arrays] for arrays in lists]


EVERY_SIZE = pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
COUNTS = pytest.mark.parametrize("count", [0, 1, 7, 1024, 1025, 5000])


@EVERY_SIZE
@COUNTS
@pytest.mark.parametrize("plan", [schedules.one_shot, schedules.two_shot], ids=["one", "two"])
@pytest.mark.parametrize("dtype", ["u1", "f8"])
def test_all_reduce_in_place(plan, count, size, dtype) -> None:
    inputs = [numbers(count, dtype=dtype, seed=rank) for rank in range(size)]
    want = np.add.reduce(inputs, dtype=dtype)[0]
    check(inputs, inputs, [[want]] * size, made(plan, size, want.nbytes, want.itemsize))


@EVERY_SIZE
@COUNTS
def test_reduce_scans_and_broadcast(count, size) -> None:
    inputs = [numbers(count, seed=rank) for rank in range(size)]
    nbytes, root, old = 4 * count, size - 1, np.zeros(count, "u4")
    sums = [[x] for x in accumulate((x[0] for x in inputs), np.add)]
    for wants, plans in (
        ([[old]] * root + sums[-1:], made(schedules.one_shot, size, nbytes, 4, readers=(root,))),
        (sums, made(schedules.scan, size, nbytes, 4, exclusive=False)),
        ([[old], *sums[:-1]], made(schedules.scan, size, nbytes, 4, exclusive=True)),
    ):
        check(inputs, zeros(inputs), wants, plans)
    wants = [[inputs[size // 2][0].copy()]] * size
    check(inputs, inputs, wants, made(schedules.broadcast, size, nbytes, root=size // 2))


@EVERY_SIZE
@pytest.mark.parametrize("most", [0, 3, 100, 900])
def test_reduce_scatter_with_blocks_of_different_sizes(size, most) -> None:
    counts = [(7 * rank + most) % (most + 1) for rank in range(size)]
    inputs = [numbers(*counts, seed=rank) for rank in range(size)]
    wants = [[np.add.reduce([x[rank] for x in inputs], dtype="u4")] for rank in range(size)]
    plans = made(schedules.reduce_scatter, size, [4 * count for count in counts], 4)
    check(inputs, zeros(wants), wants, plans)


@EVERY_SIZE
@pytest.mark.parametrize("most", [0, 5, 2000, 9000])
def test_gathers_and_scatter_of_different_sizes(size, most) -> None:
    counts = [most * rank // size for rank in range(size)][::-1]
    blocks = [numbers(count, dtype="u1", seed=count)[0] for count in counts]
    each, root = [[block] for block in blocks], size // 2
    at_root = [blocks if rank == root else [] for rank in range(size)]
    check(each, zeros([blocks] * size), [blocks] * size, made(schedules.all_gather, size, counts))
    for plan, inputs, wants in ((schedules.gather, each, at_root), (schedules.scatter, at_root, each)):
        sizes = [counts if rank == root else [counts[rank]] for rank in range(size)]
        plans = [plan(rank, size, sizes[rank], SLOT_BYTES, root) for rank in range(size)]
        check(inputs, zeros(wants), wants, plans)


@EVERY_SIZE
@pytest.mark.parametrize("most", [0, 5, 2000])
def test_all_to_all_of_different_sizes(size, most) -> None:
    counts = np.random.default_rng(most).integers(0, most + 1, (size, size)).tolist()
    inputs = [numbers(*counts[rank], dtype="u1", seed=rank) for rank in range(size)]
    taken = [list(column) for column in zip(*counts, strict=True)]
    plans = [schedules.all_to_all(r, size, counts[r], taken[r], SLOT_BYTES) for r in range(size)]
    wants = [list(blocks) for blocks in zip(*inputs, strict=True)]
    check(inputs, zeros(wants), wants, plans)


def test_elements_of_any_size_are_not_split() -> None:
    for itemsize in (1, 3, 12, 100, 1000):
        for parts in (1, 3, 4):
            share = schedules.share_of(SLOT_BYTES, parts, itemsize)
            assert share % itemsize == 0 < share
            assert share * parts <= SLOT_BYTES
    assert schedules.share_of(SLOT_BYTES, 1, 4) == SLOT_BYTES
    assert schedules.share_of(SLOT_BYTES, 4, 2000) == 0


def test_the_world_finds_a_step_left_out() -> None:
    inputs = [numbers(2000, seed=rank) for rank in range(2)]
    plans = made(schedules.one_shot, 2, 8000, 4)
    broken = [tuple(item for item in plan if item != Step(1)) for plan in plans]
    with pytest.raises(AssertionError, match="not the one taken last"):
        World(inputs, inputs).run(broken)
