"""A run as a picture: time and bandwidth over size, a line for each operation, dtype and reduction."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from .export import Run
from .sizes import format_size
from .table import Row

PICTURES = (".png", ".svg", ".pdf")
"""The endings of file names that `draw` takes."""

# Okabe and Ito's colours, which the colour-blind can tell apart; then other marks with the same colours.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_MARKS = "osD^v"


def draw(path: Path, run: Run) -> None:
    """Write the picture of `run` to `path`; its ending says the format (png, svg, pdf)."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 5.4), layout="constrained")
    times, speeds = figure.subplots(1, 2)
    lines = _lines(run.results)
    _panel(times, lines, lambda row: row.time_us, "time per call (µs)")
    if len(run.devices) > 1:
        _panel(speeds, lines, lambda row: row.busbw, "bus bandwidth (GB/s)")
    else:
        _panel(speeds, lines, lambda row: row.algbw, "size / time (GB/s); one rank has no bus")
    _limits(speeds, run)
    figure.legend(*times.get_legend_handles_labels(), loc="outside lower center", ncols=5, frameon=False)
    figure.suptitle(_title(run), fontsize=10)
    figure.savefig(path, dpi=150)


def _lines(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """The rows that have data, by label; what all of them share is left out of the labels."""
    data = [row for row in rows if row.size]
    several = {name: len({getattr(row, name) for row in data} - {"none"}) > 1 for name in ("type", "redop")}
    lines: dict[str, list[Row]] = {}
    for row in data:
        words = [row.operation]
        words += [
            getattr(row, name) for name, tell in several.items() if tell and getattr(row, name) != "none"
        ]
        lines.setdefault(" ".join(words), []).append(row)
    return lines


def _panel(axes: Any, lines: dict[str, list[Row]], value: Callable[[Row], float], label: str) -> None:
    for number, (name, rows) in enumerate(lines.items()):
        shown = [(row.size, value(row)) for row in rows]
        colour = _COLOURS[number % len(_COLOURS)]
        mark = _MARKS[number // len(_COLOURS) % len(_MARKS)]
        axes.plot(
            *zip(*shown, strict=True), mark + "-", color=colour, label=name, markersize=4, linewidth=1.5
        )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("size (bytes)")
    axes.set_title(label, loc="left", fontsize=10)
    axes.xaxis.set_major_formatter(lambda size, _: format_size(round(size)))
    axes.yaxis.set_major_formatter(lambda tick, _: f"{tick:g}")
    axes.grid(True, which="major", alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)


def _limits(axes: Any, run: Run) -> None:
    """What the memory gives to each rank when all ranks use it at once."""
    update, copy = run.machine["update_gbs"], run.machine["copy_gbs"]
    for speed in (update, copy):
        axes.axhline(speed, color="grey", linewidth=1, linestyle=":")
    axes.annotate(
        f"memory: in-place update {update:.1f}, copy {copy:.1f} GB/s",
        (0.01, max(update, copy)),
        xycoords=("axes fraction", "data"),
        xytext=(0, 3),
        textcoords="offset points",
        fontsize=8,
        color="grey",
    )
    axes.set_ylim(top=2 * max(update, copy, axes.get_ylim()[1] / 2))


def _title(run: Run) -> str:
    facts = run.machine
    return (
        f"fastcoll {facts['fastcoll']} · {run.backend} · {len(run.devices)} ranks on {facts['cpu']}, "
        f"{facts['usable_cores']} cores · {run.start_time[:10]}"
    )
