"""The training of digits.py on ranks of which some are killed: those that are left go on, and joiners join.

    python examples/elastic_digits.py
    python -m fastcoll.launch -n 4 --min_ranks 2 examples/elastic_digits.py --kill 2:100 3:300
    python -m fastcoll.launch -n 4 --min_ranks 2 --max_restarts 2 examples/elastic_digits.py --kill 2:100 --epochs 300

In the second line ranks 2 and 3 kill themselves with SIGKILL, at steps 100 and 300; in the third the launcher starts
another process for the one that was killed, which joins. Whatever happens, each sample is learnt from once in an epoch,
and the weights are those of the first line (but for rounding).
"""

import argparse
import os
import signal

import numpy as np
from digits import BATCH, Network, first_weights, step, train_and_test_sets

import fastcoll as dist
from fastcoll import elastic

COMMIT = 5  # steps: at most so many are done again after a death


def tell(before, after):
    if dist.get_rank() == 0:
        print(f"now {after} ranks, {before} before")


@elastic.run(min_ranks=1, on_change=tell)
def train(state, x, labels, epochs, kills):
    """Called at the start, and again whenever the ranks are others; `state` says where to go on."""
    network = Network(state.weights)
    while state.sampler.epoch < epochs:
        for mine in state.sampler:  # this rank's share of a batch, with as many ranks as there are now
            scale = dist.get_world_size() / state.sampler.count
            step(state.weights, state.velocity, network.backward(x[mine], labels[mine], scale))
            state.steps += 1
            if state.steps in kills:
                os.kill(os.getpid(), signal.SIGKILL)
            if state.steps % COMMIT == 0:
                state.commit()
    return network


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--kill", nargs="+", default=[], metavar="RANK:STEP", help="ranks that kill themselves"
    )
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--save", help="write the weights to this .npy file")
    options = parser.parse_args()
    kills = [kill.split(":") for kill in options.kill]
    kills = {int(at) for rank, at in kills if rank == os.environ.get("RANK")}  # a joiner has no RANK

    x, x_test, y, y_test = train_and_test_sets()
    weights = first_weights(np.random.default_rng(0))
    state = elastic.State(
        weights=weights,
        velocity={name: np.zeros_like(array) for name, array in weights.items()},
        sampler=elastic.Sampler(len(x), BATCH, seed=1),
        steps=0,
    )
    network = train(state, x, y, options.epochs, kills)

    if dist.get_rank() == 0:
        accuracy = np.mean(network.scores(x_test).argmax(1) == y_test)
        print(f"{state.steps} steps, test accuracy {accuracy:.1%}")
        if options.save:
            np.save(options.save, np.concatenate([array.ravel() for array in state.weights.values()]))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
