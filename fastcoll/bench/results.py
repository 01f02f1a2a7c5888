"""The rows of results, facts about the machine, and their output as lines, JSON and CSV.

time, p99       microseconds per call: median and 99th percentile over a rank's batches, of the slowest rank
algbw           size / time, GB/s (10**9 bytes)
busbw           algbw times the operation's bus factor: the bandwidth that each rank's link would need
#wrong          the number of wrong elements on all ranks; N/A if not checked
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable, Sequence
from dataclasses import asdict, astuple, dataclass, fields
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np

from .._version import __version__
from ..shm import tuning_cache
from ..system import load
from .cases import SHAPES, Case, format_size
from .measuring import Schedule, Timing, estimate

_STREAM_BYTES = 64 << 20

_ROW = "{:>12} {:>12} {:>10} {:>8} {:>5} {:>11} {:>11} {:>8} {:>8} {:>8}"
_NAMES = "size count type redop root time p99 algbw busbw #wrong".split()
_UNITS = ("(B)", "(elements)", "", "", "", "(us)", "(us)", "(GB/s)", "(GB/s)", "")
_COMPARED = "# {:>12} {:>12} {:>10} {:>8} {:>14} {:>14} {:>11}"
_COMPARED_NAMES = ("operation", "size", "type", "redop", "ps/element", "per element", "per byte")


@dataclass(frozen=True)
class Row:
    """The result of one case, in bytes, microseconds and GB/s; `wrong` is None if not checked."""

    operation: str
    size: int
    count: int
    type: str
    redop: str
    root: int
    iterations: int
    time_us: float
    p99_us: float
    algbw: float
    busbw: float
    wrong: int | None


@dataclass(frozen=True)
class Run:
    """One run of the benchmark; its JSON has the keys of nccl-tests' version 3."""

    start_time: str  # ISO 8601, with the offset from UTC
    command: Sequence[str]
    backend: str
    machine: dict[str, Any]  # `machine()` of rank 0, and `memory_speed()` of the slowest rank
    devices: Sequence[dict[str, Any]]  # rank, pid, hostname and allowed cores of each rank
    results: Sequence[Row]


def make_row(case: Case, plan: Schedule, timing: Timing, wrong: int | None) -> Row:
    """Return the row of a case; `timing` is the slowest rank's, and `wrong` is the sum over all ranks."""
    shape, algbw = SHAPES[case.operation], case.size / timing.median / 1e9
    kind = case.dtype.name if shape.moves else "none"
    speeds, times = (algbw, algbw * shape.bus_factor(case.ranks)), (timing.median * 1e6, timing.p99 * 1e6)
    what = case.operation, case.size, case.count, kind, case.redop, case.root
    return Row(*what, plan.batches * plan.calls, *times, *speeds, wrong)


def digits(value: float) -> str:
    """Format a number with at most two decimals, about four significant digits and no exponent."""
    decimals = 2 if value < 100 else 1 if value < 1000 else 0
    return f"{value:.{decimals}f}"


def heading(operation: str) -> list[str]:
    """Return the lines above an operation's rows."""
    return ["#", f"# {operation}", *("#" + _ROW.format(*cells)[1:].rstrip() for cells in (_NAMES, _UNITS))]


def line(row: Row) -> str:
    """Return a row as a line of the table."""
    r, wrong = row, "N/A" if row.wrong is None else row.wrong
    times, speeds = map(digits, (r.time_us, r.p99_us)), (f"{speed:.2f}" for speed in (r.algbw, r.busbw))
    return _ROW.format(r.size, r.count, r.type, r.redop, r.root, *times, *speeds, wrong)


def per_element(rows: Sequence[Row]) -> list[str]:
    """Return lines on the cost of an element, for operations with several dtypes or reductions.

    `per element` and `per byte` are ratios to the sum of float32 with the same operation and size.
    """
    rows = [row for row in rows if row.count]
    usual = ("float32", "sum")
    bases = {(row.operation, row.size): row for row in rows if (row.type, row.redop) == usual}
    compared = [(row, base) for row in rows if (base := bases.get((row.operation, row.size)))]
    several = {row.operation for row, base in compared if row is not base}
    lines = ["#", "# against float32's sum", _COMPARED.format(*_COMPARED_NAMES)]
    for row, base in compared:
        if row.operation in several:
            each, factor = row.time_us / row.count, row.time_us / base.time_us
            times = digits(each * 1e6), f"{each * base.count / base.time_us:.2f}", f"{factor:.2f}"
            lines.append(_COMPARED.format(row.operation, row.size, row.type, row.redop, *times))
    return lines if several else []


def summary(rows: Sequence[Row]) -> list[str]:
    """Return the lines below the table."""
    wrong, speeds = sum(row.wrong or 0 for row in rows), [row.busbw for row in rows if row.size]
    unchecked = all(row.wrong is None for row in rows)
    correctness = "not checked" if unchecked else f"{wrong} {'FAILED' if wrong else 'OK'}"
    mean = f"{fmean(speeds):.4f} GB/s" if speeds else "N/A"
    return ["#", f"# Out of bounds values : {correctness}", f"# Avg bus bandwidth    : {mean}"]


