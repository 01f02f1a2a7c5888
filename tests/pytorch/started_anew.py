"""A program that fails once: `torchrun --max-restarts 1 started_anew.py`. Each start joins both kinds of worlds."""

from __future__ import annotations

import os

import numpy as np
import torch
import torch.distributed as dist

import fastcoll

if torch.__version__ < "2.14":  # later releases find the backend by its entry point
    import fastcoll.torch

if __name__ == "__main__":
    torch.set_num_threads(1)
    fastcoll.init_process_group()
    dist.init_process_group("fastcoll")
    x, y = np.ones(2), torch.ones(2)
    fastcoll.all_reduce(x)
    dist.all_reduce(y)
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os._exit(7)
    os.write(
        1, f"after a restart: {x.tolist()} {y.tolist()}\n".encode()
    )  # one write, because the ranks share a pipe
    dist.destroy_process_group()
    fastcoll.destroy_process_group()
