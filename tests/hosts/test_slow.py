"""Ranks over a network that is slow, loses packets and lets them overtake one another; links that are down for a while.

What packets meet is drawn with a seed, but TCP's own timing is not: only what is promised is checked. Root is needed.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

import pytest

from hosts import slow
from hosts.network import Network
from hosts.nodes import Node, finish, ranks_on, told, until
from hosts.slow import SlowNetwork

Join = Callable[..., Network]
PROGRAM = Path(__file__).with_name("slow_ranks.py")
LATE = {"least": 0.02, "most": 0.15, "overtake": False}
LOSSY = {"most": 0.002, "loss": 0.03, "twice": 0.01}
ALL = {"least": 0.02, "most": 0.15, "loss": 0.01, "twice": 0.01}
NEARER = {**ALL, "least": 0.01, "most": 0.03}


@pytest.fixture
def slowly(join_hosts: Join) -> Iterator[Callable[..., SlowNetwork]]:
    """Makes slow networks, of so many hosts; skips where none can be made."""
    if reason := slow.lacking():
        pytest.skip(reason)
    with ExitStack() as stack:
        yield lambda hosts, **settings: stack.enter_context(
            SlowNetwork(join_hosts(hosts, own_pids=True), 7, **settings)
        )


def running(network: SlowNetwork, each: int, *words: str) -> AbstractContextManager[list[Node]]:
    """So many ranks on each host; what runs at the end is killed."""
    return ranks_on([host for host in network.hosts for _ in range(each)], [str(PROGRAM), *words])


def said(node: Node, what: str) -> list[dict[str, Any]]:
    """The lines with `what`, so far."""
    whole = node.out[: node.out.rfind("\n") + 1].splitlines()
    return [line for line in map(json.loads, whole) if what in line]


def await_calls(nodes: list[Node], count: int) -> None:
    """Until every rank has made so many more calls, or has an error."""
    wanted = [len(said(node, "call")) + count for node in nodes]

    def have() -> bool:
        assert all(node.code is None for node in nodes), told(nodes)
        return all(len(said(node, "call")) >= n for node, n in zip(nodes, wanted, strict=True))

    until(have, nodes)


ANSWER = """
import socket
own = socket.socket(type=socket.SOCK_DGRAM)
own.bind(("", 5000))
print("bound", flush=True)
while True:
    own.sendto(*own.recvfrom(16))
"""
ASK = """
import json, socket, sys, time
to, count, expected, patience = sys.argv[1], *map(float, sys.argv[2:])
own, came, began = socket.socket(type=socket.SOCK_DGRAM), [], time.monotonic()
own.settimeout(patience)
for number in range(int(count)):
    own.sendto(b"%d" % number, (to, 5000))
try:
    while len(came) < expected:
        came.append(int(own.recv(16)))
except OSError:
    pass
