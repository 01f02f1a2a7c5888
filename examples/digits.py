"""Data-parallel training: an MLP in NumPy learns scikit-learn's handwritten digits.

    python examples/digits.py
    python -m fastcoll.launch -n 4 examples/digits.py

Every rank computes the gradient on its share of each batch, one all_reduce averages the gradients, and
all take the same step. The weights do not depend on the number of ranks (but for rounding).
"""

import argparse

import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import fastcoll as dist

LAYERS = (64, 48, 10)  # pixels, hidden units, digits
BATCH, EPOCHS, RATE, MOMENTUM = 64, 30, 0.1, 0.9


class Network:
    """A perceptron with one hidden layer; its parameters are views of one flat array."""

    def __init__(self, rng):
        inputs, hidden, outputs = LAYERS
        shapes = [(inputs, hidden), (hidden,), (hidden, outputs), (outputs,)]
        self.parameters = np.zeros(sum(map(np.prod, shapes)))
        self.w1, self.b1, self.w2, self.b2 = split(self.parameters, shapes)
        self.gradient = np.zeros_like(self.parameters)
        self.shapes = shapes
        self.w1[:] = rng.normal(0, np.sqrt(2 / inputs), self.w1.shape)
        self.w2[:] = rng.normal(0, np.sqrt(2 / hidden), self.w2.shape)

    def scores(self, x):
        self.hidden = np.maximum(x @ self.w1 + self.b1, 0)
        return self.hidden @ self.w2 + self.b2

    def backward(self, x, labels):
        """Set `gradient` to the cross-entropy's, summed over the samples x."""
        error = softmax(self.scores(x))
        error[np.arange(len(x)), labels] -= 1
        back = (error @ self.w2.T) * (self.hidden > 0)
        w1, b1, w2, b2 = split(self.gradient, self.shapes)
        w1[:], b1[:] = x.T @ back, back.sum(0)
        w2[:], b2[:] = self.hidden.T @ error, error.sum(0)


def split(flat, shapes):
    ends = np.cumsum([np.prod(shape) for shape in shapes])
    return [part.reshape(shape) for part, shape in zip(np.split(flat, ends[:-1]), shapes, strict=True)]


def softmax(scores):
    powers = np.exp(scores - scores.max(1, keepdims=True))
    return powers / powers.sum(1, keepdims=True)


def train(network, x, labels):
    rank, size = dist.get_rank(), dist.get_world_size()
    velocity = np.zeros_like(network.parameters)
    order = np.random.default_rng(1)  # the same on every rank
    for _ in range(EPOCHS):
        for batch in np.array_split(order.permutation(len(x)), len(x) // BATCH):
            mine = batch[rank::size]
            network.backward(x[mine], labels[mine])
            network.gradient *= size / len(
                batch
            )  # so that the average is the batch's mean, whatever the shares
            dist.all_reduce(network.gradient, dist.ReduceOp.AVG)
            velocity = MOMENTUM * velocity - RATE * network.gradient
            network.parameters += velocity


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--save", help="write the weights to this .npy file")
    save = parser.parse_args().save

    dist.init_process_group()
    digits = load_digits()
    pixels, labels = digits.data / 16, digits.target
    x, x_test, y, y_test = train_test_split(pixels, labels, test_size=0.2, random_state=0, stratify=labels)

    network = Network(np.random.default_rng(dist.get_rank()))
    dist.broadcast(network.parameters, src=0)  # all start from rank 0's weights
    train(network, x, y)

    if dist.get_rank() == 0:
        accuracy = np.mean(network.scores(x_test).argmax(1) == y_test)
        print(f"{dist.get_world_size()} ranks: test accuracy {accuracy:.1%}")
        print(f"sum of squared weights {np.sum(network.parameters**2):.6f}")
        if save:
            np.save(save, network.parameters)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
