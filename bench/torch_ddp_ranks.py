"""What every rank of bench/torch_ddp.py runs: the same training on each side in turn, timed step by step.

A *side* is a DistributedDataParallel model on a group of its own, all with the same weights and the same data: one on
Gloo, one on fastcoll, and one whose gradients stay where they are (a communication hook that does nothing), whose step
is what would be left if communication took no time.
"""

import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from versus.pinning import pin, place_threads

import fastcoll.torch  # noqa: F401

BLOCK = (
    8  # steps that a side has at a time; the first is not timed, since another side's data is in the caches
)
POOL = 4  # different batches
CLASSES = 64

Batch = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Case:
    """A model and how many samples each rank computes in a step."""

    model: str
    batch: int


@dataclass
class Side:
    """One model under training; `seconds` are of its timed steps, `losses` this rank's of all."""

    step: Callable[[Batch], float]
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def run(self, batches: Sequence[Batch], timed: bool) -> None:
        """One block of steps."""
        for number in range(BLOCK):
            start = perf_counter()
            self.losses.append(self.step(batches[len(self.losses) % POOL]))
            if timed and number:
                self.seconds.append(perf_counter() - start)


class Transformer(nn.Module):
    """Scores for the token after each of 64: four layers, 128 wide."""

    WIDTH, HEADS, LAYERS, CONTEXT = 128, 4, 4, 64

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(CLASSES, self.WIDTH)
        self.places = nn.Parameter(torch.randn(self.CONTEXT, self.WIDTH) / 10)
        layer = nn.TransformerEncoderLayer(
            self.WIDTH, self.HEADS, 4 * self.WIDTH, dropout=0.0, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, self.LAYERS, enable_nested_tensor=False)
        self.scores = nn.Linear(self.WIDTH, CLASSES)
        self.mask = nn.Transformer.generate_square_subsequent_mask(self.CONTEXT)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        x = self.tokens(text) + self.places
        return self.scores(self.layers(x, mask=self.mask, is_causal=True)).flatten(0, 1)


def mlp() -> nn.Module:
    """256 inputs, three hidden layers of 1024."""
    widths = (256, 1024, 1024, 1024)
    hidden = [layer for pair in pairwise(widths) for layer in (nn.Linear(*pair), nn.ReLU())]
    return nn.Sequential(*hidden, nn.Linear(1024, CLASSES))


MODELS: dict[str, Callable[[], nn.Module]] = {"mlp": mlp, "transformer": Transformer}


def data(case: Case) -> list[Batch]:
    """This rank's batches: random, as only time and equality matter."""
    random = torch.Generator().manual_seed(dist.get_rank())
    size = (case.batch, Transformer.CONTEXT)
    if case.model == "transformer":
        texts = [torch.randint(CLASSES, size, generator=random) for _ in range(POOL)]
        return [(text, text.roll(-1, 1).flatten()) for text in texts]
    return [
        (torch.randn(case.batch, 256, generator=random), torch.randint(CLASSES, size[:1], generator=random))
        for _ in range(POOL)
    ]


def exchange_nothing(_: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """A communication hook: DDP does all else. (It wants these annotations as types, not as texts.)"""
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


def side(case: Case, group: Any, alone: bool = False) -> Side:
    """A model on `group`, from the same weights every time."""
    torch.manual_seed(0)
    model = DistributedDataParallel(MODELS[case.model](), process_group=group)
    if alone:
        model.register_comm_hook(None, exchange_nothing)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step(batch: Batch) -> float:
        x, labels = batch
        optimizer.zero_grad()
        loss = cross_entropy(model(x), labels)
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    return Side(step)


def measure(case: Case, groups: dict[str, Any], seconds: float, cores: Sequence[int]) -> dict[str, Any]:
    """Blocks of steps, the sides in an order that is turned round each time, for `seconds` in all."""
    sides = {name: side(case, group) for name, group in groups.items()}
    sides["alone"] = side(case, groups["gloo"], alone=True)
    batches = data(case)

    def turns(number: int, timed: bool) -> float:
        start = perf_counter()
        for turn in range(number):
            for name in list(sides)[:: 1 if turn % 2 else -1]:
                dist.barrier()
                sides[name].run(batches, timed)
        return perf_counter() - start

    turns(2, timed=False)
    number = torch.tensor(max(4, int(seconds / turns(1, timed=False))))
    dist.broadcast(number, src=0)
    place_threads(cores, dist.get_rank())  # the libraries have started theirs
    turns(int(number), timed=True)
    mine = {name: {"seconds": side.seconds, "losses": side.losses} for name, side in sides.items()}
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, mine)
    parameters = sum(parameter.numel() for parameter in MODELS[case.model]().parameters())
    return {"model": case.model, "batch": case.batch, "parameters": parameters, "ranks": ranks}


def main() -> None:
    """Arguments: a file for what was measured, seconds a case, and cases as MODEL:BATCH."""
    path, seconds, *cases = sys.argv[1:]
    cores = sorted(os.sched_getaffinity(0))
    pin(cores, int(os.environ["RANK"]))
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    groups = {"gloo": dist.new_group(backend="gloo"), "fastcoll": dist.new_group(backend="fastcoll")}
    found = []
    for name, _, batch in (case.partition(":") for case in cases):
        found.append(measure(Case(name, int(batch)), groups, float(seconds), cores))
    if dist.get_rank() == 0:
        with open(path, "w") as file:
            json.dump(found, file)
    # A barrier of fastcoll last: Gloo in torch 2.13 aborts now and then if Python ends right after one of its calls.
    dist.barrier(groups["fastcoll"])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
