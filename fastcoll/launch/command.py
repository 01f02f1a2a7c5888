"""`python -m fastcoll.launch`: start the ranks of a program once, or in generations.

A generation is a set of ranks that start together. If a rank fails, the launchers end the others and start the next
generation (generations.py).
"""

from __future__ import annotations

import argparse
import os
import secrets
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from .. import config, failpoints
from .._version import __version__
from ..errors import FastcollError
from ..metrics import in_launcher
from ..store import HashStore
from .console import Console
from .failures import NodeFailures, not_run
from .gathering import Gathering, agree, open_store
from .generations import Node, Rules
from .lifeline import reap_orphans
from .node_views import NodeViews
from .nodes import NodeShare, default_port, free_port
from .options import read
from .restarts import Restarts
from .supervisor import Supervisor

if TYPE_CHECKING:
    from ..metrics.http_server import MetricsServer
    from ..store import TCPStore

_LAST_CALL_SECONDS, _JOIN_SECONDS = 30.0, 600.0  # torchrun's defaults of `last_call_timeout`, `join_timeout`
_END_SECONDS = 5.0  # how much longer than --grace a launcher may take to end its ranks and be ready again


def main(argv: Sequence[str] | None = None) -> int:
    """Run the launcher with the arguments `argv` (default: those of this process); return its exit code."""
    options, job = read(argv)
    logs: Path | None = options.log_dir
    with Console(options.signals_to_handle) as console, ExitStack() as serving:
        try:
            failpoints.arm(config.get("FASTCOLL_FAILPOINT"))
            metrics = serving.enter_context(in_launcher.serving())
        except FastcollError as error:
            console.say(str(error))
            return 1
        if metrics is not None:
            job = replace(job, metrics=metrics.socket)
        if options.made_log_dir:
            console.say(f"output that goes to files is in {logs}")
        if counts := job.thread_counts(0, os.environ):
            many = (
                f"as {job.local_size} ranks share this node"
                if not job.shares
                else "the cores of rank 0's share"
            )
            console.say(f"{' and '.join(counts)} set to {min(counts.values())}, {many}")
        reap_orphans()
        supervise = partial(
            Supervisor,
            grace=options.grace,
            prefix=not options.no_prefix,
            console=console,
            tick=options.monitor_interval,
            outputs=options.outputs,
            metrics=metrics,
        )
        if options.has_generations:
            return _run_generations(options, job, logs, supervise, console, metrics)
        return _run_once(options, job, logs, supervise, console)


def _run_once(
    options: argparse.Namespace,
    job: NodeShare,
    logs: Path | None,
    supervise: Callable[..., Supervisor],
    console: Console,
) -> int:
    """Start the ranks once, and return the exit code; with --min_ranks, new processes may replace failed ranks."""
    goes_on = options.min_ranks is not None
    port = options.nodes_port
    nodes = None
    if job.nodes > 1 and port != 0:  # options.py refuses port 0 with --min_ranks
        nodes = NodeFailures(job.nodes, job.node_rank, job.master_addr, port or default_port(job.master_port))
    elif job.nodes == 1 and goes_on:
        os.environ.update(job.secret(os.environ))  # the store that this launcher serves requires the secret
        nodes = NodeFailures(1, 0, "127.0.0.1", 0)
    with nodes or nullcontext(), ExitStack() as showing:
        if nodes and job.nodes > 1 and nodes.address:
            job = replace(job, launchers=nodes.address)
            showing.enter_context(NodeViews(nodes.address))
        if nodes and goes_on:
            if job.nodes > 1 and not nodes.address:  # there is no store, but ranks of all nodes need it
                console.say("--min_ranks needs a store, which cannot be served: give another --nodes_port")
                return 1
            job = replace(job, elastic=nodes.address)
        restarts = options.max_restarts if goes_on else 0
        report = nodes.report if nodes and job.elastic else None
        end_joining = nodes.end_joining if nodes and job.elastic and job.nodes == 1 else None
        try:
            return supervise(
                job,
                logs=logs,
                nodes=nodes,
                min_ranks=options.min_ranks,
                max_restarts=restarts,
                report=report,
                end_joining=end_joining,
            ).run()
        except OSError as error:
            failure = not_run(error)
            console.say(failure.text)
            if nodes:
                nodes.publish(failure)
            return failure.code


def _run_generations(
    options: argparse.Namespace,
    job: NodeShare,
    logs: Path | None,
    supervise: Callable[..., Supervisor],
    console: Console,
    metrics: MetricsServer | None,
) -> int:
    """Run generations of ranks until one succeeds or no restart is left; return the exit code."""
    is_static = options.rdzv_backend == "static"
    least, most = options.nnodes
    rules = Rules(
        least, most, options.max_restarts, options.rdzv_conf.get("last_call_timeout", _LAST_CALL_SECONDS),
        options.rdzv_conf.get("join_timeout", _JOIN_SECONDS), options.grace + _END_SECONDS, is_static,
    )  # fmt: skip
    try:
        store, leads, address = _meet(options, job, rules, console.signals)
    except FastcollError as error:
        if console.signals:
            return 128 + console.signals[0]
        console.say(f"the nodes' launchers cannot meet: {error}")
        return 1
    node_rank = job.node_rank if is_static else None
    key = f"{os.uname().nodename}-{os.getpid()}-{secrets.token_hex(8)}"
    node = Node(key, os.uname().nodename, job.local_size, options.role, address, 0, node_rank)
    port = (lambda: job.master_port) if is_static and options.master_port else free_port
    if not isinstance(store, HashStore):
        from ..system.address import shown  # imports sockets

        job = replace(job, launchers=shown(store.host, store.port))
    views = NodeViews(job.launchers) if job.launchers else nullcontext()
    with Gathering(store, node, port, rules, leads, options.monitor_interval) as gathering, views:
        return Restarts(gathering, job, supervise, logs, console, options.monitor_interval, metrics).run()


def _meet(
    options: argparse.Namespace, job: NodeShare, rules: Rules, signals: list[int]
) -> tuple[HashStore | TCPStore, bool, str]:
    """Return the job's store, whether this launcher leads, and this node's address.

    The launchers communicate through the store; the launcher that serves it leads the job (gathering.py). If rank 0
    runs on this node, it listens at the address.
    """
    if rules.most == 1 and (rules.fixed or options.standalone):
        os.environ.update(job.secret(os.environ))
        return HashStore(), True, job.master_addr
    if rules.fixed:
        host, port = job.master_addr, options.nodes_port or default_port(job.master_port)
        is_host: float | None = job.node_rank == 0
    else:
        host, port = options.rdzv_endpoint
        is_host = options.rdzv_conf.get("is_host")
    leads = None if is_host is None else bool(is_host)
    store, leads = open_store(host, port, leads, rules.join, lambda: not signals)
    try:
        nodes = f"--nnodes {rules.least}:{rules.most} --max-restarts {rules.max_restarts}"
        agree(store, f"--rdzv-id {options.rdzv_id} {nodes} (fastcoll {__version__})")
    except BaseException:
        store.close()
        raise
    return store, leads, options.local_addr or (job.master_addr if rules.fixed else store.local_address)
