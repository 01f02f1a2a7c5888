"""The options of a comparison, read from the command line."""

from __future__ import annotations

import argparse
import os
import re
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fastcoll.bench.cases import argument, positive, size_range
from fastcoll.bench.command import make_parser, pictures
from fastcoll.errors import UsageError
from fastcoll.rendezvous.detect import detect

from .command import Options, check, compare, parse_operation
from .peers import PEERS, parse_peer_python, parse_peers
from .plan import DEFAULT_SIZES, OPERATIONS, UPDATES

_SECONDS = 5.0
# The benchmark's options that a comparison has; others are refused.
_USES = (
    "operations", "--ranks", "--begin", "--end", "--factor", "--sizes", "--dtype", "--backend", "--seconds", "--cores",
    "--json", "--plot",
)  # fmt: skip
_EPILOG = f"""
operations: {", ".join(OPERATIONS)} (all of these when none is given); and {", ".join(UPDATES)}

The same calls are timed on fastcoll and on other libraries, in turn, and compared with the machine's own limit. A size
is the bytes of the larger of input and output.

exit code: 0 done; 1 a side failed; 2 the command line is invalid, or no peer was found.
"""


def main(words: Sequence[str]) -> int:
    """Run the comparison that a command line asks for; return the exit code."""
    parser = make_parser(_USES)
    parser.description = "Compare collective operations with those of other libraries."
    parser.epilog = _EPILOG
    usable = sorted(os.sched_getaffinity(0))
    parser.set_defaults(begin=None, end=None, factor=None, seconds=_SECONDS, cores=usable)
    _add_options(parser.add_argument_group("compared with others").add_argument)
    given = parser.parse_args(words)
    try:
        launched = detect(os.environ)
        if launched.world_size is not None:
            raise UsageError(
                f"--vs starts its own ranks, but {launched.source} has started this one; run it without"
            )
        options = _options_of(given, words)
    except UsageError as error:
        parser.error(str(error))
    return compare(options)


def _add_options(add: Callable[..., Any]) -> None:
    add(
        "--vs",
        type=argument(parse_peers),
        metavar="PEERS",
        help=f"compare with one or several of {', '.join(PEERS)}: a,b",
    )
    add(
        "--peer-python",
        type=argument(parse_peer_python),
        action="append",
        default=[],
        metavar="PEER=PYTHON",
        help="the Python of an environment that has this peer; repeatable",
    )
    add(
        "--install-peers",
        action="store_true",
        help="make environments in the user's cache for the peers that are not found",
    )
    add(
        "--hosts",
        type=positive(int),
        default=1,
        metavar="N",
        help="divide the ranks among N hosts, which are namespaces of this machine; needs root and iproute2",
    )
    add("--rounds", type=positive(int), default=5, metavar="N", help="runs of each side (default: 5)")
    add(
        "--scale",
        type=positive(float),
        default=1.0,
        metavar="X",
        help="a factor for the number of calls (default: 1)",
    )
    add("--results", type=Path, metavar="FOLDER", help="write the tables there, as DATE-NAME.md")
    add("--name", help="the NAME in that file's name (default: the operation and the number of ranks)")


def _options_of(given: argparse.Namespace, words: Sequence[str]) -> Options:
    if given.results and given.results.exists() and not given.results.is_dir():
        raise UsageError(f"--results {given.results} is no folder")
    options = Options(
        peers=given.vs,
        pythons=dict(given.peer_python),
        install=given.install_peers,
        operations=list(dict.fromkeys(map(parse_operation, given.operations))) or list(OPERATIONS),
        sizes=given.sizes or _sizes(given),
        dtype=_one_dtype(given.dtype),
        ranks=2 if given.ranks is None else given.ranks,
        hosts=given.hosts,
        cores=given.cores,
        rounds=given.rounds,
        scale=given.scale,
        seconds=given.seconds,
        backend=given.backend,
        json=given.json,
        plots=pictures(given.plot),
        results=given.results,
        name=given.name,
        command=command_line(words),
    )
    check(options)
    return options


def command_line(words: Sequence[str]) -> str:
    """Return the command without the paths of this machine's environments."""
    names = [re.sub(rf"^((?:--peer-python=)?(?:{'|'.join(PEERS)}))=.*", r"\1=PYTHON", word) for word in words]
    return f"python -m fastcoll.bench {shlex.join(names)}"


def _sizes(given: argparse.Namespace) -> list[int]:
    if given.begin is given.end is given.factor is None:
        return list(DEFAULT_SIZES)
    return size_range(
        8 if given.begin is None else given.begin, given.end or DEFAULT_SIZES[-1], given.factor or 2.0
    )


def _one_dtype(names: list[str]) -> str:
    if len(names) > 1:
        raise UsageError(f"--vs compares one dtype at a time, not {', '.join(names)}")
    return names[0]
