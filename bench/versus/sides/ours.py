"""fastcoll, called as a user calls it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import fastcoll as dist
from fastcoll.bench.rank import reduce_op

from ..cells import Buffers, ping_pong, updated
from ..plan import UPDATES, Job


class Fastcoll:
    """The default group."""

    def __init__(self) -> None:
        self.rank = dist.get_rank()
        self.ranks = dist.get_world_size()
        self.library = f"fastcoll {dist.__version__} (backend {dist.get_backend()})"

    def barrier(self) -> None:
        dist.barrier()

    def slowest(self, seconds: float) -> float:
        x = np.array([seconds])
        dist.all_reduce(x, dist.ReduceOp.MAX)
        return float(x[0])

    def memory(self, operation: str) -> AbstractContextManager[Any]:
        return dist.shared_arrays() if operation == "update_shared_all_reduce" else nullcontext()

    def call(self, operation: str, buffers: Buffers) -> Callable[[], Any]:
        x, out = buffers
        root = self.rank == 0

        def exchange(other: int) -> tuple[Callable[[], Any], Callable[[], Any]]:
            return partial(dist.send, x, other), partial(dist.recv, out, other)

        calls: dict[str, Callable[[], Callable[[], Any]]] = {
            "all_reduce": lambda: partial(dist.all_reduce, x),
            "reduce": lambda: partial(dist.reduce, x, 0),
            "reduce_scatter": lambda: partial(dist.reduce_scatter_tensor, out, x),
            "broadcast": lambda: partial(dist.broadcast, x, 0),
            "all_gather": lambda: partial(dist.all_gather_into_tensor, out, x),
            "gather": lambda: partial(dist.gather, x, self._parts(out) if root else None, 0),
            "scatter": lambda: partial(dist.scatter, out, self._parts(x) if root else None, 0),
            "all_to_all": lambda: partial(dist.all_to_all_single, out, x),
            "send_recv": lambda: ping_pong(self.rank, self.ranks, exchange),
            **dict.fromkeys(UPDATES, lambda: updated(x, partial(dist.all_reduce, x))),
            "barrier": lambda: dist.barrier,
            "custom": lambda: partial(dist.all_reduce, x, reduce_op("custom")),
        }
        return calls[operation]()

    def close(self) -> None:
        dist.destroy_process_group()

    def _parts(self, whole: Any) -> list[Any]:
        return list(whole.reshape(self.ranks, -1))


def join(job: Job, folder: Path) -> Fastcoll:
    """Join the ranks, as the launcher's environment variables say."""
    dist.init_process_group(job.backend)
    return Fastcoll()
