"""A rank is killed, or a host vanishes, while eight ranks on four hosts work: everybody else knows who is gone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from hosts.network import Network, Started

Join = Callable[..., Network]
HOSTS, EACH = 4, 2
RANKS = HOSTS * EACH
KILLED = 2.0  # seconds after which a killed rank is known, and the exception is printed
LOST = 10.0  # seconds after which a host that vanished is given up

WORK = """
import json, os, signal, sys, threading
import numpy as np
import fastcoll as dist

dist.init_process_group(timeout=60)
print("here", flush=True)
if dist.get_rank() == int(sys.argv[1]):
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGKILL)).start()
x = np.ones(1_000_003, "f4")
try:
    while True:
        dist.all_reduce(x)
except dist.GroupError as error:
    print(json.dumps({"kind": type(error).__name__, "ranks": error.ranks, "error": str(error)}), flush=True)
    os._exit(0)
"""


@contextmanager
def working(network: Network, victim: int = -1) -> Iterator[list[Started]]:
    """All ranks, in the middle of their work; the victim kills itself."""
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
            words = [sys.executable, "-c", WORK, str(victim)]
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


def seen(started: Started, seconds: float) -> dict[str, Any]:
    """What a rank has seen, at most so many seconds from now."""
    out, err = started.process.communicate(timeout=seconds)
    assert out, err.decode()
    found: dict[str, Any] = json.loads(out)
    return found


def test_a_killed_rank_is_named_on_all_hosts(join_hosts: Join) -> None:
    victim = 5
    with working(join_hosts(HOSTS, own_pids=True), victim) as started:
        for rank, each in enumerate(started):
            if rank != victim:
                saw = seen(each, 0.5 + KILLED)
                assert (saw["kind"], saw["ranks"]) == ("PeerDiedError", [victim]), saw


def test_the_ranks_of_a_host_that_vanishes_are_named_on_all_others(join_hosts: Join) -> None:
    network = join_hosts(HOSTS, own_pids=True)
    with working(network) as started:
        time.sleep(0.5)  # into the work
        network.cut(network.hosts[3])
        end = time.monotonic() + LOST
        for each in started[:-EACH]:
            saw = seen(each, end - time.monotonic())
            assert saw["kind"] == "PeerDiedError", saw
            assert saw["ranks"], saw
            assert set(saw["ranks"]) <= {6, 7}, saw
        for each in started[-EACH:]:
            saw = seen(each, end - time.monotonic())
            assert saw["kind"] == "PeerDiedError", saw
            assert set(saw["ranks"]) <= set(range(6)), saw
