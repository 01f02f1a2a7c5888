"""Attacks on every listening socket of running jobs, on one host and on two, by all attacks of attacks.py.

The attackers start before the ranks, have recorded the network, and reach every port. The job must start and run,
answer them with challenges only, and not grow.
"""

from __future__ import annotations

import json
import os
import re
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from fastcoll.store.opening import OPENING_SIZE, Opening, Role
from hosts import attacks
from hosts.network import Host, Network
from hosts.nodes import Node, await_line, finish, launched, output_of, until

Join = Callable[..., Network]
_GROWTH_KIB = 8 << 10
_CRAWLERS = 500

# Rank 0 starts first, and the others on request. All ranks end in the same round.
PROGRAM = """
import operator, os, sys, time
import numpy as np, fastcoll as dist
from fastcoll import rpc

folder, rank = sys.argv[1], int(os.environ["RANK"])
while rank and not os.path.exists(f"{folder}/begin"):
    time.sleep(0.01)
print("began", os.getpid(), os.getppid(), flush=True)
since = time.monotonic()
dist.init_process_group(timeout=200)
groups = [None, dist.new_group(backend="tcp")]
rpc.init_rpc(f"worker{rank}")
started, rounds, stop = time.monotonic() - since, 0, 0
size = dist.get_world_size()
while not stop:
    for group in groups:
        x = np.arange(1000.0) + rank
        x[0] = os.path.exists(f"{folder}/end") and rank == 0
        dist.all_reduce(x, group=group)
        stop = x[0]
        assert (x[1:] == np.arange(1.0, 1000.0) * size + size * (size - 1) / 2).all(), x
        parts = [None] * size
        dist.all_gather_object(parts, ("rank", rank), group=group)
        assert parts == [("rank", r) for r in range(size)], parts
    assert rpc.rpc_sync((rank + 1) % size, operator.neg, args=(rounds,)) == -rounds
    rounds += 1
    if rounds in (5, 100):
        print("round", rounds, "after", started, flush=True)
    time.sleep(0.01)
rpc.shutdown()
print("right", rounds, flush=True)
dist.destroy_process_group()
"""


class Times(NamedTuple):
    """Seconds until strangers are dropped: after an attack, and the longest of one that sends a byte a second."""

    slowest: float
    median: float
    held: float


