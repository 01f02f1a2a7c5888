"""`python bench/shared_arrays.py`: all_reduce on shared and on ordinary arrays, together with the work before it.

There are two typical loops. In the first, an array is updated in place and reduced; in the second, the result of an
expression, which is a new array, is reduced. Each round runs a loop on ordinary and then on shared arrays. A time is
the median over rounds, of the slowest rank.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import numpy as np

import fastcoll as dist

SIZES = [1 << power for power in range(16, 27)]
ROUNDS = 21
_FIRST = 5  # first rounds, which do not count, because fastcoll tries algorithms in them
LOOPS = ("update, all_reduce", "expression, all_reduce")
_COLOURS = ("#D55E00", "#0072B2")
Times = dict[str, list[tuple[float, float]]]
"""By loop, for each size: microseconds on ordinary and on shared arrays."""


def main() -> None:
    """Measure, print a table and draw a picture of it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(": ")[2])
    parser.add_argument("-n", "--ranks", type=int, default=2)
    parser.add_argument(
        "--rounds", type=int, default=ROUNDS, help=f"of each size and loop (default: {ROUNDS})"
    )
    parser.add_argument(
        "--best", action="store_true", help="take the fastest round, not the median: for a busy machine"
    )
    parser.add_argument("--plot", type=Path, help="the picture's file, as in out.png")
    given = parser.parse_args()
    times = dist.run(_measure, given.ranks, (given.rounds, given.best), backend="shm")[0]
    print(f"| bytes | {' | '.join(f'{loop}: ordinary | shared | gain' for loop in LOOPS)} |")
    print("|--:" * (1 + 3 * len(LOOPS)) + "|")
    for place, nbytes in enumerate(SIZES):
        cells = [
            f"{old:.1f} | {new:.1f} | {old / new:.2f}" for old, new in (times[loop][place] for loop in LOOPS)
        ]
        print(f"| {_size(nbytes)} | {' | '.join(cells)} |")
    if given.plot:
        _draw(given.plot, times)


def _measure(rounds: int, best: bool) -> Times:
    times: Times = {loop: [] for loop in LOOPS}
    for nbytes in SIZES:
        for loop, make in zip(LOOPS, (_update, _expression), strict=True):
            times[loop].append(_compare(make, nbytes, rounds, best))
    return times


def _compare(
    make: Callable[[int], Callable[[], None]], nbytes: int, rounds: int, best: bool
) -> tuple[float, float]:
    calls = max(3, min(200, (16 << 20) // nbytes))
    steps: list[Callable[[], None]] = []
    seconds: list[list[float]] = [[], []]
    for turn in range(rounds + _FIRST):
        for which, block in enumerate((nullcontext, dist.shared_arrays)):
            with block():
                if turn == 0:
                    steps.append(make(nbytes))
                steps[which]()
                dist.barrier()
                since = time.perf_counter()
                for _ in range(calls):
                    steps[which]()
                if turn >= _FIRST:
                    seconds[which].append((time.perf_counter() - since) / calls)
    found = np.array([min(of_one) if best else float(np.median(of_one)) for of_one in seconds]) * 1e6
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return float(found[0]), float(found[1])


def _update(nbytes: int) -> Callable[[], None]:
    x = np.ones(nbytes // 4, np.float32)

    def step() -> None:
        np.multiply(x, 1.5, x)
        dist.all_reduce(x, dist.ReduceOp.AVG)

    return step


def _expression(nbytes: int) -> Callable[[], None]:
    x = np.ones(nbytes // 4, np.float32)

    def step() -> None:
        y = x * 1.5
        dist.all_reduce(y, dist.ReduceOp.AVG)

    return step


def _size(nbytes: int) -> str:
    return f"{nbytes >> 20} MiB" if nbytes >> 20 else f"{nbytes >> 10} KiB"


def _draw(path: Path, times: Times) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 3.6), layout="constrained")
    axes = figure.subplots()
    for loop, colour in zip(LOOPS, _COLOURS, strict=True):
        axes.plot(SIZES, [old / new for old, new in times[loop]], "o-", color=colour, label=loop)
    axes.axhline(1, color="grey", linewidth=0.8)
    axes.set_xscale("log", base=2)
    axes.set_xticks(SIZES, [_size(nbytes) for nbytes in SIZES], rotation=45, fontsize=8)
    axes.set_ylabel("time on ordinary arrays / on shared ones")
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    main()
