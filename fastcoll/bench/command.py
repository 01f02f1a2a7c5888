"""The command line: read and check it, then start the ranks, or run as a rank of a launcher."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import shlex
import signal
import sys
import tempfile
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from ..arrays.dtypes import parse_dtype
from ..errors import UnavailableError, UsageError, install
from ..job.backends import parse_backend
from ..pages import html_page
from ..pages.output_files import writable
from ..rendezvous.detect import Detected, detect
from ..system.standard_streams import INTERRUPTED, PIPE_IS_CLOSED, run_with_streams
from . import cases
from .cases import argument, listed, parse_operation, positive
from .picture import PICTURES
from .rank import FAILED, MISUSED, OK, run

# Options for other measurements (studies), each with the module of this package that makes the measurement.
_STUDIES = {"--start": "start_times", "--first-calls": "first_calls", "--overlap": "overlap"}
_EPILOG = f"""
operations: {", ".join(cases.SHAPES)}

time and p99 are microseconds per call: median and 99th percentile over a rank's batches of calls, of the
slowest rank. all_reduce, reduce and broadcast work in place. Sizes, algbw and busbw are those of nccl-tests.
Under a launcher (RANK and WORLD_SIZE, mpirun, srun) the benchmark uses its ranks.

--tune -n N instead finds the fastest algorithms on this machine with N ranks, and stores them. --start
times the start of ranks, --first-calls the first ten calls of new processes beside later ones, --overlap
asynchronous operations beside a computation. With the sources, --vs PEERS compares with other libraries
(--vs gloo --help: its options).

exit code: 0 all results right; 1 wrong results, or a rank failed; 2 the command line or the
launcher's environment is invalid, or no peer was found.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; return the exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    options = [word.partition("=")[0] for word in words]
    if "--vs" in options:
        folder = Path(__file__).resolve().parents[2] / "bench"
        if not (folder / "versus").is_dir():
            what = "--vs is a study, which is not in the installed package"
            print(f"{what}: run it where fastcoll's sources are, beside bench/", file=sys.stderr)
            return MISUSED
        if str(folder) not in sys.path:
            sys.path.append(str(folder))  # spawned ranks inherit sys.path
        return int(importlib.import_module("versus.options").main(words))
    if study := next((_STUDIES[option] for option in options if option in _STUDIES), ""):
        return int(importlib.import_module(f".{study}", __package__).main(words))
    parser = make_parser()
    given, unknown = parser.parse_known_args(words)
    if unknown:
        of_versus = ("--peer-python", "--install-peers", "--rounds", "--scale", "--results", "--name")
        theirs = f"; {', '.join(of_versus)} belong to --vs" if {*unknown} & {*of_versus} else ""
        parser.error(f"unrecognized arguments: {' '.join(unknown)}{theirs}")
    try:
        launched = detect(os.environ)
        ranks = count_ranks(given.ranks, launched)
        _complete(given, ranks, words)
        return run_ranks(run, launched, ranks, given)
    except UsageError as error:
        parser.error(str(error))


def run_ranks(worker: Callable[..., int | None], launched: Detected, ranks: int, *arguments: Any) -> int:
    """Call `worker(local_rank, meeting, *arguments)` in this rank of a launcher, or in new processes.

    `meeting` has the worker's arguments for `init_process_group`. The result is the exit code: under a launcher
    that of this rank, else that of rank 0.
    """
    if launched.world_size is not None:
        return worker(launched.local_rank or 0, {}, *arguments) or OK
    from ..launch.spawn import ProcessExitedError, ProcessRaisedError, spawn

    with temporary_folder() as folder:
        try:
            spawn(_run_spawned, (worker, f"file://{folder}/meeting", ranks, arguments), ranks)
        except (ProcessExitedError, ProcessRaisedError) as error:
            code: int = getattr(error, "exit_code", OK)
            if code in (FAILED, MISUSED, PIPE_IS_CLOSED):  # rank 0 has printed why, if it could
                return code
            print(error, file=sys.stderr)
            return FAILED
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            return INTERRUPTED
    return OK


