"""torch.distributed.all_reduce over fastcoll and over Gloo, in turn in one run.

    python bench/torch_backend.py
    python bench/torch_backend.py --ranks 4 --sizes 8,1M --json out.json

Each backend has a group of the same processes, whose ranks are pinned to the usable cores in turn (see
versus/pinning.py). For each size the backends run in turn, in reverse order every second time; before the timing, every
call is made once and its result checked. Times are those of single calls on float32 tensors: "sync" with
async_op=False, "async" with async_op=True and wait. A column has the slowest rank's median (p99: its 99th percentile).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from time import perf_counter
from typing import Any

from versus.pinning import pin, place_threads
from versus.targets import markdown, missed

from fastcoll import spawn
from fastcoll.bench.cases import format_size, parse_size
from fastcoll.bench.results import describe, machine

BACKENDS = ("fastcoll", "gloo")
MODES = ("sync", "async")
SIZES = "8,1K,64K,1M,64M"
TURNS = 6
_FEWEST_CALLS = 25  # per turn


def main() -> int:
    options = _parser().parse_args()
    sizes = [parse_size(size) for size in options.sizes.split(",")]
    with tempfile.TemporaryDirectory() as folder:
        spawn(rank_main, (options.ranks, sizes, options.seconds, folder), nprocs=options.ranks)
        report = json.loads(Path(folder, "report.json").read_text())
    print("\n".join(page(report)))
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0


def rank_main(rank: int, ranks: int, sizes: list[int], seconds: float, folder: str) -> None:
    """Run one rank: measure every size; rank 0 writes the report."""
    import torch
    import torch.distributed as dist

    import fastcoll.torch  # noqa: F401 - registers the backend

    cores = sorted(os.sched_getaffinity(0))
    pin(cores, rank)
    torch.set_num_threads(1)
    store, limit = dist.FileStore(f"{folder}/store", ranks), timedelta(seconds=300)
    dist.init_process_group("fastcoll", store=store, rank=rank, world_size=ranks, timeout=limit)
    groups = {name: dist.new_group(backend=name, timeout=limit) for name in BACKENDS}
    rows = [measure(nbytes, groups, seconds, cores) for nbytes in sizes]
    if rank == 0:
        facts = {**machine(len(cores)), "torch": torch.__version__}
        about = {"kind": "torch", "machine": facts, "cores": cores, "ranks": ranks}
        report = {**about, "command": " ".join(["python", *sys.argv]), "results": rows}
        Path(folder, "report.json").write_text(json.dumps(report))
    dist.destroy_process_group()


def measure(nbytes: int, groups: dict[str, Any], seconds: float, cores: Sequence[int]) -> dict[str, Any]:
    """Return a row of the table: microseconds of every backend and mode at one size; collective.

    Args:
        seconds: how long each backend is timed.
        cores: the cores of the ranks.
    """
    import torch
    import torch.distributed as dist

    x = torch.empty(nbytes // 4)
    calls: dict[str, Callable[[], Any]] = {}
    for name, group in groups.items():
        check(x, group)
        calls[f"{name} sync"] = lambda group=group: dist.all_reduce(x, group=group)
        calls[f"{name} async"] = lambda group=group: dist.all_reduce(x, group=group, async_op=True).wait()
    x.zero_()  # sums of zeros stay 0
    place_threads(cores, dist.get_rank())  # both libraries have started their threads
    counts = {name: _count(call, groups["gloo"], seconds / TURNS) for name, call in calls.items()}
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(TURNS):
        for name in list(calls) if turn % 2 == 0 else list(calls)[::-1]:
            dist.barrier(groups["gloo"])
            _time(calls[name], max(1, counts[name] // 10))
            times[name] += _time(calls[name], counts[name])
    typical = {name: _typical(found, groups["gloo"]) for name, found in times.items()}
    ratio = typical["gloo sync"]["median_us"] / typical["fastcoll sync"]["median_us"]
    return {"operation": "all_reduce", "size": nbytes, "gloo_over_fastcoll": ratio, **typical}


def check(x: Any, group: Any) -> None:
    """Check the sum over the ranks; x has other values afterwards."""
    import torch
    import torch.distributed as dist

    for asynchronous in (False, True):
        torch.arange(len(x), out=x).remainder_(1000).add_(dist.get_rank())
        expected = x.sub(dist.get_rank()).mul_(dist.get_world_size()).add_(sum(range(dist.get_world_size())))
        work = dist.all_reduce(x, group=group, async_op=asynchronous)
        if work is not None:
            work.wait()
        if not torch.equal(x, expected):
            raise SystemExit(f"all_reduce over {dist.get_backend(group)} is wrong at {len(x)} elements")


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
    lines = [
        f"all_reduce, float32, {report['ranks']} ranks, through torch.distributed (torch {report['machine']['torch']})",
        "",
        f"{describe(report['machine'])}; pinned to cores {', '.join(map(str, report['cores']))} in turn; "
        f"`{report['command']}`",
        "",
        "| bytes | mode | fastcoll, us (p99) | Gloo, us (p99) | Gloo / fastcoll |",
        "|--:|---|--:|--:|--:|",
    ]
    for row in report["results"]:
        for mode in MODES:
            ours, gloo = (row[f"{name} {mode}"] for name in BACKENDS)
            cells = [f"{side['median_us']:.4g} ({side['p99_us']:.4g})" for side in (ours, gloo)]
            ratio = gloo["median_us"] / ours["median_us"]
            lines.append(f"| {format_size(row['size'])} | {mode} | {cells[0]} | {cells[1]} | {ratio:.1f} |")
    return [*lines, "", *markdown(missed(report))]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--sizes", default=SIZES, help=f"in bytes, or with K or M; default {SIZES}")
    parser.add_argument(
        "--seconds", type=float, default=0.5, help="of timing, for each backend, mode and size"
    )
    parser.add_argument("--json", type=Path, help="file for the report")
    return parser


if __name__ == "__main__":
    sys.exit(main())
