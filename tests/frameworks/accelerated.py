"""A user's program for Accelerate; the environment chooses backend and devices."""

import sys

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import nn

run = Accelerator()
torch.manual_seed(0)
net = nn.Linear(8, 1)
net, step = run.prepare(net, torch.optim.SGD(net.parameters(), 0.1))
loss = net(torch.full((4, 8), run.process_index + 1.0)).square().mean()
run.backward(loss)
step.step()
losses = len(set(run.gather(loss.detach()[None]).tolist()))
kind = type(dist.group.WORLD).__name__ if dist.is_initialized() else "no group"
sys.stdout.write(f"{run.process_index} of {run.num_processes}: {kind}, {losses} losses\n")