@pytest.fixture(autouse=True)
def own_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the launcher's secret or the user's own, because no other is given."""
    for name in ("FASTCOLL_SECRET", "FASTCOLL_SECRET_FILE"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.long
def test_every_listening_socket_of_a_job_on_two_hosts(join_hosts: Join, tmp_path: Path) -> None:
    attack_all(join_hosts(2), 2, tmp_path)


@pytest.mark.timed
def test_strangers_are_dropped_in_time_by_a_job_on_one_host(join_hosts: Join, tmp_path: Path) -> None:
    times = attack_all(join_hosts(1), 4, tmp_path)
    assert times.slowest < 2
    assert times.median < 0.05
    assert times.held < 12


def attack_all(network: Network, ranks: int, tmp_path: Path) -> Times:
    """Attack every listening socket of a job, before and while it runs."""
    hosts, made = len(network.hosts), list[dict[str, Any]]()
    (tmp_path / "program.py").write_text(PROGRAM)
    program = [str(tmp_path / "program.py"), str(tmp_path)]
    address = "127.0.0.1" if hosts == 1 else None
    with launched(network, ranks, program, address=address) as nodes:
        first, last = network.hosts[0], network.hosts[-1]
        recording = start(first, "record", str(tmp_path / "record"))
        await_line(nodes[0], "began", nodes)
        # Rank 0's store listens, and with several hosts its launcher.
        until(lambda: len(listening_addresses(first)) >= min(hosts, 2), nodes)
        # The first connections to each port are strangers', and 500 of them are open when the ranks connect.
        crawlers = start(last, "crawl", str(_CRAWLERS), *listening_addresses(first))
        await_line(crawlers, "crawling", [crawlers])
        (tmp_path / "record.json").write_text("[]")
        made += refused(last, tmp_path / "record.json", listening_addresses(first))
        until((tmp_path / "record.begun").exists, [recording])
        (tmp_path / "begin").touch()
        for node in nodes:
            for rank in range(node.host.index * ranks, (node.host.index + 1) * ranks):
                await_line(node, f"[{rank}] round 5 ", nodes)
        (tmp_path / "record.stop").touch()
        finish([recording])
        heard = json.loads((tmp_path / "record").read_text())
        assert len(heard) >= 2 * (ranks * hosts - 1), "the record is empty"

        every = {host: listening_addresses(host) for host in network}
        for host, found in every.items():  # a job of one host listens on loopback only
            own = "127.0.0.1" if hosts == 1 else host.address
            assert {each.rpartition(":")[0] for each in found} == {own}
        assert sum(map(len, every.values())) >= 1 + ranks * hosts
        before = memory(nodes)
        secret = secret_of(next(iter(before)))
        shown = [host.namespace.run("ps", "-eo", "args") for host in network]
        for found in every.values():
            made += refused(last, tmp_path / "record", found)
        slow = [start(last, "crawl", str(_CRAWLERS), *found) for found in every.values()]
        finish([crawlers, *slow])
        held = [json.loads(each.out.splitlines()[-1]).values() for each in (crawlers, *slow)]
        longest = max(map(max, held))
        assert longest < float("inf"), output_of([crawlers, *slow])
        for each in (crawlers, *slow):
            each.close()
        recording.close()
        assert secret not in output_of(nodes) + "".join(shown)
        grown = {pid: kib - before[pid] for pid, kib in memory(nodes).items()}
        (tmp_path / "end").touch()
        finish(nodes)
        assert [node.code for node in nodes] == [0] * hosts, output_of(nodes)
        assert sum(node.out.count("right") for node in nodes) == hosts * ranks, output_of(nodes)
        assert max(grown.values()) < _GROWTH_KIB, grown
    seconds = [one["seconds"] for one in made]
    return Times(max(seconds), statistics.median(seconds), longest)


def start(host: Host, *words: str) -> Node:
    """Start the attackers' program on a host."""
    return Node(host, [sys.executable, attacks.__file__, *words], dict(os.environ))


def listening_addresses(host: Host) -> list[str]:
    """Return the addresses at which a host listens, as in 10.77.0.1:24500; only the job listens there."""
    assert host.namespace.run("ss", "-lxH") == "", "a Unix socket listens"
    return sorted(line.split()[3] for line in host.namespace.run("ss", "-ltnH").splitlines())


def refused(attacker: Host, record: Path, where: list[str]) -> list[dict[str, Any]]:
    """Return the outcomes of all attacks; none may be answered with more than a challenge, all must be dropped."""
    node = start(attacker, "attack", str(record), *where)
    finish([node])
    assert node.code == 0, output_of([node])
    made: list[dict[str, Any]] = json.loads(node.out)
    assert {one["where"] for one in made} == set(where)
    for one in made:
        answer = bytes.fromhex(one["answer"])
        assert len(answer) in (0, OPENING_SIZE, attacks.WHOLE), one
        if answer:
            assert Opening.from_bytes(answer[:OPENING_SIZE], Role.ANSWERS), one
    node.close()
    return made


def secret_of(pid: str) -> str:
    """Return the job's secret: the launcher's in the environment, else the user's own."""
    variables = Path(f"/proc/{pid}/environ").read_text().split("\0")
    given = [each.partition("=")[2] for each in variables if each.startswith("FASTCOLL_SECRET=")]
    text = given[0] if given else (Path(os.environ["XDG_CONFIG_HOME"]) / "fastcoll" / "secret").read_text()
    assert len(text) >= 64
    return text.strip()


def memory(nodes: list[Node]) -> dict[str, int]:
    """Return the resident KiB of each rank and launcher, by its pid."""
    begun = [re.findall(r"began (\d+) (\d+)", node.out) for node in nodes]
    status = {pid: Path(f"/proc/{pid}/status").read_text() for pids in begun for pid in sum(pids, ())}
    return {pid: int(re.findall(r"VmRSS:\s+(\d+) kB", text)[0]) for pid, text in status.items()}
