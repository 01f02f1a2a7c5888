"""`--vs`: find the peers, run all sides in turn, and print, write and draw the results."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import numpy as np

from fastcoll.bench.results import describe, machine
from fastcoll.errors import UsageError
from fastcoll.job.backends import parse_backend

from . import launch, peers, targets
from .limits import limit_cells
from .outcome import LIMIT, OURS, Comparison, SideTimes, write_json
from .peers import Found, Missing, Peer
from .plan import DTYPES, SHAPES, Cell, Job, cells
from .record import placement, write_page
from .rounds import Contender, count_copies, run_rounds
from .tables import faster_peers, misses, notes, single_copies, text

OK, FAILED, MISUSED = range(3)
INTERRUPTED = 130


@dataclass(frozen=True)
class Options:
    """The options of a comparison.

    Attributes:
        peers: the libraries to compare with.
        pythons: by peer, the Python that the user has given for it.
        install: whether to make environments for peers that are not found.
        sizes: the sizes in bytes.
        hosts: how many hosts, which are namespaces of this machine, the ranks are divided among.
        cores: the cores to which ranks are pinned in turn; empty: they are not pinned.
        scale: a factor for the number of batches.
        seconds: the most seconds for a cell in a round; a cell that would take longer gets fewer batches.
        backend: fastcoll's backend.
        json, plots, results: the files, pictures and folder to which the results are written.
        name: the name of the page in that folder.
        command: the command line.
    """

    peers: Sequence[Peer]
    pythons: dict[str, Path]
    install: bool
    operations: Sequence[str]
    sizes: Sequence[int]
    dtype: str
    ranks: int
    hosts: int
    cores: Sequence[int]
    rounds: int
    scale: float
    seconds: float
    backend: str
    json: Path | None
    plots: Sequence[Path]
    results: Path | None
    name: str | None
    command: str


def parse_operation(name: str) -> str:
    """Return the operation that `name` names; `-` and `_` are equivalent.

    Raises:
        UsageError: there is no such operation.
    """
    found = name.lower().replace("-", "_")
    if found not in SHAPES:
        raise UsageError(f"there is no operation {name!r} to compare; known: {', '.join(SHAPES)}")
    return found


def check(options: Options) -> None:
    """Check the options before anything runs.

    Raises:
        UsageError: an option is invalid; the message has the cure.
    """
    parse_backend(options.backend)
    if options.ranks < 2:
        raise UsageError(f"-n is {options.ranks}; a comparison needs at least 2 ranks")
    if options.ranks % options.hosts:
        raise UsageError(f"-n is {options.ranks}; it must be a multiple of --hosts {options.hosts}")
    if options.hosts > 1 and any(peer.name == "openmpi-tcp" for peer in options.peers):
        raise UsageError("openmpi-tcp is for one host; with --hosts compare with openmpi")
    if options.dtype not in DTYPES:
        raise UsageError(f"--vs compares {', '.join(DTYPES)}, not {options.dtype}: all peers have these")


def compare(options: Options) -> int:
    """Run the comparison; return the exit code: 0 done, 1 a side failed, 2 no peer was found."""
    try:
        with _ended_like_interrupted():
            found = look_for(options)
            if not found:
                return MISUSED
            comparison = measure(options, found)
    except launch.SideFailedError as error:
        print(error, file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    tell(comparison, options)
    return FAILED if comparison.failed else OK


def look_for(options: Options) -> list[Found]:
    """Return the peers that are found; print them, and how to get the others."""
    found = []
    for peer in options.peers:
        if peer.lacks.issuperset(options.operations):
            print(
                f"# {peer.name} is left out: it does not have {', '.join(options.operations)}",
                file=sys.stderr,
            )
            continue
        answer = peers.find(peer, options.pythons)
        if isinstance(answer, Missing) and options.install and peer.name not in options.pythons:
            peers.install(peer)
            answer = peers.find(peer, options.pythons)
        if isinstance(answer, Missing):
            print(answer.cure(), file=sys.stderr)
            continue
        print(f"# {peer.name}: {answer.library}, {answer.where}", file=sys.stderr)
        found.append(answer)
    return found


def measure(options: Options, found: Sequence[Found]) -> Comparison:
    """Run all rounds."""
    contenders = make_contenders(options, found)
    comparison = _describe(options, contenders)
    comparison.failed += run_rounds(contenders, options.rounds)
    if options.hosts == 1:
        count_copies([contender for contender in contenders if contender.times.seconds])
    comparison.sides = [side for side in comparison.sides if side.seconds]
    return comparison


def make_contenders(options: Options, found: Sequence[Found]) -> list[Contender]:
    """Return fastcoll, the limit and the peers, each with its job."""
    planned, hosts = plan(options), options.hosts
    limits = limit_cells(planned) if hosts == 1 else []
    sides = [
        _contender(options, launch.ours(OURS, options.ranks, hosts), "fastcoll", "this environment", planned),
        _contender(options, launch.ours(LIMIT, options.ranks, hosts), "limit", "NumPy", limits),
    ]
    for one in found:
        has = [cell for cell in planned if cell.operation not in one.peer.lacks]
        started = launch.peers(one, options.ranks, _shared_cores(options), hosts)
        sides.append(_contender(options, started, one.peer.label, one.where, has))
    return [side for side in sides if side.job.cells]


def plan(options: Options) -> list[Cell]:
    """Return the cells of fastcoll's job."""
    itemsize = np.dtype(options.dtype).itemsize
    cores = _shared_cores(options)
    return list(cells(options.operations, options.sizes, itemsize, options.ranks, cores, options.scale))


