"""The options of the launcher: its own and torchrun's, read and checked together."""

from __future__ import annotations

import argparse
import math
import os
import signal
import sys
import tempfile
import uuid
from collections.abc import Sequence
from pathlib import Path

from .binding import BINDINGS, shares, usable_processors
from .console import HANDLED
from .lifeline import GRACE_SECONDS
from .nodes import NodeShare, free_port
from .outputs import Outputs, parse
from .supervisor import TICK_SECONDS

_MANY_NODES_PORT = 29500  # torch's default; several nodes cannot agree on a free port before they meet
_ENDPOINT_PORT = 29400  # torch's default for --rdzv_endpoint
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


def read(argv: Sequence[str] | None) -> tuple[argparse.Namespace, NodeShare]:
    """Return the options and this node's share of the job; exit with a usage error if options contradict each other.

    Two of the returned options are derived from others: `has_generations`, whether a failure may restart all ranks, and
    `outputs`, where the ranks' output goes.
    """
    parser = _parser()
    options = parser.parse_args(argv)
    if options.rdzv_backend == "c10d" and options.rdzv_endpoint and options.rdzv_endpoint[1] == 0:
        options.standalone = True  # as in torchrun, for several single-node jobs on one machine
    if options.standalone:
        options.rdzv_backend, options.rdzv_endpoint = "c10d", None
    is_elastic = options.rdzv_backend == "c10d" and not options.standalone
    if options.rdzv_id is None:
        options.rdzv_id = "none" if is_elastic or options.nnodes[1] > 1 else str(uuid.uuid4())
    options.has_generations = is_elastic or (options.max_restarts > 0 and options.min_ranks is None)
    _check_rendezvous(parser, options, is_elastic)
    job = _job(parser, options, is_elastic)
    options.outputs = _outputs(parser, options)
    return options, job


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m fastcoll.launch", description=_ABOUT, epilog=_CODES, allow_abbrev=False
    )

    def add(name: str, *others: str, group: argparse._ActionsContainer = parser, **rest: object) -> None:
        # `others` may have torchrun's name of the option, for which torchrun reads PET_<NAME>.
        words = [name, *(other[2:] for other in others if other.startswith("--"))]
        given = next(filter(None, (os.environ.get(f"PET_{word.upper()}") for word in words)), None)
        if given is not None:
            rest["default"] = given == "1" if rest.get("action") == "store_true" else given
        spellings = dict.fromkeys([*others, f"--{name}", f"--{name.replace('_', '-')}"])
        group.add_argument(*spellings, dest=name, **rest)  # type: ignore[arg-type]

    add("nproc_per_node", "-n", "--nproc", type=_count, default=1, metavar="N",
        help="ranks on this node; auto or cpu: one per usable core (default 1)")  # fmt: skip
    add("nnodes", type=_nodes, default="1", metavar="N",
        help="nodes of the job, or MIN:MAX with --rdzv_backend c10d (default 1)")  # fmt: skip
    add("node_rank", type=int, default=0, metavar="I", help="this node's number, from 0 (default 0)")
    add("master_addr", metavar="HOST", help="where rank 0 listens (default 127.0.0.1 for one node)")
    add("master_port", type=int, metavar="PORT",
        help=f"the port where rank 0 listens (default: a free one for one node, else {_MANY_NODES_PORT})")  # fmt: skip
    add("nodes_port", type=int, metavar="PORT",
        help="the port over which the nodes' launchers publish failures to each other; 0: they publish none (default: "
             "10000 below master_port, or above it if the port below is 1023 or less)")  # fmt: skip
    add("standalone", action="store_true", help="start a job of one node on a free port")
    add("rdzv_backend", default="static", metavar="NAME",
        help="how the nodes' launchers meet: static, if each has its --node_rank, or c10d, if they are numbered in "
             "the order in which they join (default static)")  # fmt: skip
    add("rdzv_endpoint", type=_endpoint, metavar="HOST[:PORT]",
        help=f"where the launchers meet with c10d: an address of the node whose launcher leads the job (default port "
             f"{_ENDPOINT_PORT}); with static: another way to give --master_addr and --master_port")  # fmt: skip
    add("rdzv_id", metavar="ID",
        help="the job's name, the same on all nodes (default: none; for one node: a unique name)")  # fmt: skip
    add("rdzv_conf", type=_conf, default="", metavar="KEY=VALUE,...",
        help="last_call_timeout: seconds to wait for more than MIN nodes (default 30); join_timeout: seconds to wait "
             "for MIN nodes (default 600); is_host: whether this launcher leads (default: if it can)")  # fmt: skip
    add("local_addr", metavar="HOST",
        help="this node's address, at which other nodes reach rank 0 if rank 0 runs here (default: the address from "
             "which this node reaches the endpoint)")  # fmt: skip
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
    local_rank = parser.add_mutually_exclusive_group()
    add("pass_local_rank", group=local_rank, action="store_true",
        help="add --local_rank=N before the program's own arguments, like torch's first launcher")  # fmt: skip
    add("use_env", group=local_rank, action="store_true",
        help="do not add --local_rank: programs read LOCAL_RANK from the environment (default)")  # fmt: skip
    add("no_python", action="store_true", help="run the program itself, without Python")
    add("min_ranks", type=_count, metavar="N",
        help="a failed rank ends the others only if fewer than N ranks are left on this node; for programs that go on "
             "without failed ranks by fastcoll.shrink (default: a failed rank always ends the others)")  # fmt: skip
    add("max_restarts", type=_restarts, default="0", metavar="R",
        help="when a rank fails, all ranks are ended and restarted, at most R times; with --min_ranks: up to R failed "
             "ranks are replaced by new processes, for programs that admit joiners (default 0)")  # fmt: skip
    add("log_dir", type=Path, metavar="DIR", help="also write output to DIR/rank-R.stdout and .stderr")
    add("redirects", "-r", type=parse, default="0", metavar="WHICH",
        help="output that goes to files only: 0: none, 1: stdout, 2: stderr, 3: both; or one of these for each local "
             "rank, for example 0:3,1:2")  # fmt: skip
    add("tee", "-t", type=parse, default="0", metavar="WHICH",
        help="output that also goes to files: see --redirects (default with --log_dir alone: all)")  # fmt: skip
    add("local_ranks_filter", type=_ranks, metavar="RANKS",
        help="local ranks whose output is shown, for example 0,1 (default: all)")  # fmt: skip
    add("no_prefix", action="store_true", help="show output without [rank] before each line")
    add("grace", "--shutdown_timeout", "--shutdown-timeout", type=_seconds, default=GRACE_SECONDS, metavar="SECONDS",
        help=f"time between asking ranks to end and killing them (default {GRACE_SECONDS:g})")  # fmt: skip
    add("signals_to_handle", type=_signals, default=",".join(number.name for number in HANDLED), metavar="NAMES",
        help="signals that end the job: the launcher passes them on to the ranks, and kills the ranks that have not "
             "exited when the time of --grace is over (default %(default)s)")  # fmt: skip
    add("module", "-m", action="store_true", help="the program is a module, as in python -m")
    for name, why in _REFUSED.items():
        add(name, action=_Refused, const=why, nargs="?", help=argparse.SUPPRESS)
    parser.add_argument("program", help="the script, module or program that every rank runs")
    parser.add_argument("args", nargs=argparse.REMAINDER, help="the program's arguments")
    return parser


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


