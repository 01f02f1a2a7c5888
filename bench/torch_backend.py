"""Operations of torch.distributed over fastcoll and over Gloo, in turn in one run; also beside DeepSpeed's kernel.

    python bench/torch_backend.py
    python bench/torch_backend.py --operation all_to_all
    python bench/torch_backend.py --ranks 4 --sizes 8,1M --json out.json
    python bench/torch_backend.py --dtype bfloat16 --deepspeed           # needs deepspeed and a compiler

Each backend has a group of the same processes, whose ranks are pinned to the usable cores in turn (see
versus/pinning.py). For each size the backends run in turn, in reverse order every second time; before the timing, every
call is made once and its result checked. Times are those of single calls: "sync" with async_op=False, "async" with
async_op=True and wait. A column has the slowest rank's median (p99: its 99th percentile). DeepSpeed's kernel, which
works in shared memory and is compiled at first use, is called by its operator of torch, without torch.distributed. A
size is the bytes of the larger of input and output.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

from versus.pinning import pin, place_threads
from versus.targets import markdown, missed

from fastcoll import spawn
from fastcoll.bench.cases import format_size, parse_size
from fastcoll.bench.results import describe, machine

BACKENDS = ("fastcoll", "gloo")
TITLES = {"fastcoll": "fastcoll", "gloo": "Gloo", "deepspeed": "DeepSpeed's kernel"}
OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
MODES = ("sync", "async")
SIZES = "8,1K,64K,1M,64M"
TURNS = 6
_FEWEST_CALLS = 25  # per turn


def main() -> int:
    options = _parser().parse_args()
    with tempfile.TemporaryDirectory() as folder:
        spawn(rank_main, (options, folder), nprocs=options.ranks)
        report = json.loads(Path(folder, "report.json").read_text())
    print("\n".join(page(report)))
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0


def rank_main(rank: int, options: argparse.Namespace, folder: str) -> None:
    """Run one rank: measure every size; rank 0 writes the report."""
    import torch
    import torch.distributed as dist

    import fastcoll.torch  # noqa: F401 - registers the backend

    ranks, cores = options.ranks, sorted(os.sched_getaffinity(0))
    pin(cores, rank)
    torch.set_num_threads(1)
    store, limit = dist.FileStore(f"{folder}/store", ranks), timedelta(seconds=300)
    dist.init_process_group("fastcoll", store=store, rank=rank, world_size=ranks, timeout=limit)
    groups = {name: dist.new_group(backend=name, timeout=limit) for name in BACKENDS}
    kernel = deepspeed_kernel(rank, ranks) if options.deepspeed else None
    sizes = [parse_size(size) for size in options.sizes.split(",")]
    rows = [measure(nbytes, groups, kernel, options, cores) for nbytes in sizes]
    if rank == 0:
        facts = {**machine(len(cores)), "torch": torch.__version__}
        about = {"kind": "torch", "machine": facts, "cores": cores, "ranks": ranks, "dtype": options.dtype}
        about["operation"] = options.operation
        report = {**about, "command": " ".join(["python", *sys.argv]), "results": rows}
        Path(folder, "report.json").write_text(json.dumps(report))
    dist.destroy_process_group()


def deepspeed_kernel(rank: int, ranks: int) -> Callable[[Any], Any]:
    """Compile DeepSpeed's all_reduce in shared memory, and return it; collective."""
    import torch
    import torch.distributed as dist

    # The kernel takes these from the environment, and crashes without LOCAL_SIZE. They name its buffers.
    os.environ.update(LOCAL_SIZE=str(ranks), MASTER_ADDR="fastcoll", MASTER_PORT=str(os.getppid()))
    from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder

    if rank == 0:
        ShareMemCommBuilder().load()  # compiles, and keeps the code on disk
    dist.barrier()
    ShareMemCommBuilder().load().initialize(ranks, rank)
    dist.barrier()
    if rank == 0:  # DeepSpeed leaves the names of its buffers; all ranks have opened them
        for name in Path("/dev/shm").glob(f"deepspeed_*_fastcoll_{os.getppid()}_*"):
            name.unlink()
    reduce: Callable[[Any], Any] = torch.ops.deepspeed.inference_all_reduce_
    return reduce


