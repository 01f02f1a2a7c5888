"""A comparison as a picture: a panel per operation, time over size, a line per side, and the machine's limit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .outcome import Comparison, SideTimes
from .record import placement

# Okabe and Ito's colours, which colour-blind people can distinguish.
LOOKS = {
    "fastcoll": ("#D55E00", "o", 2.4),
    "openmpi": ("#0072B2", "s", 1.4),
    "openmpi-tcp": ("#56B4E9", "v", 1.4),
    "mpich": ("#009E73", "^", 1.4),
    "intelmpi": ("#E69F00", "P", 1.4),
    "gloo": ("#CC79A7", "D", 1.4),
}
_NAMES = {
    "custom": "all_reduce, user-defined reduction",
    "update_all_reduce": "x *= 1, all_reduce",
    "update_shared_all_reduce": "the same, ours in shared pages",
}
_COLUMNS = 4


def draw(paths: Sequence[Path], comparison: Comparison) -> None:
    """Write the picture to each path, in the format of its extension (png, svg, pdf)."""
    from matplotlib.figure import Figure

    operations = comparison.operations()
    columns = min(_COLUMNS, len(operations))
    lines = math.ceil(len(operations) / columns)
    figure = Figure(figsize=(max(6.5, 3.7 * columns), 3.0 * lines + 1.4), layout="constrained")
    panels = list(figure.subplots(lines, columns, squeeze=False).flat)
    for panel, operation in zip(panels, operations, strict=False):
        _draw_operation(panel, comparison, operation)
    for panel in panels[len(operations) :]:
        panel.set_visible(False)
    _legend(figure)
    figure.suptitle(_title(comparison), fontsize=10)
    for path in paths:
        figure.savefig(path, dpi=150)


def _draw_operation(panel: Any, comparison: Comparison, operation: str) -> None:
    panel.set_title(_NAMES.get(operation, operation), loc="left", fontsize=10, fontweight="bold")
    panel.spines[["top", "right"]].set_visible(False)
    if comparison.sizes(operation) == [0]:
        _bars(panel, comparison, operation)
    else:
        _lines(panel, comparison, operation)


def _lines(panel: Any, comparison: Comparison, operation: str) -> None:
    sizes = comparison.sizes(operation)
    for side in comparison.sides:
        shown = [(size, side.typical((operation, size))) for size in sizes]
        points = [(size, seconds * 1e6) for size, seconds in shown if seconds is not None]
        if points:
            colour, mark, width = LOOKS[side.name]
            panel.plot(
                *zip(*points, strict=True), marker=mark, color=colour, linewidth=width, markersize=4,
                label=side.label, zorder=3 if side.name == "fastcoll" else 2,
            )  # fmt: skip
    limits = [(size, comparison.limit_seconds((operation, size))) for size in sizes]
    bound = [(size, seconds * 1e6) for size, seconds in limits if seconds is not None]
    if bound:
        panel.plot(
            *zip(*bound, strict=True),
            linestyle="--",
            color="black",
            linewidth=1.2,
            label="the memory's limit",
        )
    panel.set_xscale("log", base=2)
    panel.set_yscale("log")
    panel.set_xticks(sizes[:: 1 if len(sizes) < 7 else 2])
    panel.minorticks_off()
    panel.xaxis.set_major_formatter(lambda size, _: _bytes(size))
    panel.yaxis.set_major_formatter(lambda tick, _: _duration(tick))
    panel.tick_params(labelsize=8)
    panel.set_xlabel("size (bytes)", fontsize=8)
    panel.set_ylabel("time per call", fontsize=8)
    panel.grid(True, which="major", alpha=0.3)


def _bars(panel: Any, comparison: Comparison, operation: str) -> None:
    """Draw an operation without data: one bar per side."""
    known = [(side, side.typical((operation, 0))) for side in comparison.sides]
    shown = [(side, seconds * 1e6) for side, seconds in known if seconds is not None][::-1]
    colours = [LOOKS[side.name][0] for side, _ in shown]
    bars = panel.barh([side.label for side, _ in shown], [micros for _, micros in shown], color=colours)
    panel.bar_label(bars, [f" {_duration(micros)}" for _, micros in shown], fontsize=8)
    panel.set_xscale("log")
    low, high = min(micros for _, micros in shown), max(micros for _, micros in shown)
    panel.set_xlim(low / 4, high * 6)
    panel.minorticks_off()
    panel.xaxis.set_major_formatter(lambda tick, _: _duration(tick))
    panel.tick_params(labelsize=8)
    panel.set_xlabel("time per call", fontsize=8)


def _bytes(size: float) -> str:
    """Format a size: `8`, `4K`, `4M`; sizes that were rounded to whole elements are shown rounded."""
    for unit, name in ((1 << 30, "G"), (1 << 20, "M"), (1 << 10, "K")):
        if size >= unit:
            return f"{size / unit:.3g}{name}"
    return f"{size:.3g}"


def _duration(micros: float) -> str:
    """Format a duration: `0.5 µs`, `20 µs`, `3 ms`."""
    return f"{micros:.3g} µs" if micros < 999.5 else f"{micros / 1e3:.3g} ms"


def _legend(figure: Any) -> None:
    """Add a legend that has each label of all panels once."""
    found: dict[str, Any] = {}
    for panel in figure.axes:
        handles, labels = panel.get_legend_handles_labels()
        found.update(zip(labels, handles, strict=True))
    if found:
        figure.legend(
            found.values(), found.keys(), loc="outside lower center", ncols=len(found), frameon=False
        )


def _title(comparison: Comparison) -> str:
    machine = comparison.machine
    return (
        f"{comparison.ranks} ranks, {placement(comparison)} · {machine['cpu']}, {machine['cores']} cores · "
        f"{comparison.dtype} · {comparison.start_time[:10]}\n{_libraries(comparison.sides)}"
    )


def _libraries(sides: Sequence[SideTimes]) -> str:
    return " · ".join(side.library for side in sides)