def _check_rendezvous(parser: argparse.ArgumentParser, options: argparse.Namespace, is_elastic: bool) -> None:
    least, most = options.nnodes
    if options.rdzv_backend not in ("static", "c10d"):
        why = "there is no etcd here" if options.rdzv_backend.startswith("etcd") else "it is not known"
        parser.error(f"--rdzv_backend {options.rdzv_backend} is refused: {why}; give c10d or static")
    if options.standalone and most > 1:
        parser.error(f"--standalone is for one node, as is port 0 of --rdzv_endpoint; --nnodes says {most}")
    if least != most and not is_elastic:
        parser.error(
            f"--nnodes {least}:{most} needs --rdzv_backend c10d: with static the nodes cannot change"
        )
    if is_elastic and options.min_ranks is not None:
        parser.error("--min_ranks is for programs whose ranks go on; --rdzv_backend c10d restarts them")
    if options.has_generations and options.nodes_port == 0 and most > 1 and not is_elastic:
        parser.error("--nodes_port 0 leaves the launchers no port, which restarts on several nodes need")
    if options.min_ranks is not None and options.nodes_port == 0 and most > 1:
        parser.error(
            "--nodes_port 0 leaves the launchers no store, which --min_ranks on several nodes needs; give a port, or "
            "leave --nodes_port out"
        )
    host, port = options.rdzv_endpoint or ("localhost", None)
    if is_elastic:
        options.rdzv_endpoint = host, port or _ENDPOINT_PORT
    elif options.rdzv_endpoint:
        options.master_addr, options.master_port = options.master_addr or host, options.master_port or port


