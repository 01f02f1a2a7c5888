"""Nonblocking calls beside MPIs: all_reduce and messages with their waits, between two ranks of one node.

    python bench/nonblocking.py --mpi "Open MPI=/path/to/python" --mpi "MPICH=/path/to/python"
    python bench/nonblocking.py --mpi ... --results bench/results

Each MPI is given as the Python of an environment that has NumPy, mpi4py and the MPI's wheel. fastcoll and the MPIs run
in turn, each in two new processes, pinned to two cores. A time is the least of all rounds of the slower rank's least
batch, in microseconds per call, with Python's time. A second table has fastcoll's other operations.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from datetime import date
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

SIZES = {8: 2000, 4 << 10: 2000, 64 << 10: 400, 1 << 20: 60}  # bytes, and calls a batch
CALLS = {
    "blocking": "all_reduce",
    "nonblocking": "all_reduce, nonblocking, and its wait",
    "twenty": "the same, twenty under way, each",
    "messages": "isend, irecv and both waits",
}
OTHERS = ("broadcast", "reduce", "reduce_scatter", "all_gather", "gather", "scatter", "all_to_all", "barrier")
_BATCHES, _TWENTY = 9, 20
_MARK = "TIMES "

Batch = Callable[[int], None]
Call = Callable[[bool], Any]


class Fastcoll:
    def __init__(self) -> None:
        import fastcoll

        self.dist = fastcoll
        fastcoll.init_process_group()
        self.rank, self.library = fastcoll.get_rank(), f"fastcoll {fastcoll.__version__}"
        self.barrier = fastcoll.barrier

    def slowest(self, seconds: float) -> float:
        x = np.array([seconds])
        self.dist.all_reduce(x, self.dist.ReduceOp.MAX)
        return float(x[0])

    def batches(self, xs: list[Any], y: Any) -> dict[str, Batch]:
        """Return functions that make that many calls; `xs` are twenty arrays, `y` one more."""
        d, x, peer = self.dist, xs[0], 1 - self.rank
        all_reduce, isend, irecv = d.all_reduce, d.isend, d.irecv

        def blocking(n: int) -> None:
            for _ in range(n):
                all_reduce(x)

        def nonblocking(n: int) -> None:
            for _ in range(n):
                all_reduce(x, async_op=True).wait()

        def twenty(n: int) -> None:
            for _ in range(n // _TWENTY):
                for work in [all_reduce(x, async_op=True) for x in xs]:
                    work.wait()

        def messages(n: int) -> None:
            for _ in range(n):
                send, receive = isend(x, peer), irecv(y, peer)
                send.wait()
                receive.wait()

        found = {"blocking": blocking, "nonblocking": nonblocking, "twenty": twenty, "messages": messages}
        for name, call in self._others(x, y).items():
            found[name], found[f"{name}, nonblocking"] = _repeated(call, False), _repeated(call, True)
        return found

    def _others(self, x: Any, y: Any) -> dict[str, Call]:
        """Return the other operations, as functions of `async_op`; each moves x, or as many bytes in all."""
        d, halves, on_root = self.dist, np.split(y, 2), self.rank == 0
        half = np.zeros_like(halves[0])
        calls: list[Call] = [
            lambda later: d.broadcast(x, 0, async_op=later),
            lambda later: d.reduce(x, 0, async_op=later),
            lambda later: d.reduce_scatter_tensor(half, x, async_op=later),
            lambda later: d.all_gather_into_tensor(y, half, async_op=later),
            lambda later: d.gather(half, halves if on_root else None, 0, async_op=later),
            lambda later: d.scatter(half, halves if on_root else None, 0, async_op=later),
            lambda later: d.all_to_all_single(y, x, async_op=later),
            lambda later: d.barrier(async_op=later),
        ]
        return dict(zip(OTHERS, calls, strict=True))


def _repeated(call: Call, later: bool) -> Batch:
    def repeat(n: int) -> None:
        for _ in range(n):
            work = call(later)
            if later:
                work.wait()

    return repeat


class Mpi:
    def __init__(self) -> None:
        from mpi4py import MPI

        self.mpi, self.world = MPI, MPI.COMM_WORLD
        self.rank, self.barrier = self.world.rank, self.world.Barrier
        self.library = MPI.Get_library_version().partition(", package")[0].splitlines()[0].strip(" \0")

    def slowest(self, seconds: float) -> float:
        return float(self.world.allreduce(seconds, self.mpi.MAX))

    def batches(self, xs: list[Any], y: Any) -> dict[str, Batch]:
        """See Fastcoll."""
        place, op, w, peer = self.mpi.IN_PLACE, self.mpi.SUM, self.world, 1 - self.rank
        given = [[x, self.mpi.FLOAT] for x in xs]
        x, out, Allreduce, Iallreduce = given[0], [y, self.mpi.FLOAT], w.Allreduce, w.Iallreduce

        def blocking(n: int) -> None:
            for _ in range(n):
                Allreduce(place, x, op)

        def nonblocking(n: int) -> None:
            for _ in range(n):
                Iallreduce(place, x, op).Wait()

        def twenty(n: int) -> None:
            for _ in range(n // _TWENTY):
                for request in [Iallreduce(place, x, op) for x in given]:
                    request.Wait()

        def messages(n: int) -> None:
            for _ in range(n):
                send, receive = w.Isend(x, peer), w.Irecv(out, peer)
                send.Wait()
                receive.Wait()

        return {"blocking": blocking, "nonblocking": nonblocking, "twenty": twenty, "messages": messages}


def measure(side: Fastcoll | Mpi) -> None:
    """Time all cells on this rank; rank 0 prints them."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[side.rank % len(cores)]})
    times = {}
    for nbytes, calls in SIZES.items():
        xs = [np.zeros(nbytes // 4, np.float32) for _ in range(_TWENTY)]
        for name, batch in side.batches(xs, np.zeros_like(xs[0])).items():
            batch(max(_TWENTY, calls // 10))
            least = float("inf")
            for _ in range(_BATCHES):
                side.barrier()
                start = perf_counter()
                batch(calls)
                least = min(least, (perf_counter() - start) / calls)
            times[f"{name} {nbytes}"] = 1e6 * side.slowest(least)
    if side.rank == 0:
        print(f"{_MARK}{json.dumps([side.library, times])}", flush=True)


def run(label: str, python: str, allow_root: bool) -> tuple[str, dict[str, float]]:
    """Run one side in two processes; return its library's name and its times."""
    here = [python, str(Path(__file__).resolve()), "--side"]
    if label == "fastcoll":
        command = [python, "-m", "fastcoll.launch", "--nproc_per_node", "2", *here[1:], "fastcoll"]
    else:
        root = ["--allow-run-as-root", "--bind-to", "none"] if allow_root else []
        command = [str(Path(python).with_name("mpiexec")), *root, "-n", "2", *here, "mpi"]
    environment = {**os.environ, "I_MPI_PIN": "0", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment)
    lines = [line.partition(_MARK)[2] for line in done.stdout.splitlines() if _MARK in line]
    if done.returncode or not lines:
        raise SystemExit(f"{shlex.join(command)} failed: {done.stderr[-2000:]}")
    library, times = json.loads(lines[0])
    return library, times


def table(found: dict[str, dict[str, float]]) -> list[str]:
    """Return the lines of the table of all calls, libraries and sizes."""
    sizes = [f"{nbytes} bytes" for nbytes in SIZES]
    rows = [f"| us a call | library | {' | '.join(sizes)} |", f"|---|---|{'--:|' * len(sizes)}"]
    for name, label in CALLS.items():
        for side, times in found.items():
            cells = [f"{times[f'{name} {nbytes}']:.2f}" for nbytes in SIZES]
            rows.append(f"| {label} | {side} | {' | '.join(cells)} |")
    return rows


def other_operations(times: dict[str, float]) -> list[str]:
    """Return the lines of the table of fastcoll's other operations."""
    sizes = [f"{nbytes} bytes" for nbytes in SIZES]
    rows = [f"| us blocking; nonblocking | {' | '.join(sizes)} |", f"|---|{'--:|' * len(sizes)}"]
    for name in OTHERS:
        pairs = [(times[f"{name} {nbytes}"], times[f"{name}, nonblocking {nbytes}"]) for nbytes in SIZES]
        cells = [f"{now:.2f}; {later:.2f} ({later / now:.2f})" for now, later in pairs]
        rows.append(f"| {name} | {' | '.join(cells)} |")
    return rows


def missed(found: dict[str, dict[str, float]]) -> list[str]:
    """Return a line for each cell in which the best MPI is ahead of fastcoll."""
    lines = []
    for name, label in CALLS.items():
        for nbytes in SIZES:
            cell = f"{name} {nbytes}"
            others = {times[cell]: side for side, times in found.items() if side != "fastcoll"}
            if others and min(others) < found["fastcoll"][cell]:
                ours, best = found["fastcoll"][cell], min(others)
                lines.append(f"- {label}, {nbytes} bytes: {ours:.2f} us, {others[best]} {best:.2f}")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mpi", action="append", default=[], metavar="NAME=PYTHON")
    parser.add_argument("--rounds", type=int, default=4, help="of each side in a run (default %(default)s)")
    parser.add_argument("--runs", type=int, default=2, help="each with a table (default %(default)s)")
    parser.add_argument("--results", help="a folder for the page")
    parser.add_argument("--side", choices=("fastcoll", "mpi"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        measure(Fastcoll() if options.side == "fastcoll" else Mpi())
        return
    sides = {"fastcoll": sys.executable} | dict(text.split("=", 1) for text in options.mpi)
    libraries: dict[str, str] = {}
    page = []
    for number in range(options.runs):
        found: dict[str, dict[str, float]] = {}
        for _ in range(options.rounds):
            for label, python in sides.items():
                libraries[label], times = run(label, python, allow_root="open" in label.lower())
                least = found.setdefault(label, times)
                for cell, time in times.items():
                    least[cell] = min(least[cell], time)
        ahead = missed(found) or ["- none"]
        page += [
            "",
            f"## Run {number + 1}",
            "",
            *table(found),
            "",
            "Cells in which an MPI is ahead:",
            "",
            *ahead,
            "",
            "Other operations of fastcoll, each with its wait (nonblocking / blocking):",
            "",
            *other_operations(found["fastcoll"]),
        ]
    print("\n".join(page))
    if options.results:
        save(Path(options.results), libraries, options.rounds, page)


def save(folder: Path, libraries: dict[str, str], rounds: int, page: list[str]) -> None:
    """Write the page, with what it was measured on."""
    from fastcoll.bench.results import describe, machine

    mpis = [f"--mpi={label}=PYTHON" for label in libraries if label != "fastcoll"]
    command = shlex.join(["python", "bench/nonblocking.py", *mpis, f"--rounds={rounds}"])
    head = [
        f"# Nonblocking calls, {date.today():%d %B %Y}",
        "",
        f"`{command}`, two ranks, each pinned to a core.",
        "Times are microseconds a call, with Python's time: the least of all rounds of the slower rank's least batch.",
        "",
        f"- Machine: {describe(machine(len(os.sched_getaffinity(0))))}",
        *(f"- {library}" for library in libraries.values()),
    ]
    (folder / f"{date.today():%Y-%m-%d}-nonblocking.md").write_text("\n".join([*head, *page, ""]))


if __name__ == "__main__":
    main()
