"""How a job's start through the store grows with its ranks: measured with a crowd of clients, simulated beyond.

    python bench/startup_scale.py --clients 1000 --model 10000 --plot

measures starts of some smaller jobs, takes from them what a message and a rank cost, predicts by simulation
how long the start of `--clients` ranks takes on this machine, measures it, and simulates jobs of up to
`--model` ranks on a cluster. `--results DIR` writes the table as Markdown, `--plot` the picture beside it.
"""

from __future__ import annotations

import argparse
import os
import resource
import shlex
import sys
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from statistics import median

from startup_crowd import RANKS_PER_NODE, Tally, measure, measure_byte
from startup_model import BACKLOG, CLUSTER, Costs, Machine, Outcome, Sample, Simulation, fit
from startup_plot import draw

from fastcoll.bench.results import describe, machine

# One way over loopback, and its bytes a second: neither matters next to the work of a machine's few cores.
_LOOPBACK = Machine(len(os.sched_getaffinity(0)), latency=10e-6, bandwidth=5e9)
_SHARES = (0.1, 0.2, 0.4)
_MODEL_SIZES = (10, 30, 100, 300, 1000, 2000, 4000, 10_000, 30_000)


def main() -> int:
    options = _options()
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    sizes = [max(3, round(options.clients * share)) for share in _SHARES] + [options.clients]
    measured = {size: _typical([measure(size) for _ in range(options.rounds)]) for size in sizes}
    costs = fit([_sample(measured[size]) for size in sizes[:-1]], measure_byte())
    here = {size: Simulation(size, costs, _LOOPBACK).run() for size in sizes}
    far = {size: Simulation(size, costs).run() for size in _MODEL_SIZES if size < options.model}
    far[options.model] = Simulation(options.model, costs).run()
    lines = [*_header(options.rounds), *_measured(measured, here), *_costs(costs), *_simulated(far)]
    print("\n".join(lines))
    if options.results is not None:
        options.results.mkdir(parents=True, exist_ok=True)
        report = options.results / f"{date.today()}-startup-scale.md"
        picture = report.with_suffix(".png")
        if options.plot:
            lines.insert(1, f"\n![Start-up over ranks]({picture.name})")
            draw(picture, measured, here, far)
        report.write_text("\n".join(lines) + "\n")
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--clients", type=int, default=1000, help="ranks of the largest measured job")
    parser.add_argument("--model", type=int, default=10_000, help="ranks of the largest simulated job")
    parser.add_argument(
        "--rounds", type=int, default=3, help="starts measured of each size; the median counts"
    )
    parser.add_argument("--results", type=Path, help="folder for the report")
    parser.add_argument(
        "--plot", action="store_true", help="a picture, too (in bench/results without --results)"
    )
    options = parser.parse_args()
    if options.clients < 30:
        parser.error("--clients is the largest of four sizes: 30 or more")
    if options.plot and options.results is None:
        options.results = Path(__file__).parent / "results"
    return options


def _typical(rounds: Sequence[Tally]) -> Tally:
    """The round whose last rank had its group after the median time."""
    middle = median(max(tally.joined) for tally in rounds)
    return min(rounds, key=lambda tally: abs(max(tally.joined) - middle))


def _sample(tally: Tally) -> Sample:
    return Sample(
        ranks=len(tally.joined),
        messages=tally.messages.total(),
        sent=tally.sent,
        received=tally.received,
        server_cpu=tally.facts["server_cpu"],
        client_cpu=tally.facts["client_cpu"],
    )


def _header(rounds: int) -> list[str]:
    command = shlex.join(["python", os.path.relpath(sys.argv[0]), *sys.argv[1:]])
    facts = machine(len(os.sched_getaffinity(0)))
    return [
        "# Start-up through the store",
        "",
        f"- Machine: {describe(facts)}, fastcoll {facts['fastcoll']}",
        f"- Command: `{command}`",
        "- Measured: clients as threads of four processes over loopback, all starting at one time, against rank 0",
        f"  in a process of its own; identities of {RANKS_PER_NODE} ranks a node; the median of {rounds} starts. The",
        "  time is that of the last rank's default group (backend tcp, without dialing), with this machine's cores",
        "  working for all ranks.",
        "- Predicted: simulated with what the smaller jobs cost; the largest job is not used for that.",
        "",
    ]


def _measured(measured: dict[int, Tally], here: dict[int, Outcome]) -> list[str]:
    lines = [
        "## Measured on this machine",
        "",
        "| ranks | messages | a rank | MB to the server | MB from it | server CPU (s) | clients CPU (s) | start (s) | "
        "predicted (s) | off | leave (s) | server memory (MB) | descriptors | turned away |",
        "|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for size, tally in measured.items():
        facts, seconds, predicted = tally.facts, max(tally.joined), here[size].seconds
        lines.append(
            f"| {size} | {tally.messages.total()} | {tally.messages.total() / size:.1f} | {tally.sent / 1e6:.2f} | "
            f"{tally.received / 1e6:.2f} | {facts['server_cpu']:.3f} | {facts['client_cpu']:.2f} | {seconds:.3f} | "
            f"{predicted:.3f} | {100 * (predicted / seconds - 1):+.0f} % | {facts['leave']:.3f} | "
            f"{facts['server_bytes'] / 1e6:.0f} | {facts['server_descriptors']:.0f} | {facts['turned_away']:.0f} |"
        )
    return [*lines, ""]


def _costs(costs: Costs) -> list[str]:
    return [
        "## What it costs",
        "",
        f"- server: {costs.server_message * 1e6:.1f} µs a message, {costs.server_byte * 1e9:.2f} ns a byte of lists",
        f"- a rank: {costs.client_rank * 1e3:.2f} ms of CPU, and {costs.client_record * 1e6:.2f} µs for each rank",
        f"  in lists; {costs.rank_sent:.0f} bytes sent, {costs.rank_received:.0f} received, and {costs.record:.1f} for",
        "  each rank in lists",
        "",
    ]


def _simulated(far: dict[int, Outcome]) -> list[str]:
    lines = [
        "## Simulated on a cluster",
        "",
        f"Each rank has a core; {CLUSTER.latency * 1e6:.0f} µs one way, {CLUSTER.bandwidth * 8e-9:.0f} Gbit/s at the",
        f"server. All ranks start at one time, so those beyond the {BACKLOG:,} that may wait for a connection try",
        "again after 1, 2 ... s. Looks are those of ranks that have waited for a while.",
        "",
        "| ranks | messages | a rank | looks | MB from the server | server busy (s) | tried again | start (s) |",
        "|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for size, outcome in far.items():
        total = outcome.messages.total()
        lines.append(
            f"| {size} | {total} | {total / size:.1f} | {outcome.messages['PEEK']} | {outcome.received / 1e6:.1f} | "
            f"{outcome.server_busy:.3f} | {outcome.retried} | {outcome.seconds:.3f} |"
        )
    return lines


if __name__ == "__main__":
    sys.exit(main())
