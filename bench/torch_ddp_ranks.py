"""The ranks of bench/torch_ddp.py: the same training on each side in turn, timed step by step.

A *side* is a model on a group, in DistributedDataParallel or sharded by FSDP2. There are three: one on Gloo, one on
fastcoll, and one that does not communicate, whose step is the time of computing. They begin with the same weights and
get the same data.
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
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from versus.pinning import pin, place_threads

import fastcoll.torch  # noqa: F401

BLOCK = 8  # successive steps of a side; the first is not timed, because the caches hold another side's data
POOL = 4  # number of different batches, which are used in turn
CLASSES = 64

Batch = tuple[torch.Tensor, torch.Tensor]
Wrapper = Callable[[nn.Module, dist.ProcessGroup | None], nn.Module]


@dataclass(frozen=True)
class Case:
    """A model, and the samples of each rank in a step."""

    model: str
    batch: int


@dataclass
class Side:
    """One model in training.

    Attributes:
        seconds: of each timed step.
        losses: this rank's, of every step.
    """

    step: Callable[[Batch], float]
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def run(self, batches: Sequence[Batch], timed: bool) -> None:
        """Run one block of steps."""
        for number in range(BLOCK):
            start = perf_counter()
            self.losses.append(self.step(batches[len(self.losses) % POOL]))
            if timed and number:
                self.seconds.append(perf_counter() - start)


class Transformer(nn.Module):
    """A transformer that predicts the next token at each of 64 positions.

    It has four layers, 128 wide.
    """

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
        return self.scores(self.layers(x, mask=self.mask, is_causal=True).flatten(0, 1))


def mlp() -> nn.Module:
    """Return a perceptron with 256 inputs and three hidden layers of 1024."""
    widths = (256, 1024, 1024, 1024)
    hidden = [layer for pair in pairwise(widths) for layer in (nn.Linear(*pair), nn.ReLU())]
    return nn.Sequential(*hidden, nn.Linear(1024, CLASSES))


MODELS: dict[str, Callable[[], nn.Module]] = {"mlp": mlp, "transformer": Transformer}


def data(case: Case) -> list[Batch]:
    """Return this rank's random batches; nothing is learnt from them."""
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
    """Do nothing, as DDP's communication hook. (DDP needs these annotations as types, not as strings.)"""
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


# ---- what a model is wrapped in, by the group, or by None: it does not communicate ---------------------------


def in_ddp(model: nn.Module, group: dist.ProcessGroup | None) -> nn.Module:
    model = DistributedDataParallel(model, process_group=group)
    if group is None:
        model.register_comm_hook(None, exchange_nothing)
    return model


def sharded(model: nn.Module, group: dist.ProcessGroup | None) -> nn.Module:
    """Shard every layer by itself, as users do, and the rest with the model."""
    if group is None:
        return model
    mesh = DeviceMesh.from_group(group, "cpu")
    layers = model.layers.layers if isinstance(model, Transformer) else model
    for layer in layers:
        if not isinstance(layer, nn.ReLU):
            fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


WRAPPERS = {"ddp": in_ddp, "fsdp2": sharded}


def side(case: Case, wrap: Wrapper, group: Any) -> Side:
    """Return a model on `group`, always with the same initial weights."""
    torch.manual_seed(0)
    model = wrap(MODELS[case.model](), group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step(batch: Batch) -> float:
        x, labels = batch
        optimizer.zero_grad()
        loss = cross_entropy(model(x), labels)
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    return Side(step)


def measure(
    case: Case, wrap: Wrapper, groups: dict[str, Any], seconds: float, cores: Sequence[int]
) -> dict[str, Any]:
    """Run the sides in turn for `seconds` in all, in reverse order every second time."""
    sides = {name: side(case, wrap, group) for name, group in groups.items()}
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
    place_threads(cores, dist.get_rank())  # the libraries have started their threads
    turns(int(number), timed=True)
    mine = {name: {"seconds": side.seconds, "losses": side.losses} for name, side in sides.items()}
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, mine)
    parameters = sum(parameter.numel() for parameter in MODELS[case.model]().parameters())
    return {"model": case.model, "batch": case.batch, "parameters": parameters, "ranks": ranks}


def main() -> None:
    """Run a rank; arguments: a file for the measurements, the wrapper, the seconds per case, and MODEL:BATCH."""
    path, wrapper, seconds, *cases = sys.argv[1:]
    cores = sorted(os.sched_getaffinity(0))
    pin(cores, int(os.environ["RANK"]))
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    groups = {
        "gloo": dist.new_group(backend="gloo"),
        "fastcoll": dist.new_group(backend="fastcoll"),
        "alone": None,
    }
    found = []
    for name, _, batch in (case.partition(":") for case in cases):
        found.append(measure(Case(name, int(batch)), WRAPPERS[wrapper], groups, float(seconds), cores))
    if dist.get_rank() == 0:
        with open(path, "w") as file:
            json.dump(found, file)
    # The last call is on fastcoll: Gloo in torch 2.13 sometimes aborts if Python exits right after one of its calls.
    dist.barrier(groups["fastcoll"])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
