"""The command line of the launcher: `python -m fastcoll.launch -n 4 script.py args...`."""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

from .lifeline import GRACE_SECONDS, adopt_orphans
from .nodes import Job, Nodes, default_port, free_port
from .supervisor import Supervisor

_MANY_NODES_PORT = 29500  # torch's, when the nodes must agree on a port without having talked
_ABOUT = """Start a program once per rank, with RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, GROUP_RANK,
MASTER_ADDR and MASTER_PORT in its environment."""
_CODES = """exit code: 0, that of the first rank that failed, or 128+n if signal n ended that rank or the
launcher. The other ranks get SIGTERM then, and SIGKILL when the grace is over. Options may be spelled with
- instead of _."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the launcher with the arguments `argv` (default: those of this process); returns its exit code."""
    parser = _parser()
    options = parser.parse_args(argv)
    job = _job(parser, options)
    logs: Path | None = options.log_dir
    try:
        if logs is not None:
            logs.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--log_dir {str(logs)!r} cannot be made: {error.strerror}; give another folder")
    if single := job.single_threaded(os.environ):
        sys.stderr.write(
            f"fastcoll.launch: {' and '.join(single)} set to 1, as {job.local_size} ranks share this node\n"
        )
    adopt_orphans()
    os.environ.update(job.secret(os.environ))  # for the store that is served here
    port = options.nodes_port
    nodes = None
    if job.nodes > 1 and port != 0:
        nodes = Nodes(job.nodes, job.node_rank, job.master_addr, port or default_port(job.master_port))
    elif job.nodes == 1 and options.min_ranks is not None:
        nodes = Nodes(1, 0, "127.0.0.1", 0)
    with nodes or nullcontext():
        if nodes and options.min_ranks is not None:
            job = replace(job, elastic=nodes.address)
        return Supervisor(
            job,
            options.grace,
            not options.no_prefix,
            logs,
            nodes,
            min_ranks=options.min_ranks,
            max_restarts=options.max_restarts,
        ).run()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m fastcoll.launch", description=_ABOUT, epilog=_CODES, allow_abbrev=False
    )

    def add(name: str, *others: str, group: argparse._ActionsContainer = parser, **rest: object) -> None:
        spellings = dict.fromkeys([*others, f"--{name}", f"--{name.replace('_', '-')}"])
        group.add_argument(*spellings, dest=name, **rest)  # type: ignore[arg-type]

    add("nproc_per_node", "-n", "--nproc", type=_count, default=1, metavar="N",
        help="ranks on this node; auto or cpu: one per usable core (default 1)")  # fmt: skip
    add("nnodes", type=_nodes, default=1, metavar="N", help="nodes of the job (default 1)")
    add("node_rank", type=int, default=0, metavar="I", help="this node's number, from 0 (default 0)")
    add("master_addr", metavar="HOST", help="where rank 0 listens (default 127.0.0.1 for one node)")
    add("master_port", type=int, metavar="PORT",
        help=f"its port (default: a free one for one node, else {_MANY_NODES_PORT})")  # fmt: skip
    add("nodes_port", type=int, metavar="PORT",
        help="where the nodes' launchers tell one another of failures; 0: they do not (default: 10000 below "
             "master_port, or above where that is no port)")  # fmt: skip
    add("standalone", action="store_true", help="a job of one node, with a port of its own")
    local_rank = parser.add_mutually_exclusive_group()
    add("pass_local_rank", group=local_rank, action="store_true",
        help="add --local_rank=N before the program's own arguments, as torch's first launcher did")  # fmt: skip
    add("use_env", group=local_rank, action="store_true",
        help="add none: ranks learn their number from the environment (default)")  # fmt: skip
    add("no_python", action="store_true", help="the program is not run by Python")
    add("min_ranks", type=_count, metavar="N",
        help="a rank that fails ends the others only if fewer than N are left on this node, for programs that go on "
             "without it by fastcoll.shrink (default: it always does)")  # fmt: skip
    add("max_restarts", type=_restarts, default=0, metavar="R",
        help="with --min_ranks: so many ranks that failed are replaced by new processes, for programs that take them "
             "in (default 0)")  # fmt: skip
    add("log_dir", type=Path, metavar="DIR", help="also write rank-R.stdout and rank-R.stderr there")
    add("no_prefix", action="store_true", help="pass output on without [rank] before each line")
    add("grace", type=_seconds, default=GRACE_SECONDS, metavar="SECONDS",
        help=f"between asking ranks to end and killing them (default {GRACE_SECONDS:g})")  # fmt: skip
    add("module", "-m", action="store_true", help="the program is a module, as in python -m")
    parser.add_argument("program", help="the script, module or program that every rank runs")
    parser.add_argument("args", nargs=argparse.REMAINDER, help="its arguments")
    return parser


def _count(text: str) -> int:
    if text in ("auto", "cpu"):
        return len(os.sched_getaffinity(0))
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"give a number from 1 up, auto or cpu, not {text!r}")
    return int(text)


def _restarts(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"give a whole number from 0 up, not {text!r}")
    return int(text)


def _nodes(text: str) -> int:
    low, _, high = text.partition(":")
    if not low.isdecimal() or int(low) < 1 or (high and high != low):
        raise argparse.ArgumentTypeError(
            f"give one number from 1 up, not {text!r}; it cannot change as the job runs"
        )
    return int(low)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"give a number of seconds from 0 up, not {text!r}")
    return value


def _job(parser: argparse.ArgumentParser, options: argparse.Namespace) -> Job:
    """The job that the options describe; ends the process with a usage error if they do not fit together."""
    nodes: int = options.nnodes
    if options.standalone and nodes > 1:
        parser.error(f"--standalone is for one node, --nnodes says {nodes}")
    if not 0 <= options.node_rank < nodes:
        parser.error(f"--node_rank must be from 0 to {nodes - 1}, got {options.node_rank}")
    if nodes > 1 and options.master_addr is None:
        parser.error(f"--master_addr is needed for {nodes} nodes: give the host of node 0 on every node")
    if options.module and options.no_python:
        parser.error("-m and --no_python exclude each other")
    if options.max_restarts and options.min_ranks is None:
        parser.error("--max_restarts needs --min_ranks")
    if not (options.module or options.no_python or os.path.exists(options.program)):
        parser.error(f"there is no script {options.program!r} (for a module give -m)")
    port = options.master_port
    if port is None:
        port = free_port() if nodes == 1 else _MANY_NODES_PORT
    if not 0 < port < 65536:
        parser.error(f"--master_port must be from 1 to 65535, got {port}")
    if options.nodes_port is not None and not 0 <= options.nodes_port < 65536:
        parser.error(f"--nodes_port must be from 0 to 65535, got {options.nodes_port}")
    python = () if options.no_python else (sys.executable, "-u", *(["-m"] if options.module else []))
    return Job(
        (*python, options.program),
        options.nproc_per_node,
        nodes,
        options.node_rank,
        options.master_addr or "127.0.0.1",
        port,
        tuple(options.args),
        options.pass_local_rank,
    )
