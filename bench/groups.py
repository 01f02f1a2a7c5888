"""Measure what new groups of all ranks cost: processor time, memory in /dev/shm, and memory of a rank.

python -m fastcoll.launch -n 8 bench/groups.py
torchrun --nproc-per-node 8 bench/groups.py --library gloo      with torch
mpiexec -n 8 python bench/groups.py --library mpi               with mpi4py
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np


def fastcoll_ranks(backend: str) -> tuple[int, Callable[[], Any], Callable[[Any, np.ndarray], Any]]:
    import fastcoll as dist

    dist.init_process_group(backend)
    return dist.get_rank(), dist.new_group, lambda group, x: dist.all_reduce(x, group=group)


def gloo_ranks() -> tuple[int, Callable[[], Any], Callable[[Any, np.ndarray], Any]]:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    return dist.get_rank(), dist.new_group, lambda group, x: dist.all_reduce(torch.from_numpy(x), group=group)


def mpi_ranks() -> tuple[int, Callable[[], Any], Callable[[Any, np.ndarray], Any]]:
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    return world.rank, world.Dup, lambda group, x: (group or world).Allreduce(MPI.IN_PLACE, x)


def processor_seconds() -> float:
    times = os.times()
    return times.user + times.system


def mebibytes() -> tuple[float, float]:
    """Return the memory in use in /dev/shm, and this process's proportional share of the memory it has mapped."""
    status = os.statvfs("/dev/shm")
    with open("/proc/self/smaps_rollup") as file:
        (pss,) = [int(line.split()[1]) for line in file if line.startswith("Pss:")]
    return (status.f_blocks - status.f_bfree) * status.f_frsize / 2**20, pss / 2**10


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--library", choices=["fastcoll", "gloo", "mpi"], default="fastcoll")
    parser.add_argument("--backend", default="auto", help="of fastcoll")
    parser.add_argument("--groups", type=int, default=30)
    parser.add_argument("--bytes", type=int, default=8, help="of an all_reduce on each group")
    args = parser.parse_args()
    ranks = {"fastcoll": partial(fastcoll_ranks, args.backend), "gloo": gloo_ranks, "mpi": mpi_ranks}
    rank, new_group, all_reduce = ranks[args.library]()
    x, spent = np.ones(args.bytes // 8), np.zeros(1)
    all_reduce(None, x)
    all_reduce(None, spent)  # all ranks have begun
    before, began = mebibytes(), processor_seconds()
    groups = [new_group() for _ in range(args.groups)]
    spent[0] = processor_seconds() - began
    for group in groups:
        all_reduce(group, x)
    all_reduce(None, spent)
    shared, own = (now - then for now, then in zip(mebibytes(), before, strict=True))
    if rank == 0:
        a_group = 1e3 * spent[0] / args.groups
        spending = f"{a_group:.1f} ms of processor time a group"
        print(f"{args.library}: {spending}, {shared:.1f} MiB in /dev/shm, {own:.1f} MiB a rank")


if __name__ == "__main__":
    main()
