"""`python -m fastcoll.warmup`: compile now what programs would compile at their first use.

The results go to the directory from which every process of this user loads compiled code: the user's cache directory,
or NUMBA_CACHE_DIR. Without NUMBA_CACHE_DIR they are also copied into the package, if that is writable, for its other
users. Run this command when you build a container image, and before large jobs.
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

from .arrays.dtypes import parse_dtype
from .bench.cases import positive
from .core.reduce_op import ReduceOp
from .errors import FastcollError, UsageError
from .launch.lifeline import die_with_parent
from .system.standard_streams import run_command

if TYPE_CHECKING:
    from .compiler.jit import Entry

_ALL = "bool,int8,int16,int32,int64,uint8,uint16,uint32,uint64,float16,bfloat16,float32,float64,complex64,complex128"
_REDUCTIONS = "reductions of "
_SHARED_ARRAYS = "shared_arrays"


class _Made(NamedTuple):
    name: str
    seconds: float
    new: bool
    unkept: str  # why the result could not be written to the disk; "": it was


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return the exit code."""
    about = (__doc__ or "").partition(": ")[2]
    parser = argparse.ArgumentParser(prog="python -m fastcoll.warmup", description=about)
    add, cores = parser.add_argument, len(os.sched_getaffinity(0))
    reduced = "compile reductions of these dtypes: a,b,... or all (default: float32)"
    add("--dtypes", default="float32", help=reduced)
    add("--ops", help="compile these operations: a,b,... (default: all), and always the reductions")
    add("--njit", action="store_true", help="also compile what njit functions and JAX programs call")
    add("-j", "--processes", type=positive(int), default=min(4, cores), help="default: 1 per core, at most 4")
    given = parser.parse_args(arguments)
    logger = logging.getLogger("fastcoll")
    level = logger.level
    logger.setLevel(logging.ERROR)  # this command reports compilations itself
    try:
        dtypes = _ALL if given.dtypes == "all" else given.dtypes
        reductions = [_REDUCTIONS + parse_dtype(name).name for name in dtypes.split(",")]
        known = [*all_entries(), _SHARED_ARRAYS]
        wanted = known if given.ops is None else given.ops.split(",")
        if unknown := set(wanted) - set(known):
            raise UsageError(f"there is no operation {min(unknown)!r}; known: {', '.join(known)}")
        called = _for_compiled_callers() if given.njit else ()
        return _warm_up([*(name for name in known if name in wanted), *reductions, *called], given.processes)
    except FastcollError as error:
        parser.error(str(error))
    finally:
        logger.setLevel(level)


def all_entries() -> dict[str, Entry]:
    """Return all entries (compiled functions that Python calls) by name; those of TCP and MPI are named `tcp.NAME`."""
    from .net.mpi.compiled import ENTRIES as MPI
    from .net.tcp.entries import ENTRIES as TCP
    from .shm.backend import ENTRIES as SHM

    return {entry.name: entry for entry in SHM} | {f"tcp.{entry.name}": entry for entry in (*TCP, *MPI)}


def _for_compiled_callers() -> dict[str, Callable[[], object]]:
    """Return, by name, functions that each compile or load one function that compiled callers (njit, JAX) call."""
    from .kernels.c_entries import c_entry_address
    from .kernels.call_frames import handler_address
    from .shm.callers import MESSAGES, native_call

    makers: dict[str, Callable[[], object]] = {
        f"njit.{name}": partial(native_call, op) for op, name in MESSAGES.items()
    }
    return {"njit.c_entry": c_entry_address, "jax.c_entry": handler_address} | makers


def _warm_up(todo: Sequence[str], processes: int) -> int:
    """Compile the kernels and return the exit code."""
    from .compiler.cache import copy_for_others

    began, new, unkept = time.perf_counter(), 0, ""
    print(f"{len(todo)} kernels: what is not on the disk is compiled, in {processes} processes", flush=True)
    first = _make(todo[0])  # before the fork, so that the processes inherit the imported modules
    fork = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(processes, fork, initializer=_end_early, initargs=(os.getpid(),)) as pool:
        later = as_completed([pool.submit(_make, name) for name in todo[1:]])
        for number, one in enumerate(chain([first], (future.result() for future in later)), 1):
            unkept = unkept or one.unkept
            if one.new:
                new += 1
                print(f"{number:3}/{len(todo)} {one.name:25} {one.seconds:6.2f} s", flush=True)
    copy_for_others()
    took, old = time.perf_counter() - began, len(todo) - new
    there = f"; {old} were there" if old else ""
    print(f"{new} kernels compiled in {took:.1f} s{there}" if new else f"all {old} kernels are there")
    if unkept:
        print(f"nothing is done ahead: {unkept}", file=sys.stderr)
    return 1 if unkept else 0


def _end_early(parent: int) -> None:
    """Let Ctrl-C end this process while it compiles, and end it with its parent."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    die_with_parent(parent)


def _make(name: str) -> _Made:
    from .compiler.cache import KernelCache
    from .kernels.allocator import functions
    from .kernels.reduce import reducer

    before, began = KernelCache.compiled, time.perf_counter()
    if name.startswith(_REDUCTIONS):
        reducer(ReduceOp.SUM, parse_dtype(name.removeprefix(_REDUCTIONS)))
    elif name == _SHARED_ARRAYS:
        functions()
    elif (make := _for_compiled_callers().get(name)) is not None:
        make()
    else:
        all_entries()[name].compile()
    return _Made(name, time.perf_counter() - began, KernelCache.compiled > before, KernelCache.unkept)


if __name__ == "__main__":
    sys.exit(run_command(main))
