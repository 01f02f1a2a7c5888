"""A rank of torchrun whose first start ends in the way that its argument names. It names only the backend gloo."""

import os
import signal
import sys

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
x = torch.ones(2)
dist.all_reduce(x)
how, start = sys.argv[1], int(os.environ["TORCHELASTIC_RESTART_COUNT"])
if start == 0 and dist.get_rank() == 1:
    if how == "exception":
        raise ValueError("not this time")
    if how == "SIGKILL":
        os.kill(os.getpid(), signal.SIGKILL)
    sys.exit(7)
dist.all_reduce(x)  # the other rank is in this call when this rank ends
os.write(1, f"start {start}: {type(dist.group.WORLD).__name__} {x.tolist()}\n".encode())
dist.destroy_process_group()
