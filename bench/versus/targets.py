"""The table of fastcoll's aims, and the aims that a report misses.

    PYTHONPATH=bench python -m versus.targets versus.json torch.json ...      # missed aims as a Markdown table

A report is a JSON file of `--vs`, bench/torch_backend.py, bench/torch_ddp.py or `--first-calls`. An aim is a factor
that each of its cells, or the geometric mean of its cells, should reach.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import geometric_mean
from typing import Any, NamedTuple

from fastcoll.bench.cases import format_size

Report = dict[str, Any]
Row = dict[str, Any]

_MOVING = ("broadcast", "all_gather", "gather", "scatter", "all_to_all", "send_recv")
_TEN = ("all_reduce", "reduce", "reduce_scatter", *_MOVING, "barrier")
_REDUCED = ("all_reduce", "reduce_scatter")
_FIVE = ("all_reduce", "broadcast", "all_gather", "reduce_scatter", "send_recv")
_SHARED = ("update_shared_all_reduce",)
_ANY = 0, 1 << 62
_K, _M = 1 << 10, 1 << 20


class Target(NamedTuple):
    """One aim.

    Attributes:
        run: the kind of reports to which it applies, as returned by `kind`.
        operations: its operations; empty: all.
        sizes: the smallest and the largest of its sizes, in bytes.
        value: a key of VALUES.
        aim: the factor that a cell should reach.
        mean: whether the geometric mean of the cells should reach it, instead of each cell.
    """

    run: str
    operations: tuple[str, ...]
    sizes: tuple[int, int]
    value: str
    aim: float
    mean: bool = False


class Missed(NamedTuple):
    """An aim that was not reached; `size` is None for a mean over sizes."""

    operation: str
    size: int | None
    value: str
    reached: float
    aim: float


VALUES = {
    "MPI": "best_mpi_over_fastcoll",
    "processor": "processor_best_mpi_over_fastcoll",
    "Gloo's processor": "processor_gloo_over_fastcoll",
    "p99": "p99_best_mpi_over_fastcoll",
    "Gloo": "gloo_over_fastcoll",
    "copy": "fastcoll_over_limit",
    "own": "ordinary_over_shared",
    "first": "first_over_median",
}
_AT_MOST = ("copy", "first")

TARGETS = (
    Target("shm", _TEN, _ANY, "MPI", 1.0),
    Target("shm", _TEN, _ANY, "MPI", 1.8, mean=True),
    Target("shm", _TEN, (0, 4 * _K), "MPI", 1.3),
    Target("shm", _REDUCED, (32 * _K, _ANY[1]), "MPI", 1.4),
    Target("shm", _REDUCED, (32 * _K, _ANY[1]), "MPI", 2.0, mean=True),
    Target("shm", _MOVING, (256 * _K, 16 * _M), "copy", 1.2),
    Target("shm", _TEN, _ANY, "p99", 1.0),
    Target("shm", _SHARED, (_M, _ANY[1]), "own", 1.8),
    Target("shm", _SHARED, (_M, _ANY[1]), "MPI", 3.0),
    Target("shm, crowded", _TEN, _ANY, "MPI", 1.0),
    Target("shm, crowded", _TEN, _ANY, "processor", 1.0),
    Target("shm, crowded", ("all_reduce",), _ANY, "MPI", 2.0),
    Target("hosts", (), _ANY, "Gloo's processor", 1.0),
    Target("tcp", _FIVE, (0, 32 * _K), "MPI", 1.0),
    Target("tcp", _FIVE, (4 * _M, _ANY[1]), "MPI", 1.5),
    Target("tcp", _FIVE, _ANY, "Gloo", 2.0),
    Target("torch", ("all_reduce",), (8, 8), "Gloo", 30.0),
    Target("torch", ("all_reduce",), (64 * _M, 64 * _M), "Gloo", 6.0),
    Target("ddp", (), _ANY, "Gloo", 1.3),
    Target("first calls", (), _ANY, "first", 1.3),
)


def missed(report: Report) -> list[Missed]:
    """Return the aims that a report misses.

    If several apply to one value of a cell, only the hardest is returned.
    """
    found: dict[tuple[str, int | None, str], Missed] = {}
    for target in (target for target in TARGETS if target.run == kind(report)):
        for one in _missed(target, report["results"]):
            key = one.operation, one.size, one.value
            if key not in found or _harder(one, found[key]):
                found[key] = one
    return list(found.values())


def kind(report: Report) -> str:
    """Return the kind of a report."""
    if report["kind"] != "versus":
        return str(report["kind"])
    if report["hosts"] > 1:
        return "hosts"
    if "tcp" in report["backend"]:
        return "tcp"
    return "shm" if report["ranks"] <= report["machine"]["usable_cores"] else "shm, crowded"


def sign(value: str) -> str:
    """Return the sign between a value and its aim when the aim is reached."""
    return "≤" if value in _AT_MOST else "≥"


def markdown(found: Sequence[Missed]) -> list[str]:
    """Return a table of missed aims."""
    lines = ["| missed | value | reached | aim |", "|---|---|--:|--:|"]
    for one in found:
        size = "" if one.size is None else f" of {format_size(one.size)}" if one.size else ""
        name = f"{one.value}, geometric mean" if one.size is None else one.value
        lines.append(
            f"| {one.operation}{size} | {name} | {one.reached:.2f} | {sign(one.value)} {one.aim:g} |"
        )
    return lines


def main(paths: Sequence[str]) -> int:
    """Print the aims that each report misses."""
    for path in paths:
        report = json.loads(Path(path).read_text())
        print(f"\n`{report['command']}`\n")
        print("\n".join(markdown(missed(report))))
    return 0


def _missed(target: Target, rows: Iterable[Row]) -> list[Missed]:
    low, high = target.sizes
    name = VALUES[target.value]
    cells = [
        (row["operation"], row["size"], row[name])
        for row in rows
        if (not target.operations or row["operation"] in target.operations)
        and low <= row["size"] <= high
        and row.get(name) is not None
    ]
    if target.mean and len(cells) < 2:
        return []
    if target.mean:
        operations = dict.fromkeys(operation for operation, *_ in cells)
        name = ", ".join(operations) if len(operations) <= len(_REDUCED) else f"{len(operations)} operations"
        cells = [(name, None, geometric_mean(value for *_, value in cells))]
    too_small = [Missed(*cell[:2], target.value, cell[2], target.aim) for cell in cells]
    return [one for one in too_small if not _reached(one)]


def _reached(one: Missed) -> bool:
    return one.reached <= one.aim if one.value in _AT_MOST else one.reached >= one.aim


def _harder(one: Missed, other: Missed) -> bool:
    return one.aim < other.aim if one.value in _AT_MOST else one.aim > other.aim


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
