"""fastcoll's side of a comparison; started by versus_mpi.py."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import loop

import fastcoll as dist


def setup(operation: str, buffers: loop.Buffers) -> Callable[[], Any]:
    x, out = buffers
    return {
        "all_reduce": partial(dist.all_reduce, x),
        "reduce": partial(dist.reduce, x, 0),
        "broadcast": partial(dist.broadcast, x, 0),
        "all_gather": partial(dist.all_gather_into_tensor, out, x),
        "reduce_scatter": partial(dist.reduce_scatter_tensor, out, x),
        "all_to_all": partial(dist.all_to_all_single, out, x),
    }[operation]


if __name__ == "__main__":
    dist.init_process_group()
    loop.run(dist.get_rank(), dist.get_world_size(), dist.barrier, setup, f"fastcoll {dist.__version__}")
    dist.destroy_process_group()
