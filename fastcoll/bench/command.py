"""The command line: read it, refuse what cannot be, and start workers or be one of a launcher's."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ..api.backends import parse_backend
from ..errors import UsageError
from ..launch.spawn import ProcessExitedError, ProcessRaisedError, spawn
from ..rendezvous.detect import Detected, detect
from . import overlap, start
from .cases import REDOPS, SHAPES, parse_operation, parse_redop
from .files import check_pictures, check_writable, default_picture, pictures
from .parsing import cores, dtype_name, listed, positive, read
from .places import DEVICES
from .sizes import parse_size, size_range
from .versus.command import Options as VersusOptions
from .versus.command import compare
from .versus.options import add_options, options_of
from .versus.plan import OPERATIONS
from .worker import FAILED, MISUSED, OK, Options, run_launched, run_spawned

_INTERRUPTED = 130
_EPILOG = f"""
operations: {", ".join(SHAPES)};
with --vs: {", ".join(OPERATIONS)}

time and p99 are microseconds a call: each rank times batches of calls and takes their median (99th
percentile); the slowest rank's is shown. all_reduce, reduce and broadcast work in place. Sizes, algbw and
busbw are those of nccl-tests. Under a launcher (RANK and WORLD_SIZE, mpirun, srun) its ranks are used.

With --vs the same calls are timed on fastcoll and on other libraries, in turn, beside the machine's own
limit. A size is then the bytes of the larger of input and output.

exit code: 0 all results right; 1 wrong results, or a rank failed; 2 the command line or a
launcher's environment cannot be, or none of the peers is there.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    parser = _parser()
    given = parser.parse_args(words)
    try:
        launched = detect(os.environ)
        if given.vs:
            return compare(_comparison(given, launched, words))
        ranks = _ranks(given.ranks, launched)
        if given.start:
            return _time_starts(ranks, launched)
        if given.tune:
            return _tune(ranks, launched, words)
        if given.overlap:
            return _overlap(ranks, launched)
        options = _options(given, ranks, words)
        if launched.world_size is not None:
            return run_launched(options, launched.local_rank or 0)
    except UsageError as error:
        parser.error(str(error))
    return _run_own_workers(options, ranks)


def _time_starts(ranks: int, launched: Detected) -> int:
    if launched.world_size is not None:
        raise UsageError(f"--start starts its own ranks, but {launched.source} has started this one")
    start.run(ranks)
    return OK


def _tune(ranks: int, launched: Detected, words: Sequence[str]) -> int:
    from . import tune  # brings Numba, which the command needs for nothing else

    if ranks < 3:
        raise UsageError("--tune compares ways that differ from 3 ranks on; give -n, as in --tune -n 4")
    command = shlex.join(["python", "-m", "fastcoll.bench", *words])
    if launched.world_size is not None:
        tune.run_launched(command)
        return OK
    return _spawn(tune.run_spawned, ranks, lambda meeting: (ranks, meeting, command))


def _overlap(ranks: int, launched: Detected) -> int:
    if launched.world_size is not None:
        overlap.run_launched()
        return OK
    return _spawn(overlap.run_spawned, ranks, lambda meeting: (ranks, meeting))


def _run_own_workers(options: Options, ranks: int) -> int:
    return _spawn(run_spawned, ranks, lambda meeting: (options, ranks, meeting))


def _spawn(worker: Callable[..., None], ranks: int, arguments: Callable[[str], tuple[Any, ...]]) -> int:
    """Run workers, which meet at the URL given to `arguments`."""
    with tempfile.TemporaryDirectory(prefix="fastcoll-bench-") as folder:
        try:
            spawn(worker, arguments(f"file://{folder}/meeting"), ranks)
        except (ProcessExitedError, ProcessRaisedError) as error:
            code = getattr(error, "exit_code", None)
            if code in (FAILED, MISUSED):  # rank 0 has said why
                return int(code)
            print(error, file=sys.stderr)
            return FAILED
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            return _INTERRUPTED
    return OK


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m fastcoll.bench",
        description="Time and verify collective operations.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("operations", nargs="*", metavar="operation", help="default: all")
    add("-n", "--ranks", type=int, help="processes to start (default: 2)")
    what = parser.add_argument_group("what is measured")
    _add_what(what.add_argument)
    how = parser.add_argument_group("how")
    _add_how(how.add_argument)
    add_options(parser.add_argument_group("compared with others").add_argument)
    other = parser.add_argument_group("instead of all that").add_argument
    other("--start", action="store_true", help="time how ranks start, with compiled kernels on the disk")
    other("--overlap", action="store_true", help="time asynchronous operations beside a computation")
    other("--tune", action="store_true", help="find this machine's thresholds for -n ranks, and keep them")
    results = parser.add_argument_group("results")
    for kind, meaning in (("json", "the whole run"), ("csv", "the rows")):
        results.add_argument(f"--{kind}", type=Path, metavar="FILE", help=f"also write {meaning}")
    results.add_argument(
        "--plot",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="also draw, e.g. out.png; without an ending PNG and SVG; repeatable; a run of all operations draws "
        "fastcoll-bench.png",
    )
    return parser


