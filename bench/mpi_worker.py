"""MPI's side of a comparison, through mpi4py; started by versus_mpi.py under mpiexec.

Arrays are given with their MPI type, which spares mpi4py the look at their dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import loop
import mpi4py
from mpi4py import MPI

WORLD = MPI.COMM_WORLD


def setup(operation: str, buffers: loop.Buffers) -> Callable[[], Any]:
    x, out = [buffers.x, MPI.FLOAT], [buffers.out, MPI.FLOAT]
    root = WORLD.rank == 0
    return {
        "all_reduce": partial(WORLD.Allreduce, MPI.IN_PLACE, x),
        "reduce": partial(WORLD.Reduce, MPI.IN_PLACE if root else x, x if root else None),
        "broadcast": partial(WORLD.Bcast, x),
        "all_gather": partial(WORLD.Allgather, x, out),
        "reduce_scatter": partial(WORLD.Reduce_scatter_block, x, out),
        "all_to_all": partial(WORLD.Alltoall, x, out),
    }[operation]


if __name__ == "__main__":
    version = MPI.Get_library_version().splitlines()[0].split(",")[0].replace("Version:", "")
    library = f"mpi4py {mpi4py.__version__} on {' '.join(version.split())}"
    loop.run(WORLD.rank, WORLD.size, WORLD.Barrier, setup, library)
