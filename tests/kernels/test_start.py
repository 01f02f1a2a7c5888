"""Ranks whose code is on the disk start and run without Numba, which takes longer to import than all else."""

from __future__ import annotations

import subprocess
import sys
from contextlib import ExitStack

import numpy as np
import pytest

from fastcoll.core.reduce_op import ReduceOp
from fastcoll.kernels.reduce import reducer
from fastcoll.net.tcp import entries as net
from fastcoll.shm import backend as shm

JOB = """
import sys
import numpy as np
import fastcoll as dist

meeting, backend, rank, size = *sys.argv[1:3], *map(int, sys.argv[3:])
dist.init_process_group(backend, f"file://{meeting}", world_size=size, rank=rank)
x, many = np.full(size, rank + 1.0), [np.empty(size) for _ in range(size)]
total = size * (size + 1) / 2
dist.barrier()
dist.all_reduce(x)
assert (x == total).all()
work = dist.all_reduce(x, op=dist.ReduceOp.MAX, async_op=True)
work.wait()
dist.reduce(x.copy(), 0)
dist.broadcast(x, 0)
dist.scan(x.copy())
dist.exscan(x.copy())
dist.all_gather(many, x)
dist.gather(x, many if rank == 0 else None, 0)
dist.scatter(x, many if rank == 0 else None, 0)
dist.reduce_scatter(x.copy(), many)
dist.all_to_all(many, [each.copy() for each in many])
dist.all_reduce(np.ones(100_000, np.float32))
for peer in range(size):
    if peer != rank:
        first = [lambda: dist.send(x, peer), lambda: dist.recv(many[peer], peer)]
        for step in first if rank < peer else first[::-1]:
            step()
requests = [dist.isend(x, (rank + 1) % size), dist.irecv(many[0], (rank - 1) % size)] if size > 1 else []
for request in requests:
    request.wait()
objects = [None] * size
dist.all_gather_object(objects, {"rank": rank})
half = dist.new_group([0])
dist.monitored_barrier()
print("imported:", *sorted({"numba", "llvmlite"} & sys.modules.keys()))
y = np.full(4, rank + 2.0)
dist.all_reduce(y, op=dist.ReduceOp.custom(lambda a, b: a * b + 1))
want = 2.0
for other in range(1, size):
    want = want * (other + 2.0) + 1
assert (y == want).all(), (y, want)
dist.destroy_process_group()
"""


def run(folder, backend: str, size: int) -> set[str]:
    """What each rank of a job says."""
    with ExitStack() as started:
        ranks = []
        for rank in range(size):
            command = [sys.executable, "-c", JOB, str(folder / "meeting"), backend, str(rank), str(size)]
            ranks.append(started.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, text=True)))
            started.callback(ranks[-1].kill)
        said = [rank.communicate(timeout=120)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * size
    return set(said)


@pytest.fixture(scope="module", autouse=True)
def code_on_the_disk() -> None:
    for entry in (*shm.ENTRIES, *net.ENTRIES):
        entry.compile()
    for dtype in (np.float32, np.float64):
        reducer(ReduceOp.SUM, np.dtype(dtype))


@pytest.mark.parametrize(
    "backend", ["shm", *(pytest.param(other, marks=pytest.mark.long) for other in ("tcp", "auto"))]
)
def test_ranks_run_every_operation_without_numba_and_then_compile_a_users_function(tmp_path, backend):
    assert run(tmp_path, backend, 2) == {"imported:\n"}
