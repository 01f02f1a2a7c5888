"""One rank of a program that imports only torch, and names the backend fastcoll, gloo, or none. Prints its backend."""

import os
import sys

import torch
import torch.distributed as dist

if not os.environ["FASTCOLL_TORCH_DEFAULT"]:
    assert "fastcoll" not in sys.modules, "import torch has imported fastcoll"
dist.init_process_group(*sys.argv[1:])
x = torch.full((3,), dist.get_rank() + 1.0)
dist.all_reduce(x)
pair = dist.new_group([0, 1])
dist.all_reduce(x, group=pair)
pair.monitored_barrier()
kind = type(dist.group.WORLD).__name__
sys.stdout.write(f"{dist.get_backend()} {kind} {type(pair).__name__} {x.tolist()}\n")
dist.destroy_process_group()
