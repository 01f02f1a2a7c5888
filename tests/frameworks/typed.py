"""The train.py of a command on the page: runs the program of its first argument and prints the group's type."""

import sys

import torch
import torch.distributed as dist

from frameworks import two_ranks

torch.set_num_threads(1)
for check in two_ranks.CHECKS:
    if check.__name__ in sys.argv[1:]:
        values = check()
        kind, size = type(dist.group.WORLD).__name__, dist.get_world_size()
        # One write, because the ranks share a pipe.
        sys.stdout.write(
            f"{check.__name__}: rank {dist.get_rank()} of {size}, {kind}, {len(values)} values\n"
        )
        sys.stdout.flush()
        dist.destroy_process_group()
