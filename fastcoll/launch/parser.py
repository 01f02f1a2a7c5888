"""The parser of the launcher's command line: its options, and the check of each value."""

from __future__ import annotations

import argparse
import math
import os
import signal
from collections.abc import Callable
from pathlib import Path

from .binding import BINDINGS
from .console import HANDLED
from .lifeline import GRACE_SECONDS
from .outputs import parse
from .supervisor import TICK_SECONDS

MANY_NODES_PORT = 29500  # torch's default; several nodes cannot agree on a free port before they meet
ENDPOINT_PORT = 29400  # torch's default for --rdzv_endpoint
_ABOUT = """Start a program once per rank, with RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, GROUP_RANK,
MASTER_ADDR, MASTER_PORT and torchrun's other variables in its environment."""
_CODES = """exit code: 0 if all ranks succeed; else that of the first rank that failed, or 128+n if signal n ended
that rank or the launcher. If failures restart all ranks, a final failure gives 1, as torchrun does. After a
failure, the other ranks get SIGTERM, and SIGKILL when the time of --grace is over. Options may be spelled with -
instead of _. torchrun's variables PET_<OPTION> set defaults."""
_CONF = ("is_host", "join_timeout", "last_call_timeout")
_REFUSED = {
    "start_method": "ranks are always fresh processes, made by fork and exec",
    "run_path": "ranks are always fresh processes; leave it out",
    "event_log_handler": "there are no events; the launcher writes what happens to stderr",
    "logs_specs": "it names a class of torch's; --log_dir, --redirects and --tee say where output goes",
    "numa_binding": "give --cpu_bind numa, or --cpu_bind sockets",
    "virtual_local_rank": "set CUDA_VISIBLE_DEVICES in the program from LOCAL_RANK",
    "duplicate_stdout_filters": "filter the files that --tee writes",
    "duplicate_stderr_filters": "filter the files that --tee writes",
}

_Add = Callable[..., None]
"""Adds an option to the parser; see `make_parser`."""


def make_parser() -> argparse.ArgumentParser:
    """Return the parser; `options.read` checks the options against each other."""
    parser = argparse.ArgumentParser(
        "python -m fastcoll.launch", description=_ABOUT, epilog=_CODES, allow_abbrev=False
    )

    local_rank = parser.add_mutually_exclusive_group()

    def add(name: str, *others: str, of_local_rank: bool = False, **rest: object) -> None:
        # `others` may have torchrun's name of the option, for which torchrun reads PET_<NAME>.
        words = [name, *(other[2:] for other in others if other.startswith("--"))]
        given = next(filter(None, (os.environ.get(f"PET_{word.upper()}") for word in words)), None)
        if given is not None:
            rest["default"] = given == "1" if rest.get("action") == "store_true" else given
        spellings = dict.fromkeys([*others, f"--{name}", f"--{name.replace('_', '-')}"])
        group = local_rank if of_local_rank else parser
        group.add_argument(*spellings, dest=name, **rest)  # type: ignore[arg-type]

    for add_some in (_add_nodes, _add_meeting, _add_ranks, _add_failures, _add_output, _add_end):
        add_some(add)
    add("module", "-m", action="store_true", help="the program is a module, as in python -m")
    for name, why in _REFUSED.items():
        add(name, action=_Refused, const=why, nargs="?", help=argparse.SUPPRESS)
    parser.add_argument("program", help="the script, module or program that every rank runs")
    parser.add_argument("args", nargs=argparse.REMAINDER, help="the program's arguments")
    return parser


