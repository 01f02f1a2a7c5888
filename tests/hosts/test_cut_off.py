"""Generations on several hosts: a host that is cut off is left out, and its launcher ends.

launch/test_restarts.py has launchers that join, leave and are killed.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from hosts.network import Network
from hosts.nodes import SECRET, Node, await_line, finish, output_of

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


@pytest.mark.long  # the others detect it by a call that fails after some 10 s
def test_a_host_that_is_cut_off_is_left_out(join_hosts: Callable[..., Network], tmp_path: Path) -> None:
    network = join_hosts(3, own_pids=True)
    program = [str(tmp_path / "train.py"), str(tmp_path / "go")]
    Path(program[0]).write_text(TRAIN)
    options = [
        "--nnodes=1:3",
        "--max-restarts=1",
        "--monitor-interval=0.05",
        "--grace=0.5",
        "--rdzv-backend=c10d",
    ]
    options += ["--rdzv-conf=last_call_timeout=100", f"--rdzv-endpoint={network.hosts[0].address}:29400"]
    words = [sys.executable, "-m", "fastcoll.launch", *options, *program]
    with ExitStack() as stack:
        nodes = [Node(host, words, {**os.environ, **SECRET}) for host in network]
        for node in nodes:
            stack.callback(node.close)
        await_line(nodes[0], " in 3\n", nodes)
        network.cut(network.hosts[2])
        await_line(nodes[0], " in 2\n", nodes)
        Path(program[1]).touch()
        finish(nodes)
        assert [node.code for node in nodes] == [0, 0, 1], output_of(nodes)
        assert "the launcher that leads the job ended unexpectedly, or is unreachable" in nodes[2].err