@contextmanager
def temporary_folder() -> Iterator[str]:
    """Make a folder, and remove it at the end of the block, which SIGTERM ends like an exception."""

    def end(number: int, frame: FrameType | None) -> None:
        sys.exit(128 + number)  # a shell's exit code for a program that the signal has ended

    before = signal.signal(signal.SIGTERM, end)
    try:
        with tempfile.TemporaryDirectory(prefix="fastcoll-bench-") as folder:
            yield folder
    finally:
        signal.signal(signal.SIGTERM, before)


def _run_spawned(rank: int, worker: Callable[..., int | None], url: str, ranks: int, rest: Any) -> None:
    meeting = {"init_method": url, "world_size": ranks, "rank": rank}
    sys.exit(run_with_streams(lambda: worker(rank, meeting, *rest)))


def make_parser(uses: Container[str] | None = None) -> argparse.ArgumentParser:
    """Return a parser of all options except those of studies, or only of those that a study `uses`."""
    parser = argparse.ArgumentParser(
        prog="python -m fastcoll.bench",
        description="Time and verify collective operations.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )

    def adding(group: Any) -> Callable[..., None]:
        def add(*names: str, **options: Any) -> None:
            if uses is None or any(name in uses for name in names):
                group.add_argument(*names, **options)

        return add

    add = adding(parser)
    add("operations", nargs="*", metavar="operation", help="default: all")
    add("-n", "--ranks", type=int, help="processes to start (default: 2)")

    for title, add_some in (
        ("what is measured", _add_cases),
        ("how", _add_conditions),
        ("results", _add_results),
    ):
        add_some(adding(parser.add_argument_group(title)))
    return parser


def _add_cases(add: Callable[..., None]) -> None:
    size, sizes = argument(cases.parse_size), listed(cases.parse_size)
    add("-b", "--begin", type=size, default=8, metavar="SIZE", help="smallest size (default: 8)")
    add("-e", "--end", type=size, default=64 << 20, metavar="SIZE", help="largest (default: 64M)")
    add("-f", "--factor", type=float, default=2.0, help="between sizes (default: 2)")
    add("--sizes", type=sizes, metavar="SIZES", help="these sizes instead: a,b,...")
    dtypes, redops = listed(lambda text: parse_dtype(text).name), listed(cases.parse_redop)
    add("-d", "--dtype", type=dtypes, default=["float32"], help="one or several, a,b (default: float32)")
    several = f"one or several of {', '.join(cases.REDOPS)} (default: sum)"
    add("-o", "--op", type=redops, default=["sum"], help=several)
    add("-r", "--root", type=int, default=0, help="the root of rooted operations (default: 0)")


def _add_conditions(add: Callable[..., None]) -> None:
    add("--backend", default="auto", help="default: auto")
    where = "where the arrays are (default: cpu); cuda needs CuPy"
    add("--device", choices=("cpu", "cuda"), default="cpu", help=where)
    filled = "measuring time per row (default: 0.15); with --vs: the longest (default: 5)"
    add("--seconds", type=positive(float), default=0.15, help=filled)
    add("--iters", type=positive(int), metavar="N", help="calls per row, instead of --seconds")
    warmup = "calls before the timed ones (default: 5)"
    add("-w", "--warmup", type=positive(int), default=5, metavar="N", help=warmup)
    add("-c", "--check", type=int, choices=(0, 1), default=1, help="verify the results (default: 1)")
    pinned = "pin each rank to one of these cores in turn: a,b,...; without a value all usable ones; none: "
    pinned += "do not pin (default: none; with --vs: all usable ones)"
    usable = sorted(os.sched_getaffinity(0))
    cores = argument(cases.cores)
    add("--cores", "--pin", type=cores, nargs="?", default=[], const=usable, metavar="CORES", help=pinned)


def _add_results(add: Callable[..., None]) -> None:
    add("--json", type=argument(writable), metavar="FILE", help="also write the whole run")
    add("--csv", type=argument(writable), metavar="FILE", help="also write the rows")
    drawn = "also draw, e.g. out.png; PNG and SVG if the name has no extension; repeatable; "
    drawn += "a run of all operations draws fastcoll-bench.png"
    page_help = "also write one page with plots, which opens without a network; needs plotly"
    add("--html", type=argument(writable), metavar="FILE", help=page_help)
    add("--plot", type=Path, action="append", default=[], metavar="FILE", help=drawn)


class Study(NamedTuple):
    """The command line of a study, and the number of ranks that it asks for."""

    parser: argparse.ArgumentParser
    given: argparse.Namespace
    launched: Detected
    ranks: int


def read_study(
    words: Sequence[str],
    option: str,
    uses: Sequence[str] = (),
    about: str = "this study",
    starts_ranks: bool = False,
    **defaults: Any,
) -> Study:
    """Read the command line of a study; exit with a usage error if the study cannot run.

    Args:
        option: the option that asks for the study.
        uses: the benchmark's options that the study uses besides --ranks; others are refused.
        about: the help on the option.
        starts_ranks: whether the study starts its own ranks, so that it is refused under a launcher.
        defaults: the study's defaults for options, if they differ from the benchmark's.
    """
    parser = make_parser({"--ranks", *uses})
    parser.add_argument(option, action="store_true", help=about)
    parser.set_defaults(**defaults)
    given = parser.parse_args(words)
    try:
        launched = detect(os.environ)
        if starts_ranks and launched.world_size is not None:
            raise UsageError(f"{option} starts its own ranks, but {launched.source} has started this one")
        return Study(parser, given, launched, count_ranks(given.ranks, launched))
    except UsageError as error:
        parser.error(str(error))


def _complete(given: argparse.Namespace, ranks: int, words: Sequence[str]) -> None:
    """Check options against each other, and set the options that depend on others."""
    if not 0 <= given.root < ranks:
        raise UsageError(f"--root is {given.root}; the ranks are 0 to {ranks - 1}")
    parse_backend(given.backend)
    asked = [parse_operation(name) for name in given.operations]
    possible = [n for n in cases.SHAPES if given.device == "cpu" or n != "update_symmetric_all_reduce"]
    if impossible := set(asked) - set(possible):
        raise UsageError(f"{impossible.pop()} is for host memory; leave --device {given.device} out")
    given.operations = asked or possible
    if given.html is not None:
        html_page.require()
    given.sizes = given.sizes or cases.size_range(given.begin, given.end, given.factor)
    given.plot = pictures(given.plot)
    if not (asked or given.plot) and _can_draw() and os.access(".", os.W_OK):
        given.plot = [Path("fastcoll-bench.png")]
    given.command = ["python", "-m", "fastcoll.bench", *map(shlex.quote, words)]


def count_ranks(asked: int | None, launched: Detected) -> int:
    """Return the number of ranks of the launcher, or the number to start."""
    ranks = launched.world_size
    if ranks is None:
        ranks = 2 if asked is None else asked
        if ranks < 1:
            raise UsageError(f"-n is {ranks}; there must be at least one rank")
    elif asked not in (None, ranks):
        raise UsageError(f"-n is {asked}, but {launched.source} says {ranks} ranks; leave -n out")
    return ranks


def pictures(paths: Sequence[Path]) -> list[Path]:
    """Return the pictures to draw; a name without an extension means a PNG and an SVG.

    Raises:
        UsageError: a picture cannot be drawn or written.
    """
    if unnamed := [path for path in paths if not path.name]:
        raise UsageError(f"--plot {unnamed[0]}: name a file")
    endings = [(path, [path.suffix] if path.suffix else PICTURES[:2]) for path in paths]
    found = [writable(path.with_suffix(suffix)) for path, suffixes in endings for suffix in suffixes]
    for path in found:
        if path.suffix not in PICTURES:
            raise UsageError(f"--plot {path}: the name must end in {', '.join(PICTURES)}")
    if found and not _can_draw():
        raise UnavailableError(f"--plot needs matplotlib; {install('bench')}")
    return found


def _can_draw() -> bool:
    return importlib.util.find_spec("matplotlib") is not None
