"""The cost of a collective inside JAX programs: fastcoll.jax with and without a token, io_callback, and mpi4jax.

    python bench/jax_calls.py                           # two ranks, less than a minute; prints a page
    python bench/jax_calls.py --results bench/results

There are two ranks; they all_reduce 8 bytes (two float32). "One jitted call" is a call of a jitted function and the
wait for its result; "each of 1,000" is a call in `fori_loop`; a step is one of
examples/compiled/logistic_regression.py, with the all_reduce of each side. A *side* is a library and the way of calling
it. No rank is pinned, because that would pin XLA's threads too. fastcoll's sides run in turn in the same two processes.
If mpi4jax, an MPI and its mpiexec are installed, mpi4jax runs in two other processes, between the rounds of fastcoll's.
A rank's time is its least over all turns; the table has the slower rank's.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from time import perf_counter
from types import SimpleNamespace
from typing import Any

import jax
import jax.experimental
import numpy as np
from compiled_pages import Times, beside, read_options, save

import fastcoll as dist
import fastcoll.jax as fj
from fastcoll.bench.results import describe, machine

LOOP, CALLS = 1000, 50
CASES = ("one jitted call", "each of 1,000 in `fori_loop`", "a step of logistic regression")
NOTHING, TOKEN, ORDERED, ASKED = (
    "no collective",
    "fastcoll.jax, token",
    "fastcoll.jax",
    "io_callback, ordered",
)
MPI4JAX = "mpi4jax"
SIDES = (NOTHING, TOKEN, ORDERED, ASKED, MPI4JAX)

Reduce = Callable[[Any, Any], Any]
Program = tuple[Callable[[], Any], int, int]
"""A function to call, how often it is called in a turn, and how many collective calls or steps it makes each time."""


# ---- sides: how each reduces an array, by MAX or SUM, without a token ----------------------------------------


def asked(x: Any, op: Any) -> Any:
    """Reduce by a Python callback.

    The derivative is that of the sum in fastcoll and mpi4jax.
    """

    def ask(x: Any) -> Any:
        y = np.array(x)
        dist.all_reduce(y, op)
        return y

    still = jax.lax.stop_gradient(x)
    like = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return x + (jax.experimental.io_callback(ask, like, still, ordered=True) - still)


def of_mpi4jax(x: Any, op: Any) -> Any:
    import mpi4jax
    from mpi4py import MPI

    return mpi4jax.allreduce(x, op=MPI.SUM if op == dist.ReduceOp.SUM else MPI.MAX)


# ---- cases --------------------------------------------------------------------------------------------------


def calls(call: Callable[[Any, Any], Any]) -> list[Program]:
    """Return a program with one call and one with a loop of calls.

    Args:
        call: maps an array and a token to the reduced array and the next token.
    """
    x, token = jax.numpy.ones(2), fj.create_token()
    one = jax.jit(call)
    many = jax.jit(lambda *both: jax.lax.fori_loop(0, LOOP, lambda _, both: call(*both), both))
    return [(lambda: one(x, token), CALLS, 1), (lambda: many(x, token), 1, LOOP)]


def training(reduce: Reduce, rank: int, steps: int = 300) -> Program:
    """Return the program of the example, with `reduce` instead of its all_reduce."""
    path = Path(__file__).parents[1] / "examples" / "compiled" / "logistic_regression.py"
    spec = spec_from_file_location("example", path)
    assert spec is not None
    assert spec.loader is not None
    example: Any = module_from_spec(spec)
    spec.loader.exec_module(example)
    example.fj = SimpleNamespace(all_reduce=lambda x: reduce(x, dist.ReduceOp.SUM))
    example.dist = SimpleNamespace(get_rank=lambda: rank, get_world_size=lambda: 2)
    x, odd, total = example.my_images()
    w, rates = jax.numpy.zeros(x.shape[1]), jax.numpy.full(steps, 1.0)
    return lambda: example.train(w, x, odd, total, rates), 1, steps


def programs(rank: int, side: str) -> dict[str, Program]:
    """Return a side's programs, with the keys f"{case}|{side}"."""
    highest = dist.ReduceOp.MAX

    def without(reduce: Reduce) -> Callable[[Any, Any], Any]:
        return lambda x, token: (reduce(x, highest), token)

    made = {MPI4JAX: [*calls(without(of_mpi4jax)), training(of_mpi4jax, rank)]} if side == MPI4JAX else {
        NOTHING: calls(lambda x, token: (jax.numpy.maximum(x, token), token)),
        TOKEN: calls(lambda x, token: fj.all_reduce(x, highest, token=token)),
        ORDERED: [*calls(without(fj.all_reduce)), training(fj.all_reduce, rank)],
        ASKED: [*calls(without(asked)), training(asked, rank)],
    }  # fmt: skip
    return {
        f"{case}|{name}": each for name, row in made.items() for case, each in zip(CASES, row, strict=False)
    }