def _add_nodes(add: _Add) -> None:
    add("nproc_per_node", "-n", "--nproc", type=_count, default=1, metavar="N",
        help="ranks on this node; auto or cpu: one per usable core (default 1)")  # fmt: skip
    add("nnodes", type=_nodes, default="1", metavar="N",
        help="nodes of the job, or MIN:MAX with --rdzv_backend c10d (default 1)")  # fmt: skip
    add("node_rank", type=int, default=0, metavar="I", help="this node's number, from 0 (default 0)")
    add("master_addr", metavar="HOST", help="where rank 0 listens (default 127.0.0.1 for one node)")
    add("master_port", type=int, metavar="PORT",
        help=f"the port where rank 0 listens (default: a free one for one node, else {MANY_NODES_PORT})")  # fmt: skip
    add("nodes_port", type=int, metavar="PORT",
        help="the port over which the nodes' launchers publish failures to each other; 0: they publish none (default: "
             "10000 below master_port, or above it if the port below is 1023 or less)")  # fmt: skip
    add("standalone", action="store_true", help="start a job of one node on a free port")


def _add_meeting(add: _Add) -> None:
    add("rdzv_backend", default="static", metavar="NAME",
        help="how the nodes' launchers meet: static, if each has its --node_rank, or c10d, if they are numbered in "
             "the order in which they join (default static)")  # fmt: skip
    add("rdzv_endpoint", type=_endpoint, metavar="HOST[:PORT]",
        help=f"where the launchers meet with c10d: an address of the node whose launcher leads the job (default port "
             f"{ENDPOINT_PORT}); with static: another way to give --master_addr and --master_port")  # fmt: skip
    add("rdzv_id", metavar="ID",
        help="the job's name, the same on all nodes (default: none; for one node: a unique name)")  # fmt: skip
    add("rdzv_conf", type=_conf, default="", metavar="KEY=VALUE,...",
        help="last_call_timeout: seconds to wait for more than MIN nodes (default 30); join_timeout: seconds to wait "
             "for MIN nodes (default 600); is_host: whether this launcher leads (default: if it can)")  # fmt: skip
    add("local_addr", metavar="HOST",
        help="this node's address, at which other nodes reach rank 0 if rank 0 runs here (default: the address from "
             "which this node reaches the endpoint)")  # fmt: skip


def _add_ranks(add: _Add) -> None:
    add(
        "role",
        default="default",
        metavar="NAME",
        help="the value of ROLE_NAME for the ranks of this node (default default)",
    )
    add("monitor_interval", type=_seconds, default=TICK_SECONDS, metavar="SECONDS",
        help=f"time between checks for signals and for failures of other nodes; the end of a rank is noticed at once "
             f"(default {TICK_SECONDS:g})")  # fmt: skip
    add("cpu_bind", type=_binding, default="none", metavar="WHERE",
        help="bind each rank to processors: cores: to its part of the cores; numa, sockets: to a NUMA node or socket; "
             "none: to no processors (default). A bound rank computes with a thread on each of its cores")  # fmt: skip
    add("pass_local_rank", of_local_rank=True, action="store_true",
        help="add --local_rank=N before the program's own arguments, like torch's first launcher")  # fmt: skip
    add("use_env", of_local_rank=True, action="store_true",
        help="do not add --local_rank: programs read LOCAL_RANK from the environment (default)")  # fmt: skip
    add("no_python", action="store_true", help="run the program itself, without Python")


def _add_failures(add: _Add) -> None:
    add("min_ranks", type=_count, metavar="N",
        help="a failed rank ends the others only if fewer than N ranks are left on this node; for programs that go on "
             "without failed ranks by fastcoll.shrink (default: a failed rank always ends the others)")  # fmt: skip
    add("max_restarts", type=_restarts, default="0", metavar="R",
        help="when a rank fails, all ranks are ended and restarted, at most R times; with --min_ranks: up to R failed "
             "ranks are replaced by new processes, for programs that admit joiners (default 0)")  # fmt: skip


