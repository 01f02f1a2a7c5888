"""How well the cost model predicts measured times, and what it says of clusters that cannot be had.

    python bench/cost_model.py                                      # measure, fit, tell
    python bench/cost_model.py --times a.json b.json --plot model   # with times that `fastcoll.bench --json` wrote
    python bench/cost_model.py --results bench/results --name cost-model --bandwidth 12.5e9 --per-node 8

Measures on this machine over loopback, with 1 to 4 ranks: what a call takes in Python, a step, a message, a byte. The
model is fitted to all times, and once more to every other size only, to predict the sizes between. What no machine
here can tell, the network's latency and bandwidth, are options.
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
from pathlib import Path
from statistics import median
from typing import Any

from network_model import (
    Accuracy,
    Cluster,
    Model,
    Sample,
    accuracy,
    by_nodes,
    fit,
    flat,
    header_seconds,
    shape_of,
)

from fastcoll.bench.cases import format_size
from fastcoll.bench.results import describe
from fastcoll.net.tcp.plans.choose import ALGORITHMS, chosen
from fastcoll.net.tcp.plans.shape import MEET_RANKS

OPERATIONS = (
    "all_reduce",
    "reduce",
    "reduce_scatter",
    "broadcast",
    "all_gather",
    "gather",
    "scatter",
    "all_to_all",
)
SIZES = "12,3K,12K,48K,192K,768K,3M,12M"  # divisible by 1 to 4 ranks of float32
NODES = [2**k for k in range(1, 13)]
SHOWN = (8, 64 << 10, 1 << 20, 64 << 20)
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")


def main() -> int:
    options = parse()
    runs = [json.loads(path.read_text()) for path in options.times] or measure(options)
    samples = merged(runs)
    model = fit(samples)
    facts = max((run["machine"] for run in runs), key=lambda facts: facts["usable_cores"])
    lines = page(facts, samples, model, options)
    print("\n".join(lines))
    if options.results:
        options.results.mkdir(parents=True, exist_ok=True)
        base = options.results / f"{date.today()}-{options.name}"
        base.with_suffix(".md").write_text("\n".join(lines) + "\n")
        options.plot = options.plot or base
    if options.plot:
        draw(options.plot.with_suffix(".png"), samples, model, options)
    return 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Fit the cost model, and ask it.")
    add = parser.add_argument
    add("--times", type=Path, nargs="+", default=[], metavar="FILE", help="what fastcoll.bench --json wrote")
    add("--ranks", default="1,2,3,4", help="worlds to measure (default: 1,2,3,4)")
    add("--rounds", type=int, default=3, help="times to measure each; the median counts (default: 3)")
    add("--latency", type=float, default=15e-6, help="of the network, seconds a step (default: 15e-6)")
    add("--bandwidth", type=float, default=1.25e9, help="of a node, bytes a second (default: 1.25e9)")
    add("--per-node", type=int, default=8, help="ranks a node, where nodes have several (default: 8)")
    add("--results", type=Path, metavar="FOLDER", help="write the page and the picture there")
    add("--name", default="cost-model", help="of the page (default: cost-model)")
    add("--plot", type=Path, metavar="FILE", help="draw it")
    return parser.parse_args()


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Runs of the benchmark, one after the other."""
    worlds = [int(ranks) for ranks in options.ranks.split(",")] * options.rounds
    return [measure_once(ranks) for ranks in worlds]


def measure_once(ranks: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="fastcoll-model-") as folder:
        path = Path(folder) / "times.json"
        words = [*bench_words(str(ranks)), "--json", str(path)]
        print("# python", *words, file=sys.stderr, flush=True)
        subprocess.run([sys.executable, *words], stdout=subprocess.DEVNULL, check=True)
        found: dict[str, Any] = json.loads(path.read_text())
        return found


def bench_words(ranks: str) -> list[str]:
    """One run of the benchmark, as Python takes it."""
    words = ["-m", "fastcoll.bench", *OPERATIONS, "--backend", "tcp", "-n", ranks, "--pin", "--check", "0"]
    return [*words, "--sizes", SIZES, "--seconds", "0.05"]


def merged(runs: Sequence[dict[str, Any]]) -> list[Sample]:
    """The median over the runs of each call; all runs are of one machine."""
    found: dict[tuple[str, int, int, int], list[float]] = {}
    for run in runs:
        cores = len({core for device in run["devices"] for core in device["cores"]})
        ranks = len(run["devices"])
        for row in run["results"]:
            key = (row["operation"], ranks, row["size"], min(cores, ranks))
            found.setdefault(key, []).append(row["time_us"] / 1e6)
    return [Sample(*key[:3], median(times), key[3]) for key, times in sorted(found.items())]


