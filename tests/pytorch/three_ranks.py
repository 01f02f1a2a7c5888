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
    pair.run_checks([*collectives.CHECKS, *messages.CHECKS, *groups.CHECKS], Path(sys.argv[1]))
    # No destroy_process_group: the process must end well without it.
