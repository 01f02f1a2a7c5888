"""Pipeline parallelism: a network in two stages on two ranks, which work on different micro-batches at the same time.

    python -m fastcoll.launch -n 3 examples/rpc/pipeline.py

Rank 0 leads. It sends each micro-batch to the first stage, and the RRef of the first stage's output to the second
stage. The activations are sent from stage to stage, not through rank 0. The result equals that of one process and of
one batch. Each call runs in a thread of its rank. The lock in `Stage.forward` lets the layers compute one micro-batch
at a time, on all cores of the rank; a call takes it after `to_here()`, so no thread waits for data while it holds it.
"""

import os
import threading

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy

from fastcoll import rpc

STAGES = ((64, 96, 48), (48, 32, 10))  # the layers of each stage
OPTIMIZER, RATE = torch.optim.Adam, 0.02
BATCH, MICRO_BATCHES, STEPS = 240, 4, 60


class Stage(nn.Module):
    """A part of the network, in float64, so that rounding hides no difference from one process."""

    def __init__(self, seed, inputs, hidden, outputs):
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.Sequential(nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, outputs)).double()
        self.lock = (
            threading.Lock()
        )  # calls run in threads: the micro-batches are computed one after the other

    def forward(self, x):
        """Return the output for a tensor, or for the RRef of a tensor that may not exist yet."""
        x = x if torch.is_tensor(x) else x.to_here()
        with self.lock:
            return self.layers(x)

    def parameter_rrefs(self):
        return [rpc.RRef(parameter) for parameter in self.parameters()]


class Pipeline(nn.Module):
    """The stages, as RRefs."""

    def __init__(self):
        super().__init__()
        self.stages = [
            rpc.remote(f"stage{number}", Stage, args=(number, *sizes)) for number, sizes in enumerate(STAGES)
        ]

    def forward(self, x):
        first, second = self.stages
        calls = [second.rpc_async().forward(first.remote().forward(part)) for part in x.chunk(MICRO_BATCHES)]
        return torch.cat([call.wait() for call in calls])

    def parameter_rrefs(self):
        return [rref for stage in self.stages for rref in stage.rpc_sync().parameter_rrefs()]


def batches():
    """Return pixels and labels for each step; last, those of the test."""
    digits = load_digits()
    random = torch.Generator().manual_seed(0)
    order = torch.randperm(len(digits.target), generator=random)
    pixels = torch.tensor(digits.data / 16)[order]
    labels = torch.tensor(digits.target)[order]
    for _ in range(STEPS):
        batch = torch.randint(360, len(order), (BATCH,), generator=random)
        yield pixels[batch], labels[batch]
    yield pixels[:360], labels[:360]


def train():
    network = Pipeline()
    optimizer = rpc.DistributedOptimizer(OPTIMIZER, network.parameter_rrefs(), lr=RATE)
    *steps, (x_test, test_labels) = batches()
    for step, (x, labels) in enumerate(steps):
        with rpc.autograd.context() as context_id:
            loss = cross_entropy(network(x), labels)
            rpc.autograd.backward(context_id, [loss])
            optimizer.step(context_id)
        if step % 10 == 9:
            print(f"step {step + 1}: loss {loss.item():.7f}")
    right = (network(x_test).argmax(1) == test_labels).float().mean()
    print(f"test accuracy {right:.1%}")


def main():
    torch.set_num_threads(1)  # the ranks share the cores
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    rpc.init_rpc("leader" if rank == 0 else f"stage{rank - 1}", rank=rank, world_size=size)
    if rank == 0:
        train()
    rpc.shutdown()


if __name__ == "__main__":
    main()
