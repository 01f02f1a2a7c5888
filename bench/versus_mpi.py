"""fastcoll beside mpi4py on the MPI wheels: the same loop, arrays, sizes and cores, in turn.

    python bench/versus_mpi.py                        all_reduce, 2 ranks, 8 B to 64 MiB, MPICH
    python bench/versus_mpi.py --openmpi              and Open MPI
    python bench/versus_mpi.py --mpich-python P       with the Python of an environment that has both

Without `--…-python`, an environment with mpi4py and the MPI wheel is made once in the user's cache. Each
round runs every side once, in alternating order; a side's time is the median over the rounds. The table
goes to stdout and, with machine, versions and command, to bench/results/.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from json import loads
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from loop import OPERATIONS, schedule

from fastcoll.bench.machine import machine
from fastcoll.bench.sizes import format_size, parse_size, size_range
from fastcoll.bench.table import digits

HERE = Path(__file__).resolve().parent
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"), "fastcoll-bench")
LIMIT_SECONDS = 600


@dataclass(frozen=True)
class Side:
    """One contender: what is run before the worker's own arguments."""

    name: str
    command: tuple[str, ...]


@dataclass(frozen=True)
class Result:
    """One side's seconds by size, and what it says that it is."""

    library: str
    seconds: dict[int, float]


def main() -> None:
    given = arguments()
    sizes = size_range(given.begin, given.end, 2)
    sides = [fastcoll_side(given.ranks)]
    if not given.no_mpich:
        sides.append(mpi_side("MPICH", environment(given.mpich_python, "mpich"), given.ranks, ()))
    if given.openmpi or given.openmpi_python:
        extra = (
            "--bind-to",
            "none",
            "--oversubscribe",
            *(["--allow-run-as-root"] if os.geteuid() == 0 else []),
        )
        sides.append(mpi_side("Open MPI", environment(given.openmpi_python, "openmpi"), given.ranks, extra))
    results = combine([run_round(number, sides, sizes, given) for number in range(given.rounds)])
    text = "\n".join([*table(results), "", *verdict(results)])
    print(text)
    record(text, results, given)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("operation", nargs="?", choices=OPERATIONS, default="all_reduce")
    add("-n", "--ranks", type=int, default=2)
    add("-b", "--begin", type=parse_size, default=8, metavar="SIZE")
    add("-e", "--end", type=parse_size, default=64 << 20, metavar="SIZE")
    add("--rounds", type=int, default=5)
    add("--scale", type=float, default=1.0, help="of the number of calls; smaller is shorter")
    add("--cores", default="0,1", help="ranks are pinned to these in turn (default: 0,1; empty: not pinned)")
    add("--mpich-python", type=Path, metavar="PYTHON")
    add("--no-mpich", action="store_true")
    add("--openmpi", action="store_true", help="compare with Open MPI as well")
    add("--openmpi-python", type=Path, metavar="PYTHON")
    add("--results", type=Path, default=HERE / "results", help="folder of the recorded tables")
    return parser.parse_args()


def fastcoll_side(ranks: int) -> Side:
    worker = str(HERE / "fastcoll_worker.py")
    return Side("fastcoll", (sys.executable, "-m", "fastcoll.launch", "-n", str(ranks), worker))


def mpi_side(name: str, python: Path, ranks: int, extra: Sequence[str]) -> Side:
    mpiexec = str(python.parent / "mpiexec")
    return Side(name, (mpiexec, *extra, "-n", str(ranks), str(python), str(HERE / "mpi_worker.py")))


def environment(python: Path | None, wheel: str) -> Path:
    """The Python of an environment with mpi4py and this MPI; made in the cache when none is given."""
    if python is not None:
        return python.absolute()
    home = CACHE / wheel
    made = home / "bin" / "python"
    if not (home / "complete").exists():
        subprocess.run([sys.executable, "-m", "venv", home], check=True)
        subprocess.run([made, "-m", "pip", "install", "--quiet", "mpi4py", wheel, "numpy"], check=True)
        (home / "complete").touch()
    return made


