"""Draw the README's picture of the speed, docs/speed.png, from the recorded comparison with Gloo and MPI.

python bench/speed_picture.py
"""

from __future__ import annotations

import re
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from versus.picture import LOOKS

ROOT = Path(__file__).parent.parent
TABLES = ROOT / "bench/results/2026-12-01-versus-amd.md"
PICTURE = ROOT / "docs/speed.png"
SIDES = {
    "fastcoll": "fastcoll",
    "openmpi": "Open MPI",
    "mpich": "MPICH",
    "intelmpi": "Intel MPI",
    "gloo": "Gloo",
}
OPERATIONS = ("all_reduce", "broadcast", "all_gather", "send_recv")
BYTES = {"": 1, "K": 1 << 10, "M": 1 << 20}


def times(operation: str) -> dict[str, list[tuple[int, float]]]:
    """Return the recorded (bytes, µs) of each side."""
    table = re.split(rf"^## {operation},.*\n", TABLES.read_text(), flags=re.MULTILINE)[1].partition("\n## ")[
        0
    ]
    heads, _, *rows = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("|")]
    found: dict[str, list[tuple[int, float]]] = {side: [] for side in SIDES}
    for row in rows:
        if not (size := re.fullmatch(r"(\d+)([KM]?)", row[0])):
            continue
        for side, name in SIDES.items():
            column = next(at for at, head in enumerate(heads) if head.startswith(f"{name}, µs"))
            found[side].append((int(size[1]) * BYTES[size[2]], float(row[column].split()[0])))
    return found


def draw() -> Figure:
    """Return the picture: a panel for each operation, and in it a line for each side."""
    layout = ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.1)
    figure = Figure(figsize=(10, 3.1), layout=layout, facecolor="white")
    panels = figure.subplots(1, len(OPERATIONS), sharey=True)
    for panel, operation in zip(panels, OPERATIONS, strict=True):
        for side, points in times(operation).items():
            colour, mark, width = LOOKS[side]
            panel.plot(
                *zip(*points, strict=True),
                color=colour,
                marker=mark,
                linewidth=width,
                markersize=4,
                label=SIDES[side],
            )
        panel.set_title(operation, loc="left", fontsize=10, fontweight="bold")
        panel.spines[["top", "right"]].set_visible(False)
        panel.set(xscale="log", yscale="log", xlabel="bytes")
        panel.set_xticks([8, 4 << 10, 1 << 20, 64 << 20], ["8", "4K", "1M", "64M"])
        panel.set_yticks([1, 10, 100, 1000, 10_000], ["1 µs", "10 µs", "0.1 ms", "1 ms", "10 ms"])
        panel.minorticks_off()
        panel.grid(True, alpha=0.3)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
    return figure


if __name__ == "__main__":
    draw().savefig(PICTURE, dpi=120)
