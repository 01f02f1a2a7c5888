"""Ranks on hosts of their own: the addresses that they use, and the errors when a host vanishes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from hosts.network import Host, Network

Join = Callable[..., Network]
PORT = "5000"  # of the store; no other process is in these networks
# The kernel gives up a silent host after 2.5 s; tests/hosts/test_faults.py tests the default of 8 s.
IMPATIENT = {rank: {"IMPATIENT": "1"} for rank in range(3)}

RANK = """
import json, os, sys, time
from fastcoll.errors import FastcollError
from fastcoll.system import interfaces as options
from fastcoll.net.tcp.mesh import Mesh
from fastcoll.store import TCPStore
from fastcoll.rendezvous.join import join

def report(**values):
    print(json.dumps(values), flush=True)

rank, size, master, port = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4])
if "IMPATIENT" in os.environ:
    options._PROBE_AFTER_SECONDS, options._PROBE_SECONDS, options._SILENT_MILLISECONDS = 1, 1, 2500
store = TCPStore(master, port, is_master=rank == 0, timeout=60)
members = join(store, rank, size, "tcp", 60)
try:
    mesh = Mesh.make(store, "WORLD", members, rank, 60)
except FastcollError as error:
    report(error=f"{type(error).__name__}: {error}")
    finished = store.add("finished", 1)
    end = time.monotonic() + 60
    while rank == 0 and finished < size and time.monotonic() < end:  # the others read the reason from its store
        finished = store.add("finished", 0)
    sys.exit()
for peer in range(size):
    for stream in range(mesh.streams):
        if peer != rank:
            mesh.data(peer, stream)
report(pid=os.getpid(), addresses=[str(each) for each in mesh._roster.interfaces], ports=mesh._roster.listener.ports)
while (found := mesh.monitor.decide([], "testing")) is None:
    time.sleep(0.02)
report(error=f"{type(found).__name__}: {found}", ranks=found.ranks)
mesh.monitor.fail(found)
mesh.close()
"""


class Ranks:
    """A rank on each host; killed at the end."""

    def __init__(self, undo: ExitStack) -> None:
        self._undo = undo
        self.processes: list[subprocess.Popen[str]] = []

    def start(
        self, hosts: list[Host], master: str, settings: dict[int, dict[str, str]] | None = None
    ) -> list[dict[str, Any]]:
        """Start the ranks; return what each reports once it is up or has failed."""
        names = [name for name in os.environ if not name.startswith(("FASTCOLL_", "GLOO_"))]
        plain = {name: os.environ[name] for name in names} | {"PYTHONPATH": str(Path(__file__).parents[2])}
        for rank, host in enumerate(hosts):
            words = [sys.executable, "-c", RANK, str(rank), str(len(hosts)), master, PORT]
            env = plain | (settings or {}).get(rank, {})
            started = host.start(words, env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            self._undo.callback(started.process.communicate)
            self._undo.callback(started.end)
            self.processes.append(started.process)
        return [self.next_word(rank) for rank in range(len(hosts))]

    def next_word(self, rank: int) -> dict[str, Any]:
        """Return the next line that a rank reports."""
        process = self.processes[rank]
        line = process.stdout.readline()  # type: ignore[union-attr]
        assert line, process.stderr.read()  # type: ignore[union-attr]
        reports: dict[str, Any] = json.loads(line)
        return reports


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    with ExitStack() as undo:
        signal.signal(signal.SIGALRM, lambda *_: pytest.fail("the ranks did not come to an end in time"))
        signal.alarm(120)  # only ends a hang
        undo.callback(signal.alarm, 0)
        yield Ranks(undo)


@pytest.mark.parametrize("version", [4, 6])
def test_only_the_route_to_the_master_is_used(join_hosts: Join, ranks: Ranks, version: int) -> None:
    hosts = list(join_hosts(3, links=2))
    own = [host.addresses if version == 4 else host.addresses6 for host in hosts]
    reports = ranks.start(hosts, own[0][1])
    for rank, host in enumerate(hosts):
        assert reports[rank]["addresses"] == [f"{own[rank][1]} (eth1)"]
        shown = own[rank][1] if version == 4 else f"[{own[rank][1]}]"
        ports = {*reports[rank]["ports"], *([PORT] if rank == 0 else [])}
        listening = {line.split()[3] for line in host.namespace.run("ss", "-Hltn").splitlines()}
        assert listening == {f"{shown}:{port}" for port in ports}


def test_several_interfaces_are_used_in_turn(join_hosts: Join, ranks: Ranks) -> None:
    hosts = list(join_hosts(2, links=2))
    settings = {"FASTCOLL_SOCKET_IFNAME": "eth1,eth0", "FASTCOLL_TCP_STREAMS": "2"}
    reports = ranks.start(hosts, hosts[0].address, {0: settings, 1: settings})
    own, ports = ("10.77.1.2", "10.77.0.2"), reports[1]["ports"]
    assert reports[1]["addresses"] == [f"{own[0]} (eth1)", f"{own[1]} (eth0)"]
    connected = hosts[1].namespace.run("ss", "-Htn", "state", "established").splitlines()
    ours = {line.split()[2] for line in connected}
    assert ours >= {f"{address}:{port}" for address, port in zip(own, ports, strict=True)}


@pytest.mark.parametrize(
    ("name", "why"),
    [("ib0", "host1 has no such interface"), ("lo", "only host1 itself can connect to 127.0.0.1")],
)
def test_an_unusable_interface_fails_all_ranks(join_hosts: Join, ranks: Ranks, name: str, why: str) -> None:
    hosts = list(join_hosts(2))
    for each in ranks.start(hosts, hosts[0].address, {1: {"FASTCOLL_SOCKET_IFNAME": name}}):
        assert f"FASTCOLL_SOCKET_IFNAME names {name}, but {why}" in each["error"]
        assert "eth0 10.77.0.2" in each["error"]


@pytest.mark.long
def test_a_host_that_vanishes_is_named_by_every_survivor(join_hosts: Join, ranks: Ranks) -> None:
    network = join_hosts(3, own_pids=True)
    ranks.start(network.hosts, network.hosts[0].address, IMPATIENT)
    network.cut(network.hosts[2])
    for rank in (0, 1):
        found = ranks.next_word(rank)
        assert re.match(r"PeerDiedError: rank 2 \(pid \d+ on host2\)", found["error"])
        assert "died or lost its connection" in found["error"]
        assert found["ranks"] == [2]


@pytest.mark.long
def test_packets_lost_in_one_direction_fail_all_ranks(join_hosts: Join, ranks: Ranks) -> None:
    """Each of the two misses the other's acknowledgements, and reports it to the rank that still receives from both."""
    network = join_hosts(3, own_pids=True)
    ranks.start(network.hosts, network.hosts[0].address, IMPATIENT)
    network.lose(network.hosts[1], network.hosts[0])
    for rank in range(3):  # rank 0 may learn from the third rank that rank 1 has lost it
        found = ranks.next_word(rank)
        assert "died or lost its connection" in found["error"], found
        assert {*found["ranks"]} <= {0, 1}, found
        assert found["ranks"], found


def test_a_killed_rank_is_named_where_its_process_is_invisible(join_hosts: Join, ranks: Ranks) -> None:
    network = join_hosts(3, own_pids=True)
    reports = ranks.start(network.hosts, network.hosts[0].address)
    network.hosts[1].namespace.run("kill", "-KILL", str(reports[1]["pid"]))  # its pid on that host
    for rank in (0, 2):
        assert ranks.next_word(rank)["ranks"] == [1]
