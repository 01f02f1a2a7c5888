"""The options of the launcher: its own and torchrun's, read and checked together.

parser.py has the options, and checks each by itself.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import uuid
from collections.abc import Sequence
from pathlib import Path

from .binding import shares, usable_processors
from .nodes import NodeShare, free_port
from .outputs import Outputs
from .parser import ENDPOINT_PORT, MANY_NODES_PORT, make_parser


def read(argv: Sequence[str] | None) -> tuple[argparse.Namespace, NodeShare]:
    """Return the options and this node's share of the job; exit with a usage error if options contradict each other.

    Two of the returned options are derived from others: `has_generations`, whether a failure may restart all ranks, and
    `outputs`, where the ranks' output goes.
    """
    parser = make_parser()
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
        options.rdzv_endpoint = host, port or ENDPOINT_PORT
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
    command = _command(parser, options)
    port = options.master_port
    if port is None:
        port = free_port() if nodes == 1 else MANY_NODES_PORT
    if not 0 < port < 65536:
        parser.error(f"--master_port must be from 1 to 65535, got {port}")
    if options.nodes_port is not None and not 0 <= options.nodes_port < 65536:
        parser.error(f"--nodes_port must be from 0 to 65535, got {options.nodes_port}")
    try:
        processors = usable_processors() if options.cpu_bind != "none" else []
        bound_to = shares(options.cpu_bind, processors, options.nproc_per_node)
    except ValueError as error:
        parser.error(str(error))
    return NodeShare(
        command,
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


def _command(parser: argparse.ArgumentParser, options: argparse.Namespace) -> tuple[str, ...]:
    """Return the command that starts the program, without the program's arguments."""
    if options.module and options.no_python:
        parser.error("-m and --no_python exclude each other")
    if not (options.module or options.no_python or os.path.exists(options.program)):
        parser.error(f"there is no script {options.program!r} (for a module give -m)")
    python = () if options.no_python else (sys.executable, "-u", *(["-m"] if options.module else []))
    return (*python, options.program)
