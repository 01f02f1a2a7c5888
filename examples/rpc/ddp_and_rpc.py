"""DistributedDataParallel and RPC together: copies of a dense layer, and one large table on a rank of its own.

    python -m fastcoll.launch -n 3 examples/rpc/ddp_and_rpc.py

Ranks 0 and 1 train, each on half of a batch. DDP averages the gradients of their dense layers, by collective calls on
the group of the trainers (backend fastcoll). The table of embeddings, which may be too large for a trainer, is on rank
2; trainers call it by RPC, and distributed autograd sends its gradients there, from each trainer in its own context.
So over both trainers the table changes by the sum of the gradients, and the dense layer by their mean. A fast trainer
could read the table before the other one has changed it: the average of the loss over the trainers, after each step,
makes them wait for each other, so the result is always the same.
"""

import os

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import fastcoll.torch  # noqa: F401  (registers the backend)
from fastcoll import rpc

TRAINERS = 2
ROWS, EMBEDDED = 64 * 17, 32  # a row for each of 17 greys at each of 64 pixels
BATCH, STEPS, RATE = 120, 100, 0.3


TABLE = None


def the_table():
    """Return the table; runs on rank 2."""
    return TABLE


def table():
    """Return the table. An image is the sum of the rows of its 64 pixels; in float64: rounding must hide no error."""
    torch.manual_seed(1)
    bag = nn.EmbeddingBag(ROWS, EMBEDDED, mode="sum")
    nn.init.normal_(bag.weight, std=0.1)
    return bag.double()


def dense_layer():
    torch.manual_seed(2)
    return nn.Linear(EMBEDDED, 10).double()


def parameters(module):
    """Return RRefs of the parameters of a module, itself an RRef; runs on its owner."""
    return [rpc.RRef(parameter) for parameter in module.local_value().parameters()]


def batches():
    """Return for each step the rows of the pixels of each image, and the labels; last, those of the test."""
    digits = load_digits()
    random = torch.Generator().manual_seed(0)
    order = torch.randperm(len(digits.target), generator=random)
    rows = (torch.tensor(digits.data, dtype=torch.int64) + 17 * torch.arange(64))[order]
    labels = torch.tensor(digits.target)[order]
    for _ in range(STEPS):
        batch = torch.randint(360, len(order), (BATCH,), generator=random)
        yield rows[batch], labels[batch]
    yield rows[:360], labels[:360]


def train(rank):
    """Train; runs on each trainer."""
    dist.init_process_group("fastcoll", rank=rank, world_size=TRAINERS)
    embed = rpc.remote("table", the_table)
    dense = DistributedDataParallel(dense_layer())
    rrefs = rpc.rpc_sync("table", parameters, args=(embed,)) + [rpc.RRef(p) for p in dense.parameters()]
    optimizer = rpc.DistributedOptimizer(torch.optim.SGD, rrefs, lr=RATE)
    *steps, (rows_test, test_labels) = batches()
    for step, (rows, labels) in enumerate(steps):
        mine = slice(rank, None, TRAINERS)
        with rpc.autograd.context() as context_id:
            loss = cross_entropy(dense(embed.rpc_sync().forward(rows[mine])), labels[mine])
            rpc.autograd.backward(context_id, [loss])
            optimizer.step(context_id)
        # The mean is also a barrier: the table has both trainers' steps before one of them reads it again.
        mean = loss.detach()
        dist.all_reduce(mean, dist.ReduceOp.AVG)
        if rank == 0 and step % 10 == 9:
            print(f"step {step + 1}: loss {mean.item():.7f}")
    with torch.no_grad():
        right = dense.module(embed.rpc_sync().forward(rows_test)).argmax(1) == test_labels
    weights = [torch.empty_like(dense.module.weight) for _ in range(TRAINERS)]
    dist.all_gather(weights, dense.module.weight.detach())
    if rank == 0:
        print(f"test accuracy {right.float().mean():.1%}, dense layers equal: {torch.equal(*weights)}")
    dist.destroy_process_group()


def main():
    global TABLE
    torch.set_num_threads(1)  # the ranks share the cores
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if rank == TRAINERS:
        TABLE = table()
    rpc.init_rpc(
        "table" if rank == TRAINERS else f"trainer{rank}",
        rank=rank,
        world_size=size,
    )
    if rank < TRAINERS:
        train(rank)
    rpc.shutdown()


if __name__ == "__main__":
    main()
