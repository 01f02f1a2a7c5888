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

SIZES = (1, 2, 3, 4, 8)
SLOT_BYTES = 4096
Array = np.ndarray


class World:
    """All ranks' arrays and slots; `run` takes every rank to each step, then on to the next."""

    def __init__(self, inputs: Sequence[Sequence[Array]], outputs: Sequence[Sequence[Array]]) -> None:
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


COUNTS = (0, 1, 7, 1024, 1025, 5000)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("plan", [schedules.one_shot, schedules.two_shot], ids=["one", "two"])
@pytest.mark.parametrize("dtype", ["u1", "f8"])
def test_all_reduce_in_place(plan, count, size, dtype) -> None:
    inputs = [numbers(count, dtype=dtype, seed=rank) for rank in range(size)]
    want = np.add.reduce(inputs, dtype=dtype)[0]
    World(inputs, inputs).run(made(plan, size, want.nbytes, want.itemsize))
    assert all((x[0] == want).all() for x in inputs)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("count", COUNTS)
def test_reduce_and_scans(count, size) -> None:
    inputs = [numbers(count, seed=rank) for rank in range(size)]
    sums = list(accumulate((x[0] for x in inputs), np.add))
    root = size - 1
    outputs = [[np.zeros(count, "u4")] for _ in range(size)]
    World(inputs, outputs).run(made(schedules.one_shot, size, 4 * count, 4, readers=(root,)))
    assert (outputs[root][0] == sums[-1]).all()
    for exclusive in (False, True):
        outputs = [[np.full(count, 5, "u4")] for _ in range(size)]
        World(inputs, outputs).run(made(schedules.scan, size, 4 * count, 4, exclusive=exclusive))
        want = [np.full(count, 5, "u4"), *sums] if exclusive else sums
        assert all((out[0] == one).all() for out, one in zip(outputs, want, strict=False))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("most", [0, 3, 100, 900])
def test_reduce_scatter_with_blocks_of_different_sizes(size, most) -> None:
    counts = [(7 * rank + most) % (most + 1) for rank in range(size)]
    inputs = [numbers(*counts, seed=rank) for rank in range(size)]
    outputs = [[np.zeros(counts[rank], "u4")] for rank in range(size)]
    World(inputs, outputs).run(made(schedules.reduce_scatter, size, [4 * count for count in counts], 4))
    for rank in range(size):
        assert (outputs[rank][0] == np.add.reduce([x[rank] for x in inputs])).all()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("count", COUNTS)
def test_broadcast(count, size) -> None:
    arrays = [numbers(count, seed=rank) for rank in range(size)]
    want = arrays[size // 2][0].copy()
    World(arrays, arrays).run(made(schedules.broadcast, size, 4 * count, root=size // 2))
    assert all((x[0] == want).all() for x in arrays)


def uneven(size: int, most: int) -> list[int]:
    return [most * rank // size for rank in range(size)][::-1]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("most", [0, 5, 2000, 9000])
def test_gathers_and_scatter_of_different_sizes(size, most) -> None:
    counts = uneven(size, most)
    blocks = [numbers(count, dtype="u1", seed=count)[0] for count in counts]
    inputs = [[block] for block in blocks]
    outputs = [[np.zeros_like(block) for block in blocks] for _ in range(size)]
    World(inputs, outputs).run(made(schedules.all_gather, size, counts))
    assert all((x == block).all() for outs in outputs for x, block in zip(outs, blocks, strict=True))

    root = size // 2
    outputs = [[np.zeros_like(block) for block in blocks] if rank == root else [] for rank in range(size)]
    sizes = [counts if rank == root else [counts[rank]] for rank in range(size)]
    World(inputs, outputs).run([schedules.gather(r, size, sizes[r], SLOT_BYTES, root) for r in range(size)])
    assert all((x == block).all() for x, block in zip(outputs[root], blocks, strict=True))

    sources = [blocks if rank == root else [] for rank in range(size)]
    outputs = [[np.zeros_like(block)] for block in blocks]
    World(sources, outputs).run([schedules.scatter(r, size, sizes[r], SLOT_BYTES, root) for r in range(size)])
    assert all((x[0] == block).all() for x, block in zip(outputs, blocks, strict=True))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("most", [0, 5, 2000])
def test_all_to_all_of_different_sizes(size, most) -> None:
    counts = np.random.default_rng(most).integers(0, most + 1, (size, size))
    inputs = [numbers(*counts[rank], dtype="u1", seed=rank) for rank in range(size)]
    outputs = [[np.zeros(count, "u1") for count in counts[:, rank]] for rank in range(size)]
    made = [
        schedules.all_to_all(r, size, counts[r].tolist(), counts[:, r].tolist(), SLOT_BYTES)
        for r in range(size)
    ]
    World(inputs, outputs).run(made)
    for src in range(size):
        assert all((outputs[dst][src] == inputs[src][dst]).all() for dst in range(size))


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
    broken = [
        tuple(item for item in plan if item != Step(1)) for plan in made(schedules.one_shot, 2, 8000, 4)
    ]
    with pytest.raises(AssertionError, match="not the one taken last"):
        World(inputs, inputs).run(broken)
