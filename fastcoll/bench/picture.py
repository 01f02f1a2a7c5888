"""The results of a run as a picture (matplotlib) and as a page (pages/html_page.py): a panel for each operation."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..pages import html_page
from ..pages.html_page import COLOURS, PageTable, Plot
from .cases import format_size
from .results import Row, Run, digits, load_of

PICTURES = (".png", ".svg", ".pdf")  # the file name extensions that `draw` accepts
MOST_CURVES = 4  # in a panel
_MARKS = "osD^"
_COLUMNS = 3

Curves = dict[str, list[Row]]
"""The rows of a panel, by the label of their curve; the rows of a curve differ in size only."""


def panels(run: Run) -> list[tuple[str, Curves]]:
    """Divide the rows that move data into panels: one for each operation, or several if it has more than four curves.

    A curve's label has the dtype and the reduction only if they differ within the operation.
    """
    found: list[tuple[str, Curves]] = []
    for operation in dict.fromkeys(row.operation for row in run.results if row.size):
        rows = [row for row in run.results if row.size and row.operation == operation]
        telling = [name for name in ("type", "redop") if len({getattr(row, name) for row in rows}) > 1]
        curves: Curves = {}
        for row in rows:
            label = " ".join(str(getattr(row, name)) for name in telling) or "time"
            curves.setdefault(label, []).append(row)
        count = math.ceil(len(curves) / MOST_CURVES)
        for number in range(count):
            # Panels of about the same number of curves: five are three and two.
            start, end = (len(curves) * each // count for each in (number, number + 1))
            part = dict(list(curves.items())[start:end])
            found.append((f"{operation} ({number + 1})" if count > 1 else operation, part))
    return found


def limit_us(run: Run, row: Row) -> float:
    """Return the time that the memory alone needs for a row, in microseconds: one pass over its bytes.

    The pass is an update in place if the operation reduces, else a copy. Its bandwidth was measured with 64 MiB of each
    rank, so arrays that fit in a cache may be faster.
    """
    gbs: float = run.machine["copy_gbs" if row.redop == "none" else "update_gbs"]
    return row.size / gbs / 1e3


def limit_text(run: Run) -> str:
    """Explain the dotted line."""
    update, copy = run.machine["update_gbs"], run.machine["copy_gbs"]
    return (
        f"Dotted: one pass over 64 MiB of memory by all ranks at once (update {update:.1f}, copy {copy:.1f} GB/s a "
        "rank). Curves may pass below it where arrays fit in caches, or where a rank moves only a part of the bytes."
    )


def _title(run: Run) -> str:
    place = f"{len(run.devices)} ranks on {run.machine['cpu']}, {run.machine['usable_cores']} cores"
    return f"fastcoll {run.machine['fastcoll']} · {run.backend} · {place} · {run.start_time[:10]}"


# ---- the picture -----------------------------------------------------------------------------------------


def draw(path: Path, run: Run) -> None:
    """Draw time over size into a file (png, svg, pdf), a panel for each operation."""
    from matplotlib.figure import Figure

    shown = panels(run)
    columns = max(1, min(_COLUMNS, len(shown)))
    lines = max(1, math.ceil(len(shown) / columns))
    figure = Figure(figsize=(max(6.5, 4.2 * columns), 3.1 * lines + 1.2), layout="constrained")
    axes = list(figure.subplots(lines, columns, squeeze=False, sharex=True).flat)
    for each, (operation, curves) in zip(axes, shown, strict=False):
        draw_panel(each, run, operation, curves)
    for each in axes[len(shown) :]:
        each.set_visible(False)
    figure.suptitle(_title(run), fontsize=10)
    texts = [limit_text(run), *(text.removeprefix("# ") for text in load_of(run))]
    folded = "\n".join(textwrap.fill(text, 45 * columns) for text in texts)
    figure.supxlabel(f"size (bytes)\n{folded}", fontsize=9)
    figure.savefig(path, dpi=150)


def draw_panel(axes: Any, run: Run, operation: str, curves: Curves) -> None:
    for number, (label, rows) in enumerate(curves.items()):
        sizes = [row.size for row in rows]
        look = {"color": COLOURS[number], "marker": _MARKS[number], "markersize": 4, "linewidth": 1.6}
        axes.plot(sizes, [row.time_us for row in rows], label=label, **look)
        axes.fill_between(
            sizes,
            [row.time_us for row in rows],
            [row.p99_us for row in rows],
            color=COLOURS[number],
            alpha=0.12,
        )
    widest = max(curves.values(), key=len)
    axes.plot(
        [row.size for row in widest],
        [limit_us(run, row) for row in widest],
        ":",
        color="black",
        label="memory alone",
    )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_ylim(bottom=min(row.time_us for rows in curves.values() for row in rows) / 2)
    axes.set_ylabel("µs per call; shaded: to p99", fontsize=8)
    axes.set_title(operation, loc="left", fontsize=10, fontweight="bold")
    axes.xaxis.set_major_formatter(lambda size, _: format_size(round(size)))
    axes.yaxis.set_major_formatter(lambda tick, _: f"{tick:g}")
    axes.tick_params(labelsize=8, labelbottom=True)
    axes.grid(True, which="major", alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=8, frameon=False, loc="upper left")


# ---- the page --------------------------------------------------------------------------------------------


def write_html(path: Path, run: Run, about: Sequence[str]) -> None:
    """Write a page with a plot for each operation, and the rows as a table; `about` are lines about the run.

    Raises:
        UnavailableError: Plotly is not installed.
        OSError: the file cannot be written.
    """
    parts: list[Plot | PageTable] = [plot_of(run, operation, curves) for operation, curves in panels(run)]
    names = (
        "operation",
        "size",
        "count",
        "type",
        "redop",
        "root",
        "time (µs)",
        "p99 (µs)",
        "algbw",
        "busbw",
        "#wrong",
    )
    rows = [
        (
            row.operation, format_size(row.size), str(row.count), row.type, row.redop, str(row.root),
            digits(row.time_us), digits(row.p99_us), digits(row.algbw), digits(row.busbw),
            "N/A" if row.wrong is None else str(row.wrong),
        )
        for row in run.results
    ]  # fmt: skip
    bandwidth = "algbw and busbw are in GB/s. docs/tuning.md explains the columns."
    parts.append(PageTable("All rows", bandwidth, names, rows))
    html_page.write(path, "fastcoll benchmark", [_title(run), *about, limit_text(run)], parts)


def plot_of(run: Run, operation: str, curves: Curves) -> Plot:
    traces: list[dict[str, Any]] = []
    for number, (label, rows) in enumerate(curves.items()):
        line = {
            "type": "scatter",
            "x": [row.size for row in rows],
            "marker": {"color": COLOURS[number], "size": 7},
        }
        median = {"name": label, "mode": "lines+markers", "y": [row.time_us for row in rows]}
        tail = {"name": f"{label}, p99", "mode": "lines", "y": [row.p99_us for row in rows], "opacity": 0.8}
        traces += [
            line | median,
            line | tail | {"line": {"color": COLOURS[number], "dash": "dash", "width": 1}},
        ]
    widest = max(curves.values(), key=len)
    limits: dict[str, Any] = {
        "name": "memory alone",
        "mode": "lines",
        "line": {"color": "black", "dash": "dot", "width": 1},
    }
    limits |= {"x": [row.size for row in widest], "y": [limit_us(run, row) for row in widest]}
    traces.append({"type": "scatter"} | limits)
    sizes = sorted({row.size for rows in curves.values() for row in rows})
    ticks = sizes[:: max(1, len(sizes) // 12)]
    layout = {
        "xaxis": {
            "type": "log",
            "title": {"text": "size"},
            "tickvals": ticks,
            "ticktext": [format_size(size) for size in ticks],
        },
        "yaxis": {"type": "log", "title": {"text": "microseconds per call"}, "dtick": 1},
    }
    caption = (
        "The median of a call, and dashed its 99th percentile; dotted the time that the memory alone needs."
    )
    return Plot(operation, caption, traces, layout)