def held_out(samples: Sequence[Sample]) -> Accuracy:
    """How well times are predicted that the model has not seen: every other size of each operation."""
    sizes = sorted({sample.nbytes for sample in samples})
    known = [sample for sample in samples if sizes.index(sample.nbytes) % 2 == 0]
    return accuracy(fit(known), [sample for sample in samples if sample not in known])


def page(
    facts: dict[str, Any], samples: Sequence[Sample], model: Model, options: argparse.Namespace
) -> list[str]:
    """What there is to tell, as Markdown."""
    words = [Path(word).name if Path(word).is_file() else word for word in sys.argv[1:]]
    worlds = ", ".join(str(ranks) for ranks in sorted({sample.ranks for sample in samples}))
    return [
        "# The cost model",
        "",
        f"- Machine: {describe(facts)}",
        f"- Times: {len(samples)} calls over loopback, each the median of its runs, with N = {worlds}: "
        f"`{shlex.join(['python', *bench_words('N')])}`",
        f"- Command: `{shlex.join(['python', 'bench/cost_model.py', *words])}`",
        "",
        *prices_table(model),
        "",
        *accuracy_table(samples, model),
        "",
        f"## all_reduce on nodes with one rank each: {network(options)}",
        "",
        "Microseconds; in bold what the library chooses. What the headers of the meeting add is in the last column.",
        "",
        *choice_table(model, options),
        "",
        f"## all_reduce on nodes with {options.per_node} ranks each",
        "",
        "Microseconds: all ranks alike (flat), and through shared memory in each node (by nodes); headers as above.",
        "",
        *hierarchy_table(model, options),
    ]


def prices_table(model: Model) -> list[str]:
    rows = [f"| {name} | {value * 1e9:.4g} |" for name, value in model.prices.items()]
    calls = ", ".join(f"{name} {seconds * 1e6:.1f}" for name, seconds in model.calls.items())
    return ["| price | ns |", "|---|--:|", *rows, "", f"A call besides, µs: {calls}."]


def accuracy_table(samples: Sequence[Sample], model: Model) -> list[str]:
    rows = {"all times": accuracy(model, samples), "sizes not fitted to": held_out(samples)}
    for ranks in sorted({sample.ranks for sample in samples}):
        some = [sample for sample in samples if sample.ranks == ranks]
        rows[f"{ranks_text(ranks)} on {some[0].cores or ranks} cores"] = accuracy(model, some)
    lines = ["| predicted against measured | median off | worst | within 25 % |", "|---|--:|--:|--:|"]
    return lines + [
        f"| {name} | {a.median:.0%} | {a.worst:.0%} | {a.within:.0%} |" for name, a in rows.items()
    ]


def algorithms(ranks: int) -> list[str]:
    return [name for name in ALGORITHMS["all_reduce"] if ranks <= 4 * MEET_RANKS or name != "direct"]


def choice_table(model: Model, options: argparse.Namespace) -> list[str]:
    names = list(ALGORITHMS["all_reduce"])
    lines = [f"| size | nodes | {' | '.join(names)} | headers |", "|" + "--:|" * (len(names) + 3)]
    for nbytes in SHOWN:
        for nodes in NODES[1::2]:
            cluster = cluster_of(options, nodes)
            best = chosen(shape_of("all_reduce", nodes, nbytes))
            cells = [
                cell(flat(model, cluster, name, "all_reduce", nbytes), name == best)
                if name in algorithms(nodes)
                else ""
                for name in names
            ]
            if best == "attached":
                cells[0] = cell(flat(model, cluster, "attached", "all_reduce", nbytes), True) + " attached"
            headers = cell(header_seconds(model, cluster), False)
            lines.append(f"| {format_size(nbytes)} | {nodes} | {' | '.join(cells)} | {headers} |")
    return lines


def cell(seconds: float, best: bool) -> str:
    text = f"{seconds * 1e6:,.0f}"
    return f"**{text}**" if best else text


def cluster_of(options: argparse.Namespace, nodes: int, per_node: int = 1) -> Cluster:
    return Cluster(nodes, per_node, options.latency, options.bandwidth)


def hierarchy_table(model: Model, options: argparse.Namespace) -> list[str]:
    lines = ["| size | nodes | flat | its algorithm | by nodes | headers |", "|--:|--:|--:|---|--:|--:|"]
    for nbytes in SHOWN:
        for nodes in NODES[1::2]:
            cluster = cluster_of(options, nodes, options.per_node)
            best = chosen(shape_of("all_reduce", cluster.ranks, nbytes))
            times = [flat(model, cluster, best, "all_reduce", nbytes), by_nodes(model, cluster, nbytes)]
            cells = [cell(times[0], False), best, cell(times[1], times[1] < times[0])]
            cells.append(cell(header_seconds(model, cluster), False))
            lines.append(f"| {format_size(nbytes)} | {nodes} | {' | '.join(cells)} |")
    return lines