def tell(comparison: Comparison, options: Options) -> None:
    """Print the tables, and write and draw the requested files."""
    for line in [*_header(comparison), *_body(comparison)]:
        print(line)
    if options.json:
        write_json(options.json, comparison)
    if options.plots:
        from .picture import draw

        draw(options.plots, comparison)
    if options.results:
        print(f"# written to {write_page(options.results, comparison, options.name)}", file=sys.stderr)


def _contender(
    options: Options, started: launch.Launch, label: str, where: str, has: Sequence[Cell]
) -> Contender:
    crowding = options.ranks / _shared_cores(options)
    job = Job(
        tuple(has),
        options.ranks,
        options.dtype,
        tuple(options.cores),
        crowding,
        options.seconds,
        options.backend,
        options.hosts,
    )
    return Contender(started, job, SideTimes(started.side, label, "", where, started.shown))


def _shared_cores(options: Options) -> int:
    return len(set(options.cores)) or len(os.sched_getaffinity(0))


def _describe(options: Options, contenders: Sequence[Contender]) -> Comparison:
    times = {contender.launch.side: contender.times for contender in contenders}
    limit = times.pop(LIMIT, None) or SideTimes(LIMIT, "limit", "", "NumPy", "")
    return Comparison(
        start_time=datetime.now().astimezone().isoformat(timespec="seconds"),
        command=options.command,
        machine=machine(len(os.sched_getaffinity(0))),
        backend=options.backend,
        ranks=options.ranks,
        hosts=options.hosts,
        cores=list(options.cores),
        dtype=options.dtype,
        rounds=options.rounds,
        planned={(cell.operation, cell.size): (cell.batches, cell.calls) for cell in plan(options)},
        sides=list(times.values()),
        limit=limit,
    )


def _header(comparison: Comparison) -> list[str]:
    return [
        f"# {comparison.ranks} ranks, {placement(comparison)}; median of {comparison.rounds} rounds, "
        f"{comparison.start_time}",
        f"# {describe(comparison.machine)}",
        *(f"# {side.label}: {side.library}; {side.command}" for side in comparison.sides),
        f"# {comparison.command}",
    ]


def _body(comparison: Comparison) -> list[str]:
    tables = [line for operation in comparison.operations() for line in text(comparison, operation)]
    lines = [*faster_peers(comparison), *single_copies(comparison), *notes(comparison)]
    if found := misses(comparison):
        lines += ["", *targets.markdown(found)]
    return [*tables, "#", *(f"# {line}".rstrip() for line in lines)]


@contextmanager
def _ended_like_interrupted() -> Iterator[None]:
    """Let SIGTERM raise KeyboardInterrupt.

    Then it ends the ranks and removes the files as Ctrl-C does.
    """

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