def _add_what(add: Callable[..., Any]) -> None:
    add("-b", "--begin", type=read(parse_size), metavar="SIZE", help="smallest size (default: 8)")
    add("-e", "--end", type=read(parse_size), metavar="SIZE", help="largest (default: 64M)")
    add("-f", "--factor", type=float, help="between sizes (default: 2)")
    add("--sizes", type=listed(parse_size), metavar="SIZES", help="these instead: a,b,...")
    add(
        "-d",
        "--dtype",
        type=listed(dtype_name),
        default=["float32"],
        help="one or several, a,b (default: float32)",
    )
    add(
        "-o",
        "--op",
        type=listed(parse_redop),
        default=["sum"],
        help=f"one or several of {', '.join(REDOPS)} (default: sum)",
    )
    add("-r", "--root", type=int, default=0, help="of the rooted operations (default: 0)")


def _add_how(add: Callable[..., Any]) -> None:
    add("--backend", default="auto", help="default: auto")
    add(
        "--device",
        choices=DEVICES,
        default="cpu",
        help="where the arrays lie (default: cpu); cuda needs CuPy",
    )
    add(
        "--seconds",
        type=positive(float),
        help="to fill with calls for each row (default: 0.15); with --vs: at most (default: 5)",
    )
    add("--iters", type=positive(int), metavar="N", help="calls a row, instead of --seconds")
    add(
        "-w",
        "--warmup",
        type=positive(int),
        default=5,
        metavar="N",
        help="calls before the timed ones (default: 5)",
    )
    add("-c", "--check", type=int, choices=(0, 1), default=1, help="verify the results (default: 1)")
    add(
        "--cores",
        "--pin",
        type=read(cores),
        nargs="?",
        const=sorted(os.sched_getaffinity(0)),
        metavar="CORES",
        help="pin each rank to a core, of these in turn (a,b,...) or of all usable ones; or none of them: none "
        "(default: none; with --vs: all usable ones)",
    )


def _comparison(given: argparse.Namespace, launched: Detected, words: list[str]) -> VersusOptions:
    if launched.world_size is not None:
        raise UsageError(
            f"--vs starts its own ranks, but {launched.source} has started this one; run it without"
        )
    _check_cores(given.cores or [])
    return options_of(given, words)


def _options(given: argparse.Namespace, ranks: int, words: list[str]) -> Options:
    if not 0 <= given.root < ranks:
        raise UsageError(f"--root is {given.root}; the ranks are 0 to {ranks - 1}")
    if given.peer_python or given.install_peers or given.results or given.name:
        raise UsageError("--peer-python, --install-peers, --results and --name belong to --vs")
    _check_cores(given.cores or [])
    _check_files(given)
    parse_backend(given.backend)
    return Options(
        operations=_operations(given),
        dtypes=given.dtype,
        redops=given.op,
        sizes=given.sizes or size_range(*_range(given)),
        root=given.root,
        backend=given.backend,
        device=given.device,
        seconds=given.seconds or 0.15,
        iterations=given.iters,
        warmup=given.warmup,
        check=bool(given.check),
        pin=given.cores or [],
        json=given.json,
        csv=given.csv,
        plots=pictures(given.plot) or ([] if given.operations else default_picture()),
        command=["python", "-m", "fastcoll.bench", *map(shlex.quote, words)],
    )


def _operations(given: argparse.Namespace) -> list[str]:
    possible = [name for name in SHAPES if given.device == "cpu" or name != "update_symmetric_all_reduce"]
    operations = [parse_operation(name) for name in given.operations]
    for name in operations:
        if name not in possible:
            raise UsageError(f"{name} is for host memory; leave --device {given.device} out")
    return operations or possible


def _range(given: argparse.Namespace) -> tuple[int, int, float]:
    begin = 8 if given.begin is None else given.begin
    end = 64 << 20 if given.end is None else given.end
    return begin, end, 2.0 if given.factor is None else given.factor


def _check_cores(wanted: Sequence[int]) -> None:
    if unusable := set(wanted) - os.sched_getaffinity(0):
        raise UsageError(f"--cores: this process may not use core {min(unusable)}")


def _check_files(given: argparse.Namespace) -> None:
    for path in (given.json, given.csv):
        if path is not None:
            check_writable(path)
    check_pictures(pictures(given.plot))


def _ranks(asked: int | None, launched: Detected) -> int:
    if launched.world_size is None:
        ranks: int = 2 if asked is None else asked
        if ranks < 1:
            raise UsageError(f"-n is {ranks}; there must be at least one rank")
        return ranks
    if asked not in (None, launched.world_size):
        raise UsageError(
            f"-n is {asked}, but {launched.source} says {launched.world_size} ranks; leave -n out"
        )
    return launched.world_size