def draw(path: Path, samples: Sequence[Sample], model: Model, options: argparse.Namespace) -> None:
    """Predicted against measured times, and all_reduce over nodes with one rank each and with several."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 10), layout="constrained")
    panels = figure.subplots(2, 2)
    draw_accuracy(panels[0, 0], samples, model)
    draw_choice(panels[0, 1], model, 64 << 10, options)
    draw_choice(panels[1, 0], model, 64 << 20, options)
    draw_hierarchy(panels[1, 1], model, options)
    figure.savefig(path, dpi=130)


def draw_accuracy(panel: Any, samples: Sequence[Sample], model: Model) -> None:
    for colour, ranks in zip(COLOURS, sorted({sample.ranks for sample in samples}), strict=False):
        some = [sample for sample in samples if sample.ranks == ranks]
        measured = [sample.seconds * 1e6 for sample in some]
        panel.plot(
            measured, [model.seconds(s) * 1e6 for s in some], ".", color=colour, label=ranks_text(ranks)
        )
    ends = [min(s.seconds for s in samples) * 1e6, max(s.seconds for s in samples) * 1e6]
    panel.plot(ends, ends, color="grey", lw=1)
    panel.fill_between(ends, [0.75 * x for x in ends], [1.25 * x for x in ends], color="grey", alpha=0.2)
    panel.set(xscale="log", yscale="log", xlabel="measured (µs)", ylabel="predicted (µs)")
    panel.set_title("Calls over loopback; the band is ± 25 %", fontsize=10)
    panel.legend(frameon=False)


def draw_choice(panel: Any, model: Model, nbytes: int, options: argparse.Namespace) -> None:
    for colour, name in zip(COLOURS, ALGORITHMS["all_reduce"], strict=False):
        nodes = [count for count in NODES if name in algorithms(count)]
        times = [flat(model, cluster_of(options, count), name, "all_reduce", nbytes) * 1e6 for count in nodes]
        style = "--" if name == "circulant" else "-"  # which lies upon halving
        panel.plot(nodes, times, style, color=colour, label=name, lw=1.5)
    best = [chosen(shape_of("all_reduce", count, nbytes)) for count in NODES]
    times = [
        flat(model, cluster_of(options, count), name, "all_reduce", nbytes) * 1e6
        for count, name in zip(NODES, best, strict=True)
    ]
    panel.plot(NODES, times, "o", color="black", mfc="none", label="chosen", ms=8)
    headers = [header_seconds(model, cluster_of(options, count)) * 1e6 for count in NODES]
    panel.plot(NODES, headers, ":", color="grey", label="headers, besides")
    finish(panel, f"all_reduce of {format_size(nbytes)}, {network(options)}, one rank a node")


def draw_hierarchy(panel: Any, model: Model, options: argparse.Namespace) -> None:
    clusters = [cluster_of(options, count, options.per_node) for count in NODES]
    for colour, nbytes in zip(COLOURS, (8, 64 << 10, 1 << 20, 64 << 20), strict=False):
        alike = [
            flat(model, c, chosen(shape_of("all_reduce", c.ranks, nbytes)), "all_reduce", nbytes)
            for c in clusters
        ]
        through = [by_nodes(model, cluster, nbytes) for cluster in clusters]
        size = format_size(nbytes)
        panel.plot(NODES, [1e6 * t for t in alike], "--", color=colour, label=f"{size}, all ranks alike")
        panel.plot(NODES, [1e6 * t for t in through], color=colour, label=f"{size}, by nodes")
    finish(panel, f"all_reduce, {network(options)}, {ranks_text(options.per_node)} a node")


def finish(panel: Any, title: str) -> None:
    panel.set(yscale="log", xlabel="nodes", ylabel="predicted (µs)")
    panel.set_xscale("log", base=2)
    panel.set_title(title, fontsize=10)
    panel.legend(frameon=False, fontsize=8, ncols=2)


def network(options: argparse.Namespace) -> str:
    return f"{options.bandwidth / 1e9:g} GB/s and {options.latency * 1e6:g} µs"


def ranks_text(ranks: int) -> str:
    return f"{ranks} rank" + "s" * (ranks != 1)


if __name__ == "__main__":
    os.environ.setdefault("MPLBACKEND", "Agg")
    sys.exit(main())
