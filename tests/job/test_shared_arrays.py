"""shared_arrays: which arrays are shared, and that collectives give the same results on them as on others."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
from conformance import test_every_operation
from conformance.test_every_operation import ROWS, numbers
from oracle import assert_same, reduced, values
from programs import python, until

import fastcoll as dist
from fastcoll import ReduceOp, config, shared_arrays
from fastcoll.arrays.numpy_memory import default_handler
from fastcoll.shm import arena

Array = np.ndarray[Any, Any]
F4 = np.dtype(np.float32)
LARGE = 30_011  # elements of 4 bytes: more than 64 KiB
is_shared = shared_arrays.contains


@pytest.fixture
def everywhere() -> Iterator[None]:
    shared_arrays.enable()
    yield
    shared_arrays.disable()


# ---- the switches ---------------------------------------------------------------------------------------------------


def test_arrays_of_a_block_are_shared_and_stay_so_and_an_error_ends_it() -> None:
    with shared_arrays():
        x = np.ones(LARGE, F4)
        with shared_arrays():
            y = x + 1
        z = np.concatenate([x, y])
    assert all(map(is_shared, (x, y, z, z[5:7], z.reshape(2, -1).T)))
    for ordinary in (x + y, x[:100].copy(), np.zeros(5), [1.0], None):
        assert not is_shared(ordinary)
    np.testing.assert_array_equal(z, np.repeat(np.array([1, 2], F4), LARGE))
    block = shared_arrays()
    for _ in range(2):
        with pytest.raises(ZeroDivisionError), block:
            raise ZeroDivisionError
        assert not is_shared(np.ones(LARGE))


def in_a_thread() -> bool:
    found: list[bool] = []
    thread = threading.Thread(target=lambda: found.append(is_shared(np.ones(LARGE))))
    thread.start()
    thread.join()
    return found[0]


def test_a_block_is_of_one_thread_and_one_task() -> None:
    async def other(is_in: asyncio.Event, looked: asyncio.Event) -> None:
        await is_in.wait()
        assert not is_shared(np.ones(LARGE))
        looked.set()

    async def main() -> None:
        is_in, looked = asyncio.Event(), asyncio.Event()
        task = asyncio.create_task(other(is_in, looked))
        with shared_arrays():
            is_in.set()
            await looked.wait()
            assert is_shared(np.ones(LARGE))
        await task

    asyncio.run(main())
    with shared_arrays():
        assert not in_a_thread()


def test_enable_is_for_all_threads_until_disable() -> None:
    shared_arrays.disable()
    assert not in_a_thread()
    for _ in range(2):
        shared_arrays.enable()
        shared_arrays.enable()
        assert in_a_thread()
        x = np.ones(LARGE)
        assert is_shared(x)
        with shared_arrays():
            assert is_shared(np.ones(LARGE))
        shared_arrays.disable()
        assert not in_a_thread()
        with shared_arrays():
            assert is_shared(np.ones(LARGE))
        x.resize(
            2 * LARGE, refcheck=False
        )  # NumPy uses the default handler, which must be ours for this array
        assert x[:LARGE].all()
        assert not x[LARGE:].any()
    gc.collect()
    assert default_handler().functions[:2] == arena.ordinary_functions()[:2]


def test_the_setting_is_read_when_a_process_joins() -> None:
    code = """if True:
        import numpy as np, fastcoll
        assert "fastcoll.shm" not in __import__("sys").modules
        fastcoll.init_process_group("shm", init_method="env://")
        x = np.ones(100_000, np.float32)
        fastcoll.all_reduce(x)
        print(fastcoll.shared_arrays.contains(x), fastcoll.shared_arrays.contains(x * 2), (x == 1).all())
        fastcoll.destroy_process_group()
        print(fastcoll.shared_arrays.contains(x + 1))
    """
    for setting, answer in (("1", "True"), ("0", "False")):
        done = python("-c", code, environ={"FASTCOLL_SHARED_ARRAYS": setting})
        assert done.stdout == f"{answer} {answer} True\n{answer}\n", done.stderr
    assert config.SETTINGS["FASTCOLL_SHARED_ARRAYS"].default == 0


def test_without_an_arena_arrays_are_ordinary(tmp_path: Any) -> None:
    code = """if True:
        import logging, resource, sys, tempfile
        import numpy as np, fastcoll
        logging.basicConfig(stream=sys.stdout, format="%(message)s")
        fastcoll.shared_arrays.contains(np.ones(3))
        resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))
        for _ in range(3):
            # The error says how much memory is free, which changes.
            taken = tempfile.TemporaryFile(dir="/dev/shm")
            taken.write(bytes(1 << 20))
            with fastcoll.shared_arrays():
                x = np.ones(100_000) + 1
            taken.close()
        fastcoll.shared_arrays.enable()
        print(fastcoll.shared_arrays.contains(x), (x == 2).all())
    """
    done = python("-c", code)
    # A kernel that is not cached yet may take longer than a second, which is logged, too.
    said = [line for line in done.stdout.splitlines() if not line.startswith("fastcoll compiles")]
    warning, answer = said
    assert "shared arrays are made in ordinary memory: cannot make the arena of shared arrays" in warning
    assert answer == "False True"
    assert done.stderr == ""


# ---- collectives: which ranks have shared arrays, and their sizes ---------------------------------------------------

WHO: dict[str, Callable[[int], bool]] = {
    "all": lambda rank: True,
    "rank 0": lambda rank: rank == 0,
    "all but rank 0": lambda rank: rank != 0,
}


def sliced(rank: int, count: int) -> Array:
    """Return arrays like the suite's, as slices of larger ones."""
    x = np.full(count + 2048, 77, F4)
    x[1001 : 1001 + count] = numbers(rank, count)
    return x[1001 : 1001 + count]


