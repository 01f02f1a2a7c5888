"""How the start of a job grows with its ranks: measured on this machine, and simulated up to 10,000 ranks on a cluster.

    python bench/starts/study.py --results DIR

starts real jobs, on one node and on several (namespaces of Linux), takes from them what each step costs, compares a
simulation of the same jobs with them, and simulates larger ones. It writes a page and its picture.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields
from datetime import date
from pathlib import Path
from statistics import mean
from tempfile import TemporaryDirectory

import numpy as np
from matplotlib.figure import Figure
from model import Costs, Job, Machine, Outcome, Simulation

from fastcoll.bench.results import machine
from fastcoll.rendezvous.assemble import pack, unpack
from fastcoll.system.processes import Member

HERE = Path(__file__).parent
JOBS = "1x4 1x16 1x64 1x128 1x256 4x1 4x4 4x16 8x8 8x16 8x32"
CLUSTER = "1x8 4x8 13x8 32x8 125x8 250x8 500x8 1250x8"
# Measured with a crowd of clients (bench/results/2026-11-21-startup-scale.md), as the jobs here are too small to tell:
# seconds of the server for a byte of lists, and of a rank for two messages.
BYTE, LOOK = 0.28e-9, 150e-6
_LOCAL = Machine(len(os.sched_getaffinity(0)), latency=20e-6, bandwidth=2e9)


@dataclass(frozen=True)
class Start:
    """One measured start. All but `seconds` and `server` are means of the ranks; times are processor seconds."""

    job: Job
    seconds: float  # from the first rank's first instruction until the last has its group
    before: float
    init: float
    server: float
    messages: float
    received: float
    connections: float


def measure(job: Job) -> Start:
    """Start a job, and return what it took."""
    with TemporaryDirectory(prefix="fastcoll-starts-") as folder:
        launch = [sys.executable, "-m", "fastcoll.launch", "-n", str(job.local)]
        if job.nodes > 1:
            on_hosts = [sys.executable, HERE.parent / "versus/on_hosts.py", str(job.nodes), "each"]
            launch = [
                *on_hosts,
                *launch,
                "--nnodes",
                str(job.nodes),
                "--node_rank",
                "{node}",
                "--master_addr",
                "host0",
            ]
        subprocess.run([*launch, HERE / "rank.py"], env={**os.environ, "STARTS_FOLDER": folder}, check=True)
        ranks = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(job.size)]
    server = ranks[0]["server"]
    return Start(
        job,
        max(rank["joined"] for rank in ranks) - min(rank["began"] for rank in ranks),
        mean(rank["before"] for rank in ranks),
        mean(rank["init"] for rank in ranks) - server / job.size,
        server,
        mean(rank["asked"][0] for rank in ranks),
        mean(rank["asked"][2] for rank in ranks),
        mean(rank["dialed"] for rank in ranks) - 1,  # one of them is with the store
    )


def record_seconds(count: int = 2000) -> float:
    """Return the processor time of a rank for one member of a list of all."""
    data = pack([Member.here(rank, count, "auto") for rank in range(count)])
    before = time.process_time()
    unpack(Member, data, count)
    return (time.process_time() - before) / count


def asked_once(job: Job) -> float:
    """Return the messages of a rank without those of waits that were cut into slices."""
    free = Costs(*[0.0] * len(fields(Costs)))
    return Simulation(job, free, Machine(latency=0.0)).run().messages / job.size


def fit(starts: Sequence[Start]) -> Costs:
    """Return the costs that explain the measured starts best (least squares of the relative error)."""
    one = [start for start in starts if start.job.nodes == 1]
    record, rows, values = record_seconds(), [], []
    for start in starts:
        several = start.job.nodes > 1
        looks = max(start.messages - asked_once(start.job), 0.0) / 2
        rows.append([float(not several), float(several), start.connections])
        values.append(start.init - record * start.job.size * (2 if several else 1) - LOOK * looks)
    scaled = np.array(rows, float) / np.array(values)[:, None]
    alone, between, dial = _not_negative(scaled)
    member = _slope([(start.job.size, start.received) for start in one])
    address = _slope([(s.job.size, s.received - member * s.job.size) for s in starts if s.job.nodes > 1])
    return Costs(
        before=mean(start.before for start in starts),
        alone=alone,
        between=between,
        record=record,
        dial=dial,
        look=LOOK,
        message=mean(
            start.server / start.messages / start.job.size for start in starts if start.job.size >= 16
        ),
        byte=BYTE,
        member=member,
        address=address,
    )


def _not_negative(scaled: np.ndarray) -> list[float]:
    """Solve scaled @ x = 1 without negative x: those that would be negative are 0."""
    kept = list(range(scaled.shape[1]))
    while True:
        found = np.linalg.lstsq(scaled[:, kept], np.ones(len(scaled)), rcond=None)[0]
        if (found >= 0).all():
            break
        kept.pop(int(found.argmin()))
    return [float(found[kept.index(at)]) if at in kept else 0.0 for at in range(scaled.shape[1])]


def _slope(points: Sequence[tuple[float, float]]) -> float:
    x, y = np.array(points, float).T
    return max(float(np.polyfit(x, y, 1)[0]), 0.0)


def draw(
    starts: Sequence[Start], here: Sequence[Outcome], far: dict[bool, list[tuple[Job, Outcome]]]
) -> Figure:
    """Return the picture: the time, and messages and connections of a rank, over the number of ranks."""
    figure = Figure(figsize=(11, 6.2), layout="constrained", facecolor="white")
    times, amounts = figure.subplots(1, 2)
    for several, mark, colour in ((False, "o", "#D55E00"), (True, "^", "#0072B2")):
        chosen = [(s, o) for s, o in zip(starts, here, strict=True) if (s.job.nodes > 1) == several]
        where = "several nodes" if several else "one node"
        sizes = [s.job.size for s, _ in chosen]
        times.plot(
            sizes,
            [s.seconds for s, _ in chosen],
            mark,
            color=colour,
            label=f"measured, {where}, 2 cores for all",
        )
        order = np.argsort(sizes)
        times.plot(
            np.array(sizes)[order],
            np.array([o.seconds for _, o in chosen])[order],
            "-",
            color=colour,
            linewidth=1,
            label=f"simulated, {where}, 2 cores for all",
        )
        amounts.plot(
            sizes, [s.messages for s, _ in chosen], mark, color=colour, label=f"messages, measured, {where}"
        )
    several = [s for s in starts if s.job.nodes > 1]
    amounts.plot(
        [s.job.size for s in several],
        [s.connections for s in several],
        "s",
        color="#009E73",
        label="connections, measured",
    )
    for proxies, style in ((False, "-"), (True, "--")):
        sizes = [job.size for job, _ in far[proxies]]
        also = ", a proxy of the store a node" if proxies else ""
        times.plot(
            sizes,
            [o.seconds for _, o in far[proxies]],
            style,
            color="black",
            label=f"simulated, cluster{also}",
        )
        amounts.plot(
            sizes,
            [o.messages / j.size for j, o in far[proxies]],
            style,
            color="black",
            label=f"messages, simulated, cluster{also}",
        )
    amounts.plot(
        [job.size for job, _ in far[False]],
        [o.connections / j.size for j, o in far[False]],
        "-",
        color="#009E73",
        label="connections, simulated, cluster",
    )
    times.set_title("seconds until every rank has its default group", loc="left", fontsize=10)
    amounts.set_title("of a rank: messages to the store, connections with ranks", loc="left", fontsize=10)
    times.set_yscale("log")
    times.set_yticks([0.5, 1, 2, 5, 10, 20, 50], ["0.5", "1", "2", "5", "10", "20", "50"])
    amounts.set_ylim(bottom=0)
    for axes in (times, amounts):
        axes.set_xscale("log")
        axes.set_xticks([4, 16, 64, 256, 1000, 10_000], ["4", "16", "64", "256", "1,000", "10,000"])
        axes.set_xlim(3, 15_000)
        axes.minorticks_off()
        axes.set_xlabel("ranks")
        axes.grid(True, alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=1)
    return figure


def tables(
    starts: Sequence[Start], costs: Costs, here: Sequence[Outcome], far: dict[bool, list[tuple[Job, Outcome]]]
) -> list[str]:
    """Return the page's tables."""
    lines = ["## Measured, and simulated for the same machine", ""]
    lines += [
        "| nodes | ranks | messages of a rank | simulated | connections of a rank | simulated | kB to a rank |"
    ]
    lines[-1] += (
        " processor ms of a rank in `init_process_group` | of the store | time, s | simulated | off |"
    )
    lines += ["|" + "--:|" * 12]
    for start, outcome in zip(starts, here, strict=True):
        job, off = start.job, outcome.seconds / start.seconds - 1
        cells = [job.nodes, job.size, f"{start.messages:.1f}", f"{outcome.messages / job.size:.1f}"]
        cells += [
            f"{start.connections:.1f}",
            f"{outcome.connections / job.size:.1f}",
            f"{start.received / 1e3:.1f}",
        ]
        cells += [f"{start.init * 1e3:.0f}", f"{start.server * 1e3:.0f}", f"{start.seconds:.2f}"]
        lines.append("| " + " | ".join(map(str, [*cells, f"{outcome.seconds:.2f}", f"{off:+.0%}"])) + " |")
    lines += ["", "## What a step costs", ""]
    lines += [
        f"- before `init_process_group`: {costs.before * 1e3:.0f} ms of processor time",
        f"- in it, without lists and connections: {costs.alone * 1e3:.0f} ms on one node, "
        f"{costs.between * 1e3:.0f} on several",
        f"- for each member in a list: {costs.record * 1e6:.1f} µs; for each connection: {costs.dial * 1e6:.0f} µs, "
        "both ends together",
        f"- a look, when a slice of a wait has ended: {costs.look * 1e6:.0f} µs",
        f"- the store's server: {costs.message * 1e6:.0f} µs a message, {costs.byte * 1e9:.2f} ns a byte of lists",
        f"- bytes of a rank: {costs.member:.0f} in the list of members, {costs.address:.0f} in that of addresses",
        "",
        "## Simulated on a cluster",
        "",
        "| nodes | ranks | messages of a rank | connections of a rank | MB from the store | store busy, s | time, s |"
        " the same with a proxy a node: messages of a rank | MB | store busy, s | time, s |",
        "|" + "--:|" * 11,
    ]
    for (job, plain), (_, proxied) in zip(far[False], far[True], strict=True):
        cells = [job.nodes, job.size]
        for outcome in (plain, proxied):
            cells.append(f"{outcome.messages / job.size:.1f}")
            cells += [f"{outcome.connections / job.size:.1f}"] if outcome is plain else []
            cells += [f"{outcome.sent / 1e6:.1f}", f"{outcome.server:.2f}", f"{outcome.seconds:.2f}"]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--jobs", default=JOBS, help="jobs to measure, each NODESxRANKS")
    parser.add_argument("--cluster", default=CLUSTER, help="jobs to simulate on a cluster")
    parser.add_argument("--results", type=Path, help="folder for the page and its picture")
    args = parser.parse_args()
    for job in (Job(1, 2), Job(2, 1), Job(2, 2)):
        measure(job)  # compiles the kernels
    starts = [measure(_job(word)) for word in args.jobs.split()]
    costs = fit(starts)
    here = [Simulation(start.job, costs, _LOCAL).run() for start in starts]
    cluster = [_job(word) for word in args.cluster.split()]
    far = {
        proxies: [
            (job, Simulation(Job(job.nodes, job.local, proxies), costs, Machine()).run()) for job in cluster
        ]
        for proxies in (False, True)
    }
    lines = tables(starts, costs, here, far)
    print("\n".join(lines))
    if args.results is not None:
        args.results.mkdir(parents=True, exist_ok=True)
        page = args.results / f"{date.today()}-starts.md"
        facts = machine(len(os.sched_getaffinity(0)))
        head = f"""# The start of a job, 4 to 10,000 ranks

![Seconds, messages and connections over ranks]({page.stem}.png)

- Machine: {facts["cpu"]}, {facts["usable_cores"]} cores for all ranks, {facts["kernel"]}, Python {facts["python"]}
- Command: `python bench/starts/study.py --results bench/results`
- Measured: real jobs, each started once; several nodes are namespaces of Linux. The time is that from the start of the
  first rank's process until the last rank has its default group.
- Simulated: each rank, message and connection (`bench/starts/model.py`), with what the measured jobs cost.

"""
        page.write_text("\n".join([head + lines[0], *lines[1:], ""]))
        draw(starts, here, far).savefig(page.with_suffix(".png"), dpi=130)


def _job(word: str) -> Job:
    nodes, local = word.split("x")
    return Job(int(nodes), int(local))


if __name__ == "__main__":
    main()
