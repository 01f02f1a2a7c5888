"""A training step in NumPy: gradients averaged one by one, or by GradientReducer.

    python bench/gradients.py
    python bench/gradients.py --ranks 4 --layers 8 --width 512 --batch 64

The network is a perceptron in float32. The variants run in turn in the same processes, in reverse order every second
time; ranks are pinned to the usable cores in turn. A time is the slowest rank's median step. The variant "computing"
does not communicate.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Callable
from time import perf_counter

import numpy as np
from versus.pinning import pin

import fastcoll as dist
from fastcoll import spawn
from fastcoll.bench.results import describe, machine

WAYS = ("computing", "all_reduce of each", "reducer", "reducer, float16")


class Network:
    """A perceptron whose layers have the same width."""

    def __init__(self, layers: int, width: int, batch: int) -> None:
        random = np.random.default_rng(0)
        shape = (width, width)
        self.weights = [random.normal(0, width**-0.5, shape).astype(np.float32) for _ in range(layers)]
        self.x = random.standard_normal((batch, width), np.float32)

    def backward(self, grads: list[np.ndarray], ready: Callable[[int], object]) -> None:
        """Compute the gradients, last layer first; call `ready(layer)` after each one."""
        inputs = [self.x]
        for weights in self.weights:
            inputs.append(np.tanh(inputs[-1] @ weights))
        error = inputs[-1] / len(self.x)
        for layer in reversed(range(len(self.weights))):
            error = error * (1 - inputs[layer + 1] ** 2)
            np.matmul(inputs[layer].T, error, out=grads[layer])
            ready(layer)
            error = error @ self.weights[layer].T


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2, help="processes (default 2)")
    parser.add_argument("--layers", type=int, default=8, help="of the perceptron (default 8)")
    parser.add_argument("--width", type=int, default=1024, help="of each layer (default 1024)")
    parser.add_argument("--batch", type=int, default=64, help="samples a rank (default 64)")
    parser.add_argument("--steps", type=int, default=60, help="of each variant (default 60)")
    given = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        spawn(run, args=(given, f"file://{folder}/meeting"), nprocs=given.ranks)
    return 0


def run(rank: int, given: argparse.Namespace, url: str) -> None:
    """Measure on one rank; rank 0 prints the page."""
    usable = sorted(os.sched_getaffinity(0))
    pin(usable, rank)
    dist.init_process_group("shm", init_method=url, rank=rank, world_size=given.ranks)
    network = Network(given.layers, given.width, given.batch)
    plain = [np.zeros_like(weights) for weights in network.weights]
    reducers = [dist.GradientReducer(network.weights, travel=travel) for travel in (None, "float16")]

    def computing() -> None:
        network.backward(plain, lambda layer: None)

    def each() -> None:
        network.backward(plain, lambda layer: None)
        for grad in plain:
            dist.all_reduce(grad, dist.ReduceOp.AVG)

    def by(reducer: dist.GradientReducer) -> Callable[[], None]:
        def step() -> None:
            network.backward(reducer.grads, reducer.ready)
            reducer.wait()

        return step

    steps = dict(zip(WAYS, (computing, each, *map(by, reducers)), strict=True))
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    for turn in range(given.steps + 5):
        for way in WAYS if turn % 2 else reversed(WAYS):
            dist.barrier()
            began = perf_counter()
            steps[way]()
            if turn >= 5:
                times[way].append(perf_counter() - began)
    medians = np.array([np.median(times[way]) for way in WAYS])
    dist.all_reduce(medians, dist.ReduceOp.MAX)
    nbytes = [0.0, sum(grad.nbytes for grad in plain)]
    nbytes += [reducer.bytes_sent / (given.steps + 5) for reducer in reducers]
    each()
    by(reducers[0])()
    assert all(np.allclose(a, b, rtol=1e-5, atol=1e-8) for a, b in zip(plain, reducers[0].grads, strict=True))
    if rank == 0:
        tell(given, medians * 1e3, nbytes, len(usable))
    dist.destroy_process_group()


def tell(given: argparse.Namespace, ms: np.ndarray, nbytes: list[float], cores: int) -> None:
    """Print the page."""
    print(f"# A step of {given.layers} layers of {given.width}, {given.ranks} ranks\n")
    print(f"- Machine: {describe(machine(cores))}")
    print(f"- Command: `python {' '.join(sys.argv)}`; float32, {given.batch} samples a rank\n")
    print("| way | ms | communication, ms | MB that a rank gives |\n|---|--:|--:|--:|")
    for way, time, sent in zip(WAYS, ms, nbytes, strict=True):
        print(f"| {way} | {time:.2f} | {time - ms[0]:.2f} | {sent / 1e6:.1f} |")


if __name__ == "__main__":
    sys.exit(main())
