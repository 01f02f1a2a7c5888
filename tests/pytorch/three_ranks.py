"""The checks for three ranks, as a program: `torchrun --nproc-per-node 3 three_ranks.py RESULTS`."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist

import fastcoll.torch  # noqa: F401 - registers the backend
from pytorch import collectives, groups, messages, pair

if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("fastcoll", timeout=pair.TIMEOUT)
    pair.make_groups()
    pair.run_checks([collectives, messages, groups], Path(sys.argv[1]))
    works = [dist.all_reduce(torch.ones(100_000), async_op=True) for _ in range(20)]
    if pair.rank() > 0:
        for work in works:
            work.wait()
    # The processes must exit cleanly without destroy_process_group, and although rank 0 has waited for nothing.
