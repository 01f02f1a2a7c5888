"""A program that fails once: `torchrun --max-restarts 1 started_anew.py`. Each start joins both kinds of worlds.

In the first start rank 1 is killed; rank 0 is in a call of both, or about to call.
"""

from __future__ import annotations

import os
import signal

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
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(y)
    fastcoll.all_reduce(x)
    os.write(
        1, f"after a restart: {x.tolist()} {y.tolist()}\n".encode()
    )  # one write, because the ranks share a pipe
    dist.destroy_process_group()
    fastcoll.destroy_process_group()
