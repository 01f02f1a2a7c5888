"""`top` on one of several hosts shows the ranks of all, whose launchers read them while somebody looks."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from programs import last_table

from hosts.network import Host, Network
from hosts.nodes import LIMIT, SECRET, finish, launched, output_of

PROGRAM = """
import os, sys, time, numpy as np, fastcoll as dist
dist.init_process_group(timeout=600)
x = np.ones(4, np.float32)
go = np.zeros(1)
while go[0] == 0:
    dist.all_reduce(x, op=dist.ReduceOp.AVG)
    go[0] = dist.get_rank() == 0 and os.path.exists(sys.argv[1])
    dist.broadcast(go, 0)
    time.sleep(0.02)  # leaves the processors to what reads the ranks
"""
# Ends when no process on a host reads ranks for a `top` elsewhere.
NO_READERS = "while grep -qs [f]astcoll.tools.node_view /proc/[0-9]*/cmdline; do sleep 0.1; done"


def top(host: Host) -> tuple[int, list[dict[str, str]], str]:
    """Return the exit code of `top` on a host, its rows of the default group, and what it says on stderr."""
    words = [*host.enter(), sys.executable, "-m", "fastcoll", "top", "--once"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=LIMIT)
    return done.returncode, [row for row in last_table(done.stdout) if row["group"] == "WORLD"], done.stderr


@pytest.mark.long
@pytest.mark.parametrize("options", [(), ("--max-restarts", "1")], ids=["once", "generations"])
def test_the_ranks_of_all_hosts_are_shown_on_each(
    options: tuple[str, ...], join_hosts: Callable[..., Network], tmp_path: Path
) -> None:
    (tmp_path / "calls.py").write_text(PROGRAM)
    network, go = join_hosts(2, own_pids=True), tmp_path / "go"
    with launched(network, 2, [str(tmp_path / "calls.py"), str(go)], SECRET, options) as nodes:
        for host in network:
            while not shows_all(*top(host)):
                assert [node.code for node in nodes] == [None, None], output_of(nodes)
        if not options:
            for host in network:  # because no `top` runs any longer
                subprocess.run([*host.enter(), "sh", "-c", NO_READERS], timeout=LIMIT, check=True)
        go.touch()
        finish(nodes)
        assert [node.code for node in nodes] == [0, 0], output_of(nodes)


def shows_all(code: int, rows: list[dict[str, str]], said: str) -> bool:
    """Return whether all ranks are shown with their rates; a rank may be in no group yet."""
    assert (code in (0, 1), said) == (True, "")
    placed = {row["rank"]: row["host"] for row in rows if row["calls/s"] not in ("-", "0")}
    return placed == {"0": "host0", "1": "host0", "2": "host1", "3": "host1"}