def measure(
    nbytes: int,
    groups: dict[str, Any],
    kernel: Callable[[Any], Any] | None,
    options: argparse.Namespace,
    cores: Sequence[int],
) -> dict[str, Any]:
    """Return a row of the table: microseconds of every backend and mode at one size; collective.

    Args:
        kernel: DeepSpeed's, if that is measured, too.
        cores: the cores of the ranks.
    """
    import torch
    import torch.distributed as dist

    trial = Trial.of(options.operation, nbytes, getattr(torch, options.dtype))
    calls: dict[str, Callable[[], Any]] = {}
    for name, group in groups.items():
        calls[f"{name} sync"] = partial(trial.call, group=group)
        calls[f"{name} async"] = lambda group=group: trial.call(group=group, async_op=True).wait()
    if kernel is not None:
        calls["deepspeed sync"] = partial(kernel, trial.given)
    for name, call in calls.items():
        trial.check(name, call)
    trial.given.zero_()  # sums of zeros stay 0
    place_threads(cores, dist.get_rank())  # the libraries have started their threads
    counts = {name: _count(call, groups["gloo"], options.seconds / TURNS) for name, call in calls.items()}
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(TURNS):
        for name in list(calls) if turn % 2 == 0 else list(calls)[::-1]:
            dist.barrier(groups["gloo"])
            _time(calls[name], max(1, counts[name] // 10))
            times[name] += _time(calls[name], counts[name])
    typical = {name: _typical(found, groups["gloo"]) for name, found in times.items()}
    ratio = typical["gloo sync"]["median_us"] / typical["fastcoll sync"]["median_us"]
    return {"operation": options.operation, "size": nbytes, "gloo_over_fastcoll": ratio, **typical}


@dataclass
class Trial:
    """An operation on tensors: `call` reads `given` on all ranks, and writes `got`, which may be the same tensor."""

    operation: str
    given: Any
    got: Any
    call: Callable[..., Any]

    @classmethod
    def of(cls, operation: str, nbytes: int, dtype: Any) -> Trial:
        import torch
        import torch.distributed as dist

        ranks = dist.get_world_size()
        share = nbytes // dtype.itemsize // ranks
        part, x, y = (torch.empty(n * share, dtype=dtype) for n in (1, ranks, ranks))
        given, got, function, arguments = {
            "all_reduce": (x, x, dist.all_reduce, (x,)),
            "all_gather": (part, x, dist.all_gather_into_tensor, (x, part)),
            "reduce_scatter": (x, part, dist.reduce_scatter_tensor, (part, x)),
            "all_to_all": (x, y, dist.all_to_all_single, (y, x)),
        }[operation]
        return cls(operation, given, got, partial(function, *arguments))

    def check(self, name: str, call: Callable[[], Any]) -> None:
        """Check a call's result on integers that the dtype has; `given` has other values afterwards."""
        import torch
        import torch.distributed as dist

        rank, ranks = dist.get_rank(), dist.get_world_size()
        values = 1000 if self.given.dtype == torch.float32 else 16
        inputs = [
            torch.arange(len(self.given)).remainder_(values).add_(r).to(self.given) for r in range(ranks)
        ]
        wanted = {
            "all_reduce": lambda: sum(inputs),
            "all_gather": lambda: torch.cat(inputs),
            "reduce_scatter": lambda: sum(inputs).chunk(ranks)[rank],
            "all_to_all": lambda: torch.cat([each.chunk(ranks)[rank] for each in inputs]),
        }[self.operation]()
        self.given.copy_(inputs[rank])
        call()
        if not torch.equal(self.got, wanted):
            raise SystemExit(f"{self.operation} over {name} is wrong at {len(self.given)} elements")


def _count(call: Callable[[], Any], group: Any, seconds: float) -> int:
    """Return how many calls take `seconds`: the same number on every rank."""
    import torch
    import torch.distributed as dist

    warm = _time(call, 5)
    count = torch.tensor([seconds / sorted(warm)[2]])
    dist.broadcast(count, 0, group=group)
    return max(_FEWEST_CALLS, int(count))


def _time(call: Callable[[], Any], times: int) -> list[float]:
    """Return the seconds of each call."""
    found = []
    for _ in range(times):
        start = perf_counter()
        call()
        found.append(perf_counter() - start)
    return found


def _typical(times: list[float], group: Any) -> dict[str, float]:
    """Return the slowest rank's median and 99th percentile, in microseconds."""
    import torch
    import torch.distributed as dist

    ordered = sorted(times)
    pair = torch.tensor(
        [ordered[len(ordered) // 2], ordered[len(ordered) * 99 // 100]], dtype=torch.float64
    ).mul_(1e6)
    dist.all_reduce(pair, dist.ReduceOp.MAX, group)
    return {"median_us": float(pair[0]), "p99_us": float(pair[1]), "calls": len(ordered)}


def page(report: dict[str, Any]) -> list[str]:
    """Return the report as Markdown."""
    sides = [name for name in TITLES if f"{name} sync" in report["results"][0]]
    others = sides[1:]
    titles = [f"{TITLES[name]}, us (p99)" for name in sides] + [
        f"{TITLES[name]} / fastcoll" for name in others
    ]
    lines = [
        f"{report['operation']}, {report['dtype']}, {report['ranks']} ranks, through torch.distributed (torch "
        f"{report['machine']['torch']})",
        "",
        f"{describe(report['machine'])}; pinned to cores {', '.join(map(str, report['cores']))} in turn; "
        f"`{report['command']}`",
        "",
        f"| bytes | mode | {' | '.join(titles)} |",
        f"|--:|---|{'--:|' * len(titles)}",
    ]
    for row in report["results"]:
        for mode in MODES:
            found = [row.get(f"{name} {mode}") for name in sides]
            cells = [f"{side['median_us']:.4g} ({side['p99_us']:.4g})" if side else "" for side in found]
            ours = row[f"fastcoll {mode}"]["median_us"]
            cells += [f"{side['median_us'] / ours:.2f}" if side else "" for side in found[1:]]
            lines.append(f"| {format_size(row['size'])} | {mode} | {' | '.join(cells)} |")
    return [*lines, "", *markdown(missed(report))]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--operation", default="all_reduce", choices=OPERATIONS)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--sizes", default=SIZES, help=f"in bytes, or with K or M; default {SIZES}")
    parser.add_argument(
        "--seconds", type=float, default=0.5, help="of timing, for each backend, mode and size"
    )
    parser.add_argument("--dtype", default="float32", choices=["float32", "float16", "bfloat16"])
    parser.add_argument(
        "--deepspeed", action="store_true", help="also time DeepSpeed's kernel in shared memory"
    )
    parser.add_argument("--json", type=Path, help="file for the report")
    return parser


if __name__ == "__main__":
    sys.exit(main())
