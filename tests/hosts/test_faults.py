"""A rank is killed, or a host vanishes, while eight ranks on four hosts work: everybody else knows who is gone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from hosts.network import Network, Started

Join = Callable[..., Network]
HOSTS, EACH = 4, 2
RANKS = HOSTS * EACH
KILLED = 2.0  # seconds after which a killed rank is known; the deadline is 60
LOST = 10.0  # seconds after which a host that vanished is given up; the kernel does so after 8

WORK = """
import json, os, pathlib, signal, sys, threading, time
import numpy as np
import fastcoll as dist
from fastcoll.testing.worker import clock_at_work

def die():
    pathlib.Path(sys.argv[2]).write_text(str(time.monotonic()))
    os.kill(os.getpid(), signal.SIGKILL)

dist.init_process_group(timeout=60)
print("here", flush=True)
x = np.ones(1_000_003, "f4")
try:
    dist.barrier()  # the others have started, too
    if dist.get_rank() == int(sys.argv[1]):
        threading.Timer(0.5, die).start()
    while True:
        waited = time.monotonic() - clock_at_work()  # for a core, which does not count
        dist.all_reduce(x)
except dist.GroupError as error:
    at = clock_at_work() + waited
    found = {"kind": type(error).__name__, "ranks": error.ranks, "error": str(error), "at": at}
    print(json.dumps(found), flush=True)
    os._exit(0)
"""


@contextmanager
def working(
    network: Network, victim: int = -1, stamp: object = "", program: str = WORK
) -> Iterator[list[Started]]:
    """All ranks, in the middle of their work; the victim kills itself, and writes down when."""
    with ExitStack() as stack:
        started = []
        for rank in range(RANKS):
            host = network.hosts[rank // EACH]
            env = {
                **os.environ,
                "RANK": str(rank),
                "WORLD_SIZE": str(RANKS),
                "MASTER_ADDR": network.hosts[0].address,
                "MASTER_PORT": "29500",
            }
            words = [sys.executable, "-c", program, str(victim), str(stamp)]
            started.append(host.start(words, env, stdout=subprocess.PIPE, stderr=subprocess.PIPE))
            stack.callback(_end, started[-1])
        for each in started:
            assert each.process.stdout is not None
            assert each.process.stdout.readline(), each.process.communicate()[1].decode()
        yield started


def _end(started: Started) -> None:
    started.end()
    for pipe in (started.process.stdout, started.process.stderr):
        assert pipe is not None
        pipe.close()


def seen(started: Started) -> dict[str, Any]:
    """What a rank has seen, and when."""
    out, err = started.process.communicate(timeout=60)
    assert out, err.decode()
    found: dict[str, Any] = json.loads(out)
    return found


@pytest.mark.long  # tests/net/test_hosts.py and tests/faults/test_kill_net.py kill ranks, too
def test_a_killed_rank_is_named_on_all_hosts(join_hosts: Join, tmp_path: Path) -> None:
    network, victim, stamp = join_hosts(HOSTS, own_pids=True), 5, tmp_path / "killed"

    def kill() -> float:
        """Seconds until the last rank knows."""
        with working(network, victim, stamp) as started:
            saws = [seen(each) for each in started[:victim] + started[victim + 1 :]]
        for saw in saws:
            assert (saw["kind"], saw["ranks"]) == ("PeerDiedError", [victim]), saw
        return max(saw["at"] for saw in saws) - float(stamp.read_text())

    assert any(
        kill() < KILLED for _ in range(3)
    )  # eight ranks may have to wait for a core, the killed one, too


MAKE = """
import contextlib, json, os, signal, sys
import fastcoll as dist
from fastcoll.testing.worker import clock_at_work

dist.init_process_group(timeout=60)
print("here", flush=True)
with contextlib.suppress(dist.PeerDiedError):
    dist.barrier()  # the others have started, too, and may be on their way out when one dies
if dist.get_rank() == int(sys.argv[1]):
    os.kill(os.getpid(), signal.SIGKILL)
started = clock_at_work()
try:
    dist.new_group()
except dist.PeerDiedError as error:
    dist.destroy_process_group()
    print(json.dumps({"ranks": error.ranks, "seconds": clock_at_work() - started}))
"""


@pytest.mark.long
def test_who_makes_a_group_and_who_leaves_knows_who_died_on_another_host(join_hosts: Join) -> None:
    """Its process is out of sight: only the connections of the default group tell."""
    victim = RANKS - 1
    with working(join_hosts(HOSTS, own_pids=True), victim, program=MAKE) as started:
        for each in started[:victim]:
            saw = seen(each)
            assert saw["ranks"] == [victim]
            assert saw["seconds"] < KILLED  # the deadline of each of the two is 60


@pytest.mark.long  # in tests/net/test_hosts.py a host vanishes, too
def test_the_ranks_of_a_host_that_vanishes_are_named_on_all_others(join_hosts: Join) -> None:
    network = join_hosts(HOSTS, own_pids=True)
    with working(network) as started:
        time.sleep(0.5)  # into the work
        network.cut(network.hosts[3])
        cut = time.monotonic()
        for each in started[:-EACH]:
            saw = seen(each)
            assert saw["at"] - cut < LOST
            assert saw["kind"] == "PeerDiedError", saw
            assert saw["ranks"], saw
            assert set(saw["ranks"]) <= {6, 7}, saw
        for each in started[-EACH:]:
            saw = seen(each)
            assert saw["at"] - cut < LOST
            assert saw["kind"] == "PeerDiedError", saw
            assert set(saw["ranks"]) <= set(range(6)), saw
