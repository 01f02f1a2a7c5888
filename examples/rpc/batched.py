"""Calls that wait for each other: the server collects one call of each trainer, and answers all by one computation.

    python -m fastcoll.launch -n 4 examples/rpc/batched.py

A function under `async_execution` returns a future, and its caller gets the answer when the future is set; no thread
waits meanwhile. First, each step of training is one update by the mean of all trainers' gradients; the weights equal
those of one process. Then each trainer asks for labels of single images, and the server classifies one image of each
trainer at a time.
"""

import os
import threading

import numpy as np
from softmax import SHAPE, gradient, train_and_test_sets

from fastcoll import rpc

BATCH, EPOCHS, RATE = 96, 20, 0.5


class Batch:
    """Collects one item from each caller, computes all at once, and answers each through a future."""

    def __init__(self, size, compute):
        self.size, self.compute = size, compute
        self.lock = threading.Lock()
        self.items, self.results = [], rpc.Future()

    def add(self, item):
        """Return a future of this item's result."""
        with self.lock:
            place, items, results = len(self.items), self.items, self.results
            items.append(item)
            is_full = len(items) == self.size
            if is_full:
                self.items, self.results = [], rpc.Future()  # for the next batch
        answer = results.then(lambda done: done.wait()[place])
        if is_full:
            results.set_result(self.compute(items))
        return answer


class Server:
    """The weights of a softmax regression, with functions that serve one call of each trainer at a time."""

    def __init__(self, trainers):
        self.weights = np.zeros(SHAPE)
        self.classifications = 0
        self.gradients = Batch(trainers, self.step)
        self.images = Batch(trainers, self.label)

    def step(self, gradients):
        """Step by the sum of the trainers' gradients; return the new weights for each trainer."""
        self.weights = self.weights - RATE * sum(gradients)
        return [self.weights] * len(gradients)

    def label(self, images):
        """Return the digits on images."""
        self.classifications += 1
        return (np.array(images) @ self.weights).argmax(1).tolist()


@rpc.functions.async_execution
def update(gradient):
    """Return the weights after a step that includes this gradient; runs on rank 0."""
    return SERVER.gradients.add(gradient)


@rpc.functions.async_execution
def classify(image):
    """Return the label of one image; runs on rank 0."""
    return SERVER.images.add(image)


def train(mine):
    """Train in steps of all trainers, each on its part of the batch, `mine`; return the last weights."""
    (x, labels), _ = train_and_test_sets()
    order = np.random.default_rng(1)  # the same for every trainer
    weights = np.zeros(SHAPE)
    for _ in range(EPOCHS):
        for batch in np.array_split(order.permutation(len(x)), len(x) // BATCH):
            part = batch[mine]
            found = gradient(weights, x[part], labels[part]) / len(batch)
            weights = rpc.rpc_sync("server", update, args=(found,))
    return weights


def main():
    global SERVER
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    SERVER = Server(size - 1)
    rpc.init_rpc("server" if rank == 0 else f"trainer{rank}", rank=rank, world_size=size)
    if rank > 0:
        mine = slice(rank - 1, None, size - 1)
        weights = train(mine)
        _, (x, labels) = train_and_test_sets()
        answers = [rpc.rpc_sync("server", classify, args=(image,)) for image in x[mine]]
        print(f"{np.sum(answers == labels[mine])} of {len(answers)} right")
        if rank == 1:
            print(f"sum of squared weights {np.sum(weights**2):.9f}")
    rpc.shutdown()
    if rank == 0:
        print(f"{SERVER.classifications} classifications of {size - 1} images")


if __name__ == "__main__":
    main()
