"""FSDP2 on CPU: every rank keeps its share of the parameters, gradients and optimizer state.

    python -m fastcoll.launch -n 2 examples/torch_fsdp2.py
    torchrun --nproc-per-node 2 examples/torch_fsdp2.py --backend gloo

A block's parameters are gathered from all ranks just before it computes and let go after it; its gradients are
summed and scattered, so that each rank updates the share it keeps.
"""

import argparse

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy

import fastcoll.torch  # noqa: F401

WIDTH, BLOCKS, BATCH = 128, 4, 64


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x):
        return x + self.layers(x)


def sharded_model():
    model = nn.Sequential(nn.Linear(64, WIDTH), *(Block() for _ in range(BLOCKS)), nn.Linear(WIDTH, 10))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model[1:-1]:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", default="fastcoll", help="or gloo")
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args()

    torch.set_num_threads(1)  # the ranks share the cores
    torch.manual_seed(0)
    dist.init_process_group(options.backend)
    rank, size = dist.get_rank(), dist.get_world_size()
    digits = load_digits()
    pixels = torch.tensor(digits.data / 16, dtype=torch.float32)
    labels = torch.tensor(digits.target)

    model = sharded_model()
    kept = sum(parameter.to_local().numel() for parameter in model.parameters())
    total = sum(parameter.numel() for parameter in model.parameters())
    print(f"rank {rank} keeps {kept:,} of {total:,} parameters", flush=True)

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    order = torch.Generator().manual_seed(1)  # the same on every rank
    for step in range(1, options.steps + 1):
        mine = torch.randint(len(pixels), (size, BATCH), generator=order)[rank]
        loss = cross_entropy(model(pixels[mine]), labels[mine])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 0:
            loss = loss.detach()
            dist.all_reduce(loss)
            if rank == 0:
                print(f"step {step}: loss {loss / size:.7f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