def _outputs(parser: argparse.ArgumentParser, options: argparse.Namespace) -> Outputs:
    """Return where output goes; make the folder for log files, and check that files can be made there."""
    goes_to_files = any(options.redirects.values()) or any(options.tee.values())
    options.made_log_dir = goes_to_files and options.log_dir is None
    if options.made_log_dir:
        options.log_dir = Path(tempfile.mkdtemp(prefix="fastcoll-launch-"))
    try:
        if options.log_dir is not None:
            options.log_dir.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=options.log_dir).close()
    except OSError as error:
        parser.error(
            f"--log_dir {str(options.log_dir)!r} cannot be used: {error.strerror}; give another folder"
        )
    all_to_files = options.log_dir is not None and not goes_to_files
    return Outputs(all_to_files, options.redirects, options.tee, options.local_ranks_filter)


def _job(parser: argparse.ArgumentParser, options: argparse.Namespace, is_elastic: bool) -> NodeShare:
    nodes: int = 1 if is_elastic else options.nnodes[1]
    if is_elastic:
        options.node_rank = 0  # each generation assigns the number
    if not 0 <= options.node_rank < nodes:
        parser.error(f"--node_rank must be from 0 to {nodes - 1}, got {options.node_rank}")
    if nodes > 1 and options.master_addr is None:
        parser.error(f"--master_addr is needed for {nodes} nodes: give the host of node 0 on every node")
    if options.module and options.no_python:
        parser.error("-m and --no_python exclude each other")
    if not (options.module or options.no_python or os.path.exists(options.program)):
        parser.error(f"there is no script {options.program!r} (for a module give -m)")
    port = options.master_port
    if port is None:
        port = free_port() if nodes == 1 else _MANY_NODES_PORT
    if not 0 < port < 65536:
        parser.error(f"--master_port must be from 1 to 65535, got {port}")
    if options.nodes_port is not None and not 0 <= options.nodes_port < 65536:
        parser.error(f"--nodes_port must be from 0 to 65535, got {options.nodes_port}")
    try:
        processors = usable_processors() if options.cpu_bind != "none" else []
        bound_to = shares(options.cpu_bind, processors, options.nproc_per_node)
    except ValueError as error:
        parser.error(str(error))
    python = () if options.no_python else (sys.executable, "-u", *(["-m"] if options.module else []))
    return NodeShare(
        (*python, options.program),
        options.nproc_per_node,
        nodes,
        options.node_rank,
        # As in torchrun, an IPv6 address may be in brackets.
        (options.master_addr or "127.0.0.1").strip("[]"),
        port,
        tuple(options.args),
        options.pass_local_rank,
        variables={
            "ROLE_NAME": options.role,
            "TORCHELASTIC_RUN_ID": options.rdzv_id,
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_MAX_RESTARTS": str(options.max_restarts),
            "TORCHELASTIC_USE_AGENT_STORE": "False",  # rank 0, not the launcher, serves torch's store
            "TORCHELASTIC_SIGNALS_TO_HANDLE": ",".join(number.name for number in options.signals_to_handle),
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
        },
        shares=bound_to,
    )
