"""Tensor-parallel inference on CPUs: milliseconds a token on Gloo, on fastcoll, and with DeepSpeed's own kernel.

    python bench/inference.py                                  # 2 ranks; needs torch, transformers and deepspeed
    python bench/inference.py --clients transformers --rounds 5 --results bench/results

Each side is a program of its own under torchrun (inference_ranks.py), with one thread of torch per rank. All sides load
the same model and read the same text, and must find the same most likely tokens. They run in turn, in every round; a
time is the median of a round's tokens. Nothing but FASTCOLL_TORCH_DEFAULT tells Gloo's programs from fastcoll's.
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

from fastcoll.bench.results import describe, machine

RANKS = Path(__file__).with_name("inference_ranks.py")
# The programs of each client: the program's name in inference_ranks.py, and the value of FASTCOLL_TORCH_DEFAULT.
SIDES = {
    "transformers": {"Gloo": ("transformers", ""), "fastcoll": ("transformers", "gloo")},
    "deepspeed": {
        "Gloo": ("deepspeed", ""),
        "fastcoll": ("deepspeed", "gloo"),
        "DeepSpeed's kernel": ("deepspeed-kernel", ""),
    },
}
TITLES = {"transformers": 'transformers, `tp_plan="auto"`', "deepspeed": "DeepSpeed, AutoTP"}

Runs = dict[tuple[str, str], list[dict[str, Any]]]


def main() -> None:
    options = _parser().parse_args()
    with tempfile.TemporaryDirectory(prefix="fastcoll-inference-") as folder:
        runs = measure(options, Path(folder))
    for client in options.clients:
        tokens = {str(run["tokens"]) for (of, _), each in runs.items() if of == client for run in each}
        if len(tokens) > 1:
            sys.exit(f"{client}: tokens differ between the sides")
    lines = page(options, runs)
    print("\n".join(lines))
    if options.results:
        report = options.results / f"{date.today()}-inference.md"
        report.write_text("\n".join(lines) + "\n")


def measure(options: argparse.Namespace, folder: Path) -> Runs:
    """Return the results of every run, by client and side."""
    model, results = folder / "model", folder / "results.json"
    _run([sys.executable, str(RANKS), "make", str(model), "0", str(results)], "")
    runs: Runs = {}
    for number in range(options.rounds):
        for client in options.clients:
            sides = list(SIDES[client].items())
            for side, (program, default) in sides if number % 2 == 0 else reversed(sides):
                torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
                ranks = ["--nproc-per-node", str(options.ranks), str(RANKS)]
                _run([*torchrun, *ranks, program, str(model), str(options.tokens), str(results)], default)
                runs.setdefault((client, side), []).append(json.loads(results.read_text()))
    return runs


def _run(command: Sequence[str], default: str) -> None:
    settings = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "FASTCOLL_TORCH_DEFAULT": default}
    done = subprocess.run(
        command, env={**os.environ, **settings}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if done.returncode:
        sys.exit(f"{shlex.join(command)}\n{done.stdout}\nexit code {done.returncode}")


def page(options: argparse.Namespace, runs: Runs) -> list[str]:
    """Return the page: the machine, and a table with each round's time."""
    cores = len(os.sched_getaffinity(0))
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "fastcoll", *options.clients))
    shape = next(iter(runs.values()))[0]["shape"]
    rounds = range(1, options.rounds + 1)
    lines = [
        f"# Tensor-parallel inference on CPUs, {date.today():%d %B %Y}",
        "",
        f"`{shlex.join(['python', 'bench/inference.py', *sys.argv[1:]])}`: {options.ranks} ranks, one thread each,",
        f"not pinned; {options.tokens} tokens after a prompt, one at a time. Times are milliseconds a token, the",
        "median of a round; all sides found the same tokens.",
        "",
        f"- Machine: {describe(machine(cores))}",
        f"- {versions}",
        f"- Model: Llama, bfloat16, random weights, {shape}",
        "",
        f"| client | all_reduce by | {' | '.join(f'round {number}' for number in rounds)} | best | Gloo / this |",
        f"|---|---|{'--:|' * (options.rounds + 2)}",
    ]
    for (client, side), each in runs.items():
        times = [1e3 * median(run["seconds"]) for run in each]
        gloo = min(1e3 * median(run["seconds"]) for run in runs[client, "Gloo"])
        cells = [f"{time:.1f}" for time in (*times, min(times))]
        lines.append(f"| {TITLES[client]} | {side} | {' | '.join(cells)} | {gloo / min(times):.2f} |")
    return lines


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Time tensor-parallel inference on Gloo and on fastcoll.")
    parser.add_argument(
        "--clients",
        type=lambda text: text.split(","),
        default=list(SIDES),
        help=f"default: {','.join(SIDES)}",
    )
    parser.add_argument("--ranks", type=int, default=2, help="default: 2")
    parser.add_argument("--rounds", type=int, default=3, help="default: 3")
    parser.add_argument("--tokens", type=int, default=64, help="in each round (default: 64)")
    parser.add_argument("--results", type=Path, metavar="FOLDER", help="also write the page there")
    return parser


if __name__ == "__main__":
    main()
