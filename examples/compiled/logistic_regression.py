"""Logistic regression in one jitted function, with the data shared out over the ranks.

    pip install '.[jax,examples]'
    python examples/compiled/logistic_regression.py
    fastcoll-launch -n 2 examples/compiled/logistic_regression.py

Each rank has some of scikit-learn's images of digits and tells odd ones from even ones. All steps of the training are
one program of JAX: the loss of all images is an all_reduce inside the function that is differentiated, and a second one
adds up the derivatives by each rank's part. Any number of ranks finds the same weights.
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
from sklearn.datasets import load_digits

import fastcoll as dist
import fastcoll.jax as fj


def my_images():
    """This rank's images with a last pixel of 1, (images, 65); whether their digits are odd; how many all have."""
    digits = load_digits()
    x = np.concatenate([digits.data / 16, np.ones((len(digits.data), 1))], 1).astype(np.float32)
    odd = (digits.target % 2).astype(np.float32)
    mine = slice(dist.get_rank(), None, dist.get_world_size())
    return jnp.asarray(x[mine]), jnp.asarray(odd[mine]), len(x)


def loss(w, x, odd, total):
    """The mean over the images of all ranks, the same on all of them."""
    scores = x @ w
    return fj.all_reduce(jnp.sum(jnp.logaddexp(0, scores) - odd * scores)) / total


@jax.jit
def train(w, x, odd, total, rates):
    """Gradient descent, a step for each rate; the weights, and the loss before each step."""

    def step(w, rate):
        value, mine = jax.value_and_grad(loss)(
            w, x, odd, total
        )  # of the loss of all by what this rank put in
        return w - rate * fj.all_reduce(mine), value

    return jax.lax.scan(step, w, rates)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300, help="of gradient descent")
    parser.add_argument("--save", help="a .npy file for the weights")
    options = parser.parse_args()
    dist.init_process_group()
    x, odd, total = my_images()
    w, losses = train(jnp.zeros(x.shape[1]), x, odd, total, jnp.full(options.steps, 1.0))
    right = fj.all_reduce(jnp.sum((x @ w > 0) == (odd > 0)))
    if dist.get_rank() == 0:
        n = dist.get_world_size()
        print(f"{n} ranks: {100 * int(right) / total:.1f}% right, loss {losses[0]:.4f} to {losses[-1]:.4f}")
        if options.save:
            np.save(options.save, np.asarray(w))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
