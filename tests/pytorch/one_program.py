"""A program that uses torch.distributed over Gloo and fastcoll's own functions; its first argument is the launcher.

Both use one address, by env:// and by tcp://, with either of the two first, and again after both were destroyed.
"""

from __future__ import annotations

import itertools
import os
import sys

import torch
import torch.distributed as torch_dist
import torch.multiprocessing

import fastcoll
from fastcoll.launch.nodes import free_port


def torch_joins(init_method: str | None, rank: int, size: int) -> None:
    torch_dist.init_process_group("gloo", init_method, rank=rank, world_size=size)


def fastcoll_joins(init_method: str | None, rank: int, size: int) -> None:
    fastcoll.init_process_group(init_method=init_method, rank=rank, world_size=size, timeout=60)


def main(rank: int, size: int, port: int) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    orders = list(itertools.permutations([torch_joins, fastcoll_joins]))
    for init_method, order in itertools.product([None, f"tcp://127.0.0.1:{port}"], orders):
        for join in order:
            join(init_method, rank, size)
        for all_reduce in (torch_dist.all_reduce, fastcoll.all_reduce):
            x = torch.full((4,), rank + 1.0)
            all_reduce(x)
            assert x.tolist() == [size * (size + 1) / 2] * 4
        torch_dist.destroy_process_group()
        fastcoll.barrier()  # else a rank that joins again may find torch's previous store, which is about to end
        fastcoll.destroy_process_group()
    os.write(1, f"rank {rank} met {2 * len(orders)} times\n".encode())


if __name__ == "__main__":
    if sys.argv[1] == "launched":
        main(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), int(os.environ["MASTER_PORT"]))
    else:
        spawn = fastcoll.spawn if sys.argv[1] == "fastcoll.spawn" else torch.multiprocessing.spawn
        spawn(main, args=(2, free_port()), nprocs=2)
