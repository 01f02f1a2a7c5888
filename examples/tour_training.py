"""The tour, fourth stop: fit a linear model on data that is spread over the ranks.

    python -m fastcoll.launch -n 2 examples/tour_training.py

Every step, all_reduce sums the ranks' gradients; divided by the number of ranks they are the average.
"""

import numpy as np

import fastcoll as dist

TRUE_WEIGHTS, TRUE_BIAS = np.arange(10) - 4.5, 2.0


def batches(rank, number=50, size=32):
    """This rank's part of the data set."""
    rng = np.random.default_rng(1337 + rank)
    for _ in range(number):
        x = rng.normal(size=(size, 10))
        yield x, x @ TRUE_WEIGHTS + TRUE_BIAS + rng.normal(0, 0.01, size)


def gradients(weights, bias, x, y):
    error = x @ weights + bias - y
    return [2 * x.T @ error / len(x), 2 * np.mean(error, keepdims=True)]


def main():
    dist.init_process_group()
    rank, size = dist.get_rank(), dist.get_world_size()
    weights, bias = np.zeros(10), np.zeros(1)  # the same on all ranks

    for _ in range(10):
        for x, y in batches(rank):
            for parameter, gradient in zip([weights, bias], gradients(weights, bias, x, y), strict=True):
                dist.all_reduce(gradient, op=dist.ReduceOp.SUM)
                gradient /= size
                parameter -= 0.05 * gradient

    error = max(np.abs(weights - TRUE_WEIGHTS).max(), abs(bias[0] - TRUE_BIAS))
    print(f"Rank {rank}: bias {bias[0]:.3f}, largest error {error:.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