print(json.dumps([came, time.monotonic() - began]))
"""


def test_a_slow_network_is_as_slow_as_it_says(slowly: Callable[..., SlowNetwork]) -> None:
    network = slowly(2, least=0.03, most=0.06)
    one, two = network.hosts
    answering = two.start([sys.executable, "-c", ANSWER], stdout=subprocess.PIPE)
    assert answering.process.stdout is not None

    def ask(count: int, expected: int, grace: float) -> tuple[list[int], float]:
        """Which of so many datagrams came back, in their order, until so many had or for `backoff` none; and when."""
        words = (two.address, *map(str, (count, expected, grace)))
        came, seconds = json.loads(one.namespace.run(sys.executable, "-c", ASK, *words))
        return came, seconds

    with answering.process.stdout:
        answering.process.stdout.readline()
        assert ask(1, 1, 30)[1] >= 0.06
        mixed, _ = ask(50, 50, 30)
        assert mixed != sorted(mixed)
        assert sorted(mixed) == [*range(50)]
        network.change(overtake=False)
        assert ask(50, 50, 30)[0] == [*range(50)]
        network.change(twice=1.0, most=0.03)
        assert ask(1, 4, 30)[0] == [0] * 4
        before = network.change(twice=0.0, loss=0.5)
        while (after := network.change())["sent"] < before["sent"] + 300:
            ask(300, 300, 0.5)
        network.change(loss=0.0)
        assert 0.3 < (after["lost"] - before["lost"]) / (after["sent"] - before["sent"]) < 0.7
        network.lose(two, one)
        assert ask(2, 1, 0.3)[0] == []
        network.mend()
        assert ask(1, 1, 30)[0] == [0]
        answering.end()


@pytest.mark.parametrize(
    ("hosts", "each", "settings"),
    [
        pytest.param(2, 1, NEARER, id="two-hosts-nearer"),
        pytest.param(2, 1, ALL, id="two-hosts-all", marks=pytest.mark.long),
        pytest.param(3, 1, LATE, id="three-hosts-late", marks=pytest.mark.long),
        pytest.param(3, 1, LOSSY, id="three-hosts-lossy"),
        pytest.param(2, 2, ALL, id="two-hosts-of-two-all", marks=pytest.mark.long),
    ],
)
def test_everything_is_right_over_a_slow_network(
    slowly: Callable[..., SlowNetwork], hosts: int, each: int, settings: dict[str, Any]
) -> None:
    network = slowly(hosts, **settings)
    with running(network, each, "all") as nodes:
        finish(nodes)
        assert [node.code for node in nodes] == [0] * len(nodes), told(nodes)
        assert all(said(node, "left") for node in nodes), told(nodes)
        assert not any("Error" in node.err or "died" in node.err for node in nodes), told(nodes)


def test_survivors_shrink_over_a_slow_network(slowly: Callable[..., SlowNetwork]) -> None:
    with running(slowly(3, least=0.03, most=0.06), 1, "shrink", "0") as nodes:
        finish(nodes)
        assert [node.code for node in nodes] == [-9, 0, 0], told(nodes)
        for node in nodes[1:]:
            assert [line["died"] for line in said(node, "died")] == [[0]], told(nodes)
            assert [line["shrunk"] for line in said(node, "shrunk")] == [2], told(nodes)


# An outage of up to 4 s is survived.
@pytest.mark.parametrize("seconds", [1.0, pytest.param(3.0, marks=pytest.mark.long)])
@pytest.mark.parametrize("both", [True, pytest.param(False, marks=pytest.mark.long)])
def test_a_link_that_comes_back_in_time_costs_no_more_than_time(
    slowly: Callable[..., SlowNetwork], tmp_path: Path, seconds: float, both: bool
) -> None:
    network = slowly(3, least=0.01, most=0.03)
    with running(network, 1, "calls", str(tmp_path / "over")) as nodes:
        await_calls(nodes, 3)
        if both:
            network.cut(network.hosts[2])
        else:
            network.lose(network.hosts[2], network.hosts[0])
        time.sleep(seconds)
        network.mend()
        await_calls(nodes, 3)
        (tmp_path / "over").touch()
        finish(nodes)
        assert [node.code for node in nodes] == [0, 0, 0], told(nodes)
        assert all(said(node, "left") and not said(node, "error") for node in nodes), told(nodes)


@pytest.mark.long  # the kernel gives a host up after 8 s; tests/hosts/test_faults.py and tests/net/test_hosts.py, too
def test_a_link_that_stays_down_is_told_with_the_rank_behind_it(
    slowly: Callable[..., SlowNetwork], tmp_path: Path
) -> None:
    network = slowly(3, least=0.01, most=0.05, loss=0.01)
    with running(network, 1, "calls", str(tmp_path / "over")) as nodes:
        await_calls(nodes, 3)
        network.cut(network.hosts[2])
        finish(nodes)
        for rank, node in enumerate(nodes):
            (error,) = said(node, "error")
            assert error["error"] == "PeerDiedError", told(nodes)
            assert error["ranks"], told(nodes)
            assert set(error["ranks"]) <= ({2} if rank < 2 else {0, 1}), told(nodes)
