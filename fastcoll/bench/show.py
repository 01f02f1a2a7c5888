"""What people see: lines while rank 0 runs, on a terminal above a progress bar; and a run as a picture."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import results
from .cases import Case, format_size
from .results import Row, Run

if TYPE_CHECKING:
    from rich.progress import Progress

PICTURES = (".png", ".svg", ".pdf")
"""The endings of file names that `draw` takes."""

# Okabe and Ito's colours, which the colour-blind can tell apart; then other marks with the same colours.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_MARKS = "osD^v"


class Report:
    """A context manager that shows a run: lines on stdout, each as soon as it is known.

    Ranks that do not `tell` show nothing. On a terminal where rich is installed the lines have colours (unless NO_COLOR
    is set) and scroll above a bar that says what runs now. The bar is drawn between cases only: a thread that redraws
    it would be timed with the calls.
    """

    def __init__(self, total: int, tell: bool = True) -> None:
        self._tell, self._operation = tell, ""
        self._bar = _bar(total) if tell and sys.stdout.isatty() else None

    def __enter__(self) -> Report:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar:
            self._bar.stop()

    def notes(self, lines: Sequence[str], style: str = "dim") -> None:
        """Show what is not a row: the header, the summary."""
        for text in lines if self._tell else ():
            if self._bar:
                from rich.text import Text

                # A Text has its style to itself; `style=` would be the bar's too.
                self._bar.console.print(Text(text, style), no_wrap=True, overflow="ignore", crop=False)
            else:
                print(text, flush=True)

    def begin(self, case: Case) -> None:
        """A case is being measured; a heading where the operation changes."""
        if case.operation != self._operation:
            self._operation = case.operation
            self.notes(results.heading(case.operation), "bold")
        if self._bar:
            size = f" {format_size(case.size)}" if case.size else ""
            self._bar.update(self._bar.task_ids[0], description=f"{case.operation}{size}", refresh=True)

    def add(self, row: Row) -> None:
        """It has been measured."""
        self.notes([results.line(row)], "bold red" if row.wrong else "")
        if self._bar:
            self._bar.advance(self._bar.task_ids[0])


def _bar(total: int) -> Progress | None:
    try:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
    except ImportError:
        return None
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    bar = Progress(*columns, transient=True, auto_refresh=False)
    bar.add_task("", total=total)
    return bar


def draw(path: Path, run: Run) -> None:
    """Draw time and bandwidth over size to `path`, a line for each operation, dtype and reduction.

    The ending says the format (png, svg, pdf).
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 5.4), layout="constrained")
    times, speeds = figure.subplots(1, 2)
    lines = _lines(run.results)
    _panel(times, lines, lambda row: row.time_us, "time per call (µs)")
    if len(run.devices) > 1:
        _panel(speeds, lines, lambda row: row.busbw, "bus bandwidth (GB/s)")
    else:
        _panel(speeds, lines, lambda row: row.algbw, "size / time (GB/s); one rank has no bus")
    _limits(speeds, run.machine)
    figure.legend(*times.get_legend_handles_labels(), loc="outside lower center", ncols=5, frameon=False)
    title = (
        f"fastcoll {run.machine['fastcoll']} · {run.backend} · {len(run.devices)} ranks on {run.machine['cpu']}, "
        f"{run.machine['usable_cores']} cores · {run.start_time[:10]}"
    )
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=150)


def _lines(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """The rows that have data, by label; what all of them share is left out of the labels."""
    data = [row for row in rows if row.size]
    telling = [name for name in ("type", "redop") if len({getattr(row, name) for row in data} - {"none"}) > 1]
    lines: dict[str, list[Row]] = {}
    for row in data:
        words = [row.operation, *(getattr(row, name) for name in telling)]
        lines.setdefault(" ".join(word for word in words if word != "none"), []).append(row)
    return lines


def _panel(axes: Any, lines: dict[str, list[Row]], value: Callable[[Row], float], label: str) -> None:
    for number, (name, rows) in enumerate(lines.items()):
        sizes, values = [row.size for row in rows], [value(row) for row in rows]
        colour = _COLOURS[number % len(_COLOURS)]
        mark = _MARKS[number // len(_COLOURS) % len(_MARKS)]
        axes.plot(sizes, values, mark + "-", color=colour, label=name, markersize=4, linewidth=1.5)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("size (bytes)")
    axes.set_title(label, loc="left", fontsize=10)
    axes.xaxis.set_major_formatter(lambda size, _: format_size(round(size)))
    axes.yaxis.set_major_formatter(lambda tick, _: f"{tick:g}")
    axes.grid(True, which="major", alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)


def _limits(axes: Any, facts: dict[str, Any]) -> None:
    """What the memory gives to each rank when all ranks use it at once."""
    update, copy = facts["update_gbs"], facts["copy_gbs"]
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
