"""MPI through mpi4py.

Arrays are passed with their MPI type, so that mpi4py need not derive it from the dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ..cells import Buffers, absmax, ping_pong, updated
from ..plan import UPDATES, Job

_TYPES = {
    "float32": "FLOAT",
    "float64": "DOUBLE",
    "int8": "INT8_T",
    "uint8": "UINT8_T",
    "int32": "INT32_T",
    "int64": "INT64_T",
}


class Mpi:
    """MPI.COMM_WORLD."""

    def __init__(self, dtype: str) -> None:
        import mpi4py
        from mpi4py import MPI

        from ..probe import mpi_name

        self._mpi, self._world = MPI, MPI.COMM_WORLD
        self._type = getattr(MPI, _TYPES[dtype])
        self.rank = self._world.rank
        self.library = f"mpi4py {mpi4py.__version__} on {mpi_name(MPI.Get_library_version())}"

    def barrier(self) -> None:
        self._world.Barrier()

    def slowest(self, seconds: float) -> float:
        return float(self._world.allreduce(seconds, self._mpi.MAX))

    def memory(self, operation: str) -> AbstractContextManager[Any]:
        return nullcontext()

    def call(self, operation: str, buffers: Buffers) -> Callable[[], Any]:
        world, in_place = self._world, self._mpi.IN_PLACE
        x, out = [buffers.x, self._type], [buffers.out, self._type]
        root = self.rank == 0

        def exchange(other: int) -> tuple[Callable[[], Any], Callable[[], Any]]:
            return partial(world.Send, x, other), partial(world.Recv, out, other)

        calls: dict[str, Callable[[], Callable[[], Any]]] = {
            "all_reduce": lambda: partial(world.Allreduce, in_place, x),
            "reduce": lambda: partial(world.Reduce, in_place if root else x, x if root else None),
            "reduce_scatter": lambda: partial(world.Reduce_scatter_block, x, out),
            "broadcast": lambda: partial(world.Bcast, x),
            "all_gather": lambda: partial(world.Allgather, x, out),
            "gather": lambda: partial(world.Gather, x, out if root else None),
            "scatter": lambda: partial(world.Scatter, x if root else None, out),
            "all_to_all": lambda: partial(world.Alltoall, x, out),
            "send_recv": lambda: ping_pong(self.rank, world.size, exchange),
            **dict.fromkeys(UPDATES, lambda: updated(buffers.x, partial(world.Allreduce, in_place, x))),
            "barrier": lambda: world.Barrier,
            "custom": lambda: partial(world.Allreduce, in_place, x, self._absmax(buffers.x.dtype)),
        }
        return calls[operation]()

    def close(self) -> None:
        self._mpi.Finalize()

    def _absmax(self, dtype: np.dtype[Any]) -> Any:
        """Return `absmax` as an MPI operation.

        mpi4py calls its function with two buffers; the function writes the result to the second.
        """

        def combine(given: Any, total: Any, _: Any) -> None:
            a, b = np.frombuffer(given, dtype), np.frombuffer(total, dtype)
            b[:] = absmax(a, b)

        return self._mpi.Op.Create(combine, commute=True)


def join(job: Job, folder: Path) -> Mpi:
    """Join the ranks; MPI starts when mpi4py is imported."""
    return Mpi(job.dtype)
