"""Backends side by side on several hosts of one machine: `auto` against `tcp`, by default.

    python bench/between_hosts.py                            # 2 hosts, 2 ranks on each, all_reduce
    python bench/between_hosts.py all_gather --hosts 4 --sizes 1M,16M --results bench/results --name hosts

The hosts are network namespaces joined by veth pairs and a bridge (tests/hosts/network.py), each with its own
/dev/shm and its share of the cores. Needs root and iproute2. Every round runs `python -m fastcoll.bench` once with each
backend, under a launcher on every host; every second round takes the backends in reverse order. In a round, a time is
the slowest rank's median over batches of calls; the tables have the median over the rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import shlex
import sys
import tempfile
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from hosts.network import Network, lacking
from hosts.nodes import finish, launched, output_of

from fastcoll.bench.cases import format_size
from fastcoll.bench.results import describe

_ROUND_SECONDS = 300.0


def main() -> int:
    options = _parser().parse_args()
    if reason := lacking():
        print(reason, file=sys.stderr)
        return 2
    backends: list[str] = options.backends.split(",")
    found: dict[str, list[dict[str, Any]]] = {backend: [] for backend in backends}
    with Network(options.hosts) as network:
        for number in range(options.rounds):
            for backend in backends if number % 2 == 0 else backends[::-1]:
                print(f"# round {number + 1} of {options.rounds}: {backend}", file=sys.stderr, flush=True)
                found[backend].append(measure(network, backend, options))
    lines = page(found, options)
    print("\n".join(lines))
    if options.results:
        options.results.mkdir(parents=True, exist_ok=True)
        path = options.results / f"{date.today()}-{options.name}.md"
        path.write_text("\n".join(lines) + "\n")
    return 0


def measure(network: Network, backend: str, options: argparse.Namespace) -> dict[str, Any]:
    """Run the benchmark once over all hosts, and return its JSON."""
    with tempfile.TemporaryDirectory(prefix="fastcoll-hosts-") as folder:
        report = Path(folder, "run.json")
        words = ["-m", "fastcoll.bench", *options.operations, "--backend", backend, "--sizes", options.sizes]
        words += ["--seconds", str(options.seconds), "--json", str(report)]
        # The ranks of a host inherit the cores of its launcher.
        run_on = [["taskset", "--cpu-list", cores] for cores in shares(len(network.hosts))]
        secret = {"FASTCOLL_SECRET": secrets.token_hex(32)}
        with launched(network, options.ranks, words, secret, run_on=run_on) as nodes:
            finish(nodes, _ROUND_SECONDS)
            if any(node.code for node in nodes):
                raise SystemExit(output_of(nodes))
        return dict(json.loads(report.read_text()))


def shares(hosts: int) -> list[str]:
    """Return each host's cores for taskset; with fewer cores than hosts, some hosts share one."""
    cores = sorted(os.sched_getaffinity(0))
    return [",".join(map(str, cores[host::hosts] or [cores[host % len(cores)]])) for host in range(hosts)]


def page(found: dict[str, list[dict[str, Any]]], options: argparse.Namespace) -> list[str]:
    """Return the page: the machine and the tables."""
    backends = list(found)
    run = found[backends[0]][0]
    facts = {**run["machine"], "usable_cores": len(os.sched_getaffinity(0))}
    cores = "; ".join(f"host{host} on cores {share}" for host, share in enumerate(shares(options.hosts)))
    lines = [
        f"# {' and '.join(backends)} on {options.hosts} hosts, {options.ranks} ranks on each",
        "",
        f"- Machine: {describe(facts)}; fastcoll {facts['fastcoll']}",
        f"- Hosts: network namespaces joined by veth pairs and a bridge, each with its own /dev/shm; {cores}",
        f"- Method: median of {options.rounds} rounds, the backends in turn, in every second round in reverse order; "
        "in a round the slowest rank's median over batches of calls, results verified",
        f"- Command: `{shlex.join(['python', 'bench/between_hosts.py', *sys.argv[1:]])}`",
    ]
    for operation in dict.fromkeys(row["operation"] for row in run["results"]):
        lines += ["", f"## {operation}, float32", "", *table(found, operation)]
    return lines


def table(found: dict[str, list[dict[str, Any]]], operation: str) -> list[str]:
    """Return the table of an operation: times by size, and their ratios to the first backend's."""
    first, *others = found
    titles = [
        "size",
        *(f"{backend} (µs)" for backend in found),
        *(f"{backend} / {first}" for backend in others),
    ]
    rows = [f"| {' | '.join(titles)} |", "|--:" * len(titles) + "|"]
    times = {backend: typical(runs, operation) for backend, runs in found.items()}
    for size in times[first]:
        cells = [format_size(size), *(f"{times[backend][size]:.1f}" for backend in found)]
        cells += [f"{times[backend][size] / times[first][size]:.2f}" for backend in others]
        rows.append(f"| {' | '.join(cells)} |")
    return rows


def typical(runs: Sequence[dict[str, Any]], operation: str) -> dict[int, float]:
    """Return microseconds per call by size, the median over the rounds."""
    seen: dict[int, list[float]] = {}
    for run in runs:
        for row in run["results"]:
            if row["operation"] == operation:
                seen.setdefault(row["size"], []).append(row["time_us"])
    return {size: median(values) for size, values in seen.items()}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Time backends on several hosts of this machine.")
    parser.add_argument("operations", nargs="*", default=["all_reduce"], help="default: all_reduce")
    parser.add_argument("--hosts", type=int, default=2, help="default: 2")
    parser.add_argument("-n", "--ranks", type=int, default=2, help="on each host (default: 2)")
    parser.add_argument("--backends", default="auto,tcp", help="a,b (default: auto,tcp)")
    parser.add_argument("--sizes", default="8,64K,1M,16M", help="default: 8,64K,1M,16M")
    parser.add_argument("--rounds", type=int, default=5, help="runs of each backend (default: 5)")
    parser.add_argument("--seconds", type=float, default=0.5, help="for each size in a round (default: 0.5)")
    parser.add_argument("--results", type=Path, metavar="FOLDER", help="write the tables there as a page")
    parser.add_argument("--name", default="between-hosts", help="the page's name")
    return parser


if __name__ == "__main__":
    sys.exit(main())
