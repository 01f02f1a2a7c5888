"""A recurrent network that is split over two ranks, trained by distributed autograd.

    python -m fastcoll.launch -n 2 examples/rpc/split_rnn.py

Rank 0 trains and has the LSTM; rank 1 has the embedding and the output layer, which would be the large ones. A forward
pass changes the rank four times, the backward pass of the context follows it, and DistributedOptimizer steps each
parameter on its rank. The network learns to write the next character of Shakespeare's sonnets.
"""

import os
import threading
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from fastcoll import rpc

TEXT = (Path(__file__).parent.parent / "sonnets.txt").read_text()
ALPHABET = sorted(set(TEXT))
EMBEDDED, HIDDEN = 24, 64
SEQUENCES, LENGTH, STEPS, RATE = 16, 40, 60, 0.01
SEEDING = threading.Lock()


def seeded(seed, layer, *sizes):
    """Return a layer whose initial weights depend on the seed alone, on any rank."""
    with SEEDING:  # calls run in threads, and torch has one generator
        torch.manual_seed(seed)
        return layer(*sizes)


def parameters(module):
    """Return RRefs of the parameters of a module, itself an RRef; runs on its owner."""
    return [rpc.RRef(parameter) for parameter in module.local_value().parameters()]


class SplitNetwork(nn.Module):
    """Embedding and output layer on the worker `host`, the LSTM here."""

    def __init__(self, host):
        super().__init__()
        self.embedding = rpc.remote(host, seeded, args=(1, nn.Embedding, len(ALPHABET), EMBEDDED))
        self.lstm = seeded(2, nn.LSTM, EMBEDDED, HIDDEN)
        self.output = rpc.remote(host, seeded, args=(3, nn.Linear, HIDDEN, len(ALPHABET)))

    def forward(self, characters):
        embedded = self.embedding.rpc_sync().forward(characters)
        hidden, _ = self.lstm(embedded)
        return self.output.rpc_sync().forward(hidden)

    def parameter_rrefs(self):
        """Return RRefs of all parameters, on both ranks."""
        theirs = [
            rpc.rpc_async(layer.owner(), parameters, args=(layer,)) for layer in (self.embedding, self.output)
        ]
        mine = [rpc.RRef(parameter) for parameter in self.lstm.parameters()]
        return [rref for call in theirs for rref in call.wait()] + mine


def batches():
    """Return for each step sequences of the text, and the characters that follow; shape (LENGTH, SEQUENCES) each."""
    codes = torch.tensor([ALPHABET.index(character) for character in TEXT])
    random = torch.Generator().manual_seed(0)
    for _ in range(STEPS):
        starts = torch.randint(len(codes) - LENGTH, (SEQUENCES,), generator=random)
        places = starts + torch.arange(LENGTH)[:, None]
        yield codes[places], codes[places + 1]


def loss_of(scores, following):
    return cross_entropy(scores.flatten(0, 1), following.flatten())


def train():
    network = SplitNetwork("host")
    optimizer = rpc.DistributedOptimizer(torch.optim.Adam, network.parameter_rrefs(), lr=RATE)
    for step, (characters, following) in enumerate(batches()):
        with rpc.autograd.context() as context_id:
            loss = loss_of(network(characters), following)
            rpc.autograd.backward(context_id, [loss])  # gradients stay in the context; .grad does not change
            optimizer.step(context_id)
        if step % 10 == 9:
            print(f"step {step + 1}: loss {loss.item():.7f}")


def main():
    torch.set_num_threads(1)  # the ranks share the cores
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    rpc.init_rpc("trainer" if rank == 0 else "host", rank=rank, world_size=size)
    if rank == 0:
        train()
    rpc.shutdown()


if __name__ == "__main__":
    main()
