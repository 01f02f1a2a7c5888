"""A parameter server: trainers send gradients as they compute them, and no trainer waits for another one.

    python -m fastcoll.launch -n 3 examples/rpc/parameter_server.py

Rank 0 has the weights of a softmax regression of scikit-learn's digits, in NumPy. Each trainer computes with the
weights that it received last, while its previous gradient is being sent. Gradients are slightly stale, as in HogWild!,
and the regression still learns.
"""

import os
import threading

import numpy as np
from softmax import SHAPE, accuracy, gradient, train_and_test_sets

from fastcoll import rpc

BATCH, EPOCHS, RATE = 32, 20, 0.1


class Server:
    """The weights, and the functions that trainers call; calls of several trainers run concurrently, in threads."""

    def __init__(self):
        self.weights = np.zeros(SHAPE)
        self.updates = 0
        self.lock = threading.Lock()

    def fetch(self):
        """Return the current weights."""
        with self.lock:
            return self.weights.copy()

    def update(self, gradient):
        """Step by a trainer's gradient; return the new weights."""
        with self.lock:
            self.weights -= RATE * gradient
            self.updates += 1
            return self.weights.copy()


SERVER = Server()  # only that of rank 0 is used


def the_server():
    """Return the server; runs on rank 0. `rpc.remote` makes an RRef of what a function returns."""
    return SERVER


def train(rank, trainers):
    """Train on this trainer's share of the samples."""
    server = rpc.remote("server", the_server)
    (x, labels), _ = train_and_test_sets()
    x, labels = x[rank - 1 :: trainers], labels[rank - 1 :: trainers]
    random = np.random.default_rng(rank)
    weights, pending = server.rpc_sync().fetch(), None
    for _ in range(EPOCHS):
        for batch in np.array_split(random.permutation(len(x)), len(x) // BATCH):
            found = gradient(weights, x[batch], labels[batch]) / len(batch)
            if pending is not None:
                weights = pending.wait()
            pending = server.rpc_async().update(found)
    pending.wait()


def main():
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    rpc.init_rpc("server" if rank == 0 else f"trainer{rank}", rank=rank, world_size=size)
    if rank > 0:
        train(rank, size - 1)
    rpc.shutdown()  # waits for all: the server serves until the last trainer has ended
    if rank == 0:
        _, test = train_and_test_sets()
        print(
            f"{SERVER.updates} updates by {size - 1} trainers: test accuracy {accuracy(SERVER.weights, *test):.1%}"
        )


if __name__ == "__main__":
    main()
