"""A training step compiled by torch.compile, on fastcoll and on Gloo.

    python bench/torch_compile.py                     # uses Inductor if there is a C++ compiler
    python bench/torch_compile.py --batches 32,256 --seconds 2 --compiler aot_eager
    python bench/torch_compile.py --results bench/results

The model is a multilayer perceptron (784, 512, 512, 10: 2.7 MB of gradients). One function, compiled with
fullgraph=True, does a step: forward, backward, the average of the gradients over the ranks as one tensor, and SGD. The
sides differ only in the function that reduces the gradients; one more side runs the step with fastcoll's function
without compiling it ("eager"). All sides run in turn in the same processes, from the same weights on the same data,
with one torch thread per rank, pinned to the usable cores in turn (see versus/pinning.py). A time is the slowest rank's
median step.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import sys
import tempfile
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

from compiled_pages import Times, save
from versus.pinning import pin

from fastcoll import spawn
from fastcoll.bench.results import describe, machine

BLOCK = 6  # steps of a side in a row; the first is not timed
SIDES = ("alone", "Gloo", "fastcoll, torch.distributed", "fastcoll", "fastcoll, eager")
_TOLERANCE = 1e-5  # for losses, because Gloo adds the ranks' gradients in another order


def main() -> int:
    parser = argparse.ArgumentParser()
    inductor = shutil.which("g++") or shutil.which("clang++")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--batches", default="16,64", help="samples of a rank in a step")
    parser.add_argument("--seconds", type=float, default=6.0, help="of timing, for all sides of a batch")
    parser.add_argument("--compiler", default="inductor" if inductor else "aot_eager")
    parser.add_argument("--results", help="a folder for the page and its picture")
    options = parser.parse_args()
    batches = [int(batch) for batch in options.batches.split(",")]
    with tempfile.TemporaryDirectory() as folder:
        spawn(rank_main, (options.ranks, batches, options.seconds, options.compiler, folder), options.ranks)
        ranks = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(options.ranks)]
    times = [
        {side: max(median(rank[index][side]) for rank in ranks) * 1e3 for side in SIDES}
        for index in range(len(batches))
    ]
    panels = {f"{batch} samples a rank": each for batch, each in zip(batches, times, strict=True)}
    text = "\n".join(page(times, batches, options))
    save(options.results, "torch-compile", text, panels, "ms a step", ["Gloo"])
    return 0


def page(times: list[Times], batches: list[int], options: argparse.Namespace) -> list[str]:
    cores = len(os.sched_getaffinity(0))
    lines = [
        "# A training step compiled by torch.compile",
        "",
        f"- Machine: {describe(machine(cores))}; torch {version('torch')}; fastcoll {version('fastcoll')}",
        f"- Ranks: {options.ranks}, one thread of torch each; compiler: {options.compiler}, fullgraph=True",
        "- Model: a perceptron of 784, 512, 512 and 10; SGD; 2.7 MB of gradients, averaged as one tensor",
        f"- Method: the sides in the same processes, in turn, {BLOCK} steps at a time; the slowest rank's median; "
        "ms. Losses agree",
        f"- Command: `{shlex.join(['python', 'bench/torch_compile.py', *sys.argv[1:]])}`",
        "",
        f"| batch a rank | {' | '.join(SIDES)} | Gloo / fastcoll | Gloo / fastcoll, communication |",
        "|--:|" + "--:|" * (len(SIDES) + 2),
    ]
    for batch, each in zip(batches, times, strict=True):
        alone, gloo, _, ours, _ = (each[side] for side in SIDES)
        cells = [str(batch), *(f"{each[side]:.2f}" for side in SIDES), f"{gloo / ours:.2f}"]
        lines.append(f"| {' | '.join(cells)} | {(gloo - alone) / max(ours - alone, 1e-3):.1f} |")
    lines += [
        "",
        "alone: no communication. Gloo, and fastcoll, torch.distributed: `torch.distributed.all_reduce`, which is a "
        "functional collective in the graph. fastcoll: `fastcoll.all_reduce`. Eager: the same function, not compiled.",
    ]
    return lines


def rank_main(rank: int, ranks: int, batches: list[int], seconds: float, compiler: str, folder: str) -> None:
    """Run one rank: all sides at every batch."""
    import torch
    import torch.distributed as torchs

    import fastcoll
    import fastcoll.torch

    pin(sorted(os.sched_getaffinity(0)), rank)
    torch.set_num_threads(1)
    fastcoll.init_process_group(init_method=f"file://{folder}/ours", rank=rank, world_size=ranks, timeout=120)
    store = torchs.FileStore(f"{folder}/store", ranks)
    torchs.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    group = torchs.new_group(backend="fastcoll")
    reduces: dict[str, Callable[[Any], Any]] = {
        "alone": lambda flat: None,
        "Gloo": torchs.all_reduce,
        "fastcoll, torch.distributed": lambda flat: torchs.all_reduce(flat, group=group),
        "fastcoll": fastcoll.all_reduce,
    }
    steps = {
        side: torch.compile(make_step(reduce, ranks), backend=compiler, fullgraph=True)
        for side, reduce in reduces.items()
    }
    steps["fastcoll, eager"] = make_step(fastcoll.all_reduce, ranks)
    found = [measure(steps, batch, seconds, rank, fastcoll.broadcast) for batch in batches]
    Path(folder, f"{rank}.json").write_text(json.dumps(found))
    fastcoll.barrier()
    torchs.destroy_process_group()
    fastcoll.destroy_process_group()


def make_step(reduce: Callable[[Any], Any], ranks: int) -> Callable[..., Any]:
    import torch
    from torch.func import grad_and_value
    from torch.nn.functional import cross_entropy, linear

    def loss_of(weights: Any, x: Any, labels: Any) -> Any:
        hidden = linear(linear(x, weights[0]).relu(), weights[1]).relu()
        return cross_entropy(linear(hidden, weights[2]), labels)

    def step(weights: Any, x: Any, labels: Any) -> Any:
        gradients, loss = grad_and_value(loss_of)(weights, x, labels)
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        reduce(flat)
        parts = flat.split([weight.numel() for weight in weights])
        moved = [w - 0.1 / ranks * part.view_as(w) for w, part in zip(weights, parts, strict=True)]
        return moved, loss

    return step


def measure(
    steps: dict[str, Callable[..., Any]], batch: int, seconds: float, rank: int, broadcast: Any
) -> dict[str, list[float]]:
    """Return the seconds of every timed step of each side.

    All ranks make the same number of steps.
    """
    import torch

    shapes = [(512, 784), (512, 512), (10, 512)]
    start = torch.Generator().manual_seed(0)
    first = [torch.randn(shape, generator=start) * 0.05 for shape in shapes]
    data = torch.Generator().manual_seed(1 + rank)
    x, labels = torch.randn(batch, 784, generator=data), torch.randint(10, (batch,), generator=data)
    weights, losses = {side: first for side in steps}, {side: [] for side in steps}
    times: dict[str, list[float]] = {side: [] for side in steps}
    more, began, turn = torch.ones(1), 0.0, 0
    while more:
        for side in sorted(steps, reverse=bool(turn % 2)):
            step = steps[side]
            for _ in range(BLOCK):
                now = perf_counter()
                weights[side], loss = step(weights[side], x, labels)
                times[side].append(perf_counter() - now)
                losses[side].append(loss.item())
            del times[side][-BLOCK]
        turn += 1
        if turn == 1:  # the first step compiles
            began, times = perf_counter(), {side: [] for side in steps}
        more[0] = perf_counter() - began < seconds
        broadcast(more, 0)
    for side in steps.keys() - {"alone"}:
        torch.testing.assert_close(losses[side], losses["fastcoll"], rtol=_TOLERANCE, atol=_TOLERANCE)
    return times


if __name__ == "__main__":
    sys.exit(main())
