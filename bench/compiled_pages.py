"""What the studies of compiled callers share.

They run sides in separate processes, and write a page with a picture. A *side* is a library, and in some studies a way
of calling it, whose times are compared with those of others.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from datetime import date
from importlib.util import find_spec
from pathlib import Path
from textwrap import fill

Times = dict[str, float]


def read_options(description: str | None, rounds: int, turns: int) -> argparse.Namespace:
    """Read the options of a script whose sides `beside` runs.

    They are rounds, turns and results. A process of a side also gets the side's name (`side`) and the file for its
    times (`file`).
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--rounds", type=int, default=rounds, help="of processes, of each library (default %(default)s)"
    )
    parser.add_argument(
        "--turns", type=int, default=turns, help="of each side in a round (default %(default)s)"
    )
    parser.add_argument("--results", help="a folder for the page and its picture")
    parser.add_argument("--side", help=argparse.SUPPRESS)
    parser.add_argument("--file", help=argparse.SUPPRESS)
    return parser.parse_args()


def beside(script: str, library: str, rounds: int, options: Sequence[str] = ()) -> Times:
    """Run a script once for fastcoll and once for `library` in each round.

    Each run has two processes. The command is `script *options --side NAME --file FILE`; NAME is "fastcoll" or the
    library's. The library runs under an MPI's mpiexec, if both are installed. Rank 0 writes a JSON object of names and
    times to the file.

    Returns:
        the least time of each name.
    """
    here = [str(Path(script).resolve()), *options]
    launchers = {"fastcoll": [sys.executable, "-m", "fastcoll.launch", "-n", "2"]}
    mpiexec = shutil.which("mpiexec", path=str(Path(sys.executable).parent)) or shutil.which("mpiexec")
    if find_spec(library) and mpiexec:
        launchers[library] = [mpiexec, "-n", "2", sys.executable]
    found: Times = {}
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(rounds):
            for side, words in launchers.items():
                file = Path(folder) / f"{side}{turn}"
                command = [*words, *here, "--side", side, "--file", str(file)]
                done = subprocess.run(command, capture_output=True, text=True)
                if done.returncode:
                    sys.exit(f"{side}: {done.stderr}")
                for name, time in json.loads(file.read_text()).items():
                    found[name] = min(time, found.get(name, time))
    return found


def save(
    folder: str | None, name: str, text: str, panels: Mapping[str, Times], unit: str, others: Sequence[str]
) -> None:
    """Print a page; with a folder, write the page and its picture there.

    The picture has a panel per case, with a bar per side.
    """
    if folder:
        stem = f"{date.today()}-{name}"
        plot(panels, unit, others, Path(folder, f"{stem}.png"))
        Path(folder, f"{stem}.md").write_text(f"{text}\n\n![the table as bars]({stem}.png)\n")
    print(text)


def plot(panels: Mapping[str, Times], unit: str, others: Sequence[str], path: Path) -> None:
    """Draw the bars; the sides in `others` have another colour."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(3 * max(2, len(panels)), 3.2), layout="constrained")
    for panel, (title, times) in zip(
        figure.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True
    ):
        colours = ["tab:orange" if side in others else "tab:blue" for side in times]
        bars = panel.bar(list(times), list(times.values()), color=colours)
        panel.bar_label(bars, fmt="%.2f", fontsize=8)
        panel.set_title(fill(title, 26), fontsize=10)
        panel.set_ylabel(unit)
        panel.set_xticks(
            range(len(times)), times, fontsize=8, rotation=30, ha="right", rotation_mode="anchor"
        )
        panel.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