def reduce_by_max(rank: int, n: int, count: int) -> None:
    given = [values(r, count, F4) for r in range(n)]
    x = given[rank].copy()
    dist.all_reduce(x, ReduceOp.MAX)
    assert_same(x, reduced(given, ReduceOp.MAX), "all_reduce")


@pytest.mark.ranks(3, 5)
@pytest.mark.parametrize("who", WHO)
def test_every_collective(rank: int, who: str, world_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with shared_arrays() if WHO[who](rank) else nullcontext():
        assert is_shared(np.ones(LARGE, F4)) == WHO[who](rank)
        for made in (numbers, sliced):
            with monkeypatch.context() as patch:
                patch.setattr(test_every_operation, "numbers", made)
                for row in (*ROWS.values(), reduce_by_max):
                    for count in (LARGE, 140_003):
                        row(rank, world_size, count)


@pytest.mark.ranks(2, 3)
def test_a_loop_that_allocates_and_frees_arrays(rank: int, world_size: int, everywhere: None) -> None:
    """The same addresses get new contents; no rank may use stale contents or read them too late."""
    for step in range(60):
        count = LARGE * (1 + step % 5)
        x = np.full(count, rank + step, F4)
        dist.all_reduce(x)
        y = x * 2 - x
        assert (y == sum(r + step for r in range(world_size))).all()
        dist.broadcast(y, step % world_size)
        parts = np.empty((world_size, count), F4)
        dist.all_gather_single(parts, x + rank)
        assert all((parts[r] == x[0] + r).all() for r in range(world_size))


@pytest.mark.ranks(2, 3)
def test_groups_made_before_and_after_the_first_shared_array(rank: int, world_size: int) -> None:
    ranks = list(range(world_size))
    before = dist.new_group(ranks)
    with shared_arrays():
        x = np.full(LARGE, rank + 1.0, F4)
    after = dist.new_group(ranks[::-1])
    for step in range(1, 4):
        for group in (before, after, None):
            y = x.copy()
            with shared_arrays():
                z = x * step
            dist.all_reduce(y, group=group)
            dist.all_reduce(z, group=group)
            assert (z == step * y).all()
            assert y[0] == sum(r + 1 for r in ranks)
    dist.destroy_process_group(after)
    dist.all_reduce(x, group=before)
    dist.destroy_process_group(before)
    dist.all_reduce(x)
    assert x[0] == world_size * sum(r + 1 for r in ranks)


@pytest.mark.ranks(2)
def test_the_arena_grows_while_a_group_is_used(rank: int, world_size: int) -> None:
    kept = []
    with shared_arrays():
        for step in range(1, 9):
            kept.append(np.full(step << 20, rank + step, F4))  # 4 to 32 MiB each, all kept
            dist.all_reduce(kept[-1])
    for step, x in enumerate(kept, 1):
        assert (x == 2 * step + 1).all()


@pytest.mark.ranks(2, init=False)
def test_arrays_outlive_the_world_and_work_in_the_next(rank: int, world_size: int) -> None:
    with shared_arrays():
        x = np.zeros(LARGE, F4)
    for turn in range(1, 4):
        dist.init_process_group("shm")
        x += turn * rank
        y = x.copy()
        dist.all_reduce(y)
        dist.all_reduce(x)
        assert (x == y).all()
        dist.destroy_process_group()
    assert x[0] == 11
    assert is_shared(x)


@pytest.mark.ranks(2)
def test_the_last_reference_frees_an_array(rank: int, world_size: int) -> None:
    gc.collect()  # garbage of earlier tests
    used = arena.bytes_in_use()
    with shared_arrays():
        x = np.ones(1 << 20, F4)
    work = dist.all_reduce(x, async_op=True)
    assert work is not None
    del x
    work.wait()
    assert arena.bytes_in_use() >= used + (4 << 20)
    del work

    def is_freed() -> bool:
        gc.collect()
        return arena.bytes_in_use() <= used

    until(is_freed)  # the thread that executed it may not have released it yet
    assert arena.bytes_in_use() == used