def run_round(
    number: int, sides: list[Side], sizes: list[int], given: argparse.Namespace
) -> dict[str, Result]:
    """Each side once, in an order that changes from round to round."""
    order = sides if number % 2 == 0 else sides[::-1]
    found = {}
    for side in order:
        print(f"round {number + 1} of {given.rounds}: {side.name}", file=sys.stderr, flush=True)
        found[side.name] = run_side(side, sizes, given)
    return {side.name: found[side.name] for side in sides}


def run_side(side: Side, sizes: list[int], given: argparse.Namespace) -> Result:
    """One side's times: the slowest rank's for each size."""
    with TemporaryDirectory(prefix="fastcoll-versus-") as out:
        words = [given.operation, "--sizes", ",".join(map(str, sizes)), "--cores", given.cores]
        words += ["--scale", str(given.scale), "--out", out]
        done = subprocess.run([*side.command, *words], capture_output=True, text=True, timeout=LIMIT_SECONDS)
        if done.returncode:
            sys.exit(f"{side.name} failed ({shlex.join(side.command)}):\n{done.stdout}{done.stderr}")
        ranks = [loads(file.read_text()) for file in sorted(Path(out).iterdir())]
    times = {size: max(rank["seconds"][str(size)] for rank in ranks) for size in sizes}
    return Result(ranks[0]["library"], times)


def combine(rounds: list[dict[str, Result]]) -> dict[str, Result]:
    """The median over the rounds, side by side and size by size."""
    return {
        name: Result(
            side.library,
            {size: median(found[name].seconds[size] for found in rounds) for size in side.seconds},
        )
        for name, side in rounds[0].items()
    }


def table(results: dict[str, Result]) -> list[str]:
    """Microseconds a call, and how many times longer than fastcoll each other side takes."""
    ours, *others = results.values()
    names = list(results)[1:]
    lines = [
        " | ".join(
            ["| size", *(f"{name} (µs)" for name in results), *(f"{name} / fastcoll" for name in names)]
        )
        + " |",
        "|--:" * (1 + len(results) + len(others)) + "|",
    ]
    for size, seconds in ours.seconds.items():
        times = [digits(side.seconds[size] * 1e6) for side in results.values()]
        ratios = [f"{side.seconds[size] / seconds:.2f}" for side in others]
        lines.append(" | ".join([f"| {format_size(size)}", *times, *ratios]) + " |")
    return lines


def verdict(results: dict[str, Result]) -> list[str]:
    """A sentence for each other side: at which sizes it is faster than fastcoll."""
    ours, *_ = results.values()
    lines = []
    for name, side in list(results.items())[1:]:
        lost = [format_size(size) for size, seconds in side.seconds.items() if seconds < ours.seconds[size]]
        lines.append(f"{name} is faster at: {', '.join(lost) or 'no size'}.")
    return lines


def record(text: str, results: dict[str, Result], given: argparse.Namespace) -> None:
    facts = machine(len(os.sched_getaffinity(0)))
    batches, calls = schedule(given.begin, given.scale)
    name = given.operation.replace("_", "")
    path = given.results / f"{date.today().isoformat()}-{name}-{given.ranks}-ranks.md"
    lines = [
        f"# {given.operation}, float32, {given.ranks} ranks",
        "",
        f"- Machine: {facts['cpu']}, {facts['cores']} cores ({facts['usable_cores']} usable), {facts['kernel']}",
        f"- Ranks: pinned to cores {given.cores} in turn" if given.cores else "- Ranks: not pinned",
        f"- Software: {'; '.join(side.library for side in results.values())}; "
        f"Python {facts['python']}, NumPy {facts['numpy']}, Numba {facts['numba']}",
        f"- Method: median of {given.rounds} rounds, the sides in turn; in a round the slowest rank's median "
        f"over batches of calls ({batches} of {calls} at {format_size(given.begin)}), one call verified",
        f"- Command: `python bench/versus_mpi.py {shlex.join(sys.argv[1:])}`",
        "",
        text,
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n")
    print(f"written to {path}", file=sys.stderr)


if __name__ == "__main__":
    main()
