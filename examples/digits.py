"""Data-parallel training: an MLP in NumPy learns scikit-learn's handwritten digits.

    python examples/digits.py
    python -m fastcoll.launch -n 4 examples/digits.py

Every rank computes the gradient on its share of each batch; the last layer's is averaged over the ranks while the first
layer's is still computed, and all take the same step. The weights do not depend on the number of ranks (but for
rounding).
"""

import argparse

import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import fastcoll as dist

LAYERS = (64, 48, 10)  # pixels, hidden units, digits
BATCH, EPOCHS, RATE, MOMENTUM = 64, 30, 0.1, 0.9


def first_weights(rng):
    inputs, hidden, outputs = LAYERS
    return {
        "w1": rng.normal(0, np.sqrt(2 / inputs), (inputs, hidden)),
        "b1": np.zeros(hidden),
        "w2": rng.normal(0, np.sqrt(2 / hidden), (hidden, outputs)),
        "b2": np.zeros(outputs),
    }


class Network:
    """A perceptron with one hidden layer."""

    def __init__(self, weights):
        self.weights = weights
        self.reducer = dist.GradientReducer(weights)

    def scores(self, x):
        self.hidden = np.maximum(x @ self.weights["w1"] + self.weights["b1"], 0)
        return self.hidden @ self.weights["w2"] + self.weights["b2"]

    def backward(self, x, labels, scale):
        """The gradients of the cross-entropy summed over the samples x, times `scale`, averaged over the ranks."""
        gradients, ready = self.reducer.grads, self.reducer.ready
        error = softmax(self.scores(x))
        error[np.arange(len(x)), labels] -= 1
        error *= scale
        gradients["w2"][:], gradients["b2"][:] = self.hidden.T @ error, error.sum(0)
        ready("w2", "b2")
        back = (error @ self.weights["w2"].T) * (self.hidden > 0)
        gradients["w1"][:], gradients["b1"][:] = x.T @ back, back.sum(0)
        ready("w1", "b1")
        self.reducer.wait()
        return gradients


def softmax(scores):
    powers = np.exp(scores - scores.max(1, keepdims=True))
    return powers / powers.sum(1, keepdims=True)


def train(network, x, labels):
    rank, size = dist.get_rank(), dist.get_world_size()
    velocity = {name: np.zeros_like(weights) for name, weights in network.weights.items()}
    order = np.random.default_rng(1)  # the same on every rank
    for _ in range(EPOCHS):
        for batch in np.array_split(order.permutation(len(x)), len(x) // BATCH):
            mine = batch[rank::size]
            # So scaled that the average is the batch's mean, whatever the shares.
            gradients = network.backward(x[mine], labels[mine], size / len(batch))
            step(network.weights, velocity, gradients)


def step(weights, velocity, gradients):
    """Gradient descent with momentum, in place."""
    for name in weights:
        velocity[name] *= MOMENTUM
        velocity[name] -= RATE * gradients[name]
        weights[name] += velocity[name]


def train_and_test_sets():
    digits = load_digits()
    pixels, labels = digits.data / 16, digits.target
    return train_test_split(pixels, labels, test_size=0.2, random_state=0, stratify=labels)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--save", help="write the weights to this .npy file")
    save = parser.parse_args().save

    dist.init_process_group()
    x, x_test, y, y_test = train_and_test_sets()
    weights = first_weights(np.random.default_rng(dist.get_rank()))
    dist.broadcast(weights, src=0)  # all start from rank 0's
    network = Network(weights)
    train(network, x, y)

    if dist.get_rank() == 0:
        accuracy = np.mean(network.scores(x_test).argmax(1) == y_test)
        print(f"{dist.get_world_size()} ranks: test accuracy {accuracy:.1%}")
        weights = np.concatenate([each.ravel() for each in network.weights.values()])
        print(f"sum of squared weights {np.sum(weights**2):.6f}")
        if save:
            np.save(save, weights)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
