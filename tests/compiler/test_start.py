"""Ranks whose code is on disk start and run without Numba, whose import takes longer than all else."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from programs import python_ranks

from fastcoll.core.reduce_op import ReduceOp
from fastcoll.kernels.reduce import reducer
from fastcoll.net.tcp import entries as net
from fastcoll.shm import backend as shm

JOB = """
import sys
import numpy as np
import fastcoll as dist
from conformance.test_every_operation import ROWS

meeting, backend, rank, size = *sys.argv[1:3], int(sys.argv[3]), SIZE
dist.init_process_group(backend, f"file://{meeting}", world_size=size, rank=rank)
for row in ROWS.values():
    for count in (5, 100_000):
        row(rank, size, count)
x = np.full(size, rank + 1.0)
dist.all_reduce(x, op=dist.ReduceOp.MAX)
dist.all_gather_object([None] * size, {"rank": rank})
dist.new_group([0])
dist.monitored_barrier()
print("imported:", *sorted({"numba", "llvmlite"} & sys.modules.keys()))
y = np.full(4, rank + 2.0)
dist.all_reduce(y, op=dist.ReduceOp.custom(lambda a, b: a * b + 1))
assert (y == 7).all(), y
dist.destroy_process_group()
"""


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
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    words = ["-c", JOB.replace("SIZE", "2"), tmp_path / "meeting", backend]
    ends = python_ranks(2, *words, env=environ)
    assert [(end.returncode, end.stdout) for end in ends] == [(0, "imported:\n")] * 2, ends
