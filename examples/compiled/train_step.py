"""A training step in one graph: both passes, the average over the ranks and the update, compiled by torch.compile.

    python -m fastcoll.launch -n 2 examples/compiled/train_step.py
    python -m fastcoll.launch -n 2 examples/compiled/train_step.py --compiler inductor  # needs a C++ compiler
    python -m fastcoll.launch -n 2 examples/compiled/train_step.py --compiler none

A small network learns scikit-learn's handwritten digits. Nothing of torch.distributed is used: `dist.all_reduce` is
fastcoll's own, and is in the graph with all else (fullgraph=True would raise otherwise).
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.func import functional_call, grad_and_value
from torch.nn.functional import cross_entropy

import fastcoll as dist

torch.manual_seed(0)
MODEL = nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 10))
RATE = 0.2


def loss_of(weights, x, labels):
    return cross_entropy(functional_call(MODEL, weights, (x,)), labels)


def step(weights, x, labels):
    """New weights and the mean loss, the same on all ranks."""
    gradients, loss = grad_and_value(loss_of)(weights, x, labels)
    dist.all_reduce({**gradients, "loss": loss}, dist.ReduceOp.AVG)  # all of them in one call, in place
    return {name: weight - RATE * gradients[name] for name, weight in weights.items()}, loss


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--compiler", default="aot_eager", help="a backend of torch.compile, or none")
    parser.add_argument("--epochs", type=int, default=10)
    options = parser.parse_args()

    torch.set_num_threads(1)  # the ranks share the cores
    dist.init_process_group()
    digits = load_digits()
    pixels, targets = torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target)
    weights = {name: weight.detach() for name, weight in MODEL.named_parameters()}
    dist.broadcast(weights, 0)
    compiled = (
        step if options.compiler == "none" else torch.compile(step, backend=options.compiler, fullgraph=True)
    )

    mine = torch.arange(1440).view(-1, dist.get_world_size(), 30)[:, dist.get_rank()]
    for epoch in range(options.epochs):
        losses = []
        for rows in mine:
            weights, loss = compiled(weights, pixels[rows], targets[rows])
            losses.append(loss.item())
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {sum(losses) / len(losses):.6f}")

    if dist.get_rank() == 0:
        guessed = functional_call(MODEL, weights, (pixels[1440:],)).argmax(1)
        print(f"test accuracy {(guessed == targets[1440:]).float().mean():.1%}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
