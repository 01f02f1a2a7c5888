"""DistributedDataParallel or FSDP2 on fastcoll beside Gloo: the time of a training step, and its communication.

    python bench/torch_ddp.py                                   # 2 and 4 ranks, an MLP and a transformer
    python bench/torch_ddp.py --fsdp2                           # the same with each layer's parameters sharded
    python bench/torch_ddp.py --ranks 2 --cases mlp:64 --json run.json
    python bench/torch_ddp.py --results bench/results           # also write the page, and its picture

A model on each backend is trained in turn in the same processes, a block of steps each, from the same weights on the
same data, with one torch thread per rank, pinned to the usable cores in turn (see versus/pinning.py). A time is the
slowest rank's median step. A third model, in the same turns, does everything except communicate; the difference between
its step and that of a backend is the backend's communication time. Beside FSDP2 it is the model itself, not sharded, so
the difference also has the time that FSDP2 takes to divide and to join the parameters.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from datetime import date
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

from versus.targets import markdown, missed

from fastcoll.bench.results import describe, machine

CASES = "mlp:32,mlp:64,mlp:256,transformer:1,transformer:2,transformer:8"
_TOLERANCE = 1e-5  # for losses, because Gloo adds the ranks' gradients in another order
# The aim for the step's time holds only if at least this share of a step on Gloo is communication.
_MATTERS = 0.3
# The name of each wrapper, and its side that does not communicate.
_WRAPPERS = {
    "ddp": ("DistributedDataParallel", "the same with a communication hook that does nothing"),
    "fsdp2": (
        "FSDP2",
        "the model itself, not sharded; the rest is communication, and FSDP2's own work around it",
    ),
}

Row = dict[str, Any]


def main() -> int:
    options = _parser().parse_args()
    rows = [summary(found) for ranks in options.ranks for found in measure(ranks, options)]
    report = {"kind": "ddp", "machine": _facts(), "command": _command(), "results": rows}
    lines = page(rows, options.wrapper)
    if found := missed(report):
        lines += ["", *markdown(found)]
    print("\n".join(lines))
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    if options.results:
        options.results.mkdir(parents=True, exist_ok=True)
        report = options.results / f"{date.today()}-torch-{options.wrapper}.md"
        picture = report.with_suffix(".png")
        draw(picture, rows)
        lines.insert(1, f"\n![A step's time]({picture.name})")
        report.write_text("\n".join(lines) + "\n")
    wrong = [row for row in rows if row["loss_difference"] > _TOLERANCE]
    for row in wrong:
        print(f"losses differ by {row['loss_difference']:.1e}: {row['operation']}", file=sys.stderr)
    return 1 if wrong else 0


def measure(ranks: int, options: argparse.Namespace) -> list[Row]:
    """Return the measurements of every rank, for each case."""
    worker = Path(__file__).with_name("torch_ddp_ranks.py")
    with tempfile.TemporaryDirectory(prefix="fastcoll-ddp-") as folder:
        path = Path(folder, "run.json")
        command = [sys.executable, "-m", "fastcoll.launch", "-n", str(ranks), str(worker), str(path)]
        done = subprocess.run([*command, options.wrapper, str(options.seconds), *options.cases.split(",")])
        if done.returncode:
            sys.exit(done.returncode)
        return list(json.loads(path.read_text()))


def summary(found: Row) -> Row:
    """Return milliseconds per step on each side, and figures derived from them."""
    ranks = found["ranks"]
    steps = {
        side: 1e3 * max(median(rank[side]["seconds"]) for rank in ranks)
        for side in ("gloo", "fastcoll", "alone")
    }
    share = {side: max(0.0, 1 - steps["alone"] / steps[side]) for side in ("gloo", "fastcoll")}
    speedup = steps["gloo"] / steps["fastcoll"]
    differences = [
        abs(one - other)
        for rank in ranks
        for one, other in zip(rank["gloo"]["losses"], rank["fastcoll"]["losses"], strict=True)
    ]
    return {
        "operation": f"{found['model']}, batch {found['batch']}, {len(ranks)} ranks",
        "size": 0,
        "model": found["model"],
        "batch": found["batch"],
        "parameters": found["parameters"],
        "ranks": len(ranks),
        "steps": len(ranks[0]["gloo"]["seconds"]),
        "step_ms": steps,
        "share": share,
        "speedup": speedup,
        "gloo_over_fastcoll": speedup if share["gloo"] >= _MATTERS else None,
        "loss_difference": max(differences),
    }


def page(rows: Sequence[Row], wrapper: str) -> list[str]:
    """Return the page: the machine and the table."""
    steps = [row["steps"] for row in rows]
    name, alone = _WRAPPERS[wrapper]
    lines = [
        f"# {name} on fastcoll and on Gloo",
        "",
        f"- Machine: {describe(_facts())}; torch {version('torch')}; fastcoll {version('fastcoll')}",
        f"- Ranks: one thread of torch each, pinned to cores {_cores()} in turn{_crowded(rows)}",
        "- Method: the sides in the same processes, in turn, 8 steps at a time, every second time in reverse "
        f"order; the slowest rank's median of {min(steps)} to {max(steps)} steps; {wrapper.upper()}'s defaults; SGD",
        f"- Computing: {alone}; communication: the share of the rest",
        f"- Losses: Gloo's and fastcoll's compared at every step; the largest difference is "
        f"{max(row['loss_difference'] for row in rows):.1e}",
        f"- Command: `{_command()}`",
        "",
        "| model | gradients (MB) | batch a rank | ranks | computing (ms) | Gloo (ms) | fastcoll (ms) "
        "| Gloo / fastcoll | communication, Gloo | communication, fastcoll |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    return lines + [_line(row) for row in rows]


def _line(row: Row) -> str:
    step, share = row["step_ms"], row["share"]
    cells = [row["model"], f"{row['parameters'] * 4e-6:.1f}", str(row["batch"]), str(row["ranks"])]
    cells += [f"{step[side]:.2f}" for side in ("alone", "gloo", "fastcoll")]
    cells += [f"{row['speedup']:.2f}", f"{share['gloo']:.0%}", f"{share['fastcoll']:.0%}"]
    return f"| {' | '.join(cells)} |"


def _crowded(rows: Sequence[Row]) -> str:
    cores = len(os.sched_getaffinity(0))
    most = max(row["ranks"] for row in rows)
    return f"; {most} ranks take turns on {cores} cores" if most > cores else ""


def _command() -> str:
    return shlex.join(["python", "bench/torch_ddp.py", *sys.argv[1:]])


def _cores() -> str:
    return ", ".join(map(str, sorted(os.sched_getaffinity(0))))


def _facts() -> dict[str, Any]:
    return machine(len(os.sched_getaffinity(0)))


def draw(path: Path, rows: Sequence[Row]) -> None:
    """Write the picture: for each case a bar per side.

    The grey part of a bar is the time of computing.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 0.62 * len(rows) + 1.2), layout="constrained")
    axes = figure.subplots()
    for offset, side, colour in ((-0.19, "gloo", "#D55E00"), (0.19, "fastcoll", "#0072B2")):
        steps = [row["step_ms"][side] for row in rows]
        whole = [step / row["step_ms"]["gloo"] for step, row in zip(steps, rows, strict=True)]
        computing = [length * (1 - row["share"][side]) for length, row in zip(whole, rows, strict=True)]
        places = [number + offset for number in range(len(rows))]
        axes.barh(places, whole, 0.36, color=colour, label=side)
        axes.barh(places, computing, 0.36, color="#BBBBBB", label="computing" if side == "fastcoll" else None)
        for place, length, step in zip(places, whole, steps, strict=True):
            axes.text(length + 0.01, place, f"{step:.1f} ms", va="center", fontsize=7)
    axes.set_yticks(range(len(rows)), [row["operation"] for row in rows])
    axes.invert_yaxis()
    axes.set_xlabel("time of a step / Gloo's")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8, ncols=3, loc="lower center", bbox_to_anchor=(0.5, 1.0))
    figure.savefig(path, dpi=150)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Time DistributedDataParallel or FSDP2 on fastcoll and on Gloo."
    )
    parser.add_argument(
        "--fsdp2", dest="wrapper", action="store_const", const="fsdp2", default="ddp",
        help="shard each layer instead (fully_shard)",
    )  # fmt: skip
    parser.add_argument(
        "--ranks", type=lambda text: [int(n) for n in text.split(",")], default=[2, 4], help="default: 2,4"
    )
    parser.add_argument(
        "--cases", default=CASES, help=f"MODEL:BATCH,...; models are mlp and transformer (default: {CASES})"
    )
    parser.add_argument("--seconds", type=float, default=2.0, help="for each case (default: 2)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows there")
    parser.add_argument(
        "--results", type=Path, metavar="FOLDER", help="also write the page and its picture there"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
