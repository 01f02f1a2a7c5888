"""Calls from compiled code: fastcoll inside numba.njit, from Python, and numba-mpi beside them.

    python bench/compiled_callers.py
    python bench/compiled_callers.py --results bench/results

There are two ranks. A *side* is a library and the way of calling it. fastcoll's sides run in turn in the same two
processes. If numba-mpi, an MPI and its mpiexec are installed, numba-mpi runs in two other processes, between the rounds
of fastcoll's. A rank's time is its least over all turns; the table has the slower rank's. The stencil is the loop of
examples/compiled/heat.py.
"""

from __future__ import annotations

import json
import os
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import numba
import numpy as np
from compiled_pages import Times, beside, read_options, save

import fastcoll as dist
from fastcoll.bench.results import describe, machine

CALLS, STEPS = 2000, 200
COLUMNS = ("njit, nogil", "njit", "from Python", "numba-mpi")
POINTS = 64


# ---- fastcoll's -------------------------------------------------------------------------------------------


def reduced(x, n):
    for _ in range(n):
        dist.all_reduce(x)


def synchronised(x, n):
    for _ in range(n):
        dist.barrier()


def there_and_back(x, n):
    rank = dist.get_rank()
    for _ in range(n):
        if rank == 0:
            dist.send(x, 1)
            dist.recv(x, 1)
        else:
            dist.recv(x, 0)
            dist.send(x, 0)


def stencil(u, n):
    rank, size = dist.get_rank(), dist.get_world_size()
    v, change = u.copy(), np.empty(1)
    for step in range(n):
        if rank % 2 == 0:
            if rank + 1 < size:
                dist.send(u[-2], rank + 1)
                dist.recv(u[-1], rank + 1)
            if rank > 0:
                dist.send(u[1], rank - 1)
                dist.recv(u[0], rank - 1)
        else:
            dist.recv(u[0], rank - 1)
            dist.send(u[1], rank - 1)
            if rank + 1 < size:
                dist.recv(u[-1], rank + 1)
                dist.send(u[-2], rank + 1)
        change[0] = relax(u, v)
        u, v = v, u
        if step % 10 == 0:
            dist.all_reduce(change, dist.ReduceOp.MAX)


@numba.njit
def relax(u, v):
    change = 0.0
    for i in range(1, u.shape[0] - 1):
        for j in range(1, u.shape[1] - 1):
            v[i, j] = 0.25 * (u[i - 1, j] + u[i + 1, j] + u[i, j - 1] + u[i, j + 1])
            change = max(change, abs(v[i, j] - u[i, j]))
    return change


