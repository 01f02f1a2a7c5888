"""Gloo through torch.distributed, on tensors over the same NumPy memory.

Gloo sends from threads of its own (see `pinning`).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from ..cells import Buffers, ping_pong, updated
from ..loop import rank_in_environment
from ..plan import UPDATES, Job


class Gloo:
    """torch.distributed's default group."""

    def __init__(self, job: Job, folder: Path) -> None:
        import torch
        import torch.distributed as dist

        self.rank, self._ranks = rank_in_environment(), job.ranks
        self._torch, self._dist = torch, dist
        self.library = f"torch {torch.__version__} (Gloo)"
        meeting = f"file://{folder.absolute()}/meeting"
        dist.init_process_group("gloo", init_method=meeting, rank=self.rank, world_size=job.ranks)

    def barrier(self) -> None:
        self._dist.barrier()

    def slowest(self, seconds: float) -> float:
        x = self._torch.tensor([seconds], dtype=self._torch.float64)
        self._dist.all_reduce(x, self._dist.ReduceOp.MAX)
        return float(x[0])

    def memory(self, operation: str) -> AbstractContextManager[Any]:
        return nullcontext()

    def call(self, operation: str, buffers: Buffers) -> Callable[[], Any]:
        dist, root = self._dist, self.rank == 0
        x, out = map(self._torch.from_numpy, buffers)

        def exchange(other: int) -> tuple[Callable[[], Any], Callable[[], Any]]:
            return partial(dist.send, x, other), partial(dist.recv, out, other)

        calls: dict[str, Callable[[], Callable[[], Any]]] = {
            "all_reduce": lambda: partial(dist.all_reduce, x),
            "reduce": lambda: partial(dist.reduce, x, 0),
            "reduce_scatter": lambda: partial(
                self._named("reduce_scatter_single", "reduce_scatter_tensor"), out, x
            ),
            "broadcast": lambda: partial(dist.broadcast, x, 0),
            "all_gather": lambda: partial(self._named("all_gather_single", "all_gather_into_tensor"), out, x),
            "gather": lambda: partial(dist.gather, x, self._parts(out) if root else None, 0),
            "scatter": lambda: partial(dist.scatter, out, self._parts(x) if root else None, 0),
            "all_to_all": lambda: partial(dist.all_to_all_single, out, x),
            "send_recv": lambda: ping_pong(self.rank, self._ranks, exchange),
            **dict.fromkeys(UPDATES, lambda: updated(buffers.x, partial(dist.all_reduce, x))),
            "barrier": lambda: dist.barrier,
        }
        return calls[operation]()

    def close(self) -> None:
        self._dist.barrier()
        self._dist.destroy_process_group()

    def _named(self, name: str, earlier: str) -> Any:
        """Return an operation by its new name, or by its earlier name if torch is older.

        torch 2.13 has renamed some operations, and warns of the earlier names.
        """
        return getattr(self._dist, name, None) or getattr(self._dist, earlier)

    def _parts(self, whole: Any) -> list[Any]:
        return list(whole.chunk(self._ranks))


def join(job: Job, folder: Path) -> Gloo:
    """Join the ranks over the loopback interface: all are on this machine."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    return Gloo(job, folder)
