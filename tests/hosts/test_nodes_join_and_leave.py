"""Generations on several hosts: nodes that join, that are lost, and that are cut off."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from hosts.network import Host, Network
from hosts.nodes import SECRET, Node, await_line, finish, output_of

Join = Callable[..., Network]
Begin = Callable[..., Node]
OPTIONS = ["--rdzv-backend=c10d", "--rdzv-conf=last_call_timeout=0", "--monitor-interval=0.05", "--grace=0.5"]
TRAIN = """
import os, sys, time
import numpy as np
import fastcoll as dist
dist.init_process_group(timeout=200)
x = np.ones(1)
dist.all_reduce(x)
print(f"{dist.get_rank()} in {x[0]:.0f}", flush=True)
while x[0] < 1e6:
    x[0] = 2e6 * os.path.exists(sys.argv[1])
    dist.all_reduce(x)
    time.sleep(0.01)
dist.destroy_process_group()
"""


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Begin]:
    """Start a launcher on a host of a network, with `TRAIN`; kill what runs at the end."""
    program = [str(tmp_path / "train.py"), str(tmp_path / "go")]
    Path(program[0]).write_text(TRAIN)
    with ExitStack() as stack:

        def start(network: Network, host: Host, options: Sequence[str]) -> Node:
            endpoint = f"--rdzv-endpoint={network.hosts[0].address}:29400"
            words = [sys.executable, "-m", "fastcoll.launch", *OPTIONS, endpoint, *options, *program]
            node = Node(host, words, {**os.environ, **SECRET})
            stack.callback(node.close)
            return node

        yield start


@pytest.mark.long
def test_hosts_join_and_leave(join_hosts: Join, begin: Begin, tmp_path: Path) -> None:
    """Four join one after another; one is killed, one leaves, one joins again; the others continue each time."""
    network = join_hosts(4, own_pids=True)
    nodes: list[Node] = []
    for host in network:
        nodes.append(begin(network, host, ["--nnodes=1:4"]))
        await_line(nodes[0], f"[0] 0 in {len(nodes)}\n", nodes)
    nodes[2].end()
    await_line(nodes[3], "[2] 2 in 3\n", nodes)
    nodes[1].signal(signal.SIGTERM)
    await_line(nodes[3], "[1] 1 in 2\n", nodes)
    nodes[2] = begin(network, network.hosts[2], ["--nnodes=1:4"])
    await_line(nodes[2], "[2] 2 in 3\n", nodes)
    (tmp_path / "go").touch()
    finish([nodes[0], nodes[2], nodes[3]])
    assert [node.code for node in (nodes[0], *nodes[2:])] == [0, 0, 0], output_of(nodes)
    assert re.search(r"the launcher on host2 \(pid \d+\) ended unexpectedly", nodes[0].err), output_of(nodes)


@pytest.mark.long
def test_the_loss_of_the_host_that_leads_ends_the_job(join_hosts: Join, begin: Begin) -> None:
    network = join_hosts(2, own_pids=True)
    nodes = [begin(network, host, ["--nnodes=2"]) for host in network]
    await_line(nodes[1], " in 2\n", nodes)
    nodes[0].end()
    finish(nodes[1:])
    assert nodes[1].code == 1, output_of(nodes)
    assert "the launcher that leads the job ended unexpectedly" in nodes[1].err


@pytest.mark.long  # the others detect it by a call that fails after some 10 s
def test_a_host_that_is_cut_off_is_left_out(join_hosts: Join, begin: Begin, tmp_path: Path) -> None:
    network = join_hosts(3, own_pids=True)
    options = ["--nnodes=1:3", "--max-restarts=1", "--rdzv-conf=last_call_timeout=100"]
    nodes = [begin(network, host, options) for host in network]
    await_line(nodes[0], " in 3\n", nodes)
    network.cut(network.hosts[2])
    await_line(nodes[0], " in 2\n", nodes)
    (tmp_path / "go").touch()
    finish(nodes)
    assert [node.code for node in nodes] == [0, 0, 1], output_of(nodes)
    assert "the launcher that leads the job ended unexpectedly, or is unreachable" in nodes[2].err