CASES = {
    "all_reduce, 8 bytes": (reduced, CALLS),
    "barrier": (synchronised, CALLS),
    "send and recv there and back, 8 bytes": (there_and_back, CALLS // 2),
    f"a step of the stencil, {POINTS} x {POINTS} points a rank": (stencil, STEPS),
}


def array_for(function: Callable[..., Any]) -> Any:
    return np.ones((POINTS + 2, POINTS + 2)) if function.__name__ == "stencil" else np.zeros(1)


def of_fastcoll() -> dict[str, Callable[..., Any]]:
    sides: dict[str, Callable[..., Any]] = {}
    for case, (function, _) in CASES.items():
        sides[f"{case}|njit, nogil"] = numba.njit(nogil=True)(function)
        sides[f"{case}|njit"] = numba.njit(function)
        if function is not stencil:
            sides[f"{case}|from Python"] = function
    return sides


# ---- numba-mpi's ------------------------------------------------------------------------------------------


def of_numba_mpi() -> dict[str, Callable[..., Any]]:
    import numba_mpi as mpi

    @numba.njit
    def reduced(x, n):
        y = x.copy()
        for _ in range(n):
            mpi.allreduce(x, y, operator=mpi.Operator.SUM)

    @numba.njit
    def synchronised(x, n):
        for _ in range(n):
            mpi.barrier()

    @numba.njit
    def there_and_back(x, n):
        rank = mpi.rank()
        for _ in range(n):
            if rank == 0:
                mpi.send(x, dest=1)
                mpi.recv(x, source=1)
            else:
                mpi.recv(x, source=0)
                mpi.send(x, dest=0)

    @numba.njit
    def stencil(u, n):
        rank, size = mpi.rank(), mpi.size()
        v, change, largest = u.copy(), np.empty(1), np.empty(1)
        for step in range(n):
            if rank % 2 == 0:
                if rank + 1 < size:
                    mpi.send(u[-2], dest=rank + 1)
                    mpi.recv(u[-1], source=rank + 1)
                if rank > 0:
                    mpi.send(u[1], dest=rank - 1)
                    mpi.recv(u[0], source=rank - 1)
            else:
                mpi.recv(u[0], source=rank - 1)
                mpi.send(u[1], dest=rank - 1)
                if rank + 1 < size:
                    mpi.recv(u[-1], source=rank + 1)
                    mpi.send(u[-2], dest=rank + 1)
            change[0] = relax(u, v)
            u, v = v, u
            if step % 10 == 0:
                mpi.allreduce(change, largest, operator=mpi.Operator.MAX)

    made = [reduced, synchronised, there_and_back, stencil]
    return {f"{case}|numba-mpi": function for case, function in zip(CASES, made, strict=True)}


# ---- measuring --------------------------------------------------------------------------------------------


def measured(sides: dict[str, Callable[..., Any]], rounds: int, meet: Callable[[], Any]) -> list[float]:
    """Return each side's least microseconds per call.

    In each turn every side makes some calls.
    """
    times: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(rounds + 1):
        for name, function in sides.items():
            plain, calls = CASES[name.partition("|")[0]]
            x = array_for(plain)
            if turn == 0:
                function(x, 3)  # the first call compiles
            meet()
            began = perf_counter()
            function(x, calls)
            times[name].append((perf_counter() - began) / calls * 1e6)
    return [float(np.min(each[1:])) for each in times.values()]


def run_fastcoll(file: str, rounds: int) -> None:
    dist.init_process_group()
    sides = of_fastcoll()
    mine = np.array(measured(sides, rounds, dist.barrier))
    dist.all_reduce(mine, dist.ReduceOp.MAX)
    if dist.get_rank() == 0:
        tell(file, sides, mine)
    dist.destroy_process_group()


def run_numba_mpi(file: str, rounds: int) -> None:
    import numba_mpi as mpi

    sides = of_numba_mpi()
    mine = np.array(measured(sides, rounds, mpi.barrier))
    slowest = mine.copy()
    mpi.allreduce(mine, slowest, operator=mpi.Operator.MAX)
    if mpi.rank() == 0:
        tell(file, sides, slowest)


def tell(file: str, sides: dict[str, Callable[..., Any]], times: Any) -> None:
    Path(file).write_text(json.dumps(dict(zip(sides, times.tolist(), strict=True))))


def main() -> int:
    given = read_options(__doc__, 3, 20)
    if given.side:
        (run_fastcoll if given.side == "fastcoll" else run_numba_mpi)(given.file, given.turns)
        return 0
    os.environ |= {"OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"}
    found = beside(__file__, "numba_mpi", given.rounds, ["--turns", str(given.turns)])
    panels = {
        case: {column: found[f"{case}|{column}"] for column in COLUMNS if f"{case}|{column}" in found}
        for case in CASES
    }
    unit, others = "µs a call (a step)", ["numba-mpi"]
    save(given.results, "compiled-callers", page(given, found), panels, unit, others)
    return 0


def page(given: Namespace, found: Times) -> str:
    lines = [
        "# Calls from compiled code\n",
        f"- Machine: {describe(machine(len(os.sched_getaffinity(0))))}",
        "- Two ranks; microseconds a call, by the slowest rank; the least of all turns",
        f"- Command: `python bench/compiled_callers.py --rounds {given.rounds} --turns {given.turns}`\n",
        f"| | {' | '.join(COLUMNS)} | numba-mpi / njit, nogil |",
        "|---|" + "--:|" * (len(COLUMNS) + 1),
    ]
    for case in CASES:
        row = [found.get(f"{case}|{column}") for column in COLUMNS]
        ratio = row[-1] / row[0] if row[-1] else None
        cells = ["–" if us is None else f"{us:.3f}" for us in row]
        lines.append(f"| {case} | {' | '.join(cells)} | {'–' if ratio is None else f'{ratio:.1f}'} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
