"""A program that uses torch.distributed over Gloo and fastcoll's own functions; fastcoll's launcher starts it.

Both use one address, by env:// and by tcp://, with either of the two first, and again after both were destroyed.
"""

from __future__ import annotations

import itertools
import os

import torch
import torch.distributed as torch_dist

import fastcoll

if __name__ == "__main__":
    rank, size, port = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
    orders = list(itertools.permutations([torch_dist.init_process_group, fastcoll.init_process_group]))
    for init_method, order in itertools.product([None, f"tcp://127.0.0.1:{port}"], orders):
        for join in order:
            join("gloo", init_method, rank=rank, world_size=size)
        for all_reduce in (torch_dist.all_reduce, fastcoll.all_reduce):
            x = torch.full((4,), rank + 1.0)
            all_reduce(x)
            assert x.tolist() == [size * (size + 1) / 2] * 4
        torch_dist.destroy_process_group()
        fastcoll.barrier()  # else a rank that joins again may find torch's previous store, which is about to end
        fastcoll.destroy_process_group()
    os.write(1, f"rank {rank} met {2 * len(orders)} times\n".encode())
