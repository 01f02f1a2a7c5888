"""The checks for two ranks, as a program: `two_ranks.py RESULTS RANK`. Rank 1 dies at the end."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist

import fastcoll.torch  # noqa: F401 - registers the backend
from pytorch import faults, pair, parts, training

if __name__ == "__main__":
    results, rank = Path(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(1)
    store = dist.FileStore(f"{results}-store", 2)
    for start in range(2):  # the second start finds the keys of the first in the store
        if start:
            dist.destroy_process_group()
        dist.init_process_group("fastcoll", store=store, rank=rank, world_size=2, timeout=pair.TIMEOUT)
        dist.barrier()
    pair.make_groups()
    pair.run_checks([parts, training, faults], results)
    dist.destroy_process_group()
