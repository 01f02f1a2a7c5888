"""A rank is killed, or a host vanishes, while eight ranks on four hosts work: all other ranks name the lost ranks."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hosts.network import Network
from hosts.nodes import Node, await_line, finish, output_of, ranks_on

Join = Callable[..., Network]
HOSTS, EACH = 4, 2
RANKS = HOSTS * EACH

WORK = """
import json, os, pathlib, signal, sys, threading, time
import numpy as np
import fastcoll as dist
from fastcoll.testing.worker import clock_at_work

def die():
    pathlib.Path(sys.argv[2]).write_text(str(time.monotonic()))
    os.kill(os.getpid(), signal.SIGKILL)

dist.init_process_group(timeout=300)
x = np.ones(1_000_003, "f4")
try:
    dist.all_reduce(x)  # the others have started, too
    print("works", flush=True)
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


def placed(network: Network) -> list[Any]:
    """Return the host of each rank."""
    return [network.hosts[rank // EACH] for rank in range(RANKS)]


def seen(nodes: list[Node], rank: int) -> dict[str, Any]:
    """Return the error of a rank, and its time."""
    assert nodes[rank].out.endswith("}\n"), output_of(nodes)
    found: dict[str, Any] = json.loads(nodes[rank].out.splitlines()[-1])
    return found


@pytest.mark.timed
def test_a_killed_rank_is_named_on_all_hosts_within_two_seconds(join_hosts: Join, tmp_path: Path) -> None:
    victim, stamp = 5, tmp_path / "killed"
    with ranks_on(placed(join_hosts(HOSTS, own_pids=True)), ["-c", WORK, str(victim), str(stamp)]) as nodes:
        finish(nodes)
        saws = [seen(nodes, rank) for rank in range(RANKS) if rank != victim]
    for saw in saws:
        assert (saw["kind"], saw["ranks"]) == ("PeerDiedError", [victim]), saw
    assert max(saw["at"] for saw in saws) - float(stamp.read_text()) < 2.0


@pytest.mark.timed
def test_a_host_that_vanishes_is_given_up_on_both_sides_within_ten_seconds(join_hosts: Join) -> None:
    network = join_hosts(HOSTS, own_pids=True)
    with ranks_on(placed(network), ["-c", WORK, "-1", ""]) as nodes:
        for node in nodes:
            await_line(node, "works\n", nodes)
        network.cut(network.hosts[-1])
        cut = time.monotonic()
        finish(nodes)
        saws = [seen(nodes, rank) for rank in range(RANKS)]
    for rank, saw in enumerate(saws):
        assert saw["kind"] == "PeerDiedError", saw
        others = set(range(6)) if rank in (6, 7) else {6, 7}
        assert set(saw["ranks"]) <= others, saw
        assert saw["ranks"] or rank in (6, 7), saw
    assert max(saw["at"] for saw in saws) - cut < 10.0  # the kernel gives a host up after 8 s


MAKE = """
import contextlib, json, os, signal, sys
import fastcoll as dist

dist.init_process_group(timeout=300)
with contextlib.suppress(dist.PeerDiedError):
    dist.barrier()  # the others have started, too, and may be on their way out when one dies
if dist.get_rank() == int(sys.argv[1]):
    os.kill(os.getpid(), signal.SIGKILL)
try:
    dist.new_group()
except dist.PeerDiedError as error:
    dist.destroy_process_group()
    print(json.dumps({"ranks": error.ranks}))
"""


@pytest.mark.long
def test_making_and_leaving_groups_name_a_dead_rank_of_another_host(join_hosts: Join) -> None:
    """Its process is out of sight: only the connections of the default group reveal its death."""
    victim = RANKS - 1
    with ranks_on(placed(join_hosts(HOSTS, own_pids=True)), ["-c", MAKE, str(victim)]) as nodes:
        finish(nodes)
        assert [seen(nodes, rank)["ranks"] for rank in range(victim)] == [[victim]] * victim
