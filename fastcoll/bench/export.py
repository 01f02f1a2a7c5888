"""A run as JSON (the keys of nccl-tests' version 3) and as CSV (one line a row)."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from .machine import describe
from .sizes import format_size
from .table import Row, digits, summary

_VERSION = 3


@dataclass(frozen=True)
class Run:
    """One run of the benchmark.

    Attributes:
        start_time: ISO 8601, with the offset from UTC.
        command: the words of the command line.
        backend: what carried the operations.
        machine: of rank 0, see `machine.machine` and `machine.memory_speed` (the slowest rank's).
        devices: rank, pid, hostname and allowed cores of each rank.
        results: the rows.
    """

    start_time: str
    command: Sequence[str]
    backend: str
    machine: dict[str, Any]
    devices: Sequence[dict[str, Any]]
    results: Sequence[Row]


def header(run: Run) -> list[str]:
    """The lines above the table: on what, with what and how it was measured."""
    facts = run.machine
    return [
        f"# fastcoll {facts['fastcoll']}, backend {run.backend}, {len(run.devices)} ranks on {_hosts(run)}, "
        f"{run.start_time}",
        f"# {describe(facts)}",
        f"# memory, all ranks at once, the slowest: in-place update {facts['update_gbs']:.1f} GB/s, "
        f"copy {facts['copy_gbs']:.1f} GB/s a rank",
        *_placement(run),
        f"# {' '.join(run.command)}",
    ]


def in_short(run: Run) -> list[str]:
    """The last lines: each operation's best numbers, and what to hold them against."""
    facts = run.machine
    lines = ["#", f"# in short: {len(run.devices)} ranks on {facts['usable_cores']} cores of {facts['cpu']}"]
    for operation in dict.fromkeys(row.operation for row in run.results):
        rows = [row for row in run.results if row.operation == operation]
        quick, wide = min(rows, key=lambda row: row.time_us), max(rows, key=lambda row: row.busbw)
        text = f"# {operation:>27}  {digits(quick.time_us):>8} us"
        if wide.size:
            text += f" for {format_size(quick.size):>5},  busbw {wide.busbw:8.2f} GB/s for {format_size(wide.size):>5}"
        lines.append(text)
    return [
        *lines,
        f"# memory alone: update {facts['update_gbs']:.1f} GB/s, copy {facts['copy_gbs']:.1f} GB/s a rank",
        "# beside other libraries: python -m fastcoll.bench --vs gloo,openmpi,mpich --install-peers",
    ]


def write_json(path: Path, run: Run) -> None:
    """Write the whole run as one JSON object."""
    document = {
        "version": _VERSION,
        **asdict(run),
        "summary": [text[2:] for text in summary(run.results)[1:]],
    }
    path.write_text(json.dumps(document, indent=2) + "\n")


def write_csv(path: Path, rows: Sequence[Row]) -> None:
    """Write the rows as CSV with a line of names; an unchecked row has nothing under `wrong`."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(Row)])
        writer.writeheader()
        writer.writerows(asdict(row) for row in rows)


def _hosts(run: Run) -> str:
    return ", ".join(dict.fromkeys(device["hostname"] for device in run.devices))


def _placement(run: Run) -> list[str]:
    if all(len(device["cores"]) > 1 for device in run.devices):
        return []
    return ["# cores: " + ", ".join(f"rank {d['rank']} on {_cores(d['cores'])}" for d in run.devices)]


def _cores(cores: Sequence[int]) -> str:
    return "any" if len(cores) > 1 else str(cores[0])
