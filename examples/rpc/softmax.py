"""Softmax regression of scikit-learn's handwritten digits in NumPy, for the examples with a server of weights."""

import numpy as np
from sklearn.datasets import load_digits

SHAPE = (65, 10)  # of the weights: 64 pixels and a 1 for the bias, digits


def train_and_test_sets():
    """Return pixels from 0 to 1, with a 1 at the end for the bias, and labels."""
    digits = load_digits()
    x = np.hstack([digits.data / 16, np.ones((len(digits.data), 1))])
    order = np.random.default_rng(0).permutation(len(x))
    x, labels = x[order], digits.target[order]
    return (x[360:], labels[360:]), (x[:360], labels[:360])


def gradient(weights, x, labels):
    """Return the gradient of the cross-entropy, summed over the samples."""
    error = np.exp(x @ weights)
    error /= error.sum(1, keepdims=True)
    error[np.arange(len(x)), labels] -= 1
    return x.T @ error


def accuracy(weights, x, labels):
    """Return the share of the samples that the weights classify correctly."""
    return np.mean((x @ weights).argmax(1) == labels)
