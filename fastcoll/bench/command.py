"""The command line: read it, refuse what cannot be, and start workers or be one of a launcher's."""

from __future__ import annotations

import argparse
import importlib.util
import math
import os
import shlex
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ..backends import parse_backend
from ..errors import UnavailableError, UsageError
from ..launch.spawn import ProcessExitedError, ProcessRaisedError, spawn
from ..rendezvous.detect import Detected, detect
from .cases import REDOPS, SHAPES, parse_dtype, parse_operation, parse_redop
from .plot import PICTURES
from .sizes import parse_size, size_range
from .worker import FAILED, MISUSED, OK, Options, run_launched, run_spawned

_INTERRUPTED = 130
_EPILOG = f"""
operations: {", ".join(SHAPES)}

time and p99 are microseconds a call: each rank times batches of calls and takes their median (99th
percentile); the slowest rank's is shown. all_reduce, reduce and broadcast work in place. Sizes, algbw and
busbw are those of nccl-tests. Under a launcher (RANK and WORLD_SIZE, mpirun, srun) its ranks are used.

exit code: 0 all results right; 1 wrong results, or a rank failed; 2 the command line or a
launcher's environment cannot be.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    parser = _parser()
    given = parser.parse_args(words)
    try:
        launched = detect(os.environ)
        ranks = _ranks(given.ranks, launched)
        options = _options(given, ranks, words)
        if launched.world_size is not None:
            return run_launched(options, launched.local_rank or 0)
    except UsageError as error:
        parser.error(str(error))
    return _run_own_workers(options, ranks)


def _run_own_workers(options: Options, ranks: int) -> int:
    with tempfile.TemporaryDirectory(prefix="fastcoll-bench-") as folder:
        try:
            spawn(run_spawned, (options, ranks, f"file://{folder}/meeting"), ranks)
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
    add("operations", nargs="*", metavar="operation", type=_read(parse_operation), help="default: all")
    add("-n", "--ranks", type=int, help="processes to start (default: 2)")
    what = parser.add_argument_group("what is measured")
    _add_what(what.add_argument)
    how = parser.add_argument_group("how")
    _add_how(how.add_argument)
    results = parser.add_argument_group("results")
    for kind, meaning in (
        ("json", "the whole run"),
        ("csv", "the rows"),
        ("plot", "a picture, e.g. out.png"),
    ):
        results.add_argument(f"--{kind}", type=Path, metavar="FILE", help=f"also write {meaning}")
    return parser


def _add_what(add: Callable[..., Any]) -> None:
    add("-b", "--begin", type=_read(parse_size), default=8, metavar="SIZE", help="smallest size (default: 8)")
    add(
        "-e", "--end", type=_read(parse_size), default=64 << 20, metavar="SIZE", help="largest (default: 64M)"
    )
    add("-f", "--factor", type=float, default=2.0, help="between sizes (default: 2)")
    add(
        "-d",
        "--dtype",
        type=_listed(_dtype_name),
        default=["float32"],
        help="one or several, a,b (default: float32)",
    )
    add(
        "-o",
        "--op",
        type=_listed(parse_redop),
        default=["sum"],
        help=f"one or several of {', '.join(REDOPS)} (default: sum)",
    )
    add("-r", "--root", type=int, default=0, help="of the rooted operations (default: 0)")


def _add_how(add: Callable[..., Any]) -> None:
    add("--backend", default="auto", help="default: auto")
    add(
        "--seconds",
        type=_positive(float),
        default=0.15,
        help="to fill with calls for each row (default: 0.15)",
    )
    add("--iters", type=_positive(int), metavar="N", help="calls a row, instead of --seconds")
    add(
        "-w",
        "--warmup",
        type=_positive(int),
        default=5,
        metavar="N",
        help="calls before the timed ones (default: 5)",
    )
    add("-c", "--check", type=int, choices=(0, 1), default=1, help="verify the results (default: 1)")
    add(
        "--pin",
        type=_listed(int),
        nargs="?",
        const=sorted(os.sched_getaffinity(0)),
        default=[],
        metavar="CORES",
        help="pin each rank to a core, of these in turn (a,b,...) or of all usable ones",
    )


def _options(given: argparse.Namespace, ranks: int, words: list[str]) -> Options:
    if not 0 <= given.root < ranks:
        raise UsageError(f"--root is {given.root}; the ranks are 0 to {ranks - 1}")
    if unusable := set(given.pin) - os.sched_getaffinity(0):
        raise UsageError(f"--pin: this process may not use core {min(unusable)}")
    _check_files(given)
    parse_backend(given.backend)
    return Options(
        operations=given.operations or list(SHAPES),
        dtypes=given.dtype,
        redops=given.op,
        sizes=size_range(given.begin, given.end, given.factor),
        root=given.root,
        backend=given.backend,
        seconds=given.seconds,
        iterations=given.iters,
        warmup=given.warmup,
        check=bool(given.check),
        pin=given.pin,
        json=given.json,
        csv=given.csv,
        plot=given.plot,
        command=["python", "-m", "fastcoll.bench", *map(shlex.quote, words)],
    )


def _check_files(given: argparse.Namespace) -> None:
    """Before the run, not after it."""
    for path in (given.json, given.csv, given.plot):
        if path is not None:
            _check_writable(path)
    if given.plot is None:
        return
    if given.plot.suffix not in PICTURES:
        raise UsageError(f"--plot {given.plot}: the name must end in {', '.join(PICTURES)}")
    if importlib.util.find_spec("matplotlib") is None:
        raise UnavailableError("--plot needs matplotlib; pip install 'fastcoll[bench]'")


def _check_writable(path: Path) -> None:
    folder = path.absolute().parent
    if not folder.is_dir():
        raise UsageError(f"{path} cannot be written: there is no folder {folder}")
    try:
        if path.exists():
            os.close(os.open(path, os.O_WRONLY))
        else:
            tempfile.TemporaryFile(dir=folder).close()  # leaves nothing; a mode does not bind root
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}") from error


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


def _dtype_name(text: str) -> str:
    return parse_dtype(text).name


def _read(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """`parse` with its errors as argparse shows them."""

    def read(text: str) -> Any:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return read


def _listed(parse: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    """Several values, separated by commas."""
    read = _read(parse)
    return lambda text: [read(part) for part in text.split(",")]


def _positive(kind: Callable[[str], Any]) -> Callable[[str], Any]:
    def parse(text: str) -> Any:
        value = kind(text)
        if not 0 < value < math.inf:
            raise UsageError(f"{text} is not a finite number greater than 0")
        return value

    return _read(parse)
