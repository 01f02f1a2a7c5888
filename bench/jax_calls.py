"""What a collective costs inside JAX's programs: fastcoll.jax with a token and without, io_callback, and mpi4jax.

    python bench/jax_calls.py                           # two ranks, less than a minute; prints a page
    mpiexec -n 2 python bench/jax_calls.py --mpi4jax    # its row, where it can be built: it needs an MPI's mpicc

Two ranks, 8 bytes (two float32). "One call" is a jitted function whose result is waited for; "each of 1,000" a call in
`fori_loop`. Nobody is pinned, as XLA's threads would be as well. All ways are measured in turn, in each of several
rounds; a time is the slower rank's, and the smallest counts.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import jax
import jax.experimental
import numpy as np

import fastcoll as dist
from fastcoll.bench.results import describe, machine

LOOP, CALLS, ROUNDS = 1000, 50, 15

Program = Callable[[Any, Any], tuple[Any, Any]]


def ways() -> dict[str, Program]:
    """One call in each way: (array, token) in and out."""
    import fastcoll.jax as fj

    def ask(x: Any) -> Any:
        y = np.array(x)
        dist.all_reduce(y, dist.ReduceOp.MAX)
        return y

    def called_back(x: Any, token: Any) -> tuple[Any, Any]:
        return jax.experimental.io_callback(
            ask, jax.ShapeDtypeStruct(x.shape, x.dtype), x, ordered=True
        ), token

    return {
        "no collective": lambda x, token: (jax.numpy.maximum(x, token), token),
        "fastcoll.jax, with a token": lambda x, token: fj.all_reduce(x, dist.ReduceOp.MAX, token=token),
        "fastcoll.jax, without": lambda x, token: (fj.all_reduce(x, dist.ReduceOp.MAX), token),
        "io_callback(ordered=True) around fastcoll's": called_back,
    }


def mpi4jax_ways() -> dict[str, Program]:
    """As `ways`."""
    import mpi4jax
    from mpi4py import MPI

    return {"mpi4jax": lambda x, token: (mpi4jax.allreduce(x, op=MPI.MAX), token)}


def measure(
    programs: dict[str, Program], barrier: Callable[[], Any], slowest: Callable[[float], float]
) -> dict[str, tuple[float, float]]:
    """Microseconds of one call, and of each of 1,000."""
    x, token = jax.numpy.ones(2), jax.numpy.zeros((), jax.numpy.uint32)
    cases = {}
    for name, program in programs.items():

        def loop(x: Any, token: Any, program: Program = program) -> Any:
            return jax.lax.fori_loop(0, LOOP, lambda _, both: program(*both), (x, token))

        cases[name] = (jax.jit(program), CALLS, 1), (jax.jit(loop), 1, LOOP)
    best = {name: [float("inf")] * 2 for name in cases}
    for number in range(ROUNDS + 1):
        for name, pair in cases.items():
            for k, (jitted, calls, each) in enumerate(pair):
                barrier()
                began = perf_counter()
                for _ in range(calls):
                    jax.block_until_ready(jitted(x, token))
                taken = slowest((perf_counter() - began) / calls / each * 1e6)
                if number:  # the first compiles
                    best[name][k] = min(best[name][k], taken)
    return {name: (one, many) for name, (one, many) in best.items()}


def rank_of_fastcoll(rank: int, folder: str) -> None:
    dist.init_process_group(init_method=f"file://{folder}/store", rank=rank, world_size=2)

    def slowest(seconds: float) -> float:
        taken = np.array([seconds])
        dist.all_reduce(taken, dist.ReduceOp.MAX)
        return float(taken[0])

    found = measure(ways(), dist.barrier, slowest)
    if rank == 0:
        print_page(found)
    dist.destroy_process_group()


def print_page(found: dict[str, tuple[float, float]]) -> None:
    print("# Collectives inside JAX's programs\n")
    print(f"{describe(machine(len(os.sched_getaffinity(0))))}; JAX {jax.__version__}\n")
    print(f"`{Path(sys.argv[0]).name}`: two ranks, `all_reduce` of 8 B, us\n")
    print(
        "| | one jitted call | over one without a collective | each of 1,000 in `fori_loop` |\n|---|--:|--:|--:|"
    )
    nothing = found.get("no collective", (0.0, 0.0))[0]
    for name, (one, many) in found.items():
        over = f"{one - nothing:.1f}" if nothing and name != "no collective" else ""
        print(f"| {name} | {one:.1f} | {over} | {many:.2f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mpi4jax", action="store_true", help="measure it, under mpiexec")
    if parser.parse_args().mpi4jax:
        from mpi4py import MPI

        world = MPI.COMM_WORLD
        found = measure(mpi4jax_ways(), world.barrier, lambda taken: world.allreduce(taken, MPI.MAX))
        if world.rank == 0:
            print_page(found)
        return
    with tempfile.TemporaryDirectory() as folder:
        dist.spawn(rank_of_fastcoll, (folder,), nprocs=2)


if __name__ == "__main__":
    main()
