"""Situations in which ranks that share a GPU could block one another, each in processes of its own.

    PYTHONPATH=tests python tests/gpu/hazards.py CASE [-n RANKS] [--backend shm|tcp|nccl] [--host]

This process starts the ranks, prints their output, and ends ranks that hang. It exits with 0 if every rank printed "is
right". --host has arrays in host memory instead, to try the cases where there is no GPU.

In the cases of `ACTIONS`, rank 0 queues a collective, then calls something of CUDA that may wait for all work on the
GPU, and then sends a message to rank 1, without which rank 1 does not join the collective. If CUDA waits, nobody can go
on; then the group must fail at its timeout, and not hang. Both ends are right, and the output says which it was.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import fastcoll as dist
from fastcoll.errors import GroupError
from fastcoll.gpu.carriers import carrier_name
from fastcoll.job.groups import groups

SECONDS = 60.0
"""How long the ranks of a case may take; their group's timeout is TIMEOUT."""
TIMEOUT = 20.0

xp: Any = np
"""CuPy, or NumPy with --host."""


def sync() -> None:
    if xp is not np:
        xp.cuda.get_current_stream().synchronize()


def assert_all(x: Any, value: float) -> None:
    sync()
    assert bool((x == value).all()), f"{x[:4]} instead of {value}"


# ---- what may make CUDA wait -------------------------------------------------------------------------------


def load_module() -> None:
    name = f"never_loaded_{os.getpid()}"
    source = f'extern "C" __global__ void {name}(float* x) {{ x[0] = 5; }}'
    x = xp.zeros(1, "f4")
    with xp.cuda.Stream(non_blocking=True):
        xp.RawKernel(source, name)((1,), (1,), (x,))


def load_our_kernel() -> None:
    from fastcoll import ReduceOp
    from fastcoll.kernels.cuda.reducers import cuda_reducer

    cuda_reducer(ReduceOp.PRODUCT, np.dtype("f8")).prepare(5)


def free_memory() -> None:
    xp.cuda.runtime.free(xp.cuda.runtime.malloc(1 << 20))


def free_pinned_memory() -> None:
    from fastcoll.gpu.runtime import runtime

    runtime().pinned(1 << 20)
    gc.collect()


def free_pinned_memory_of_cupy() -> None:
    pinned = xp.cuda.PinnedMemory(1 << 20)
    del pinned
    gc.collect()


def fill_the_queue() -> None:
    x = xp.ones(16, "f4")
    for _ in range(40):
        dist.all_reduce(x, async_op=True)


ACTIONS: dict[str, Callable[[], None]] = {
    "load_module": load_module,
    "load_our_kernel": load_our_kernel,
    "free_memory": free_memory,
    "free_pinned_memory": free_pinned_memory,
    "free_pinned_memory_of_cupy": free_pinned_memory_of_cupy,
    "fill_the_queue": fill_the_queue,
}


def blocking(action: str, rank: int, size: int) -> None:
    """Run the case of an action, as the module's docstring describes it."""
    x, word = xp.ones(1 << 20, "f4"), np.zeros(1)
    dist.all_reduce(x)  # the first call, which meets and loads kernels
    assert_all(x, size)
    try:
        if rank == 0:
            work = dist.all_reduce(x, async_op=True)
            began = time.monotonic()
            if xp is not np:
                ACTIONS[action]()
            print(f"{action} took {time.monotonic() - began:.3f} s while a collective was outstanding")
            for peer in range(1, size):
                dist.send(word, peer)
        else:
            dist.recv(word, 0)
            work = dist.all_reduce(x, async_op=True)
        if action == "fill_the_queue" and rank and xp is not np:
            fill_the_queue()
        work.wait(timeout=2 * TIMEOUT)
        assert_all(x, size * size)
        print(f"CUDA did not wait in {action}")
    except GroupError as error:
        print(f"CUDA waited in {action}; the group failed: {type(error).__name__}: {error}")


# ---- other cases ---------------------------------------------------------------------------------------------


def smoke(rank: int, size: int) -> None:
    for dtype in ("f4", "i8", "f2"):
        x = xp.full(1009, rank + 1, dtype)
        dist.all_reduce(x)
        assert_all(x, size * (size + 1) / 2)
    y = xp.full(5, rank, "f4")
    dist.broadcast(y, size - 1)
    assert_all(y, size - 1)
    if xp is not np:
        found = carrier_name(groups.world)
        print(f"carried by {found}")
        assert (
            found == {"shm": "IpcCarrier", "tcp": "StagedCarrier", "nccl": "NcclCarrier"}[dist.get_backend()]
        )