def header(run: Run) -> list[str]:
    """Return the lines above the table: the machine, the versions and the command."""
    facts, devices = run.machine, run.devices
    hosts = ", ".join(dict.fromkeys(device["hostname"] for device in devices))
    lines = [
        f"# fastcoll {facts['fastcoll']}, backend {run.backend}, {len(devices)} ranks on {hosts}, {run.start_time}",
        f"# {describe(facts)}",
    ]
    cores = ["any" if len(device["cores"]) > 1 else str(device["cores"][0]) for device in devices]
    if set(cores) != {"any"}:
        places = (f"rank {device['rank']} on {core}" for device, core in zip(devices, cores, strict=True))
        lines.append("# cores: " + ", ".join(places))
    return [*lines, f"# {' '.join(run.command)}"]


def in_short(run: Run) -> list[str]:
    """Return the last lines: each operation's best numbers, and the memory bandwidth to compare them with."""
    facts = run.machine
    lines = ["#", f"# in short: {len(run.devices)} ranks on {facts['usable_cores']} cores of {facts['cpu']}"]
    for operation in dict.fromkeys(row.operation for row in run.results):
        rows = [row for row in run.results if row.operation == operation]
        quick, wide = min(rows, key=lambda row: row.time_us), max(rows, key=lambda row: row.busbw)
        text = f"# {operation:>27}  {digits(quick.time_us):>8} us"
        if wide.size:
            text += f" for {format_size(quick.size):>5},  busbw {wide.busbw:8.2f} GB/s for {format_size(wide.size):>5}"
        lines.append(text)
    lines.append(
        f"# memory alone: update {facts['update_gbs']:.1f} GB/s, copy {facts['copy_gbs']:.1f} GB/s a rank"
    )
    return [
        *lines,
        "# beside other libraries: python -m fastcoll.bench --vs gloo,openmpi,mpich --install-peers",
    ]


def load_of(run: Run) -> list[str]:
    """Return a line about the cores that other processes used during the run, if they used some."""
    used = run.machine.get("cores_of_others", 0.0)
    if used < load.MUCH:
        return []
    text = load.describe(used, run.machine["usable_cores"]).replace(" use ", " used ")
    return [f"# {text} during this run, on average: times on a busy machine mean little"]


def machine(usable_cores: int) -> dict[str, Any]:
    """Return facts about this machine and its software, for JSON; the ranks share `usable_cores` cores."""
    from importlib.metadata import version  # imports email; no rank needs it before its first call

    return {
        "hostname": os.uname().nodename,
        "cpu": tuning_cache.machine().rpartition(", ")[0],
        "caches": _caches(),
        "cores": os.cpu_count(),
        "usable_cores": usable_cores,
        "kernel": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "numpy": np.__version__,
        "numba": version("numba"),
        "fastcoll": __version__,
    }


def _caches() -> str:
    """Return the data caches of the first core: `L1 48K, L2 1024K, L3 32768K`."""
    folders = sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*"))
    caches = [
        [(folder / name).read_text().strip() for name in ("level", "type", "size")] for folder in folders
    ]
    return ", ".join(f"L{level} {size}" for level, kind, size in caches if kind != "Instruction")


def describe(facts: dict[str, Any]) -> str:
    """Return processor, cores, kernel and versions in one line."""
    return (
        f"{facts['cpu']}, {facts['caches']}, {facts['cores']} cores ({facts['usable_cores']} usable), "
        f"{facts['kernel']}, Python {facts['python']}, NumPy {facts['numpy']}, Numba {facts['numba']}"
    )


def memory_speed(barrier: Callable[[], Any]) -> dict[str, float]:
    """Measure this rank's memory bandwidth in GB/s while all ranks measure together; medians of nine.

    `update_gbs` is that of an in-place `x *= 1` on 64 MiB of float32; no all_reduce can do less. `copy_gbs` is that of
    a copy of 64 MiB; no operation that moves data can do less.
    """
    x = np.ones(_STREAM_BYTES // 4, np.float32)
    y, one = np.ones_like(x), np.float32(1)

    def gbs(sweep: Callable[[], Any]) -> float:
        seconds = []
        for _ in range(9):
            barrier()
            seconds.append(estimate(sweep, 1))
        return _STREAM_BYTES / median(seconds) / 1e9

    return {"update_gbs": gbs(lambda: np.multiply(x, one, out=x)), "copy_gbs": gbs(lambda: np.copyto(y, x))}


def write_json(path: Path, run: Run) -> None:
    """Write the whole run as one JSON object."""
    short = [text[2:] for text in summary(run.results)[1:]]
    path.write_text(json.dumps({"version": 3, **asdict(run), "summary": short}, indent=2) + "\n")


def write_csv(path: Path, rows: Sequence[Row]) -> None:
    """Write the rows as CSV with a line of names; `wrong` is empty in an unchecked row."""
    import csv

    with path.open("w", newline="") as file:
        csv.writer(file).writerows([[field.name for field in fields(Row)], *map(astuple, rows)])