# ---- measuring ----------------------------------------------------------------------------------------------


def measured(cases: dict[str, Program], turns: int, meet: Callable[[], Any]) -> Times:
    """Return this rank's least microseconds per call, by the keys of `cases`."""
    best = dict.fromkeys(cases, float("inf"))
    for turn in range(turns + 1):
        for name, (program, repeated, each) in cases.items():
            meet()
            began = perf_counter()
            for _ in range(repeated):
                jax.block_until_ready(program())
            if turn:  # the first call compiles
                best[name] = min(best[name], (perf_counter() - began) / repeated / each * 1e6)
    return best


def run_side(side: str, file: str, turns: int) -> None:
    if side == MPI4JAX:
        from mpi4py import MPI

        world = MPI.COMM_WORLD
        rank, found = world.rank, measured(programs(world.rank, side), turns, world.barrier)
        everybody = world.allgather(found)
    else:
        dist.init_process_group()
        rank, everybody = dist.get_rank(), [{}, {}]
        dist.all_gather_object(everybody, measured(programs(rank, side), turns, dist.barrier))
    if rank == 0:
        slowest = {name: max(found[name] for found in everybody) for name in everybody[0]}
        Path(file).write_text(json.dumps(slowest))
    if side != MPI4JAX:
        dist.destroy_process_group()


def page(given: argparse.Namespace, found: Times) -> str:
    lines = [
        "# Collectives inside JAX's programs\n",
        f"- Machine: {describe(machine(len(os.sched_getaffinity(0))))}; JAX {jax.__version__}",
        "- Two ranks; `all_reduce` of 8 B, and of 4 B and 260 B in the example; microseconds, by the slower rank",
        f"- Command: `python bench/jax_calls.py --rounds {given.rounds} --turns {given.turns}`\n",
        f"| | {CASES[0]} | over one without a collective | {' | '.join(CASES[1:])} |",
        "|---|" + "--:|" * (len(CASES) + 1),
    ]
    for side in SIDES:
        times = [found.get(f"{case}|{side}") for case in CASES]
        over = None if times[0] is None or side == NOTHING else times[0] - found[f"{CASES[0]}|{NOTHING}"]
        cells = ["–" if us is None else f"{us:.2f}" for us in (times[0], over, *times[1:])]
        lines.append(f"| {side} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> int:
    given = read_options(__doc__, 2, 12)
    if given.side:
        run_side(given.side, given.file, given.turns)
        return 0
    found = beside(__file__, MPI4JAX, given.rounds, ["--turns", str(given.turns)])
    panels = {
        case: {side: found[f"{case}|{side}"] for side in SIDES if f"{case}|{side}" in found} for case in CASES
    }
    save(given.results, "jax-calls", page(given, found), panels, "µs a call (a step)", [ASKED, MPI4JAX])
    return 0


if __name__ == "__main__":
    sys.exit(main())