def large(rank: int, size: int) -> None:
    """A call with more launches than the driver's queue holds; rank 1 is late, and the others queue on."""
    x, word = xp.ones((1 << 28) if xp is not np else 1 << 20, "f4"), np.zeros(1)
    dist.all_reduce(x[:4])
    if rank == 1:
        dist.recv(word, 0)
    works = [dist.all_reduce(x, async_op=True)]
    if rank == 0:
        dist.send(word, 1)
    for work in works:
        work.wait(timeout=5 * TIMEOUT)
    assert_all(x[4:], size)


def many_groups(rank: int, size: int) -> None:
    """More groups than the GPU has queues (CUDA_DEVICE_MAX_CONNECTIONS), called in one order."""
    groups = [dist.new_group() for _ in range(20)]
    xs = [xp.ones(1000, "f4") for _ in groups]
    for _ in range(5):
        works = [dist.all_reduce(x, group=group, async_op=True) for group, x in zip(groups, xs, strict=True)]
        for work in works:
            work.wait()
    for x in xs:
        assert_all(x, size**5)


def threads_in_another_order(rank: int, size: int) -> None:
    """Two threads, each with a group; ranks queue them in opposite orders. Errors at the timeout are reported."""
    groups = [dist.new_group() for _ in range(2)]
    xs = [xp.ones(1000, "f4") for _ in groups]
    for group, x in zip(groups, xs, strict=True):
        dist.all_reduce(x, group=group)
    turns, failed = [threading.Event() for _ in range(2)], []

    def call(k: int) -> None:
        first = rank % 2
        if k != first:
            turns[first].wait(SECONDS)
        try:
            work = dist.all_reduce(xs[k], group=groups[k], async_op=True)
            turns[k].set()
            work.wait(timeout=2 * TIMEOUT)
        except GroupError as error:
            turns[k].set()
            failed.append(error)

    threads = [threading.Thread(target=call, args=(k,)) for k in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(f"ranks in opposite orders: {failed or 'no error'}")
    if not failed:
        for x in xs:
            assert_all(x, size**2)


def regions_again(rank: int, size: int) -> None:
    """Groups that are made while earlier ones are closed; shared memory is reused and does not grow."""
    free: list[int] = []
    for _ in range(12):
        group = dist.new_group()
        x = xp.ones(100_000, "f4")
        dist.all_reduce(x, group=group)
        assert_all(x, size)
        dist.destroy_process_group(group)
        if xp is not np:
            free.append(xp.cuda.runtime.memGetInfo()[0])
    if free:
        print(f"free GPU memory after each group, MiB: {[each >> 20 for each in free]}")
        assert free[3] - free[-1] < 64 << 20, "memory grows with groups"


def structured(rank: int, size: int) -> None:
    """A function of the user on records whose fields are not aligned."""
    dtype = np.dtype([("index", "i4"), ("tag", "i1"), ("value", "f8")])
    host = np.zeros(1001, dtype)
    host["value"], host["index"] = (np.arange(1001) * 7 + rank * 13) % 31, rank
    from fastcoll import ReduceOp

    op = ReduceOp.custom(lambda a, b: b if b.value > a.value else a, "larger")
    if xp is np:
        x = host.copy()
        dist.all_reduce(x, op)
    else:
        os.environ.setdefault("GPU_TEST_ARRAYS", "cupy")
        from gpu.on_gpu import Holder

        there = Holder(host)
        dist.all_reduce(there, op)
        sync()
        x = there.get()
    most = np.max([(np.arange(1001) * 7 + r * 13) % 31 for r in range(size)], axis=0)
    np.testing.assert_array_equal(x["value"], most)


def misaligned(rank: int, size: int) -> None:
    """Views that begin at any element: no 16 bytes at once, or only after some elements."""
    for dtype in ("u1", "f2", "f4", "f8", "c16"):
        for start in (0, 1, 3):
            base = xp.ones(1040, dtype)
            dist.all_reduce(base[start : start + 1000])
            assert_all(base[start : start + 1000], size)
            assert_all(base[start + 1000 :], 1)


def killed(rank: int, size: int) -> None:
    """Rank 1 dies while the others wait for it on the GPU; they get an error that names it."""
    x = xp.ones(1000, "f4")
    dist.all_reduce(x)
    sync()
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    began, found = time.monotonic(), "no error"
    try:
        dist.all_reduce(x, async_op=True).wait(timeout=SECONDS)
    except GroupError as error:
        found = f"{type(error).__name__}: {error}"
    print(f"after {time.monotonic() - began:.2f} s: {found}")
    assert "rank 1" in found, "the error does not name rank 1"
    assert "TimeoutError" not in found, "the death was not seen before the timeout"


def aborted(rank: int, size: int) -> None:
    """Rank 0 aborts while its call waits on the GPU; the wait ends, and the GPU is free for other work."""
    group = dist.new_group()
    x, word = xp.ones(1000, "f4"), np.zeros(1)
    dist.all_reduce(x, group=group)
    if rank == 0:
        work = dist.all_reduce(x, group=group, async_op=True)
        dist.abort(group)
        try:
            work.wait(timeout=SECONDS)
        except GroupError as error:
            print(f"{type(error).__name__}: {error}")
        y = xp.ones(3, "f4")
        assert_all(y + y, 2)
        for peer in range(1, size):
            dist.send(word, peer)
    else:
        dist.recv(word, 0)


def split(rank: int, size: int) -> None:
    """NCCL: a communicator, groups split from it, and calls on all of them."""
    x = xp.ones(100, "f4")
    dist.all_reduce(x)
    assert_all(x, size)
    whole, mine = dist.new_group(), dist.new_group([0])
    dist.all_reduce(x, group=whole)
    assert_all(x, size**2)
    if rank == 0:
        dist.all_reduce(x, group=mine)
        assert_all(x, size**2)


def refused(rank: int, size: int) -> None:
    """NCCL refuses ranks that share a GPU; fastcoll says so on every rank before NCCL would fail."""
    from fastcoll.errors import UnavailableError

    os.environ.pop("NCCL_HOSTID", None)
    found = "no error"
    try:
        dist.all_reduce(xp.ones(3, "f4"))
    except UnavailableError as error:
        found = str(error)
    print(found)
    assert xp is np or "use one GPU, which NCCL refuses" in found


CASES: dict[str, Callable[[int, int], None]] = {
    function.__name__: function
    for function in (
        smoke, large, many_groups, threads_in_another_order, regions_again, structured, misaligned, killed, aborted,
        split, refused,
    )
}  # fmt: skip


# ---- starting ranks ------------------------------------------------------------------------------------------


def run_rank(given: argparse.Namespace) -> None:
    global xp
    rank = given.rank
    logging.basicConfig(level=logging.INFO)  # fastcoll then says which carrier it has chosen, and why
    faulthandler.dump_traceback_later(SECONDS - 10)
    if not given.host:
        os.environ.setdefault("NCCL_HOSTID", f"rank-{rank}")  # so NCCL lets ranks share a GPU
        import cupy

        cupy.cuda.Device(rank % cupy.cuda.runtime.getDeviceCount()).use()
        xp = cupy
    dist.init_process_group(
        given.backend, init_method=given.url, rank=rank, world_size=given.ranks, timeout=TIMEOUT
    )
    if given.case in ACTIONS:
        blocking(given.case, rank, given.ranks)
    else:
        CASES[given.case](rank, given.ranks)
    print(f"rank {rank}: {given.case} is right", flush=True)
    if given.case in CASES and given.case != "killed":
        dist.destroy_process_group()
    os._exit(0)  # the groups of some cases have failed; that must not change the result


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("case", choices=[*CASES, *ACTIONS])
    parser.add_argument("-n", "--ranks", type=int, default=2)
    parser.add_argument("--backend", default="shm")
    parser.add_argument("--host", action="store_true")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--url", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank is not None:
        run_rank(given)
    victims = {1} if given.case == "killed" else set()
    with tempfile.TemporaryDirectory() as folder:
        url = f"file://{folder}/meeting"
        outputs = [Path(folder, str(rank)) for rank in range(given.ranks)]
        ranks = [
            subprocess.Popen(
                [sys.executable, __file__, *sys.argv[1:], "--rank", str(rank), "--url", url],
                stdout=output.open("w"), stderr=subprocess.STDOUT,
            )
            for rank, output in enumerate(outputs)
        ]  # fmt: skip
        end = time.monotonic() + SECONDS
        for rank in ranks:
            try:
                rank.wait(max(end - time.monotonic(), 0.1))
            except subprocess.TimeoutExpired:
                print(f"rank {ranks.index(rank)} hangs")
        for rank in ranks:
            rank.kill()
            rank.wait()
        texts = [output.read_text() for output in outputs]
    for number, text in enumerate(texts):
        print("".join(f"[{number}] {line}\n" for line in text.splitlines()), end="")
    right = {number for number, text in enumerate(texts) if "is right" in text}
    return 0 if right == set(range(given.ranks)) - victims else 1


if __name__ == "__main__":
    sys.exit(main())