def _add_output(add: _Add) -> None:
    add("log_dir", type=Path, metavar="DIR", help="also write output to DIR/rank-R.stdout and .stderr")
    add("redirects", "-r", type=parse, default="0", metavar="WHICH",
        help="output that goes to files only: 0: none, 1: stdout, 2: stderr, 3: both; or one of these for each local "
             "rank, for example 0:3,1:2")  # fmt: skip
    add("tee", "-t", type=parse, default="0", metavar="WHICH",
        help="output that also goes to files: see --redirects (default with --log_dir alone: all)")  # fmt: skip
    add("local_ranks_filter", type=_ranks, metavar="RANKS",
        help="local ranks whose output is shown, for example 0,1 (default: all)")  # fmt: skip
    add("no_prefix", action="store_true", help="show output without [rank] before each line")


def _add_end(add: _Add) -> None:
    add("grace", "--shutdown_timeout", "--shutdown-timeout", type=_seconds, default=GRACE_SECONDS, metavar="SECONDS",
        help=f"time between asking ranks to end and killing them (default {GRACE_SECONDS:g})")  # fmt: skip
    add("signals_to_handle", type=_signals, default=",".join(number.name for number in HANDLED), metavar="NAMES",
        help="signals that end the job: the launcher passes them on to the ranks, and kills the ranks that have not "
             "exited when the time of --grace is over (default %(default)s)")  # fmt: skip


def _count(text: str) -> int:
    if text in ("auto", "cpu"):
        return len(os.sched_getaffinity(0))
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"give a number from 1 up, auto or cpu, not {text!r}")
    return int(text)


def _binding(text: str) -> str:
    """Check the option here, since argparse does not compare a default with `choices`, and PET_CPU_BIND sets one."""
    if text not in BINDINGS:
        raise argparse.ArgumentTypeError(f"give {', '.join(BINDINGS[:-1])} or {BINDINGS[-1]}, not {text!r}")
    return text


def _restarts(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"give a whole number from 0 up, not {text!r}")
    return int(text)


def _nodes(text: str) -> tuple[int, int]:
    low, colon, high = text.partition(":")
    high = high if colon else low
    if not (low.isdecimal() and high.isdecimal() and 1 <= int(low) <= int(high)):
        raise argparse.ArgumentTypeError(f"give a number from 1 up, or MIN:MAX, not {text!r}")
    return int(low), int(high)


def _ranks(text: str) -> frozenset[int]:
    if not all(part.isdecimal() for part in text.split(",")):
        raise argparse.ArgumentTypeError(f"give local ranks, as 0,1, not {text!r}")
    return frozenset(map(int, text.split(",")))


def _endpoint(text: str) -> tuple[str, int | None]:
    """Parse `host`, `host:port`, `[IPv6]` or `[IPv6]:port`; an empty host is localhost, as in torch."""
    host, colon, port = text.rpartition(":")
    if not colon or text.endswith("]"):
        host, port = text, ""
    if (port or (colon and not text.endswith("]"))) and not (port.isdecimal() and int(port) < 65536):
        raise argparse.ArgumentTypeError(f"give HOST or HOST:PORT, not {text!r}")
    return host.strip("[]") or "localhost", int(port) if port else None


def _conf(text: str) -> dict[str, float]:
    found = {}
    for item in filter(None, text.split(",")):
        key, _, value = item.partition("=")
        if key not in _CONF:
            raise argparse.ArgumentTypeError(f"{key!r} is none of {', '.join(_CONF)}")
        found[key] = _seconds({"true": "1", "false": "0"}.get(value.lower(), value))
    return found


def _signals(text: str) -> tuple[signal.Signals, ...]:
    try:
        found = tuple(signal.Signals[name.strip()] for name in text.split(","))
    except KeyError as error:
        raise argparse.ArgumentTypeError(f"{error} is no signal; give names, as SIGTERM,SIGUSR1") from None
    if {signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD} & {*found}:
        raise argparse.ArgumentTypeError(f"SIGKILL, SIGSTOP and SIGCHLD cannot be among them, as in {text!r}")
    return found


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"give a number of seconds from 0 up, not {text!r}")
    return value


class _Refused(argparse.Action):
    """An option of torchrun that does not apply here."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> None:
        parser.error(f"{option_string} is refused: {self.const}")
